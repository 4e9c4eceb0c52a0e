"""A study on a cluster that SLURM schedules: a job array, a run per task.

    <out>/<study>/.jobs/<n>/
        plan.json          the runs as they were when they were submitted, by the number of their task
        job.sh             what a task runs: `moe-rl work`, and its requeueing
        submission.json    the job's id, sbatch's arguments, and the run of each task
        task-<k>.txt       the output of the task's shell; failed-<k>: its failures, a line each

A run that is preempted, or near its time limit, commits its next step, is requeued and goes on; so it does after a
failure, a bounded number of times. Exit code 2 marks a failure that would come again; it is not retried.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.storage.folder import read_json, write_json
from moe_rl.storage.links import require_inside
from moe_rl.storage.provenance import code_version
from moe_rl.study.declaration import Planned, Study

ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
}
"""SLURM's states of a task that will not run again by itself."""
JOBS = ".jobs"
"""The folder of a study that has its submissions."""
PREFIX = "moe-rl-"
"""Of the names of a study's jobs."""
Words = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: shlex.split(value) if isinstance(value, str) else value)
]


class Slurm(BaseModel, frozen=True, extra="forbid"):
    """What a task needs, and how its worker is started. Other values give the same numbers."""

    partition: str = ""
    time: str = ""
    """As sbatch takes it, e.g. 04:00:00; empty: the partition's own limit."""
    gpus: int = Field(0, ge=0)
    cpus: int = Field(1, ge=1)
    memory: str = ""
    """As sbatch takes it, e.g. 64G; empty: the partition's default."""
    options: Words = ()
    """More of sbatch, each a word, as ("--account=lab", "--qos=low")."""
    warning: int = Field(120, ge=5)
    """Seconds before the time limit at which a run gets the signal to commit its next step; longer than a step."""
    retries: int = Field(2, ge=0)
    """How often a run is run again after failures."""
    ranks: int = Field(1, ge=1)
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
    """The settings of `--launcher NAME` and `--set launcher.KEY=VALUE`, which win: None for this machine, else those of
    SLURM, by default or from a TOML file. Raises ConfigError for another name or setting."""
    if name == "local":
        if settings:
            raise ConfigError(f"--set {settings[0]} needs a cluster. Add --launcher slurm.")
        return None
    if name != "slurm" and not Path(name).is_file():
        raise ConfigError(f"--launcher {name} is unknown. Use local, slurm, or a TOML file with settings of SLURM.")
    if odd := [text for text in settings if "=" not in text]:
        raise ConfigError(f"--set {odd[0]} has no value. Write {odd[0]}=….")
    pairs = [text.removeprefix("launcher.").partition("=") for text in settings]
    try:
        values = {} if name == "slurm" else tomllib.loads(Path(name).read_text(encoding="utf-8"))
        return Slurm(**values | {key: value for key, _, value in pairs})
    except ValidationError as error:
        text = "; ".join(f"launcher.{e['loc'][0]}={e['input']!r}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{text}. Settings are {', '.join(Slurm.model_fields)}.") from error
    except ValueError as error:
        raise ConfigError(f'{name} is not a TOML file: {error}. Write lines such as partition = "gpu".') from error


def submit(
    study: Study,
    planned: Sequence[Planned],
    cluster: Slurm,
    *,
    cache: Path,
    jobs: int | None = None,
    trackers: Sequence[str] = (),
    mix_code: bool = False,
) -> tuple[list[str], int]:
    """Submit the runs that have not ended and are not in the queue, at most `jobs` of them at a time; the ids of their
    jobs, and how many are in the queue already.

    Raises RunError for folders of another configuration or of other code, as on one machine, and where SLURM refuses.
    """
    from moe_rl.study.workers import unfinished

    folder = planned[0].path.parents[2].absolute()
    queued = {path for path, task in scheduled(folder).items() if task.live}
    left = [p for p, is_left in zip(planned, unfinished(planned, mix_code), strict=True) if is_left]
    waiting = [dataclasses.replace(p, path=p.path.absolute()) for p in left if p.path.absolute() not in queued]
    if not waiting:
        return [], len(left)
    require_inside(folder / JOBS, folder)
    here = folder / JOBS / str(1 + max((int(f.name) for f in folder.glob(f"{JOBS}/[0-9]*")), default=0))
    here.mkdir(parents=True)
    plan = freeze_plan(waiting, trainer=study.trainer, cache=cache.absolute(), mix_code=mix_code, trackers=trackers)
    write_json(here / "plan.json", plan)
    (here / "job.sh").write_text(script(here, cluster), encoding="utf-8")
    words = arguments(study.name, here, cluster, len(waiting), jobs)
    job = call("sbatch", "--parsable", *words, str(here / "job.sh")).strip().partition(";")[0]
    runs = [{"path": str(p.path.relative_to(folder)), "steps": p.config.steps} for p in waiting]
    write_json(here / "submission.json", {"job": job, "sbatch": words, "runs": runs})
    return [job], len(left) - len(waiting)


def arguments(name: str, here: Path, cluster: Slurm, runs: int, jobs: int | None) -> list[str]:
    """Of sbatch, for an array of so many runs."""
    gres = f"gpu:{cluster.gpus}" if cluster.gpus else ""
    named = {"partition": cluster.partition, "time": cluster.time, "mem": cluster.memory, "gres": gres}
    return [
        f"--job-name={PREFIX}{name}",
        f"--array=0-{runs - 1}" + (f"%{jobs}" if jobs else ""),
        "--ntasks=1",
        f"--cpus-per-task={cluster.cpus}",
        "--requeue",
        "--open-mode=append",
        f"--output={here}/task-%a.txt",
        f"--signal=B:USR1@{cluster.warning}",
        *(f"--{key}={value}" for key, value in named.items() if value),
        *cluster.options,
    ]


def script(here: Path, cluster: Slurm) -> str:
    """What a task runs."""
    from moe_rl.study.workers import ONE_THREAD, WORKER

    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {cluster.ranks} " if cluster.ranks > 1 else ""
    exports = "export " + " ".join(f"{k}={shlex.quote(v)}" for k, v in {**WORKER, **ONE_THREAD}.items())
    values = f"here={shlex.quote(str(here))} retries={cluster.retries} patience={cluster.warning * 4 // 5}"
    command = f"command=({cluster.container} {shlex.quote(cluster.python)} {torchrun}-m moe_rl work)"
    return "\n".join(["#!/bin/bash", exports, cluster.preamble, values, command]) + JOB


# ---------------------------------------------------------------------- the worker
def freeze_plan(
    planned: Sequence[Planned], *, trainer: str, cache: Path, mix_code: bool, trackers: Sequence[str] = ()
) -> dict[str, Any]:
    """The plan of runs that wait for a machine: their configurations, the code, and where modules that are not
    installed are found."""
    return {
        "trainer": trainer,
        "cache": str(cache),
        "code": code_version(),
        "mix_code": mix_code,
        "search_path": search_path(),
        "trackers": [*trackers],
        "runs": [
            {"path": str(p.path), "config": p.config.to_dict(), "study_file": p.study_file and str(p.study_file)}
            for p in planned
        ],
    }


def search_path() -> list[str]:
    """The folders of modules that are not installed, for another process of this interpreter."""
    own = [os.path.abspath(folder) for folder in sys.path if not folder.endswith((".zip", "lib-dynload"))]
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    names = ("site-packages", "dist-packages")  # an environment may have several, in an order of its own
    return [folder for folder in own if folder not in installed and Path(folder).name not in names]


def planned_run(plan: Mapping[str, Any], number: int) -> Planned:
    """A run of a plan. Raises ConfigError for a number that has none, RunError where the code has changed."""
    if not 0 <= number < len(plan["runs"]):
        raise ConfigError(f"the plan has {len(plan['runs'])} runs, counted from 0, and none with the number {number}")
    if plan["code"] != code_version() and not plan["mix_code"]:
        raise RunError(f"the plan was made by code {plan['code']}, but this is {code_version()}. Submit it again.")
    run = plan["runs"][number]
    return Planned(Path(run["path"]), RunConfig.from_dict(run["config"]), run["study_file"] and Path(run["study_file"]))


def work(source: str, number: int, stop: Path | None = None) -> int:
    """The worker process of a plan in a file: one of its runs; its exit code.

    It may be called again at any time. A run that has ended is left alone, an interrupted one goes on from its last
    commit, and a run that another worker carries out is refused. SIGTERM, SIGUSR1 or the file `stop` end it after the
    next step, which is committed. How it ended is a line of JSON on stdout.
    """
    from moe_rl import ranks
    from moe_rl.study.workers import carry_out, outcome_of, stop_signals, unfinished, write_log

    signals = stop_signals()
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def carry_out_run() -> Planned:
        plan = read_json(Path(source), ("trainer", "cache", "code", "mix_code", "search_path", "trackers", "runs"))
        if plan is None:
            raise ConfigError(f"there is no plan {source}. Create one with `moe-rl run STUDY --launcher slurm`.")
        sys.path[:] = list(dict.fromkeys([*plan["search_path"], *sys.path]))
        planned = planned_run(plan, number)
        if ranks.launched():
            ranks.join(planned.config.model.device)
        if ranks.from_rank_0(lambda: unfinished([planned], plan["mix_code"])[0]):
            if not ranks.rank():
                write_log(planned.path)
            stopping = lambda: bool(signals) or stop is not None and stop.exists()  # noqa: E731
            carry_out(planned, plan["trainer"], Path(plan["cache"]), plan["trackers"], stopping=stopping)
        if ranks.launched():
            ranks.leave()
        return planned

    message, code, expected = outcome_of(carry_out_run)
    if not ranks.rank():
        json.dump({"message": message[-20_000:], "expected": expected}, report)
        print(file=report, flush=True)
    return code


# ---------------------------------------------------------------------- the queue
@dataclass(frozen=True)
class Scheduled:
    """SLURM's state of a run's task, empty for a forgotten one."""

    task: str
    state: str
    steps: int

    @property
    def live(self) -> bool:
        """Whether it runs, or will without being submitted again."""
        return bool(self.state) and self.state.partition(":")[0] not in ENDED


def scheduled(folder: Path) -> dict[Path, Scheduled]:
    """Every submitted run at or below a folder of runs, by absolute path: its last submission, or one that lives.
    Raises RunError when SLURM cannot be asked, which is only done where something was submitted."""
    folder = folder.absolute()
    if not (submissions := [*_submissions(folder)]):
        return {}
    states, words = {}, ("--noheader", "--me", "--array", "--states=all", "--format=%F_%K|%j|%T|%r")
    for line in call("squeue", *words).splitlines():
        task, name, state, why = line.split("|", 3)
        states[task, name] = f"{state}: {why}" if why not in ("None", "") and state not in ENDED else state
    tasks: dict[Path, Scheduled] = {}
    for study, submission in submissions:
        for number, run in enumerate(submission["runs"]):
            task, path = f"{submission['job']}_{number}", study / run["path"]
            state = states.get((task, f"{PREFIX}{study.name}"), "")  # a job with another name is not of this study
            now = Scheduled(task, state, run["steps"])
            if path.is_relative_to(folder) and not (path in tasks and tasks[path].live and not now.live):
                tasks[path] = now
    return tasks


def cancel(folder: Path) -> list[str]:
    """Cancel the tasks of all runs at or below a folder; their ids. A run commits its next step if that ends within
    SLURM's KillWait."""
    tasks = [task.task for task in scheduled(folder).values() if task.live]
    if tasks:
        call("scancel", *tasks)
    return tasks


def _submissions(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Of the studies below, at, or around a folder, in order: each with the folder of its study."""
    for study in (*sorted(folder.glob("*/")), folder, *folder.parents[:3]):
        for file in sorted(study.glob(f"{JOBS}/[0-9]*/submission.json"), key=lambda file: int(file.parent.name)):
            if submission := read_json(file, ("job", "runs")):
                yield study, submission


def call(program: str, *words: str) -> str:
    """The output of a program of SLURM. Raises RunError with its error when it fails or is missing."""
    try:
        return subprocess.run([program, *words], capture_output=True, check=True, encoding="utf-8").stdout
    except OSError as error:
        raise RunError(
            f"{program} cannot be run ({error.strerror}). Run this command on a machine of a SLURM cluster."
        ) from error
    except subprocess.CalledProcessError as error:
        raise RunError(f"{program} failed: {error.stderr.strip() or error}") from error
