"""Rollouts that verl's trainers write (`trainer.rollout_data_dir`), as rows of our table.

verl writes a file per step. Each response has its text, its score and the text of its prompt, without special tokens:
no ids, no log-probs and no routes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.tasks.json_lines import objects


def read_rollouts(folder: Path, steps: int, most: int = 8) -> list[dict[str, Any]]:
    """Rows of the steps 1 to `steps`: at most so many responses of each, at equal distances in the order of their
    scores, the lowest and the highest included. Raises ConfigError where there is none, and for a line of another
    form."""
    files = {int(file.stem): file for file in folder.glob("*.jsonl") if file.stem.isdecimal()}
    rows = [row for step in sorted(files) if 0 < step <= steps for row in _rows(step, files[step], most)]
    if not rows:
        raise ConfigError(f"{folder} contains no response of a step from 1 to {steps}. Give verl's rollout_data_dir.")
    return rows


def _rows(step: int, file: Path, most: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    prompts: dict[str, int] = {}
    for where, _, entry in objects(file):
        try:
            prompt, response, score = entry["input"], entry["output"], float(entry["score"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: no input, output and score of a response ({error!r}).") from error
        group = prompts.setdefault(prompt, len(prompts))
        text = json.dumps([[response, math.nan, 0, 0]])
        rows.append(
            {"step": step, "rollout": len(rows), "group": group, "reward": score, "prompt": prompt, "response": text}
        )
    ranked = sorted(rows, key=lambda row: row["reward"])
    places = {round(place * (len(ranked) - 1) / max(1, most - 1)) for place in range(most)} if ranked else set()
    return [ranked[place] for place in sorted(places)]
