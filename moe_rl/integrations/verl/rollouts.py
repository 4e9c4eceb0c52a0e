"""Rollouts that verl's trainers write (`trainer.rollout_data_dir`), as rows of our table.

verl writes a file per step, and of each response its text, its score and the text of its prompt, without special
tokens: no ids, no log-probs and no routes.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.tasks.json_lines import objects


def read_rollouts(folder: Path, steps: int, kept: int = 8) -> list[dict[str, Any]]:
    """Rows of the steps 1 to `steps`: `kept` responses of each, at equal distances in the order of their scores, the
    lowest and the highest included. Raises ConfigError where there is none, and for a line of another form."""
    files = {int(file.stem): file for file in folder.glob("*.jsonl") if re.fullmatch(r"\d+", file.stem)}
    wanted = [(step, files[step]) for step in sorted(files) if 0 < step <= steps]
    if not wanted:
        raise ConfigError(f"{folder} contains no file N.jsonl of a step from 1 to {steps}. Give verl's "
                          "rollout_data_dir.")
    return [row for step, file in wanted for row in _rows(step, file, kept)]


def _rows(step: int, file: Path, kept: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    prompts: dict[str, int] = {}
    for where, _, entry in objects(file):
        prompt, response, score = (entry.get(key) for key in ("input", "output", "score"))
        if not (isinstance(prompt, str) and isinstance(response, str) and isinstance(score, int | float)
                and abs(score) < 1e30):
            raise ConfigError(f"{where}: expected input and output as texts, and score as a number; the keys are "
                              f"{', '.join(entry)}")
        text = json.dumps([[response, math.nan, 0, 0]])
        found.append({"step": step, "rollout": len(found), "group": prompts.setdefault(prompt, len(prompts)),
                      "reward": float(score), "prompt": prompt, "response": text})
    if not found:
        raise ConfigError(f"{file} is empty. Restore it, or remove it.")
    ranked = sorted(found, key=lambda row: row["reward"])
    places = {round(place * (len(ranked) - 1) / max(1, kept - 1)) for place in range(kept)}
    return [ranked[place] for place in sorted(places)]
