"""The file of a benchmark's completions: a line per problem, which a kill may have cut off, and others may have edited.

    {"problem": 0, "question": "…", "answer": "…", "samples": [{"problem": 0, "sample": 1, "reward": 1.0, …}, …]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from moe_rl.errors import RunError
from moe_rl.types import Prompt


def _number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "reward": (lambda value: _number(value, 1), "a number in [0, 1]"),
    "response_tokens": (lambda value: _number(value, 2**53), "a number of tokens"),
    "truncated": (lambda value: _number(value, 1) and value in (0, 1), "0 or 1"),
    "vote": (lambda value: value is None or type(value) is int, "a whole number or null"),
}
"""What a completion's row of `evaluations` has beside its place, and what is valid there."""


def resumed(file: Path, at_once: int, problems: int) -> tuple[int, int]:
    """How many problems a file has to the end, and in how many bytes: the rest is what a kill left of others."""
    if not file.exists():
        return 0, 0
    lines = file.read_bytes().splitlines(keepends=True)
    whole = sum(line.endswith(b"\n") for line in lines)
    whole = whole if whole == problems else whole // at_once * at_once
    return whole, sum(map(len, lines[:whole]))


def check(file: Path, whole: int, asked: Sequence[Prompt], numbers: Sequence[int]) -> None:
    """Raise RunError, which names the line, unless the first `whole` lines of a file are as many of the problems that
    are `asked`, each with the completions of these numbers."""
    for i, line in enumerate(_first(file, whole)):
        wrong = (_wrong(line, i, asked[i], numbers) if i < len(asked) else
                 f"is one too many, {len(asked)} problems being asked")
        if wrong:
            raise RunError(f"{file}, line {i + 1}, {wrong}: the file was damaged; remove it, and its problems are "
                           "asked again")


def rows(file: Path, problems: int) -> Iterator[dict[str, Any]]:
    """The rows of the table `evaluations`, but for checkpoint and benchmark, of a file that is whole and was checked;
    what a kill left behind its last problem is passed over."""
    for line in _first(file, problems):
        for sample in json.loads(line)["samples"]:
            yield {key: sample[key] for key in ("problem", "sample", *FIELDS)}


def _first(file: Path, count: int) -> Iterator[bytes]:
    if count:
        with file.open("rb") as lines:
            yield from islice(lines, count)


def _wrong(line: bytes, problem: int, prompt: Prompt, numbers: Sequence[int]) -> str | None:
    """What a line says that one of this problem does not, as the end of a sentence."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("problem") != problem:
        return f"is not problem {problem}"
    for key, wanted in (("question", prompt.text), ("answer", prompt.answer)):
        if (said := content.get(key)) != wanted:
            return f"is of the {key} {repr(said)[:80]}, not {repr(wanted)[:80]}"
    samples = content.get("samples")
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        return "has no list of samples"
    if (found := [sample.get("sample") for sample in samples]) != [*numbers]:
        return f"has the samples {str(found)[:80]}, not {numbers[0]} to {numbers[-1]}"
    for sample in samples:
        if sample.get("problem") != problem:
            return f"has a sample {sample['sample']} of the problem {sample.get('problem')!r}, not {problem}"
        for key, (valid, form) in FIELDS.items():
            if not valid(value := sample.get(key, "missing")):
                return f"has a sample {sample['sample']} whose {key} is {repr(value)[:80]}, not {form}"
    return None
