"""What verl's file logger writes (`trainer.logger=[file]`), as rows of our tables.

A quantity that verl's log has by our definition is in our column. Means over the updates of a step are in columns
`own_…`: our columns of steps pool the tokens of all updates. Where verl evaluates on several held-out sets, each has
columns `own_eval_…_SET`, and our columns, which are of one set, are absent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_rl.errors import RunError
from moe_rl.storage.columns import unknown

Row = dict[str, Any]
Entry = tuple[int, dict[str, float]]
"""A step, and its numbers by verl's names."""
STEPS = {
    "critic/score/mean": "reward",
    "response_length/mean": "response_tokens",
    "actor/grad_norm": "grad_norm",
    "timing_s/gen": "seconds_sample",
    "timing_s/old_log_prob": "seconds_score",
    "timing_s/testing": "seconds_evaluate",
    "timing_s/update_actor": "seconds_update",
    "timing_s/step": "seconds_step",
    **{
        f"actor/routing/engine_{name}": f"engine_{name}"
        for name in ("expert_change_rate", "any_change_rate", "any_layer_change")
    },
    "actor/pg_clipfrac": "own_pg_clipfrac",
    "actor/ppo_kl": "own_ppo_kl",
    "actor/entropy": "own_entropy",
    "response_length/clip_ratio": "own_clip_ratio",
}
"""verl's names, and the columns of `steps`."""
ACTIVE = "actor/routing/coverage"
"""In every step of a trainer in which moe_rl is active."""
OURS = re.compile(
    r"actor/routing/(?:update_(?P<update>\d+)/|(?P<step>step_))?(?P<column>\w+)(?:/layer_(?P<layer>\d+))?"
)
"""Of the mean over a step's updates, of one of them, or of what all of them change together; of all layers, or one."""
HELD_OUT = re.compile(r"val-\w+/(.*)/(acc|reward)/mean@1")
EVALUATED = {"acc": "eval_exact_greedy", "reward": "eval_reward_greedy"}


def read_log(files: Iterable[Path], active: bool = False) -> dict[str, list[Row]]:
    """Rows of `steps`, `updates` and `layers`, from the logs of one run in the order of their time: of a step that two
    of them have, the later numbers count. Raises RunError where no step is in them; with `active`, also for a step of a
    trainer in which moe_rl was not active."""
    steps: dict[int, dict[str, float]] = {}
    for file in files:
        for step, values in entries(file)[0]:
            steps[step] = steps.get(step, {}) | values  # a trainer that goes on evaluates first, and logs no more
    if not steps:
        raise RunError(f"{', '.join(map(str, files)) or 'the folder'} contains no step of verl's logger `file`.")
    # verl saves a step before it logs it: killed between the two, it goes on with the next, and has evaluated alone.
    trained = {step: values for step, values in steps.items() if any(not name.startswith("val-") for name in values)}
    if active and (without := [step for step, values in trained.items() if ACTIVE not in values]):
        raise RunError(
            f"step {without[0]} of verl's log has no {ACTIVE}, so moe_rl was not active. Install it on every machine."
        )
    return tables_of(steps)


def entries(file: Path, start: int = 0) -> tuple[list[Entry], int]:
    """The complete lines of a log from the byte `start` on, and the byte at which they end: a kill cuts the last line
    off. Raises RunError for a line of another form."""
    with file.open("rb") as log:
        log.seek(start)
        text, _, rest = log.read().rpartition(b"\n")
        end = log.tell() - len(rest)
    return [_entry(line, file) for line in text.decode(errors="replace").split("\n") if line.strip()], end


def _entry(line: str, file: Path) -> Entry:
    try:
        entry = json.loads(line)
        numbers = {key: value for key, value in entry["data"].items() if isinstance(value, int | float)}
        return int(entry["step"]), {key: value for key, value in numbers.items() if math.isfinite(value)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file}: {line[:80]!r} is not a line of verl's logger `file` ({error!r}).") from error


def tables_of(steps: Mapping[int, Mapping[str, float]]) -> dict[str, list[Row]]:
    """Rows of `steps`, `updates` and `layers`."""
    tables: dict[str, list[Row]] = {"steps": [], "updates": [], "layers": []}
    for step, values in sorted(steps.items()):
        row: Row = {"step": step} | {column: values[name] for name, column in STEPS.items() if name in values}
        updates: dict[int, Row] = {}
        layers: dict[int, Row] = {}
        for name, value in values.items():
            match = OURS.fullmatch(name)
            if match is None or name in STEPS:
                continue
            column, update, layer = match["column"], match["update"], match["layer"]
            if update and not layer and not unknown("updates", {column}):
                updates.setdefault(int(update), {"step": step, "update": int(update)})[column] = value
            elif match["step"] and layer and not unknown("layers", {column}):
                layers.setdefault(int(layer), {})[column] = value
            elif match["step"] and not layer and not unknown("steps", {column}):
                row[column] = value
            elif not (update or match["step"] or layer):
                row[f"own_{column}"] = value
        tables["steps"].append(row | _held_out(values))
        tables["updates"] += [updates[number] for number in sorted(updates)]
        tables["layers"] += [
            {"step": step, "moe_layer": moe_layer, "layer": layer, **layers[layer]}
            for moe_layer, layer in enumerate(sorted(layers))
        ]
    return tables


def _held_out(values: Mapping[str, float]) -> Row:
    """The evaluations on one held-out set, or on several."""
    matches = [(match, value) for name, value in values.items() if (match := HELD_OUT.fullmatch(name))]
    several = len({match[1] for match, _ in matches}) > 1
    row = {}
    for match, value in matches:
        column, name_of_set = EVALUATED[match[2]], re.sub(r"\W+", "_", match[1])
        row[f"own_{column}_{name_of_set}" if several else column] = value
    return row
