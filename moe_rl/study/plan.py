"""A plan: the runs of a study as they were when they were handed out, by number, for workers anywhere (see `work`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.storage.folder import read_json
from moe_rl.storage.inputs import INSTALLED, changed, inputs_of
from moe_rl.storage.versions import code_version
from moe_rl.study.declaration import Planned


def frozen(planned: Sequence[Planned], *, trainer: str, cache: Path, mix_code: bool) -> dict[str, Any]:
    """The plan of runs that wait for a machine: their configurations and what these name, the code, where modules that
    are not installed are found. A worker that finds another code or other inputs refuses, unless `mix_code`."""
    own = [os.path.abspath(folder) for folder in sys.path if not folder.endswith((".zip", "lib-dynload"))]
    return {
        "trainer": trainer, "cache": str(cache), "code": code_version(), "mix_code": mix_code,
        "search_path": [folder for folder in own if folder not in INSTALLED],
        "runs": [{"path": str(p.path), "hash": p.config.hash, "config": p.config.to_dict(),
                  "study_file": p.study_file and str(p.study_file),
                  "inputs": {} if mix_code else inputs_of(p.config.to_dict(), trainer)} for p in planned],
    }  # fmt: skip


def read_plan(file: Path) -> dict[str, Any]:
    """What `frozen` made, from a file. Raises ConfigError where there is none, RunError for another file."""
    plan = read_json(file, ("trainer", "cache", "code", "mix_code", "search_path", "runs"))
    if plan is None:
        raise ConfigError(f"there is no plan {file}; `moe-rl run STUDY --launcher slurm` writes one for its job array")
    return plan


def run_of(plan: Mapping[str, Any], number: int) -> Planned:
    """A run of a plan. Raises ConfigError for a number that has none, RunError for one that would not be the run that
    was planned."""
    if not 0 <= number < len(plan["runs"]):
        raise ConfigError(f"the plan has runs 0 to {len(plan['runs']) - 1}, and none with the number {number}")
    entry = plan["runs"][number]
    config = RunConfig.from_dict(entry["config"])
    path, again = entry["path"], "submit the study again, or put back what was there"
    if config.hash != entry["hash"]:
        raise RunError(f"the configuration of {path} reads differently now: {again}")
    if not plan["mix_code"]:
        if plan["code"] != code_version():
            raise RunError(f"{path} was planned by code {plan['code']}, this is {code_version()}: {again}")
        if names := changed(entry["inputs"], inputs_of(entry["config"], plan["trainer"])):
            raise RunError(f"{', '.join(names)} changed or went since {path} was planned: {again}")
    return Planned(Path(path), config, entry["study_file"] and Path(entry["study_file"]))
