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
from moe_rl.integrations.slurm import search_path
from moe_rl.integrations.verl import log, reward
from moe_rl.integrations.verl.rollouts import read_rollouts
from moe_rl.integrations.verl.settings import Data, check_settings, overrides_of
from moe_rl.registry import Component
from moe_rl.storage.folder import RunFolder, write_text

Listener = Callable[[dict[str, list[dict[str, Any]]]], None]
CAUTION = (
    "verl and our trainer use the same prompts, but other mini-batches and another order of samples. With one seed "
    "their values differ."
)
DECAY = "verl's weight decay acts on norms and biases, too. Our own policies leave them out."
ROUNDED = (
    "model.dtype=bfloat16: verl's AdamW then trains bfloat16 weights, which round most small steps away. For float32 "
    "weights, use model.dtype=float32 with policy=fsdp(compute_dtype=bfloat16) and engine=vllm(dtype=bfloat16)."
)


def check(run: RunConfig, *, settings: Sequence[str] = ()) -> list[str]:
    """Raise ConfigError for what verl cannot do of a run; return what differs from our trainer."""
    if ranks.launched():
        raise ConfigError("--trainer verl does not work under torchrun. Set verl.trainer.n_gpus_per_node instead.")
    check_settings(run)
    overrides_of(run, Path(), settings)
    return [CAUTION, *[ROUNDED] * (run.model.dtype == "bfloat16"), *[DECAY] * bool(run.optimizer.weight_decay)]


def command(run: RunConfig, folder: Path, *, settings: Sequence[str] = ()) -> str:
    """How verl is called for the run in `folder`: what a dry run prints."""
    words = ["python", "-m", "verl.trainer.main_ppo", *overrides_of(run, folder.absolute() / "verl", settings)]
    return shlex.join(words)


def execute(
    run: RunConfig,
    folder: RunFolder,
    *,
    cache: Path,
    listen: Listener = lambda rows: None,
    settings: Sequence[str] = (),
) -> None:
    """Carry out a run by verl, in a process of its own, and read what it logs.

    Raises ConfigError without verl; RunError where verl fails, and where moe_rl was not active in its workers; Stopped
    where the run gets the signal to stop.
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
    words = [
        sys.executable,
        "-m",
        "moe_rl.integrations.verl.main",
        *overrides_of(run, place, settings),
        *(f"++ray_kwargs.ray_init.runtime_env.env_vars.{name}={json.dumps(text)}" for name, text in variables.items()),
    ]
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
    for name, table in rows.items():
        folder.add(name, [row for row in table if row["step"] > folder.step or not folder.step])
    where = json.dumps(f"{place / 'checkpoints'}")
    folder.commit(run.steps, lambda target: write_text(target / "where.json", where))
    folder.finish()


def _follow(process: subprocess.Popen, folder: RunFolder, logs: list[Path], listen: Listener) -> None:
    """Give the rows of every new step to `listen`, until verl's process has ended."""
    seen, places, running = folder.step or -1, dict.fromkeys(logs, 0), True
    while running:
        time.sleep(1)
        running = process.poll() is None
        if folder.stopping():
            raise Stopped(
                f"{folder.path} was told to stop. Repeat the command to continue from the last checkpoint of verl."
            )
        for file in filter(Path.exists, logs):
            added, places[file] = log.entries(file, places[file])
            for step, values in added:
                if step > seen:
                    seen = step
                    listen(log.tables_of({step: values}))


def _write_data(run: RunConfig, place: Path) -> None:
    data, task = Data.of(run), json.dumps(plain(Component.of(run.task)))
    for name, prompts in (("train", data.train), ("held_out", data.held_out)):
        rows = [reward.row_of(task, prompt, index) for index, prompt in enumerate(prompts)]
        pd.DataFrame(rows).to_parquet(place / f"{name}.parquet")
