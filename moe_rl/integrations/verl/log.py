"""What verl logs, as rows of our tables: the lines of its file logger, or of its console.

A quantity that verl's log has by our definition is in our column. What is a mean over the updates of a step is in a
column `own_…`: our columns of steps pool the tokens of all updates. Where verl evaluates on several held-out sets,
each has columns `own_eval_…_SET`, and our columns, which are of one set, are absent. What verl does not measure is not
there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moe_rl.errors import RunError
from moe_rl.storage.columns import TABLES, unknown

Row = dict[str, Any]
STEPS = {
    "critic/score/mean": "reward", "response_length/mean": "response_tokens", "actor/grad_norm": "grad_norm",
    "timing_s/gen": "seconds_sample", "timing_s/old_log_prob": "seconds_score", "timing_s/testing": "seconds_evaluate",
    "timing_s/update_actor": "seconds_update", "timing_s/step": "seconds_step",
    **{f"actor/routing/engine_{name}": f"engine_{name}" for name in (
        "kl_k3", "logprob_mean", "beyond_2", "expert_change_rate", "any_change_rate", "any_layer_change")},
    "actor/pg_clipfrac": "own_pg_clipfrac", "actor/ppo_kl": "own_ppo_kl", "actor/entropy": "own_entropy",
    "response_length/clip_ratio": "own_clip_ratio",
}  # fmt: skip
"""verl's names, and the columns of `steps`."""
ACTIVE = "actor/routing/coverage"
"""In every step of a trainer in which moe_rl is active."""
CONSOLE = re.compile(r"^(?:\x1b\[\d+m)?(?:\(\w+ [^)]*\))?(?:\x1b\[0m)? ?step:(\d{1,9}) - (.*)")
"""A line that verl's console printed, as it is or with the name of Ray's worker before it. A response that is printed
may begin so too: the parts of a true one are all numbers with a name that contains a slash."""
PART, BETWEEN = re.compile(r"[^\s:/]+/.+:(?:np\.\w+\()?[-+.\w]+\)?"), re.compile(r" - (?=[^\s:/]+/)")
UPDATE = re.compile(r"actor/routing/update_(\d{1,6})/(\w+)")
STEP, LAYER = re.compile(r"actor/routing/step_(\w+)"), re.compile(r"actor/routing/step_(\w+)/layer_(\d{1,6})")
"""What all updates of a step change together."""
HELD_OUT = re.compile(r"val-\w+/(.*)/(acc|reward)/mean@1")
COLUMNS = {"acc": "eval_exact_greedy", "reward": "eval_reward_greedy"}
MEAN = re.compile(r"actor/routing/(\w+)")


def read_log(files: Iterable[Path], active: bool = False) -> dict[str, list[Row]]:
    """Rows of `steps`, `updates` and `layers`, from the logs of one run in the order of their time: of a step that two
    of them have, the later numbers count. Raises RunError where no step is in them; with `active`, also for a step of a
    trainer in which moe_rl was not active."""
    found: dict[int, dict[str, float]] = {}
    for file in files:
        for step, values in _entries(file):
            found[step] = found.get(step, {}) | values  # a trainer that goes on evaluates first, and logs no more
    if not found:
        raise RunError(f"{', '.join(map(str, files)) or 'the folder'} contains no step of verl. Give the file of its "
                       "logger `file` (trainer.logger), or its console output.")
    # verl saves a step before it logs it: killed between the two, it goes on with the next, and has evaluated alone.
    trained = {step: values for step, values in found.items() if any(not name.startswith("val-") for name in values)}
    if active and (without := [step for step, values in trained.items() if ACTIVE not in values]):
        raise RunError(f"step {without[0]} of verl's log has no {ACTIVE}, so moe_rl was not active and nothing was "
                       "replayed. Is moe_rl installed on every machine?")
    rows = sorted(found.items())
    tables = {"updates": _update_rows, "layers": _layer_rows}
    return {"steps": [_step_row(*one) for one in rows]} | {
        table: [row for one in rows for row in rows_of(*one)] for table, rows_of in tables.items()}


def _entries(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and numbers of every line of a log that has them; a line of JSON that a kill cut off has none."""
    for line in file.read_text(errors="replace").splitlines():
        if (match := CONSOLE.search(line)) and all(map(PART.fullmatch, parts := BETWEEN.split(match[2].strip()))):
            pairs = (part.rpartition(":") for part in parts)
            values = {key: re.sub(r"np\.\w+\((.*)\)", r"\1", text.strip()) for key, _, text in pairs}
            yield int(match[1]), _numbers(values)
        elif line.startswith("{") and line.endswith("}"):
            try:
                entry = json.loads(line)
                step, data = entry["step"], entry["data"].items()
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise RunError(f"{file}: {line[:80]!r} is not a line of verl's file logger ({error})") from error
            if type(step) is not int or not 0 <= step < 2**31:
                raise RunError(f"{file}: {line[:80]!r} has the step {step!r}, which is not a number")
            yield step, _numbers(dict(data))


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    found = {}
    for key, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(number):
            found[key] = number
    return found


def _step_row(step: int, values: dict[str, float]) -> Row:
    row: Row = {"step": step} | {column: values[name] for name, column in STEPS.items() if name in values}
    several = len({match[1] for name in values if (match := HELD_OUT.fullmatch(name))}) > 1
    for name, value in values.items():
        if match := HELD_OUT.fullmatch(name):
            column, name_of_set = COLUMNS[match[2]], re.sub(r"\W+", "_", match[1])
            row[f"own_{column}_{name_of_set}" if several else column] = value
        elif (match := STEP.fullmatch(name)) and _is_measured("steps", match[1]):
            row[match[1]] = value
        elif (match := MEAN.fullmatch(name)) and name not in STEPS:
            row[f"own_{match[1]}"] = value
    return row


def _is_measured(table: str, column: str) -> bool:
    """Whether the data dictionary has the column, and it is no key of the table's rows."""
    return column not in (*TABLES[table], "layer") and not unknown(table, {column})


def _layer_rows(step: int, values: dict[str, float]) -> list[Row]:
    found = [(int(match[2]), match[1], value) for name, value in values.items()
             if (match := LAYER.fullmatch(name)) and _is_measured("layers", match[1])]
    return [{"step": step, "site": site, "layer": layer, column: value}
            for site, (layer, column, value) in enumerate(sorted(found))]


def _update_rows(step: int, values: dict[str, float]) -> list[Row]:
    rows: dict[int, Row] = {}
    for name, value in values.items():
        if (match := UPDATE.fullmatch(name)) and _is_measured("updates", match[2]):
            rows.setdefault(int(match[1]), {"step": step, "update": int(match[1])})[match[2]] = value
    return [rows[update] for update in sorted(rows)]
