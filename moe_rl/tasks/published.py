"""Published benchmarks by name, from the Hugging Face hub or from a file with their columns or those of a copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.registry import unknown
from moe_rl.tasks.json_lines import objects

PUBLISHED = {
    "gsm8k": ("integer", 1319, "openai/gsm8k", "main", "test"),
    "math500": ("math", 500, "HuggingFaceH4/MATH-500", "default", "test"),
    "aime2024": ("integer", 30, "HuggingFaceH4/aime_2024", "default", "train"),
    "aime2025": ("integer", 30, "math-ai/aime25", "default", "test"),
}
"""By name: the match, the number of different problems, and the path, configuration and split on the hub."""
ASKED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
QUESTION, ANSWER = ("question", "problem"), ("answer", "expected_answer")


def entries(name: str, file: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place of each problem, for errors, and its row with `question`, which asks for a box, and `answer`. Raises
    ConfigError where it cannot be read, or has no such columns; warns of another number of problems."""
    if name not in PUBLISHED:
        unknown("benchmark", name, PUBLISHED)
    (match, count, hub, *_), seen = PUBLISHED[name], set()
    for n, row in enumerate(_rows(name, file), start=1):
        columns, where = {key.lower(): value for key, value in row.items()}, f"{file or hub}, row {n}"
        values = [columns.get(next((key for key in keys if key in columns), "")) for keys in (QUESTION, ANSWER)]
        try:
            answer = (
                str(int(str(values[1]).rpartition("####")[2].replace(",", ""))) if match == "integer" else values[1]
            )
        except ValueError:
            answer = None
        if None in (values[0], answer):
            raise ConfigError(f"{where}: {row!r:.200} is no problem of {name}. Give {QUESTION} and {ANSWER}.")
        seen.add(values[0])
        yield where, {**row, "question": f"{values[0]}{ASKED}", "answer": answer}
    if len(seen) != count:
        warnings.warn(f"{name} has {count} problems, but {file or hub} has {len(seen)} different ones", stacklevel=2)


def _rows(name: str, file: Path | None) -> Iterable[dict[str, Any]]:
    if file is not None and file.suffix == ".parquet":
        import pandas as pd

        return pd.read_parquet(file).to_dict("records")
    if file is not None:
        return (row for _, _, row in objects(file))
    _, _, hub, part, split = PUBLISHED[name]
    try:
        from datasets import load_dataset

        return load_dataset(hub, part, split=split)
    except Exception as error:  # no package, no network, no such data
        how = f"Run pip install datasets, or give a file: --data {name}=FILE.jsonl, or .parquet."
        raise ConfigError(f"{hub} cannot be read ({error!r:.200}). {how}") from error
