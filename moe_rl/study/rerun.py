"""Runs that a table reports, made again from the configuration in their own rows, and compared with what it says."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype
from rich.console import Console

from moe_rl.config.run import NAMED, RunConfig
from moe_rl.config.values import check_values
from moe_rl.errors import ConfigError
from moe_rl.runs import folder as runs
from moe_rl.runs.columns import TABLES, timing
from moe_rl.runs.frames import Frames, load_study, read_table
from moe_rl.runs.terminal import say
from moe_rl.runs.versions import code_version, package_versions
from moe_rl.study.declaration import DECLARATION, Planned, Study, path_of, read_declaration
from moe_rl.study.workers import Failure, run_study


def rerun(path: Path, out: Path, *, jobs: int | None, console: Console,
          trusted: Callable[[list[str]], bool] = lambda code: False) -> list[Failure]:
    """Run every row below `path` (a study, an arm, a cell or a run) again in `out`; returns the failures.

    Then says of each whether its final weights and optimizer state are those of the row, bit for bit, and else in which
    columns their tables part; that can happen on another kind of machine or with other versions, which are named.

    Rows that name code from outside the package run only if `trusted`, called with these names, says so; it is looked
    for in the current folder and in those above the tables, where a study's file lies beside its results. Raises
    ConfigError where it is not trusted, for settings that this code does not know or that no run can have, and for
    labels that would lead out of `out`.
    """
    above = [path, *path.absolute().parents][:4]
    declared = next((f for f in above if (f / DECLARATION).exists()), path)
    trainer = read_declaration(declared)["trainer"]
    frames = load_study(path, mix_code=True)
    planned = [_planned(row, out) for row in frames.runs.itertuples()]
    if code := outside_code([p.config for p in planned], trainer):
        if not trusted(code):
            raise ConfigError(f"the rows in {path} name code from outside moe_rl, which would run here: "
                              f"{', '.join(code)}. A table can name anything that is installed: look at that code, "
                              "then say --trust")
        make_importable(code, declared)
    study = Study(name=planned[0].path.parts[-4], question="", hypothesis="", arms=(planned[0].config.arm,),
                  base=planned[0].config, trainer=trainer)
    failures = run_study(study, planned, cache=out / ".cache", jobs=jobs, console=console)
    failed = {failure.path for failure in failures}
    for p in planned:
        if p.path not in failed:
            say(console, f"{p.path}: {verdict(frames.select([p.path]), p.path)}")
    return failures


def outside_code(configs: Iterable[RunConfig], trainer: str) -> list[str]:
    """Every `pkg.module:name` outside this package that these runs would import and call, in alphabetical order."""
    found = set(NAMED.findall(trainer)).union(*(config.own_code() for config in configs))
    return sorted(name for name in found if name.partition(":")[0].partition(".")[0] != "moe_rl")


def _planned(row: Any, out: Path) -> Planned:
    config = RunConfig.from_dict(json.loads(row.config))
    check_values(config)
    path = path_of(out, row.study, row.arm, row.factors, row.seed)
    if (config.seed, config.arm.name) != (row.seed, row.arm):
        raise ConfigError(f"the row of arm {row.arm!r}, seed {row.seed}, holds the configuration of arm "
                          f"{config.arm.name!r}, seed {config.seed}: somebody has edited one of them")
    return Planned(path, config)


def make_importable(code: list[str], tables: Path) -> None:
    """Put the current folder on the search path, and the nearest one above `tables` that holds a module of `code`."""
    sys.path.insert(0, str(Path.cwd()))
    for top in {name.partition(":")[0].partition(".")[0] for name in code}:
        if top and importlib.util.find_spec(top) is None:
            holds = (f for f in tables.absolute().parents[:4] if (f / f"{top}.py").exists() or (f / top).is_dir())
            sys.path.extend(str(folder) for folder in itertools.islice(holds, 1))


def _equal(a: pd.Series, b: pd.Series) -> bool:
    numbers = is_numeric_dtype(a) and is_numeric_dtype(b)  # else names, as of a benchmark
    x, y = (column.to_numpy("float32" if numbers else object) for column in (a, b))
    return np.array_equal(x, y, equal_nan=numbers)


def verdict(reported: Frames, path: Path) -> str:
    """How the run in `path` compares with the one that `reported` holds. Values are compared as float32."""
    (row,), manifest = reported.runs.to_dict("records"), runs.read_manifest(path)
    if manifest is not None and manifest.get("checkpoint") == row["checkpoint"]:
        return "the same weights and optimizer state, bit for bit"
    tables = {name: (reported[name], read_table(path, name)) for name in TABLES}
    both = [(name, c) for name, (a, b) in tables.items() for c in b if c in a and not timing(c)]
    parted = [f"{name}.{c}" for name, c in both if not _equal(*(table[c] for table in tables[name]))]
    values = (f"values part in {len(parted)} of {len(both)} columns ({', '.join(parted[:3])}, …)" if parted else
              f"equal values in all {len(both)} columns")
    there = json.loads(row["packages"]) | {"code": row["code"]}
    here = package_versions() | {"code": code_version()}
    changed = [f"{name} {there[name]} there, {here.get(name)} here" for name in there if there[name] != here.get(name)]
    return f"another checkpoint, {values}; {'; '.join(changed) or 'the same versions, so another machine?'}"
