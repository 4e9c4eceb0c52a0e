"""Committed rows to TensorBoard and to Weights & Biases (`wandb`), every point once.

A tracker is brought up to date from tables on the disk, and never told by the process that trains: what a kill took
back was never sent, and nothing that a tracker does can hold up a step. `processes` does so while runs go on.

A point is a number of a row under `<table>/<column of the data dictionary>`, followed by what else names the row, as in
`layers/slot_change/site_3`; its place on the x axis is the row's step. Single completions are no curves, and left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from filelock import FileLock, Timeout

from moe_rl.errors import ConfigError, MoeRlError, RunError
from moe_rl.registry import Use, lookup
from moe_rl.storage.columns import COMPLETIONS, TABLES
from moe_rl.storage.commits import Row, last_step, read_rows
from moe_rl.storage.folder import read_manifest, run_folders
from moe_rl.storage.frames import LABELS, collected, labels_of

Tables = Mapping[str, list[Row]]
GIVEN = {name: keys for name, keys in TABLES.items() if name not in COMPLETIONS}
"""The tables whose numbers are points."""


@dataclass(frozen=True)
class Tracked:
    """A run as a tracker sees it."""

    study: str
    arm: str
    factors: str
    seed: int
    config: Mapping[str, Any]
    created: float
    """Seconds since 1970; tells the run from an earlier one in the same place."""
    step: int
    """Of its last commit."""
    read: Callable[[], tuple[int, Tables]]
    """The step of the last commit by now, and the rows up to it."""

    @property
    def place(self) -> str:
        """Where it lies: study/arm/factors/seed=n."""
        return f"{self.study}/{self.arm}/{self.factors}/seed={self.seed}"


@dataclass(frozen=True)
class Points:
    """The numbers of one step, of all tables."""

    step: int
    time: float
    """Seconds since 1970: when the run was created, and the seconds of its steps until then."""
    values: Mapping[str, float]


@runtime_checkable
class Tracker(Protocol):
    """What is made of `Class(folder)`; everything that it keeps lies in that folder, or with a service."""

    def last(self, run: Tracked) -> int:
        """The step up to which it has the run's points; -1: none."""

    def write(self, run: Tracked, points: list[Points]) -> None:
        """Take over the points of the steps after `last`, in their order. A kill leaves all of them or none; after it,
        or an error, they are given again."""


class TensorBoard:
    """An event file per call, `<study>/<arm>/<factors>/seed=<n>/events.out.tfevents.<created>.<step>.moe_rl`, which
    appears when it is whole. Numbers are float32, as all of TensorBoard's."""

    package = "tensorboard"

    def __init__(self, folder: Path):
        import tensorboard.compat.proto.event_pb2  # now, since what `write` takes is measured
        import tensorboard.summary.writer.record_writer  # noqa: F401

        self.folder = folder

    def last(self, run: Tracked) -> int:
        """Raises RunError for a folder with the events of another run of the same name."""
        found = [file.name.split(".") for file in (self.folder / run.place).glob("events.out.tfevents.*.moe_rl")]
        if any(int(created) != int(run.created) for *_, created, _, _ in found):
            raise RunError(f"{self.folder / run.place} has the events of another run of that name, which was begun at "
                           "another time: remove them, or choose another folder, NAME=FOLDER")
        return max((int(step) for *_, step, _ in found), default=-1)

    def write(self, run: Tracked, points: list[Points]) -> None:
        """See `Tracker.write`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = self.folder / run.place
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / ".tmp"  # TensorBoard looks for "tfevents" in names
        with aside.open("wb") as file:
            writer = RecordWriter(file)
            writer.write(Event(wall_time=run.created, file_version="brain.Event:2").SerializeToString())
            for p in points:
                values = [Summary.Value(tag=name, simple_value=value) for name, value in p.values.items()]
                event = Event(wall_time=p.time, step=p.step, summary=Summary(value=values))
                writer.write(event.SerializeToString())
        aside.rename(folder / f"events.out.tfevents.{int(run.created)}.{points[-1].step:09d}.moe_rl")


class WandB:
    """Project: the study; group: the arm; job type: the factors; one run per seed, whose id is made of its place and
    the time of its creation. `WANDB_MODE=offline` writes folders for `wandb sync`, a folder per call; else wandb's own
    settings say where rows go, and what a resumed run has there already is left out."""

    package, hint = "wandb", "; WANDB_MODE=offline needs neither a login nor a network"

    def __init__(self, folder: Path):
        import wandb  # noqa: F401  (now, since what `write` takes is measured)

        self.folder = folder

    def last(self, run: Tracked) -> int:
        """From what was put beside the rows when they were written."""
        files = self.folder.glob(f"*run-*-{_id(run)}/moe_rl.json")
        return max((json.loads(file.read_text())["step"] for file in files), default=-1)

    def write(self, run: Tracked, points: list[Points]) -> None:
        """See `Tracker.write`."""
        import wandb

        aside = self.folder / ".tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True,
                               disable_git=True, disable_code=True)
        with wandb.init(project=run.study, group=run.arm, job_type=run.factors, id=_id(run), resume="allow",
                        name=f"{run.arm}/{run.factors}/seed={run.seed}", config=dict(run.config), dir=str(aside),
                        settings=quiet) as there:
            for p in points:
                if p.step >= there.starting_step:
                    there.log(dict(p.values), step=p.step)
        (made,) = (aside / "wandb").glob(f"*run-*-{_id(run)}")
        (made / "moe_rl.json").write_text(json.dumps({"place": run.place, "step": points[-1].step}))
        made.rename(self.folder / made.name)
        shutil.rmtree(aside)


TRACKERS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


def names_a_tracker(text: str) -> bool:
    """Whether a target begins with the name of a tracker, or with `pkg.module:Class`; else it can only be a folder."""
    name = text.partition("=")[0]
    return name in TRACKERS or Use(name).own


def target(text: str) -> tuple[str, Path]:
    """The tracker and the folder that `NAME`, `NAME=FOLDER` or `pkg.module:Class=FOLDER` means, by default a folder
    with the tracker's name. Raises ConfigError where there is no such tracker, or it is not installed."""
    name, _, folder = text.partition("=")
    package = getattr(lookup("tracker", name, TRACKERS), "package", None)
    # By its metadata: a folder of that name in the working directory can be imported, too.
    if package is not None and not any(importlib.metadata.distributions(name=package)):
        raise ConfigError(f"{package} is not installed here: pip install 'moe_rl[trackers]'")
    return name, Path(folder or name.rpartition(":")[2])


@contextlib.contextmanager
def opened(text: str) -> Iterator[Tracker]:
    """The tracker of a target, whose folder no other process writes to meanwhile. Raises ConfigError for no target,
    RunError where another process does."""
    name, folder = target(text)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".moe_rl.lock").acquire(timeout=1)
    except Timeout as error:
        raise RunError(f"another process is writing to {folder}: wait for it, or choose another, "
                       f"{name}=FOLDER") from error
    with lock:
        yield lookup("tracker", name, TRACKERS)(folder)


def bring_up_to_date(tracker: Tracker, run: Tracked) -> int:
    """Give a tracker what was committed since it was last given something; how many steps that were. Raises RunError
    for whatever the tracker raises."""
    try:
        last = tracker.last(run)
        if run.step <= last:
            return 0
        step, tables = run.read()
        if points := [p for p in points_of(tables, run.created) if last < p.step <= step]:
            tracker.write(run, points)
        return len(points)
    except MoeRlError:
        raise
    except Exception as error:  # each tracker has its own
        hint = getattr(tracker, "hint", "")
        raise RunError(f"{type(tracker).__name__} did not take the rows of {run.place}: {error!r}{hint}") from error


def tracked(root: Path) -> Iterator[Tracked]:
    """Every run below a folder of runs, as its last commit left it."""
    for path in run_folders(root):
        manifest = read_manifest(path)
        assert manifest is not None, "run_folders finds them by it"
        yield Tracked(**labels_of(path), config=manifest["config"], created=manifest["created"],
                      step=last_step(path), read=partial(committed, path))


def tracked_tables(root: Path) -> Iterator[Tracked]:
    """Every run of the tables that `collect` wrote; older ones do not say when a run was created."""
    if (frames := collected(root)) is None:
        return
    for run in frames.runs.fillna({"created": 0.0, "config": "{}"}).itertuples():
        tables = {}
        for name, frame in frames.tables.items():
            mine = (frame["arm"] == run.arm) & (frame["factors"] == run.factors) & (frame["seed"] == run.seed)
            rows = frame[mine].drop(columns=LABELS).to_dict("records")
            tables[name] = [{k: v for k, v in row.items() if v == v} for row in rows]
        step = max((row["step"] for row in tables["steps"]), default=0)
        yield Tracked(run.study, run.arm, run.factors, run.seed, json.loads(run.config), run.created, step,
                      partial(lambda *found: found, step, tables))


def committed(path: Path) -> tuple[int, Tables]:
    """The step of a run's last commit and the rows of its tables, of one moment: the run may go on meanwhile, and what
    is published, or left by an earlier commit, is removed as it does."""
    def moment() -> tuple[int | None, int]:
        return (read_manifest(path) or {}).get("finished"), last_step(path)

    while True:
        before = finished, step = moment()
        with contextlib.suppress(FileNotFoundError):
            tables = {name: read_rows(path, name, finished).to_pylist() for name in GIVEN}
            if moment() == before:
                return step, tables


def points_of(tables: Tables, created: float) -> Iterator[Points]:
    """The numbers of the rows, step by step; what is no number, or was not measured, is left out."""
    values: dict[int, dict[str, float]] = {}
    seconds: dict[int, float] = {}
    for table, keys in GIVEN.items():
        for row in tables.get(table, []):
            names = "".join(f"/{key}_{row[key]}" for key in keys[1:])
            values.setdefault(row["step"], {}).update(
                {f"{table}/{column}{names}": float(value) for column, value in row.items()
                 if column not in keys and isinstance(value, int | float)})
            seconds[row["step"]] = seconds.get(row["step"], 0.0) + (row.get("seconds_step") or 0.0)
    steps = sorted(values)
    for step, since in zip(steps, itertools.accumulate(seconds[s] for s in steps), strict=True):
        yield Points(step, created + since, values[step])


def _id(run: Tracked) -> str:
    return hashlib.sha256(f"{run.place} {run.created}".encode()).hexdigest()[:16]
