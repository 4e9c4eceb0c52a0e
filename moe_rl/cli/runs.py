"""Verbs that look at runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_rl.cli.verbs import argument, verb
from moe_rl.errors import ConfigError, RunError
from moe_rl.metrics.rounding import number


@verb(
    argument("folder", type=Path, nargs="?", default=Path("runs"), help="any folder above runs (default: runs)"),
    examples="""
  moe-rl runs list                               every run below runs/
  moe-rl runs list runs/routing_replay/gspo_short   one arm""",
)
def list_runs(options: argparse.Namespace) -> int:
    """A line per run. A folder of runs needs neither pandas nor torch."""
    from moe_rl.storage.folder import run_folders, state
    from moe_rl.storage.terminal import duration, harmless, table

    states = [(path, state(path)) for path in run_folders(options.folder)]
    states += _submitted(options.folder, states)
    if not states:
        raise ConfigError(f"no run below {options.folder}. Give a folder of studies, or a study.")
    rows: list[tuple[str, ...]] = [("run", "state", "step", "reward", "changed", "left")]
    for path, now in states:
        age = f"{duration(time.time() - now['updated'])} ago" if "updated" in now else ""
        left = duration(now["seconds_left"]) if now.get("seconds_left") else ""
        reward = number(now["reward"], ".3f") if now.get("reward") is not None else ""
        scheduler = f" ({now['scheduler']})" if now.get("scheduler") else ""
        rows.append((str(path), now["state"] + scheduler, f"{now['step']}/{now['steps']}", reward, age, left))
    print(*map(harmless, table(rows)), sep="\n")
    return 0


@verb(
    argument("run", type=Path, help="folder of a run"),
    examples="""
  moe-rl runs show runs/routing_replay/gspo_short/lag=0/seed=0
                                configuration, versions and the last rows""",
)
def show(options: argparse.Namespace) -> int:
    """The manifest, the state, and the last row of every table."""
    from moe_rl.storage.columns import TABLES, pooled
    from moe_rl.storage.folder import read_manifest, state
    from moe_rl.storage.frames import NESTED, collected, read_table
    from moe_rl.storage.terminal import harmless

    manifest, frames = read_manifest(options.run), None
    if manifest is not None:
        print(json.dumps(manifest, indent=2))
        print(json.dumps({"progress": state(options.run)}, indent=2))
    else:
        frames = collected(options.run)
        if frames is None or len(frames.runs) != 1:
            raise ConfigError(f"{options.run} is not a run: it has no manifest.json. See `moe-rl runs list`.")
        row = frames.runs.iloc[0].to_dict()
        print(json.dumps(row | {k: json.loads(row[k] or "null") for k in NESTED}, indent=2, default=str))
    for name in TABLES if frames is None else pooled():
        frame = read_table(options.run, name) if frames is None else frames[name]
        print(f"\n{name}: {len(frame)} rows, {len(frame.columns)} columns")
        if len(frame):
            print(harmless(frame.iloc[-1].dropna().to_string()))
    return 0


@verb(
    argument("run", type=Path, help="folder of a run"),
    argument("--step", metavar="N[:M]", help="a step, or a range of steps (default: the last stored)"),
    argument("--sort", default="reward", metavar="BY", help="or length, ratio, advantage, clipped, flips or step"),
    argument("--best", type=int, metavar="N", help="the N highest of all steps, or of --step"),
    argument("--worst", type=int, metavar="N", help="the N lowest of them"),
    argument("--page", type=Path, metavar="FILE", help="write a web page of all steps instead"),
    examples="""
  moe-rl runs read runs/x/gspo/base/seed=0              the last step, by reward
  moe-rl runs read runs/x/gspo/base/seed=0 --best 5     the highest rewards
  moe-rl runs read runs/x/gspo/base/seed=0 --sort ratio --best 3 --step 50:100
  moe-rl runs read runs/x/gspo/base/seed=0 --page read.html
A running run shows its last checkpoint. docs/studies.md explains the marks.""",
)
def read(options: argparse.Namespace) -> int:
    """Print rollouts, or write their page."""
    from rich.console import Console

    from moe_rl.results.rollouts import load_rollouts, ordered, print_rollout, write_rollouts_page

    if options.page is not None:
        if (options.step, options.sort, options.best, options.worst) != (None, "reward", None, None):
            raise ConfigError("--page shows every step. Leave out --step, --sort, --best and --worst.")
        write_rollouts_page(options.run, options.page)
        print(f"{options.page}: open it in any browser")
        return 0
    rows = load_rollouts(options.run, _range(options.step))
    if options.step is None and options.best is options.worst is None:
        rows = rows[rows["step"] == rows["step"].max()]
    high = ordered(rows, options.sort)
    low = ordered(rows, options.sort, ascending=True).head(max(0, options.worst or 0))
    if options.best is not None or options.worst is not None:
        high = high.head(max(0, options.best or 0))
    console = Console(highlight=False)
    for row in [*high.to_dict("records"), *low.to_dict("records")]:
        print_rollout(console, row)
    return 0


def _range(text: str | None) -> tuple[int, int] | None:
    first, _, last = (text or "").partition(":")
    try:
        return None if text is None else (int(first), int(last or first))
    except ValueError as error:
        raise ConfigError(f"--step {text} is not a step, or two steps such as 10:20") from error


@verb(
    argument("a", type=Path, help="folder of a run"),
    argument("b", type=Path, help="folder of another run"),
    examples="""
  moe-rl runs diff runs/x/gspo/base/seed=0 again/x/gspo/base/seed=0
Exit code: 0 if all values are equal, 1 if not. It ignores seconds_* and
memory_*.""",
)
def diff(options: argparse.Namespace) -> int:
    """Settings that differ, then the first row that does."""
    from moe_rl.storage.frames import diff as first_difference
    from moe_rl.storage.frames import settings_that_differ
    from moe_rl.storage.terminal import harmless

    for key, (a, b) in settings_that_differ(options.a, options.b).items():
        print(harmless(f"{key}: {a!r} | {b!r}"))
    difference = first_difference(options.a, options.b)
    if difference is None:
        print("all rows are equal (seconds_* and memory_* are not compared)")
        return 0
    where = ", ".join(f"{k} {v}" for k, v in difference.row.items())
    if difference.column is None:
        print(harmless(f"{difference.table}: {where} exists only in {options.a if difference.a else options.b}"))
    else:
        print(harmless(f"{difference.table}: {where}: {difference.column} = {difference.a!r} | {difference.b!r}"))
    return 1


def _submitted(folder: Path, found: Sequence[tuple[Path, dict[str, Any]]]) -> list[tuple[Path, dict[str, Any]]]:
    """Runs that were submitted to a cluster and have not begun; those that are `found` get what its scheduler says."""
    from moe_rl.registry import import_component
    from moe_rl.storage.folder import ENDED, state
    from moe_rl.storage.terminal import harmless

    try:
        waiting = import_component("launcher", "slurm", "moe_rl.integrations.slurm:scheduled")(folder)
    except RunError as error:
        print(f"moe-rl: {harmless(str(error))}. The states of the scheduler are missing.", file=sys.stderr)
        return []
    for path, now in found:
        if (task := waiting.pop(path.absolute(), None)) and (task.live or now["state"] not in ENDED):
            now["scheduler"] = f"{task.task} {task.state or 'forgotten'}"
    return [
        (
            path if folder.is_absolute() else Path(os.path.relpath(path)),
            {**state(path, task.steps), "scheduler": f"{task.task} {task.state or 'forgotten'}"},
        )
        for path, task in waiting.items()
    ]
