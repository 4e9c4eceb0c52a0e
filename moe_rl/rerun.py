"""Runs that a table reports, made again from the configuration in their own rows, and compared with what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from moe_rl import runs
from moe_rl.config import RunConfig
from moe_rl.frames import load_study
from moe_rl.study import DECLARATION, Planned, Study, read_declaration
from moe_rl.versions import code_version, package_versions
from moe_rl.workers import Failure, run_study


def rerun(path: Path, out: Path, *, jobs: int | None, console: Console) -> list[Failure]:
    """Run every row below `path` (a study, an arm, a cell or a run) again in `out`; returns the failures.

    Then says of each whether its final weights and optimizer state are those of the row, bit for bit. They can be only
    on the same kind of machine with the same versions; differing versions are named. A task, loss or trainer of one's
    own is looked for in the current folder. Raises ConfigError for a row with settings that this code does not know.
    """
    sys.path.insert(0, str(Path.cwd()))
    declared = next((f for f in [path, *path.absolute().parents][:4] if (f / DECLARATION).exists()), path)
    trainer = read_declaration(declared)["trainer"]
    rows = list(load_study(path, mix_code=True).runs.itertuples())
    planned = [Planned(out / row.study / row.arm / row.factors / f"seed={row.seed}",
                       RunConfig.from_dict(json.loads(row.config))) for row in rows]
    study = Study(name=rows[0].study, question="", hypothesis="", arms=(planned[0].config.arm,),
                  base=planned[0].config, trainer=trainer)
    failures = run_study(study, planned, cache=out / ".cache", jobs=jobs, console=console)
    failed = {failure.path for failure in failures}
    for row, p in zip(rows, planned, strict=True):
        if p.path not in failed:
            same = (runs.read_manifest(p.path) or {}).get("checkpoint") == row.checkpoint
            console.print(f"{p.path}: {'the same weights, bit for bit' if same else 'other weights'}"
                          + ("" if same else _other_versions(row.code, row.packages)), highlight=False, soft_wrap=True)
    return failures


def _other_versions(code: str, packages: str) -> str:
    there, here = json.loads(packages) | {"code": code}, package_versions() | {"code": code_version()}
    changed = [f"{name} {there[name]} there, {here.get(name)} here" for name in there if there[name] != here.get(name)]
    return f" ({'; '.join(changed) or 'with equal versions'})"
