"""Carries a study out: a process per run, one thread each, or all ranks together run after run, with a live display.
Killed at any moment, it can go on.

A worker is one process that carries out one run of a plan, wherever it is started: `moe-rl work PLAN NUMBER` is all
that a scheduler has to call, on any machine that sees the files, with the variables of `environment` set. It may be
called again at any time: a run that has ended is left alone, an interrupted one goes on from its last commit, and one
that another worker carries out is refused. SIGTERM, SIGUSR1 or the file `--stop` end the worker after the next step,
which is committed whatever `save_every` says. Its output goes to `log.txt` in the run's folder; how it ended is a
line of JSON on stdout. A plan of `-` is read from stdin, a line, and the worker dies when stdin closes, so that no
worker outlives the study that started it on one machine.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_rl import ranks
from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, Diverged, MoeRlError, RunError, Stopped, name_full_disk
from moe_rl.registry import Component, import_component
from moe_rl.storage import folder as runs
from moe_rl.storage.commits import replaced
from moe_rl.storage.lock import Held
from moe_rl.storage.provenance import INSTALLED, changed, code_version, inputs_of
from moe_rl.storage.terminal import say
from moe_rl.study.declaration import Planned, Study
from moe_rl.study.display import Display

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
TRACKERS = "moe_rl.integrations.trackers:Listeners"
WORKER = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:"
                            "glibc.malloc.trim_threshold=1073741824"}
"""Variables of a worker. Large tensors come and go at every operation; without these a sixth of a step is spent on page
faults. Linux only."""

DONE, BUG, TO_MEND, TOLD_TO_STOP = 0, 1, 2, 75
"""Exit codes of a worker: its run ended, divergence included; an error that may not come again, as that another worker
is at it; one that would; stopped, and to be called again (EX_TEMPFAIL)."""



@dataclass(frozen=True)
class Failure:
    """A run that ended without finishing; `expected` errors are the user's to mend and need no traceback."""

    path: Path
    message: str
    expected: bool


def run_study(study: Study, planned: Sequence[Planned], *, cache: Path, jobs: int | None = None,
              trackers: Sequence[str] = (), mix_code: bool = False, pooled: bool = True,
              console: Console | None = None) -> list[Failure]:
    """Run what is not finished, at most `jobs` (default: all cores) at a time; returns the failures. `trackers` are
    given the rows as they are made.

    Everything that can be seen to be wrong raises before a process starts, as `unfinished` says. A failing run does not
    stop the others, unless they would most likely fail alike: after an expected error before a first step, or the same
    error in runs that differ in more than their seeds while no other run came further. A diverged run is no failure.
    Under torchrun all ranks carry out one run after the other, and the first error ends the job.
    """
    console, jobs = console or Console(), at_a_time(jobs)
    left = ranks.from_rank_0(lambda: unfinished(planned, mix_code, pooled))
    waiting = [p for p, is_left in zip(planned, left, strict=True) if is_left]
    how = f"{ranks.world()} ranks each" if ranks.launched() else f"{min(jobs, len(waiting))} at a time"
    say(console, f"{study.name}: {len(planned)} runs, {len(planned) - len(waiting)} finished, {how}")
    if ranks.launched():
        run_together(study, planned, waiting, cache, trackers, console)
        return []
    running: dict[subprocess.Popen, Planned] = {}
    failures: list[Failure] = []
    try:
        with Display(planned, console) as display:
            while waiting or running:
                while waiting and len(running) < jobs:
                    p = waiting.pop(0)
                    running[start(p, study.trainer, cache, trackers)] = p
                time.sleep(0.2)
                for process in [p for p in running if p.poll() is not None]:
                    if failure := _outcome(process, p := running.pop(process)):
                        failures.append(failure)
                        why = "" if failure.expected else f"\n{failure.message}"
                        say(console, ("failed", "red"), f" {p.path}{why}")
                        if waiting and _alike(failures, planned):
                            say(console, f"no more runs are started: {len(waiting)} would probably fail in the same "
                                         "way")
                            waiting.clear()
                display.update()
    finally:
        for process in running:
            process.kill()  # runs survive it, and it cannot be ignored
            process.wait()
    return failures


def _alike(failures: Sequence[Failure], planned: Sequence[Planned]) -> bool:
    """Whether further runs would most likely fail as these did."""
    steps = {p.path: runs.state(p.path)["step"] for p in planned}
    failed = {failure.path for failure in failures}
    if failures[-1].expected and not steps[failures[-1].path]:
        return True
    kinds, all_kinds = ({path.parent for path in paths} for paths in (failed, steps))  # but for their seeds
    return (
        len(failed) > 1
        and len(kinds) >= min(2, len(all_kinds))
        and len({failure.message.strip().rpartition("\n")[2] for failure in failures}) == 1  # below a traceback
        and max(steps.values()) <= max(steps[path] for path in failed)
    )


def unfinished(planned: Sequence[Planned], mix_code: bool, pooled: bool = True) -> list[bool]:
    """Which runs are still to be carried out. Raises RunError for a folder that holds another run, one that finished
    and lacks rows, or one of other code or data unless `mix_code`, and, where they are to be `pooled`, for runs beside
    them, of the same study, that have other settings; nothing is touched then."""
    from moe_rl.storage.frames import require_whole

    for p in planned:
        runs.check(p.path, p.config.to_dict(), p.config.hash)
        check_code(p.path, mix_code)
        require_whole(p.path)
    if pooled and not mix_code:
        _require_equal_settings(planned)
    return [runs.state(p.path, p.config.steps)["state"] not in runs.ENDED for p in planned]


def _require_equal_settings(planned: Sequence[Planned]) -> None:
    """Raise RunError where they and the runs that are there would be refused as the runs of one study."""
    import pandas as pd

    from moe_rl.storage.comparable import require_equal_settings
    from moe_rl.storage.frames import labels_of

    for root in {p.path.parents[2] for p in planned}:
        own = {p.path: p.config.to_dict() for p in planned if p.path.is_relative_to(root)}
        there = {path: manifest["config"] for path in runs.run_folders(root)
                 if path not in own and (manifest := runs.read_manifest(path)) is not None and _has_rows(path)}
        require_equal_settings(root, pd.DataFrame([labels_of(path) | {"config": json.dumps(config)}
                                                   for path, config in (there | own).items()]))


def _has_rows(path: Path) -> bool:
    """Whether a run has some, or may soon; not one that failed before its first, as by a setting of no task."""
    return bool(runs.last_step(path)) or runs.state(path)["state"] in ("running", *runs.ENDED)


def run_together(study: Study, planned: Sequence[Planned], waiting: Sequence[Planned], cache: Path,
                 trackers: Sequence[str], console: Console) -> None:
    """Carry out the waiting runs of those planned, all ranks together; rank 0 keeps the folders and shows them."""
    with Display([] if ranks.rank() else planned, console) as display:
        for p in waiting:
            carry_out(p, study.trainer, cache, trackers, update=display.update)
            display.update()


def at_a_time(jobs: int | None) -> int:
    """How many runs at a time `--jobs` allows: by default as many as there are cores. Raises ConfigError for none."""
    if jobs is None:
        return os.cpu_count() or 1
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs} must be at least 1")
    return jobs


def preflight(study: Study, planned: Sequence[Planned]) -> list[str]:
    """Why the comparison would be void, one sentence each, found before any process starts.

    Raises ConfigError for a task, model, loss or route source that cannot be used, or that breaks on a toy batch, and
    for a trainer that is not there. What runs are checked by is the function `check(run)` beside the study's trainer;
    without one nothing is checked.
    """
    if (check := checked_by(study)) is None:
        return []
    from moe_rl.study.rehearsal import rehearse

    # Runs that differ in their seeds alone would be checked, and their models laid out, again and again.
    distinct = {p.config.replace(seed=0, **{"cold_start.seed": 0}).hash: p.config for p in planned}
    parts = {str((p.config.arm, p.config.task, p.config.model)): p.config for p in planned}
    found = [text for config in distinct.values() for text in check(config)]
    return list(dict.fromkeys([*found, *(text for config in parts.values() for text in rehearse(config))]))


def checked_by(study: Study) -> Callable[[RunConfig], list[str]] | None:
    """The `check(run)` beside the study's trainer; None where there is none, so that its runs need not be made of what
    this package knows. Raises ConfigError for a trainer that is not there."""
    return beside(study, "check")


def beside(study: Study, name: str) -> Callable[..., Any] | None:
    """A function beside the study's trainer, which takes the trainer's options too; None where there is none. Raises
    ConfigError for a trainer that is not there."""
    load(study.trainer)
    use = Component.read(study.trainer)
    found = getattr(sys.modules[use.name.partition(":")[0]], name, None)
    return found and partial(found, **use.options)


def environment() -> dict[str, str]:
    """Of a worker: this process's, with one thread."""
    return WORKER | os.environ | ONE_THREAD


def start(planned: Planned, trainer: str, cache: Path, trackers: Sequence[str] = ()) -> subprocess.Popen:
    """Start the worker of one run; its output goes to `log.txt` in the run's folder."""
    planned.path.mkdir(parents=True, exist_ok=True)
    with replaced(planned.path / "log.txt").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-P", "-m", "moe_rl", "work", "-", "0"], env=environment(),
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    assert process.stdin is not None, "it is a pipe"
    with contextlib.suppress(BrokenPipeError):  # a worker that died at once is reported when it is polled
        # It was checked when the study began, and is that of this process.
        plan = freeze_plan([planned], trainer=trainer, cache=cache, trackers=trackers, mix_code=True)
        process.stdin.write(json.dumps(plan).encode() + b"\n")
        process.stdin.flush()
    return process


def carry_out(planned: Planned, trainer: str, cache: Path, trackers: Sequence[str] = (), *,
              update: Callable[[], None] = lambda: None, stopping: Callable[[], bool] = lambda: False) -> None:
    """One run in its folder, or this rank's part in it. `update` is called after every step; once `stopping()`, the
    next step is committed, and Stopped raised. Rank 0 keeps the folder."""
    config = planned.config
    if ranks.rank():
        with contextlib.suppress(Diverged):  # rank 0 records it
            load(trainer)(config, runs.SharedFolder(None), cache=cache)
        return
    with name_full_disk(planned.path), runs.RunFolder.open(planned.path, config.to_dict(), config.hash, trainer=trainer,
                                                           study_file=planned.study_file) as folder:
        folder.stopping = stopping
        watch = Watch(folder)
        track = import_component("listener", "trackers", TRACKERS)(trackers, folder) if trackers else None

        def listen(rows: dict[str, list[dict[str, Any]]]) -> None:
            watch(rows)
            if track:
                track(rows)
            update()

        with recorded(folder, config.steps, watch), contextlib.closing(track) if track else contextlib.nullcontext():
            load(trainer)(config, runs.SharedFolder(folder) if ranks.launched() else folder, cache=cache,
                          listen=listen)


@contextlib.contextmanager
def recorded(folder: runs.RunFolder, steps: int, watch: Watch) -> Iterator[None]:
    """Around a trainer's work on a run, after which the folder says how that ended.

    A divergence is a result: the run ends at its last commit, whether or not its trainer saw to that. Raises Diverged
    where there is no commit to end at, RunError when the trainer returns early, and whatever it raises itself.
    """
    try:
        try:
            yield
        except Diverged as error:
            if "diverged" not in folder.manifest:
                if folder.latest()[1] is None:
                    raise Diverged(f"{error} The run has no checkpoint. Save one at step 0, or before the error is "
                                   "raised.") from error
                folder.finish(diverged=str(error))
        if folder.manifest.get("finished", -1) < steps and "diverged" not in folder.manifest:
            raise RunError(f"the trainer returned before the run {folder.path} was finished")
    except Stopped:
        raise
    except BaseException as error:
        folder.progress(watch.step, error=str(error) or type(error).__name__)
        raise


class Watch:
    """Listens to the rows of every step; writes `progress.json`."""

    def __init__(self, folder: runs.RunFolder) -> None:
        self.folder, self.step = folder, folder.step
        self.pace: float | None = None
        self.last: float | None = None
        folder.progress(self.step)

    def __call__(self, rows: dict[str, list[dict[str, Any]]]) -> None:
        row = rows["steps"][-1]
        now, self.step = time.monotonic(), row["step"]
        if self.last is not None:  # the first interval holds the cold start
            self.pace = now - self.last if self.pace is None else 0.9 * self.pace + 0.1 * (now - self.last)
        self.last = now
        self.folder.progress(self.step, seconds_per_step=self.pace, reward=row.get("reward"))


def load(spec: str) -> Any:
    """The trainer that `pkg.module:name`, or `pkg.module:name(option=value)`, names. Raises ConfigError when there is
    none."""
    use = Component.read(spec)
    module, colon, name = use.name.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
        return partial(found, **use.options) if use.options else found
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{spec!r} cannot be imported ({error}). Write pkg.module:name.") from error


def check_code(path: Path, mix_code: bool) -> None:
    """Raise RunError for a run that other code wrote, or that was made from other data, unless that is wanted."""
    manifest = runs.read_manifest(path)
    if manifest is None or mix_code:
        return
    if manifest["code"] != [code_version()]:
        raise RunError(f"{path} was written by code {' then '.join(manifest['code'])}, but this is {code_version()}. "
                       "Choose another --out, or continue with --mix-code if the numbers remain comparable.")
    if names := changed(manifest.get("inputs", {}), inputs_of(manifest["config"], manifest.get("trainer", ""))):
        raise RunError(f"{path} was made from {', '.join(names)}, which changed since, or is missing. Restore that, "
                       "choose another --out, or continue with --mix-code.")


def _outcome(process: subprocess.Popen, planned: Planned) -> Failure | None:
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    text = process.stdout.read()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    if process.returncode == 0:
        return None
    if not text:
        cause = {-s.value: s.name for s in signal.Signals}.get(process.returncode, f"exit code {process.returncode}")
        return Failure(planned.path, f"the worker ended by {cause}. See {planned.path / 'log.txt'}.", False)
    return Failure(planned.path, **json.loads(text))


# ---------------------------------------------------------------------- plans, for workers anywhere
def freeze_plan(planned: Sequence[Planned], *, trainer: str, cache: Path, mix_code: bool,
                trackers: Sequence[str] = ()) -> dict[str, Any]:
    """The plan of runs that wait for a machine: their configurations and what these name, the code, where modules that
    are not installed are found. A worker that finds another code or other inputs refuses, unless `mix_code`."""
    return {
        "trainer": trainer, "cache": str(cache), "code": code_version(), "mix_code": mix_code,
        "search_path": search_path(), "trackers": [*trackers],
        "runs": [{"path": str(p.path), "hash": p.config.hash, "config": p.config.to_dict(),
                  "study_file": p.study_file and str(p.study_file),
                  "inputs": {} if mix_code else inputs_of(p.config.to_dict(), trainer)} for p in planned],
    }  # fmt: skip


def search_path() -> list[str]:
    """Where modules that are not installed are found: folders that another process of this interpreter has to be
    told. The order of folders with installed packages, of which an environment may have several, is its own."""
    own = [os.path.abspath(folder) for folder in sys.path if not folder.endswith((".zip", "lib-dynload"))]
    return [folder for folder in own
            if folder not in INSTALLED and Path(folder).name not in ("site-packages", "dist-packages")]


def read_plan(file: Path) -> dict[str, Any]:
    """What `freeze_plan` made, from a file. Raises ConfigError where there is none, RunError for another file."""
    plan = runs.read_json(file, ("trainer", "cache", "code", "mix_code", "search_path", "trackers", "runs"))
    if plan is None:
        raise ConfigError(f"there is no plan {file}. Create one with `moe-rl run STUDY --launcher slurm`.")
    return plan


def read_run(plan: Mapping[str, Any], number: int) -> Planned:
    """A run of a plan. Raises ConfigError for a number that has none, RunError for one that would not be the run that
    was planned."""
    if not 0 <= number < len(plan["runs"]):
        raise ConfigError(f"the plan has {len(plan['runs'])} runs, counted from 0, and none with the number {number}")
    entry = plan["runs"][number]
    config = RunConfig.from_dict(entry["config"])
    path, again = entry["path"], "Submit the study again, or restore what changed."
    if config.hash != entry["hash"]:
        raise RunError(f"the configuration of {path} changed since it was planned. {again}")
    if not plan["mix_code"]:
        if plan["code"] != code_version():
            raise RunError(f"{path} was planned by code {plan['code']}, but this is {code_version()}. {again}")
        if names := changed(entry["inputs"], inputs_of(entry["config"], plan["trainer"])):
            raise RunError(f"{', '.join(names)} changed since {path} was planned, or is missing. {again}")
    return Planned(Path(path), config, entry["study_file"] and Path(entry["study_file"]))


# ---------------------------------------------------------------------- the worker process
def work(source: str, number: int, stop: Path | None = None) -> int:
    """The worker process: one run of a plan; its exit code."""
    told: list[int] = []
    for warning in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(warning, lambda received, frame: told.append(received))
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    message, code, expected = "", DONE, False
    try:
        planned = _carry_out_planned(source, number, lambda: bool(told) or stop is not None and stop.exists())
        message = f"{planned.path} is {runs.state(planned.path, planned.config.steps)['state']}"
    except Stopped as error:
        message, code = str(error), TOLD_TO_STOP
    except BaseException as error:  # a divergence is this run's own: other runs need not fail alike
        expected = isinstance(error, MoeRlError) and not isinstance(error, Diverged)
        message = str(error) if expected else traceback.format_exc()
        code = TO_MEND if expected and not isinstance(error, Held) else BUG
    if not ranks.rank():
        json.dump({"message": message[-20_000:], "expected": expected}, report)
        print(file=report, flush=True)
    if code:
        with contextlib.suppress(OSError):  # the log may lie on a full disk
            print(f"moe-rl: {message}" if expected else message, file=sys.stderr)
    return code


def _carry_out_planned(source: str, number: int, stopping: Callable[[], bool]) -> Planned:
    """The run with a number, which has ended now."""
    if source == "-":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
        plan = json.loads(sys.stdin.buffer.readline())
        threading.Thread(target=_die_with_parent, daemon=True).start()
    else:
        plan = read_plan(Path(source))
    sys.path[:] = list(dict.fromkeys([*plan["search_path"], *sys.path]))
    planned = read_run(plan, number)
    if ranks.launched():
        ranks.join(planned.config.model.device)
    attached = source == "-"  # whoever is there has checked, and keeps the log
    if ranks.from_rank_0(lambda: attached or unfinished([planned], plan["mix_code"])[0]):
        if not attached and not ranks.rank():
            planned.path.mkdir(parents=True, exist_ok=True)
            log = os.open(replaced(planned.path / "log.txt"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
        carry_out(planned, plan["trainer"], Path(plan["cache"]), plan["trackers"], stopping=stopping)
    if ranks.launched():
        ranks.leave()
    return planned


def _die_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    os._exit(1)
