"""What a cluster's scheduler says of runs that were submitted to it (see `slurm`), and how they leave its queue."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl.errors import RunError
from moe_rl.storage.folder import read_json

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
         "OUT_OF_MEMORY"}  # fmt: skip
"""SLURM's states of a task that will not run again by itself."""
JOBS = ".jobs"
"""The folder of a study that holds its submissions."""


@dataclass(frozen=True)
class Scheduled:
    """What SLURM says of a run: its task, and the task's state, empty for one that it has forgotten."""

    task: str
    state: str
    steps: int

    @property
    def live(self) -> bool:
        """Whether it runs, or will without being submitted again."""
        return bool(self.state) and self.state.partition(":")[0] not in ENDED


def scheduled(folder: Path) -> dict[Path, Scheduled]:
    """What SLURM says of every submitted run at or below a folder of runs, by absolute path; of the last submission,
    or of one that lives. Empty, and nobody is asked, where nothing was submitted. Raises RunError when SLURM cannot be
    asked."""
    found: dict[Path, Scheduled] = {}
    if not (submissions := [*_submissions(folder.absolute())]):
        return {}
    states, words = {}, ("--noheader", "--me", "--array", "--states=all", "--format=%F_%K|%T|%r")
    for line in asked_of("squeue", *words).splitlines():
        task, state, why = line.split("|", 2)
        states[task] = f"{state}: {why}" if why not in ("None", "") and state not in ENDED else state
    for study, submission in submissions:
        for number, run in enumerate(submission["runs"]):
            task, path = f"{submission['job']}_{number}", study / run["path"]
            one = Scheduled(task, states.get(task, ""), run["steps"])
            if path.is_relative_to(folder.absolute()) and not (path in found and found[path].live and not one.live):
                found[path] = one
    return found


def cancel(folder: Path) -> list[str]:
    """Cancel the tasks of all runs at or below a folder; their ids. A run commits its next step if that ends within
    SLURM's KillWait."""
    tasks = [one.task for one in scheduled(folder).values() if one.live]
    for start in range(0, len(tasks), 500):
        asked_of("scancel", *tasks[start : start + 500])
    return tasks


def _submissions(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Of the studies below, at, or around a folder, in order: each with the folder of its study."""
    files = [f for study in (*sorted(folder.glob("*/")), folder, *folder.parents[:3])
             for f in sorted(study.glob(f"{JOBS}/*/submission.json"), key=lambda f: int(f.parent.name))]
    for file in files:
        if found := read_json(file, ("job", "runs")):
            yield file.parents[2], found


def asked_of(program: str, *words: str) -> str:
    """What a program of SLURM prints. Raises RunError with what it said when it fails or is not there."""
    try:
        return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise RunError(f"{program} cannot be run ({error.strerror}): this machine is no part of a cluster of SLURM") \
            from error
    except subprocess.CalledProcessError as error:
        raise RunError(f"{program} refused: {error.stderr.strip() or error}") from error
