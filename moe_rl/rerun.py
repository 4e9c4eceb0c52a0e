"""Runs that a table reports, made again from the configuration in their own rows, and compared with what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype
from rich.console import Console

from moe_rl import runs
from moe_rl.columns import TABLES, timing
from moe_rl.config import RunConfig
from moe_rl.frames import Frames, load_study, read_table
from moe_rl.study import DECLARATION, Planned, Study, read_declaration
from moe_rl.versions import code_version, package_versions
from moe_rl.workers import Failure, run_study


def rerun(path: Path, out: Path, *, jobs: int | None, console: Console) -> list[Failure]:
    """Run every row below `path` (a study, an arm, a cell or a run) again in `out`; returns the failures.

    Then says of each whether its final weights and optimizer state are those of the row, bit for bit, and else in which
    columns their tables part; that can happen on another kind of machine or with other versions, which are named. A
    task, loss or trainer of one's own is looked for in the current folder. Raises ConfigError for a row with settings
    that this code does not know.
    """
    sys.path.insert(0, str(Path.cwd()))
    declared = next((f for f in [path, *path.absolute().parents][:4] if (f / DECLARATION).exists()), path)
    trainer = read_declaration(declared)["trainer"]
    frames = load_study(path, mix_code=True)
    rows = list(frames.runs.itertuples())
    planned = [Planned(out / row.study / row.arm / row.factors / f"seed={row.seed}",
                       RunConfig.from_dict(json.loads(row.config))) for row in rows]
    study = Study(name=rows[0].study, question="", hypothesis="", arms=(planned[0].config.arm,),
                  base=planned[0].config, trainer=trainer)
    failures = run_study(study, planned, cache=out / ".cache", jobs=jobs, console=console)
    failed = {failure.path for failure in failures}
    for p in planned:
        if p.path not in failed:
            console.print(f"{p.path}: {verdict(frames.select([p.path]), p.path)}", highlight=False, soft_wrap=True)
    return failures


def _equal(a: pd.Series, b: pd.Series) -> bool:
    numbers = is_numeric_dtype(a) and is_numeric_dtype(b)  # else names, as of a benchmark
    return np.array_equal(*(x.to_numpy("float32" if numbers else object) for x in (a, b)), equal_nan=numbers)


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
