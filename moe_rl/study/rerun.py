"""Runs that a table reports, made again from the configuration in their own rows, and compared with what it says."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype
from rich.console import Console

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.storage import folder as runs
from moe_rl.storage.columns import pooled, timing
from moe_rl.storage.folder import DECLARATION
from moe_rl.storage.frames import LABELS, Frames, load_study, read_table
from moe_rl.storage.provenance import HARDWARE, changed, digests_of, inputs_of
from moe_rl.storage.terminal import say
from moe_rl.study.declaration import TRAINER, Planned, Study, path_of, read_declaration
from moe_rl.study.workers import Failure, run_study

OWN_TRAINERS = (TRAINER, "moe_rl.integrations.verl.study:execute")
"""What carries out a run and is part of the package."""


def rerun(path: Path, out: Path, *, jobs: int | None, console: Console, steps: int | None = None,
          trusted: Callable[[list[str]], bool] = lambda code: False) -> list[Failure]:
    """Run every row below `path` (a study, an arm, a cell or a run) again in `out`; returns the failures.

    Then says of each whether its final weights and optimizer state are those of the row, bit for bit, and in which
    columns their tables part, if any, from which step on and by how much; that can happen on another processor or with
    other versions, which are named. With `steps` only the first ones are run and compared.

    Rows that name code from outside the package run only if `trusted`, called with these names, says so. It is looked
    for beside the study file that the row names, in or below the folders above the tables and the current one, or, as
    an older row names none, in these folders; what is not, byte for byte, what the row ran with is named before it
    runs. Raises ConfigError where it is not trusted, for settings that this code does not know or that no run can have,
    and for labels that would lead out of `out`.
    """
    above = [path, *path.absolute().parents][:4]
    tables = next((f for f in above if (f / DECLARATION).exists()), path)
    trainer = read_declaration(tables, trust=True)["trainer"]  # whether it may be called is asked below
    frames = load_study(path, mix_code=True)
    rows = list(frames.runs.itertuples())
    planned = [_planned(row, out, tables, steps) for row in rows]
    if code := outside_code([p.config for p in planned], trainer):
        if not trusted(code):
            raise ConfigError(f"the rows in {path} name code from outside moe_rl, or another trainer's options: "
                              f"{', '.join(code)}. Read that code; if you trust it, repeat the command with --trust.")
        make_importable(code, tables, [p.study_file for p in planned])
    notes = (note for row, p in zip(rows, planned, strict=True) for note in _differences(row, p, trainer, bool(code)))
    for note in dict.fromkeys(notes):
        say(console, ("warning", "yellow"), f" {note}", wrap=True)
    if not code:  # git would be asked about the folder of a study file, and runs commands that a sent checkout names
        planned = [replace(p, study_file=None) for p in planned]
    study = Study(name=planned[0].path.parts[-4], question="", hypothesis="", arms=(planned[0].config.arm,),
                  base=planned[0].config, trainer=trainer)
    failures = run_study(study, planned, cache=out / ".cache", jobs=jobs, pooled=False, console=console)
    failed = {failure.path for failure in failures}
    for p in planned:
        if p.path not in failed and runs.read_manifest(p.path) is not None:  # others were not started
            say(console, f"{p.path}: {verdict(frames.select([p.path]), p.path)}")
    return failures


def outside_code(configs: Iterable[RunConfig], trainer: str) -> list[str]:
    """Every `pkg.module:name` outside this package that these runs would import and call, in alphabetical order, and
    a trainer that is not the package's, or has options, since these may reach the command line of another program. An
    engine on a server is one, too: prompts are sent to it."""
    configs = list(configs)
    found = set().union(*(config.own_code() for config in configs))
    outside = {name for name in found if name.partition(":")[0].partition(".")[0] != "moe_rl"}
    outside |= {str(config.engine) for config in configs if Component.of(config.engine).name == "server"}
    use = Component.read(trainer)
    return sorted(outside | ({trainer} if use.options or use.name not in OWN_TRAINERS else set()))


def _planned(row: Any, out: Path, tables: Path, steps: int | None) -> Planned:
    config = RunConfig.from_dict(json.loads(row.config))
    config = config if steps is None else config.replace(steps=steps)
    path = path_of(out, row.study, row.arm, row.factors, row.seed)
    if (config.seed, config.arm.name) != (row.seed, row.arm):
        raise ConfigError(f"the row of arm {row.arm!r}, seed {row.seed}, contains the configuration of arm "
                          f"{config.arm.name!r}, seed {config.seed}. The table was edited; restore it from a copy.")
    return Planned(path, config, _study_file(json.loads(row.declared or "{}").get("file"), tables))


def _study_file(name: str | None, tables: Path) -> Path | None:
    """Where the study file of a row is now: under the path that it had in its checkout, or its name alone, below a
    folder above the tables or the current one. A file among the tables is none: git would be asked about its folder,
    and runs commands that a checkout of somebody else names."""
    if name is None:
        return None
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name.endswith(".py"):
        raise ConfigError(f"the study file {name!r} of a row is not the path of a Python file in a checkout. The table "
                          "was edited; restore it from a copy.")
    roots = [*tables.absolute().parents, Path.cwd(), *Path.cwd().parents]
    places = (root / form for root in roots for form in (name, PurePosixPath(name).name))
    inside = tables.resolve()
    return next((place for place in places if place.is_file() and inside not in place.resolve().parents), None)


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


def _differences(row: Any, planned: Planned, trainer: str, own: bool) -> Iterable[str]:
    """What a row was made from and declared by, where that is not what is here."""
    declared, here = json.loads(row.declared or "{}"), planned.study_file
    if row.inputs is None and own:
        yield f"the rows of {row.study} have no digests, so it is unknown with which version of their code they ran"
    elif names := changed(made_from := json.loads(row.inputs or "{}"),
                          inputs_of(planned.config.to_dict(), trainer, made_from)):
        yield (f"{', '.join(names)} changed since the rows of {row.study} ran, or is missing. The rerun uses the "
               "version here.")
    if not declared:
        return
    if here is None:
        yield (f"the study file {declared['file']} of {row.study} is not in or above {Path.cwd()} or the tables. "
               "The rerun does not use it.")
    elif names := changed(declared["sources"], digests_of(declared["sources"], here.parent)):
        yield (f"{', '.join(names)} beside {here} changed since {row.study} ran. The rerun uses the configuration of "
               "the rows.")


def verdict(reported: Frames, path: Path) -> str:
    """How the run in `path` compares with the one that `reported` holds: its checkpoint, and the steps that both have.

    Values are compared as float32. Of a run of fewer steps what the other had not measured by then is left out, as the
    evaluation at its end.
    """
    (row,), made = reported.runs.to_dict("records"), runs.read_manifest(path)
    assert made is not None, "the run has just ended"
    alike = made.get("checkpoint") == row["checkpoint"]
    last = min(row["step"], made["finished"])
    shorter = last < row["step"]
    parted: dict[str, tuple[int, float]] = {}
    without: list[str] = []
    count = 0
    for name, keys in pooled().items():
        both = (reported[name], read_table(path, name))
        a, b = (table[table["step"] <= last].set_index(list(keys)).sort_index() for table in both)
        lost = [c for c in a if (c not in b or not len(b)) and a[c].notna().any() and c not in LABELS]
        without += [f"{name}.{c}" for c in lost if not timing(c)]
        if not len(a) or not len(b):
            continue
        columns = [c for c in b if c in a and not timing(c) and not (shorter and a[c].isna().all())]
        count += len(columns)
        if shorter:  # which evaluates at its end, where the longer run need not have
            b = b[b.index.isin(a.index) | (b.index.get_level_values("step") < last)]
        if not a.index.equals(b.index):
            steps = a.index.symmetric_difference(b.index).get_level_values("step")
            parted[f"{name}, its rows"] = int(steps.min()), np.inf
            a, b = (table.loc[a.index.intersection(b.index)] for table in (a, b))
        parted |= {f"{name}.{c}": found for c in columns if (found := _parts(a[c], b[c], shorter)) is not None}
    if not parted:
        values = f"equal values in all {count} columns"
    else:
        first, largest = min(step for step, _ in parted.values()), max(parted, key=lambda c: parted[c][1])
        values = (f"values differ in {len(parted)} of {count} columns ({', '.join([*parted][:3])}, …), from step "
                  f"{first} on, by at most {parted[largest][1]:.1g} of the largest value of a column ({largest})")
    lacking = f", and {len(without)} columns of the row are missing now ({', '.join(without[:3])}, …)" * bool(without)
    if alike and not parted:
        return f"the same weights and optimizer state, bit for bit{lacking}"
    checkpoint = ("the same weights and optimizer state" if alike else "another checkpoint"
                  + f", because it ran {last} of {row['step']} steps" * bool(shorter))
    there, here = _made_from(row), _made_from({**made, "code": " then ".join(made["code"])})
    others = [f"{name} {there[name]} there, {here.get(name)} here" for name in there if there[name] != here.get(name)]
    if parted and any(there[name] != here[name] for name in HARDWARE):
        others.append("another processor or instruction set alone can change these values")
    unsaid = ("as they should be" if shorter and not parted else
              "versions, processor and instruction set are the same, so the table may have been edited")
    return f"{checkpoint}, {values}{lacking}; {'; '.join(others) or unsaid}"


def _made_from(run: Mapping[str, Any]) -> dict[str, str]:
    """Processor, packages, code and inputs of a row or of a manifest."""
    packages, inputs = (json.loads(part) if isinstance(part := run.get(key) or {}, str) else part
                        for key in ("packages", "inputs"))
    return {**dict.fromkeys(HARDWARE, "not recorded"), "cpu_kernels": "used", **packages, "code": run["code"],
            **{name: value[:10] for name, value in inputs.items()}}


def _parts(a: pd.Series, b: pd.Series, measured: bool) -> tuple[int, float] | None:
    """The first step at which two columns part, and by how much of the largest value at most; None where they do not.
    With `measured` only where a has a value."""
    numbers = is_numeric_dtype(a) and is_numeric_dtype(b)  # else names, as of a benchmark
    x, y = (column.to_numpy("float32" if numbers else object) for column in (a, b))
    missing = (a.isna().to_numpy(), b.isna().to_numpy())
    differ = (x != y) & ~(missing[0] & missing[1]) & ~(missing[0] & measured)
    if not differ.any():
        return None
    step = int(a.index.get_level_values("step")[differ].min())
    if not numbers or (missing[0] != missing[1])[differ].any():
        return step, np.inf
    with np.errstate(invalid="ignore"):
        return step, float(np.nanmax(np.abs(x - y)) / np.nanmax(np.maximum(np.abs(x), np.abs(y))))
