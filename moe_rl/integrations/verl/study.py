"""Runs of a study that verl's own PPO trainer carries out: `moe-rl run STUDY --trainer verl`.

Data, checkpoints and logs of verl are in the folder `verl` of the run; an interrupted run goes on from verl's last
checkpoint. verl starts Ray on this machine, or uses the cluster that RAY_ADDRESS names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from moe_rl import ranks
from moe_rl.config import RunConfig, plain
from moe_rl.errors import ConfigError, RunError, Stopped
from moe_rl.integrations.verl import log, reward
from moe_rl.integrations.verl.rollouts import read_rollouts
from moe_rl.integrations.verl.settings import Data, check_settings, overrides_of
from moe_rl.registry import Component
from moe_rl.storage.folder import RunFolder
from moe_rl.study.workers import search_path

Listener = Callable[[dict[str, list[dict[str, Any]]]], None]


def check(run: RunConfig, *, settings: Sequence[str] = ()) -> list[str]:
    """Raise ConfigError for what verl cannot do of a run; return what differs from our trainer."""
    if ranks.launched():
        raise ConfigError("--trainer verl does not work under torchrun. Leave torchrun out, and use --set "
                          "verl.trainer.n_gpus_per_node=8.")
    check_settings(run)
    overrides_of(run, Path(), settings)
    return ["verl and our trainer use the same prompts, but other mini-batches and another order of samples. With one "
            "seed their values differ."]


def command(run: RunConfig, folder: Path, *, settings: Sequence[str] = ()) -> str:
    """How verl is called for the run in `folder`: what a dry run prints."""
    words = ["python", "-m", "verl.trainer.main_ppo", *overrides_of(run, folder.absolute() / "verl", settings)]
    return shlex.join(words)


def execute(run: RunConfig, folder: RunFolder, *, cache: Path, listen: Listener = lambda rows: None,
            settings: Sequence[str] = ()) -> None:
    """Carry out a run by verl, in a process of its own, and read what it logs.

    Raises ConfigError without verl; RunError where verl fails, and where moe_rl was not active in its workers; Stopped
    where the run is told to stop.
    """
    if importlib.util.find_spec("verl") is None:
        raise ConfigError("--trainer verl needs verl: pip install verl==0.9.1")
    place = folder.path.absolute() / "verl"
    place.mkdir(exist_ok=True)
    _write_data(run, place)
    logs = [place / f"log-{number:03d}.jsonl" for number in range(len([*place.glob("log-*.jsonl")]) + 1)]
    variables = {"VERL_FILE_LOGGER_PATH": str(logs[-1]), "PYTHONPATH": os.pathsep.join(search_path())}
    if (engine := Component.of(run.engine)).own:
        variables["VERL_USE_EXTERNAL_MODULES"] = engine.name.partition(":")[0]
    words = [sys.executable, "-m", "moe_rl.integrations.verl.main", *overrides_of(run, place, settings),
             *(f"++ray_kwargs.ray_init.runtime_env.env_vars.{name}={json.dumps(text)}"
               for name, text in variables.items())]
    process = subprocess.Popen(words, env=os.environ | variables, cwd=place, stdin=subprocess.PIPE)
    try:
        _follow(process, folder, logs, listen)
    finally:
        process.terminate()
        process.wait()
    printed = f"Its output is in {folder.path / 'log.txt'}."
    if process.returncode:
        raise RunError(f"verl ended with exit code {process.returncode}. {printed}")
    rows = log.read_log(logs, active=True)
    if (last := rows["steps"][-1]["step"]) < run.steps:
        raise RunError(f"verl ended after step {last} of {run.steps}. {printed}")
    if run.measure.rollouts:
        rows["rollouts"] = read_rollouts(place / "rollouts", run.steps, run.measure.rollouts)
    for table, found in rows.items():
        folder.add(table, [row for row in found if row["step"] > folder.step or not folder.step])
    folder.commit(run.steps, lambda target: json.dump(f"{place / 'checkpoints'}", (target / "where.json").open("w")))
    folder.finish()


def _follow(process: subprocess.Popen, folder: RunFolder, logs: list[Path], listen: Listener) -> None:
    """Until verl's process has ended, give the rows of every new step to `listen`."""
    seen = folder.step
    while process.poll() is None:
        time.sleep(1)
        if folder.stopping():
            raise Stopped(f"{folder.path} was told to stop. Repeat the command to continue from the last checkpoint of "
                          "verl.")
        if not logs[-1].exists() or not logs[-1].read_text().strip():
            continue
        rows = log.read_log(logs)
        for seen in [row["step"] for row in rows["steps"] if row["step"] > seen]:
            listen({table: [row for row in found if row["step"] == seen] for table, found in rows.items()})


def _write_data(run: RunConfig, place: Path) -> None:
    data, task = Data.of(run), json.dumps(plain(Component.of(run.task)))
    for name, prompts in (("train", data.train), ("held_out", data.held_out)):
        rows = [reward.row_of(task, prompt, index) for index, prompt in enumerate(prompts)]
        pd.DataFrame(rows).to_parquet(place / f"{name}.parquet")
