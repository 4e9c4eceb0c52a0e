"""A study on a cluster that SLURM schedules: a job array, a run per task.

    <out>/<study>/.jobs/<n>/
        plan.json          the runs as they were when they were submitted, by the number of their task
        job.sh             what a task runs: `moe-rl work`, and its requeueing
        submission.json    the job's id, sbatch's arguments, and the run of each task
        task-<k>.txt       what the task's shell said; failed-<k>: its failures, a line each

A run that is preempted, or near its time limit, commits its next step, is requeued and goes on; so it does after a
failure, a bounded number of times. What goes wrong in the same way again (exit code 2) is not run again.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl.errors import ConfigError, RunError
from moe_rl.registry import unknown
from moe_rl.storage.folder import read_json, write_json
from moe_rl.study.declaration import Planned, Study

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
         "OUT_OF_MEMORY"}  # fmt: skip
"""SLURM's states of a task that will not run again by itself."""
JOBS = ".jobs"
"""The folder of a study that holds its submissions."""
NAMED = "moe-rl-"
"""How the name of a study's job begins."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """What every task asks for, and how its worker is started. No part of a run: other values, the same numbers."""

    partition: str = ""
    time: str = ""
    """As sbatch takes it, e.g. 04:00:00; empty: the partition's own limit."""
    gpus: int = 0
    cpus: int = 1
    memory: str = ""
    """As sbatch takes it, e.g. 64G; empty: the partition's default."""
    options: tuple[str, ...] = ()
    """More of sbatch, each a word, as ("--account=lab", "--qos=low")."""
    array: int = 1000
    """The most runs in one job array: below the cluster's MaxArraySize. A study of more has several."""
    warning: int = 120
    """Seconds before the time limit at which a run is told to commit its next step; longer than a step."""
    retries: int = 2
    """How often a run is run again after failures."""
    ranks: int = 1
    """Processes of a run, on one machine: more than one are started by torchrun."""
    preamble: str = ""
    """Lines of shell before the worker, as `module load cuda`."""
    container: str = ""
    """Words before the worker's command, as `apptainer exec --nv moe.sif`."""
    python: str = sys.executable
    """The interpreter there."""


JOB = r"""
task=$SLURM_ARRAY_TASK_ID job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID restart=${SLURM_RESTART_COUNT:-0}
stop=$here/stop-$task-$restart

requeue() {  # the controller may be away for a while
  for _ in $(seq 60); do scontrol requeue "$job" && return; sleep 5; done
}
failed() {
  echo "$(date) restart $restart: $1" >> "$here/failed-$task"
  [ "$(wc -l < "$here/failed-$task")" -gt "$retries" ] || requeue
}
# USR1: the time limit is near, or a preemption begins. A file tells the worker: it crosses containers and torchrun,
# and waits for a Python that still imports.
trap 'told=${told:+$told, }USR1; touch "$stop"
  { sleep "$patience"; failed "no step ended within $patience s"; } & deadline=$!' USR1
# TERM: SLURM ends the job, and requeues it by itself where it wants to.
trap 'told=${told:+$told, }TERM; touch "$stop"; kill -TERM "$worker" 2> /dev/null' TERM
"${command[@]}" "$here/plan.json" "$task" --stop "$stop" & worker=$!
while kill -0 "$worker" 2> /dev/null; do wait "$worker"; code=$?; done  # a trap ends `wait` early
wait "$worker" 2> /dev/null; late=$?; [ $late = 127 ] || code=$late
[ -z "$deadline" ] || kill "$deadline" 2> /dev/null
echo "$(date) task $task of job $SLURM_ARRAY_JOB_ID, restart $restart on $(hostname): told ${told:-nothing}, exit $code"
case "$told:$code" in
  *:0 | *TERM*:*) ;;
  USR1*:* | :75) requeue ;;
  :2) echo "running it again would fail alike" ;;
  *) failed "exit $code" ;;
esac
exit "$code"
"""


def launcher(name: str, settings: Sequence[str]) -> Slurm | None:
    """What `--launcher NAME` and `--set launcher.KEY=VALUE` say: None for this machine, else the settings of SLURM, by
    themselves or from a TOML file. Raises ConfigError for what is neither, and for a setting that does not exist."""
    if name == "local":
        if settings:
            raise ConfigError(f"--set {settings[0]} needs a cluster. Add --launcher slurm.")
        return None
    found: dict[str, Any] = {}
    if name != "slurm":
        if not (file := Path(name)).is_file():
            raise ConfigError(f"--launcher {name} is unknown. Use local, slurm, or a TOML file with settings of SLURM, "
                              "such as cluster.toml.")
        try:
            found = tomllib.loads(file.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} is not a TOML file: {error}. Write lines such as partition = "
                              "\"gpu\".") from error
    fields = {field.name for field in dataclasses.fields(Slurm)}
    for key in [*found, *(text.partition("=")[0].removeprefix("launcher.") for text in settings)]:
        if key not in fields:
            unknown("setting of the launcher", key, fields)
    found = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    defaults = dataclasses.asdict(Slurm())
    for text in settings:
        key, equals, value = text.removeprefix("launcher.").partition("=")
        if not equals:
            raise ConfigError(f"--set {text} has no value. Write launcher.{key}=….")
        whole = type(defaults[key]) is int and value.lstrip("-").isdigit()
        found[key] = int(value) if whole else tuple(shlex.split(value)) if key == "options" else value
    for key, value in found.items():
        if type(value) is not (wanted := type(defaults[key])):
            raise ConfigError(f"launcher.{key}={value!r} must be of type {wanted.__name__}, not {type(value).__name__}")
    asked = Slurm(**found)
    low = {"gpus": 0, "cpus": 1, "array": 1, "warning": 5, "retries": 0, "ranks": 1}
    for key, least in low.items():
        if getattr(asked, key) < least:
            raise ConfigError(f"launcher.{key}={getattr(asked, key)} must be at least {least}")
    return asked


def submit(study: Study, planned: Sequence[Planned], asked: Slurm, *, cache: Path, jobs: int | None = None,
           trackers: Sequence[str] = (), mix_code: bool = False) -> tuple[list[str], int]:
    """Submit the runs that have not ended and are not in the queue, at most `jobs` of them at a time; the ids of their
    jobs, and how many are in the queue already.

    Raises RunError for folders of another configuration or of other code, as on one machine, and where SLURM refuses.
    """
    from moe_rl.study.workers import freeze_plan, unfinished

    folder = planned[0].path.parents[2]
    queued = {path for path, one in scheduled(folder).items() if one.live}
    left = [p for p, is_left in zip(planned, unfinished(planned, mix_code), strict=True) if is_left]
    waiting = [dataclasses.replace(p, path=p.path.absolute()) for p in left if p.path.absolute() not in queued]
    ids = []
    for start in range(0, len(waiting), asked.array):
        part = waiting[start : start + asked.array]
        here = _new_folder(folder.absolute() / JOBS)
        plan = freeze_plan(part, trainer=study.trainer, cache=cache.absolute(), mix_code=mix_code, trackers=trackers)
        write_json(here / "plan.json", plan)
        (here / "job.sh").write_text(script(here, asked))
        words = arguments(study.name, here, asked, len(part), jobs)
        ids.append(asked_of("sbatch", "--parsable", *words, str(here / "job.sh")).strip().partition(";")[0])
        write_json(here / "submission.json", {"job": ids[-1], "sbatch": words, "runs": [
            {"path": str(p.path.relative_to(folder.absolute())), "steps": p.config.steps} for p in part]})
    return ids, len(left) - len(waiting)


def arguments(name: str, here: Path, asked: Slurm, runs: int, jobs: int | None) -> list[str]:
    """Of sbatch, for an array of so many runs."""
    named = {"partition": asked.partition, "time": asked.time, "mem": asked.memory,
             "gres": f"gpu:{asked.gpus}" if asked.gpus else ""}
    return [f"--job-name={NAMED}{name}", f"--array=0-{runs - 1}" + (f"%{jobs}" if jobs else ""), "--ntasks=1",
            f"--cpus-per-task={asked.cpus}", "--requeue", "--open-mode=append", f"--output={here}/task-%a.txt",
            f"--signal=B:USR1@{asked.warning}", *(f"--{key}={value}" for key, value in named.items() if value),
            *asked.options]  # fmt: skip


def script(here: Path, asked: Slurm) -> str:
    """What a task runs."""
    from moe_rl.study.workers import ONE_THREAD, WORKER

    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {asked.ranks} " if asked.ranks > 1 else ""
    exports = "export " + " ".join(f"{k}={shlex.quote(v)}" for k, v in {**WORKER, **ONE_THREAD}.items())
    values = f"here={shlex.quote(str(here))} retries={asked.retries} patience={asked.warning * 4 // 5}"
    command = f"command=({asked.container} {shlex.quote(asked.python)} {torchrun}-m moe_rl work)"
    return "\n".join(["#!/bin/bash", exports, asked.preamble, values, command]) + JOB


def _new_folder(jobs: Path) -> Path:
    """The next number."""
    for number in itertools.count(1):
        try:
            (jobs / str(number)).mkdir(parents=True)
            return jobs / str(number)
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


# ---------------------------------------------------------------------- the queue
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
    states, words = {}, ("--noheader", "--me", "--array", "--states=all", "--format=%F_%K|%j|%T|%r")
    for line in asked_of("squeue", *words).splitlines():
        task, name, state, why = line.split("|", 3)
        states[task, name] = f"{state}: {why}" if why not in ("None", "") and state not in ENDED else state
    for study, submission in submissions:
        for number, run in enumerate(submission["runs"]):
            task, path = f"{submission['job']}_{number}", study / run["path"]
            state = states.get((task, f"{NAMED}{study.name}"), "")  # any other job is not of this study
            one = Scheduled(task, state, run["steps"])
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
             for f in sorted(study.glob(f"{JOBS}/[0-9]*/submission.json"), key=lambda f: f.parent.name.zfill(9))]
    for file in files:
        if found := read_json(file, ("job", "runs")):
            yield file.parents[2], found


def asked_of(program: str, *words: str) -> str:
    """What a program of SLURM prints. Raises RunError with what it said when it fails or is not there."""
    try:
        return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise RunError(f"{program} cannot be run ({error.strerror}). Run this command on a machine of a SLURM "
                       "cluster.") \
            from error
    except subprocess.CalledProcessError as error:
        raise RunError(f"{program} failed: {error.stderr.strip() or error}") from error
