"""Carries a study out on this machine: a process per run, one thread each, or all ranks together run after run, with a
live display. A study that is killed at any moment can go on.

What a worker prints goes to `log.txt` in the run's folder.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_rl import ranks
from moe_rl.errors import ConfigError, Diverged, MoeRlError, RunError, Stopped
from moe_rl.registry import Component, import_component
from moe_rl.storage import folder as runs
from moe_rl.storage.links import replaced
from moe_rl.storage.lock import Held
from moe_rl.storage.provenance import code_version, inputs_of, merged
from moe_rl.storage.terminal import say
from moe_rl.study.declaration import Planned, Study
from moe_rl.study.display import SHOWN, Display

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
TRACKERS = "moe_rl.integrations.trackers:Listeners"
WORKER = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:"
    "glibc.malloc.trim_threshold=1073741824"
}
"""Variables of a worker. Large tensors come and go at every operation; without these a sixth of a step is spent on page
faults. Linux only."""

CONTEXT: Any = multiprocessing.get_context("spawn")
DONE, BUG, TO_MEND, TOLD_TO_STOP = 0, 1, 2, 75
"""Exit codes of a worker: its run ended, divergence included; an error that may not come again, as that another worker
is at it; one that would; stopped, and to be called again (EX_TEMPFAIL)."""


@dataclass(frozen=True)
class Failure:
    """A run that ended without finishing; `expected` errors are the user's to mend and need no traceback."""

    path: Path
    message: str
    expected: bool


def run_study(
    study: Study,
    planned: Sequence[Planned],
    *,
    cache: Path,
    jobs: int | None = None,
    trackers: Sequence[str] = (),
    mix_code: bool = False,
    pooled: bool = True,
    console: Console | None = None,
) -> list[Failure]:
    """Run what is not finished, at most `jobs` at a time (default: see `at_a_time`), and return the failures.
    `trackers` are given the rows as they are made.

    Everything that can be seen to be wrong raises before a process starts, as `unfinished` says. A failing run does not
    stop the others, unless they would most likely fail alike: after an error of settings or surroundings before a first
    checkpoint. A diverged run is no failure.
    Under torchrun all ranks carry out one run after the other, and the first error ends the job.
    """
    console, jobs = console or Console(), at_a_time(jobs, planned)
    left = ranks.from_rank_0(lambda: unfinished(planned, mix_code, pooled))
    waiting = [p for p, is_left in zip(planned, left, strict=True) if is_left]
    how = f"{ranks.world()} ranks each" if ranks.launched() else f"{min(jobs, len(waiting))} at a time"
    say(console, f"{study.name}: {len(planned)} runs, {len(planned) - len(waiting)} finished, {how}")
    if ranks.launched():
        run_together(study, planned, waiting, cache, trackers, console)
        return []
    gpus = find_gpus(planned) if jobs > 1 else []  # a single worker may use them all
    waiting = in_turns(waiting, jobs)
    running: list[Worker] = []
    failures: list[Failure] = []
    try:
        with Display(planned, console) as display:
            while waiting or running:
                while waiting and len(running) < jobs:
                    busy = [worker.gpu for worker in running]
                    gpu = min(gpus, key=busy.count, default=None)
                    running.append(Worker(waiting.pop(0), study.trainer, cache, trackers, gpu))
                time.sleep(0.2)
                for worker in [worker for worker in running if not worker.process.is_alive()]:
                    running.remove(worker)
                    if failure := worker.failure():
                        failures.append(failure)
                        why = "" if failure.expected else f"\n{failure.message}"
                        say(console, ("failed", "red"), f" {failure.path}{why}")
                        if waiting and worker.process.exitcode == TO_MEND and not runs.last_step(failure.path):
                            say(console, f"{len(waiting)} more runs are not started: they would fail in the same way")
                            waiting.clear()
                display.update()
    finally:
        for worker in running:
            worker.process.kill()  # runs survive it, and it cannot be ignored
            worker.process.join()
    return failures


def in_turns(planned: Sequence[Planned], jobs: int) -> list[Planned]:
    """The runs with `jobs` seeds at a time taking turns: the runs of a seed wait for the supervised warm-up that they
    share."""
    numbers = {seed: i for i, seed in enumerate(dict.fromkeys(p.config.seed for p in planned))}
    turns = {seed: itertools.count() for seed in numbers}
    places = [(numbers[p.config.seed] // jobs, next(turns[p.config.seed])) for p in planned]
    return [p for _, p in sorted(zip(places, planned, strict=True), key=lambda pair: pair[0])]


class Worker:
    """A process that carries out one run. It ignores Ctrl-C, which the parent decides on, and dies with its parent. Of
    several GPUs it sees one.

    Each run has a process of its own, and not one of a pool, which would end all its runs when one process is killed.
    """

    def __init__(
        self, planned: Planned, trainer: str, cache: Path, trackers: Sequence[str] = (), gpu: str | None = None
    ) -> None:
        self.planned, self.gpu = planned, gpu
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self._answer, answer = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_carry_out_here, args=(answer, planned, trainer, cache, [*trackers]))
        resource_tracker.ensure_running()  # else the first start would, and unblock SIGINT
        blocked, before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}), dict(os.environ)
        try:  # a process inherits both
            os.environ.update(
                environment() | visible | {"PYTHONSAFEPATH": "1"}
            )  # nothing is imported from the current folder
            self.process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        answer.close()

    def failure(self) -> Failure | None:
        """Of a process that has ended; None where its run has."""
        self.process.join()
        try:
            message, _, expected = self._answer.recv()
        except EOFError:
            code = self.process.exitcode
            cause = {-s.value: s.name for s in signal.Signals}.get(code, f"exit code {code}")
            log = self.planned.path / "log.txt"
            return Failure(self.planned.path, f"the worker ended by {cause}. See {log}.", False)
        return Failure(self.planned.path, message, expected) if self.process.exitcode else None


def unfinished(planned: Sequence[Planned], mix_code: bool, pooled: bool = True) -> list[bool]:
    """Which runs are still to be carried out. Nothing is changed.

    Raises RunError for a folder that contains another run, and unless `mix_code` where the runs, together with those of
    the same study that are there, could not be pooled: see `require_comparable`. Runs that are not to be `pooled` are
    each checked alone, as one that goes on with other code.
    """
    for p in planned:
        runs.check(p.path, p.config.to_dict(), p.config.hash)
    if not mix_code:
        for root in {p.path.parents[2] for p in planned}:
            own = {p.path: p.config.to_dict() for p in planned if p.path.is_relative_to(root)}
            _require_comparable(root, own, pooled)
    left = [runs.state(p.path, p.config.steps)["state"] not in runs.ENDED for p in planned]
    for p, is_left in zip(planned, left, strict=True):
        if is_left:
            runs.require_unlinked(p.path)
    return left


def _require_comparable(root: Path, planned: Mapping[Path, Mapping[str, Any]], pooled: bool) -> None:
    import pandas as pd

    from moe_rl.storage.comparable import require_comparable
    from moe_rl.storage.frames import labels_of

    def row(path: Path) -> dict[str, Any]:
        """The run as it is or, if it is planned, as it would be."""
        manifest = runs.read_manifest(path) or {"code": []}
        config, codes, inputs = manifest.get("config"), manifest["code"], manifest.get("inputs", {})
        if path in planned:
            config, codes = planned[path], dict.fromkeys([*codes, code_version()])
            inputs = merged(inputs, inputs_of(planned[path], manifest.get("trainer", "")))
        texts = {"config": json.dumps(config), "inputs": json.dumps(inputs), "code": " then ".join(codes)}
        return {**labels_of(path), **texts}

    there = [path for path in runs.run_folders(root) if runs.last_step(path) or runs.is_held(path / runs.LOCK)]
    rows = [row(path) for path in dict.fromkeys([*there, *planned] if pooled else planned)]
    for group in [rows] if pooled else [[single] for single in rows]:
        require_comparable(root, pd.DataFrame(group))


def run_together(
    study: Study,
    planned: Sequence[Planned],
    waiting: Sequence[Planned],
    cache: Path,
    trackers: Sequence[str],
    console: Console,
) -> None:
    """Carry out the waiting runs of those planned, all ranks together; rank 0 keeps the folders and shows them."""
    with Display([] if ranks.rank() else planned, console) as display:
        for p in waiting:
            carry_out(p, study.trainer, cache, trackers, update=display.update)
            display.update()


def at_a_time(jobs: int | None, planned: Sequence[Planned]) -> int:
    """How many runs at a time `--jobs` allows: by default one per GPU where runs are on GPUs, else one per core that
    this process may use. Raises ConfigError for none."""
    if jobs is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        return len(find_gpus(planned)) or len(allowed) or os.cpu_count() or 1
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs} must be at least 1")
    return jobs


def find_gpus(planned: Sequence[Planned]) -> list[str]:
    """The GPUs over which workers are spread, as CUDA_VISIBLE_DEVICES names them. None where a run is on another device
    or names its GPU, as in `cuda:1`."""
    if any(p.config.model.device != "cuda" for p in planned):
        return []
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def preflight(study: Study, planned: Sequence[Planned], elsewhere: bool = False) -> list[str]:
    """Why the comparison would be void, one sentence each, found before any process starts.

    Raises ConfigError for a task, model, loss or route source that cannot be used, or that breaks on a toy batch, and
    for a trainer that is not there. Runs that go `elsewhere` may name a device or weights that this machine lacks. The
    function `check(run)` beside the study's trainer checks the runs; without one nothing is checked.
    """
    if (check := beside(study, "check")) is None:
        return []
    from moe_rl.models.load import PRESETS, check_weights
    from moe_rl.study.rehearsal import on_this_machine, rehearse

    planned, cautions = on_this_machine(planned) if elsewhere else (planned, [])
    # Runs that differ in their seeds alone would be checked, and their models laid out, again and again.
    distinct = {p.config.replace(seed=0, **{"cold_start.seed": 0}).hash: p.config for p in planned}
    parts = {str((p.config.arm, p.config.task, p.config.model, p.config.batches)): p.config for p in planned}
    cautions += [text for config in distinct.values() for text in check(config)]
    for name in dict.fromkeys(p.config.model.name for p in planned if p.config.model.name not in PRESETS):
        try:
            check_weights(name)
        except ConfigError as error:
            if not elsewhere:
                raise
            cautions.append(f"{error} A plan does not need them, but the runs do.")
    return list(dict.fromkeys([*cautions, *(text for config in parts.values() for text in rehearse(config))]))


def beside(study: Study, name: str) -> Callable[..., Any] | None:
    """A function beside the study's trainer, which takes the trainer's options too; None if there is none. Raises
    ConfigError for a trainer that is not there."""
    load(study.trainer)
    use = Component.read(study.trainer)
    function = getattr(sys.modules[use.name.partition(":")[0]], name, None)
    return function and partial(function, **use.options)


def environment() -> dict[str, str]:
    """Of a worker: this process's, with one thread and a log in UTF-8."""
    return WORKER | os.environ | ONE_THREAD | {"PYTHONIOENCODING": "utf-8"}


def carry_out(
    planned: Planned,
    trainer: str,
    cache: Path,
    trackers: Sequence[str] = (),
    *,
    update: Callable[[], None] = lambda: None,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """One run in its folder, or this rank's part in it. `update` is called after every step; once `stopping()`, the
    next step is committed, and Stopped raised. Rank 0 keeps the folder."""
    config = planned.config
    if ranks.rank():
        with contextlib.suppress(Diverged):  # rank 0 records it
            load(trainer)(config, runs.SharedFolder(None), cache=cache)
        return
    with runs.RunFolder.open(
        planned.path, config.to_dict(), config.hash, trainer=trainer, study_file=planned.study_file
    ) as folder:
        folder.stopping = stopping
        watch = Watch(folder)
        track = import_component("listener", "trackers", TRACKERS)(trackers, folder) if trackers else None

        def listen(rows: dict[str, list[dict[str, Any]]]) -> None:
            watch(rows)
            if track:
                track(rows)
            update()

        with recorded(folder, config.steps, watch), contextlib.closing(track) if track else contextlib.nullcontext():
            load(trainer)(config, runs.SharedFolder(folder) if ranks.launched() else folder, cache=cache, listen=listen)


@contextlib.contextmanager
def recorded(folder: runs.RunFolder, steps: int, watch: Watch) -> Iterator[None]:
    """Record in the folder how a trainer's work on a run ends.

    A divergence is a result: the run ends at its last commit. Raises RunError when the trainer returns early, and the
    errors of the trainer.
    """
    try:
        try:
            yield
        except Diverged as error:
            if "diverged" not in folder.manifest:
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
        self.folder.progress(self.step, seconds_per_step=self.pace, **{name: row.get(name) for name in SHOWN})


def load(spec: str) -> Any:
    """The trainer that `pkg.module:name`, or `pkg.module:name(option=value)`, names. Raises ConfigError when there is
    none."""
    use = Component.read(spec)
    module, colon, name = use.name.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        return partial(function, **use.options) if use.options else function
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{spec!r} cannot be imported ({error}). Write pkg.module:name.") from error


# ---------------------------------------------------------------------- the worker process
def _carry_out_here(answer: Connection, planned: Planned, trainer: str, cache: Path, trackers: Sequence[str]) -> None:
    """The worker process of a study on this machine, which has checked the run."""
    os.environ.pop("PYTHONSAFEPATH", None)

    def die_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None, "it was started by one"
        parent.join()
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()
    signals = stop_signals()

    def planned_run() -> Planned:
        write_log(planned.path)
        carry_out(planned, trainer, cache, trackers, stopping=lambda: bool(signals))
        return planned

    message, code, expected = outcome_of(planned_run)
    answer.send((message[-20_000:], code, expected))
    sys.exit(code)


def outcome_of(carry_out_run: Callable[[], Planned]) -> tuple[str, int, bool]:
    """Carry out a run. Returns a message on its end, which the log has too, the exit code, and whether the error is the
    user's."""
    message, code, expected = "", DONE, False
    try:
        planned = carry_out_run()
        message = f"{planned.path} is {runs.state(planned.path, planned.config.steps)['state']}"
    except Stopped as error:
        message, code = str(error), TOLD_TO_STOP
    except BaseException as error:  # a divergence is of this run alone
        expected = isinstance(error, MoeRlError) and not isinstance(error, Diverged)
        message = str(error) if expected else traceback.format_exc()
        code = TO_MEND if expected and not isinstance(error, Held) else BUG
    if code:
        with contextlib.suppress(OSError):  # the log may lie on a full disk
            os.write(2, f"{'moe-rl: ' * expected}{message}\n".encode(errors="backslashreplace"))
    return message, code, expected


def stop_signals() -> list[int]:
    """The list of SIGTERM and SIGUSR1 that this process receives; each stops a run after its next step."""
    received: list[int] = []
    for warning in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(warning, lambda number, frame: received.append(number))
    return received


def write_log(path: Path) -> None:
    """Send what this process prints to the log of a run."""
    path.mkdir(parents=True, exist_ok=True)
    log = os.open(replaced(path / "log.txt"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
