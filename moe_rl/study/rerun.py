"""Runs that a table reports, made again from the configurations in its rows, and compared with its values."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.storage import folder as runs
from moe_rl.storage.columns import pooled
from moe_rl.storage.folder import DECLARATION
from moe_rl.storage.frames import (
    Difference,
    Frames,
    differences,
    load_study,
    read_run_manifest,
    read_table,
)
from moe_rl.storage.provenance import HARDWARE
from moe_rl.storage.terminal import say
from moe_rl.study.declaration import TRAINER, Planned, Study, find_study_file, path_of, read_declaration
from moe_rl.study.workers import Failure, run_study

OWN_TRAINERS = (TRAINER, "moe_rl.integrations.verl.study:execute")
"""Trainers of the package."""


def rerun(
    path: Path,
    out: Path,
    *,
    jobs: int | None,
    console: Console,
    steps: int | None = None,
    trust: bool = False,
) -> list[Failure]:
    """Run every row below `path` (a study, an arm, a condition or a run) again in `out`; returns the failures.

    Prints for each the `verdict`. With `steps` only the first ones are run and compared. Rows that name code from
    outside the package run only with `trust`. The code may be beside the study file that the row names, in the folders
    above the tables, or in the current folder. Raises ConfigError for code that is not trusted, for settings that no
    run can have, and for labels that would lead out of `out`.
    """
    above = [path, *path.absolute().parents][:4]
    tables = next((f for f in above if (f / DECLARATION).exists()), path)
    trainer = read_declaration(tables, trust=True)["trainer"]  # it is checked below
    frames = load_study(path, mix_code=True)
    rows = list(frames.runs.itertuples())
    planned = [_planned(row, out, tables, steps) for row in rows]
    if code := outside_code([p.config for p in planned], trainer):
        if not trust:
            raise ConfigError(
                f"the rows in {path} name code from outside moe_rl, or another trainer's options: "
                f"{', '.join(code)}. Read that code; if you trust it, repeat the command with --trust."
            )
        make_importable(code, tables, [p.study_file for p in planned])
    if not code:  # git in the folder of a study file would run commands that a sent checkout names
        planned = [replace(p, study_file=None) for p in planned]
    study = Study(
        name=planned[0].path.parts[-4],
        question="",
        hypothesis="",
        arms=(planned[0].config.arm,),
        base=planned[0].config,
        trainer=trainer,
    )
    failures = run_study(study, planned, cache=out / ".cache", jobs=jobs, pooled=False, console=console)
    failed = {failure.path for failure in failures}
    for p in planned:
        if p.path not in failed and "finished" in (runs.read_manifest(p.path) or {}):  # others were not started
            say(console, f"{p.path}: {verdict(frames.select([p.path]), p.path)}")
    return failures


def outside_code(configs: Iterable[RunConfig], trainer: str) -> list[str]:
    """Every `pkg.module:name` outside this package that these runs would import and call, in alphabetical order, and
    a trainer that is not the package's, or has options, since these may reach the command line of another program. An
    engine on a server is one, too: prompts are sent to it."""
    configs = list(configs)
    names = set().union(*(config.own_code() for config in configs))
    outside = {name for name in names if name.partition(":")[0].partition(".")[0] != "moe_rl"}
    outside |= {str(config.engine) for config in configs if Component.of(config.engine).name == "server"}
    use = Component.read(trainer)
    return sorted(outside | ({trainer} if use.options or use.name not in OWN_TRAINERS else set()))


def _planned(row: Any, out: Path, tables: Path, steps: int | None) -> Planned:
    config = RunConfig.from_dict(json.loads(row.config))
    config = config if steps is None else config.replace(steps=steps)
    path = path_of(out, row.study, row.arm, row.condition, row.seed)
    return Planned(path, config, find_study_file(json.loads(row.declared or "{}").get("file"), tables))


def make_importable(code: list[str], tables: Path, study_files: Iterable[Path | None] = ()) -> None:
    """Put the current folder on the search path, those of study files, and else the nearest one above `tables` that
    holds a module of `code`."""
    known = dict.fromkeys(str(file.parent) for file in study_files if file is not None)
    sys.path[:0] = [*known, str(Path.cwd())]
    importlib.invalidate_caches()
    for top in {name.partition(":")[0].partition(".")[0] for name in code}:
        if top and importlib.util.find_spec(top) is None:
            holds = (f for f in tables.absolute().parents[:4] if (f / f"{top}.py").exists() or (f / top).is_dir())
            sys.path.extend(str(folder) for folder in itertools.islice(holds, 1))


def verdict(reported: Frames, path: Path) -> str:
    """How the run in `path` compares with the one that `reported` contains: its checkpoint, and the values, as float32,
    of the steps and columns that both have; where these differ, from which step on and under which versions."""
    (row,), manifest = reported.runs.to_dict("records"), read_run_manifest(path)
    last = min(row["step"], manifest["finished"])
    shorter = last < row["step"]
    tables = [
        {name: rows[rows["step"] <= last] for name, rows in of.items() if len(rows)}
        for of in (reported.tables, {name: read_table(path, name) for name in pooled()})
    ]
    different: dict[str, Difference] = {}
    for difference in differences(*tables, narrow=True, measured=shorter):
        is_last_evaluation = shorter and difference.column is None and difference.b  # the longer run lacks it
        if not is_last_evaluation:
            different.setdefault(f"{difference.table}.{difference.column or 'rows'}", difference)
    same = "the same weights and optimizer state" if manifest.get("checkpoint") == row["checkpoint"] else ""
    checkpoint = same or "another checkpoint" + f", because it ran {last} of {row['step']} steps" * shorter
    if not different:
        return f"{checkpoint}, {'bit for bit' if same else 'equal values'}"
    first = min(difference.step for difference in different.values())
    largest = max(difference.relative for difference in different.values())
    names = ", ".join(list(different)[:3])
    values = f"values differ in {len(different)} columns ({names}) from step {first} on, by at most {largest:.1g}"
    made = manifest["packages"] | manifest.get("inputs", {}) | {"code": " then ".join(manifest["code"])}
    recorded = json.loads(row["packages"] or "{}") | json.loads(row["inputs"] or "{}") | {"code": row["code"]}
    reported_with = dict.fromkeys(HARDWARE, "not recorded") | recorded
    versions = [f"{k} {v} there, {made.get(k)} here" for k, v in reported_with.items() if v != made.get(k)]
    return f"{checkpoint}, {values} of the largest value of a column; {'; '.join(versions) or 'the same versions'}"
