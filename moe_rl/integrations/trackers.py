"""The rows of runs to TensorBoard and to Weights & Biases (`wandb`): while a run trains, or afterwards (`export`).

A point is a number of a row, named `<table>/<column of the data dictionary>` and by what else names the row, as in
`layers/expert_change_rate/site_3`. Its place on the x axis is the row's step. Single completions are no curves and left
out.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from moe_rl.errors import ConfigError, MoeRlError, RunError
from moe_rl.registry import lookup
from moe_rl.storage.columns import COMPLETIONS, TABLES
from moe_rl.storage.commits import Row, last_step, read_rows
from moe_rl.storage.folder import RunFolder, read_manifest, run_folders
from moe_rl.storage.frames import LABELS, collected, labels_of

Tables = Mapping[str, Sequence[Row]]
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
    """The last step that an earlier process of this run has logged; -1: none, or not known."""

    @property
    def place(self) -> str:
        """Where it lies: study/arm/factors/seed=n."""
        return f"{self.study}/{self.arm}/{self.factors}/seed={self.seed}"


@runtime_checkable
class Tracker(Protocol):
    """What is made of `Class(folder, run)`. It gets all steps of the run in order. A run that goes on gives those up to
    `run.step` again, because what sends them may have been killed before it wrote them."""

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """The numbers of one step; `time` in seconds since 1970, of a step that is given again without pauses."""

    def close(self) -> None:
        """The process ends, or the run."""


class TensorBoard:
    """Event files in `<folder>/<study>/<arm>/<factors>/seed=<n>`. Numbers are float32, as all of TensorBoard's."""

    package = "tensorboard"

    def __init__(self, folder: Path, run: Tracked):
        from torch.utils.tensorboard import SummaryWriter

        place = folder / run.place
        self._last = run.step if any(place.glob("events.*")) else -1  # flushed before their step was committed
        self._writer = SummaryWriter(str(place), purge_step=self._last + 1)
        self._writer.flush()  # what was logged after the last commit goes now

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        if step <= self._last:
            return
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, time)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandB:
    """Project: the study; group: the arm; job type: the factors; one run per seed, whose id is made of its place and
    the time of its creation. `WANDB_MODE=offline` writes folders for `wandb sync`; else wandb's own settings say where
    rows go. What a resumed run has there already is left out."""

    package, hint = "wandb", "; WANDB_MODE=offline needs neither a login nor a network"

    def __init__(self, folder: Path, run: Tracked):
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True,
                               disable_git=True, disable_code=True)
        known = hashlib.sha256(f"{run.place} {run.created}".encode()).hexdigest()[:16]
        self._run = wandb.init(project=run.study, group=run.arm, job_type=run.factors, id=known, resume="allow",
                               name=f"{run.arm}/{run.factors}/seed={run.seed}", config=dict(run.config),
                               dir=str(folder), settings=quiet, reinit="create_new")

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        if step >= self._run.starting_step:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Hand over what is left."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, Tracked], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


def find_tracker(text: str) -> tuple[Callable[[Path, Tracked], Tracker], Path]:
    """The tracker and the folder that `NAME`, `NAME=FOLDER` or `pkg.module:Class=FOLDER` means, by default a folder
    with the tracker's name. Raises ConfigError where there is no such tracker, or it is not installed."""
    name, _, folder = text.partition("=")
    found = lookup("tracker", name, TRACKERS)
    package = getattr(found, "package", None)
    # By its metadata: a folder of that name in the working directory can be imported, too.
    if package is not None and not any(importlib.metadata.distributions(name=package)):
        raise ConfigError(f"{package} is not installed here: pip install 'moe_rl[trackers]'")
    return found, Path(folder or name.rpartition(":")[2])


class Listeners:
    """Gives the rows of a run, as they are made, to trackers. A tracker that fails is dropped with a warning on stderr;
    the run goes on."""

    def __init__(self, targets: Sequence[str], folder: RunFolder) -> None:
        manifest = folder.manifest
        run = Tracked(**labels_of(folder.path), config=manifest["config"], created=manifest["created"],
                      step=folder.step or -1)
        self._root, self._open = folder.path.parents[2], dict[str, Tracker]()
        for text in targets:
            with self._dropping(text):
                make, where = find_tracker(text)
                self._open[text] = make(where, run)
                for point in _points(run, read_run(folder.path)):
                    self._open[text].log(*point)

    def __call__(self, rows: Tables) -> None:
        for step, values in values_of(rows).items():
            for text, tracker in list(self._open.items()):
                with self._dropping(text):
                    tracker.log(step, time.time(), values)

    def close(self) -> None:
        """Close all of them."""
        for text, tracker in list(self._open.items()):
            with self._dropping(text):
                tracker.close()

    @contextlib.contextmanager
    def _dropping(self, text: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each tracker has its own
            self._open.pop(text, None)
            print(f"moe-rl: warning: the tracker {text} failed and is no longer used: {error!r}. To send its rows "
                  f"later, run `moe-rl runs export {self._root} --to {text}`.", file=sys.stderr, flush=True)


def export(root: Path, target: str, follow: bool = False, wait: Callable[[float], Any] = time.sleep) -> Iterator[str]:
    """Give a tracker every run below a folder of runs, up to its last commit, or of the tables that `collect` wrote;
    with `follow` also what is committed from then on. Yields a line for each run and each time that it had new steps.

    Raises RunError where there is no run, and for whatever the tracker raises.
    """
    make, folder = find_tracker(target)
    trackers: dict[str, tuple[Tracker, int]] = {}
    try:
        while True:
            for run, tables in _committed(root):
                try:
                    tracker, last = trackers.get(run.place) or (make(folder, run), -1)
                    new = [point for point in _points(run, tables) if point[0] > last]
                    for point in new:
                        tracker.log(*point)
                except MoeRlError:
                    raise
                except Exception as error:
                    raise RunError(f"{target} did not accept the rows of {run.place}: "
                                   f"{error!r}{getattr(make, 'hint', '')}") from error
                if new or run.place not in trackers:
                    yield f"{run.place}: {len(new)} steps"
                trackers[run.place] = tracker, new[-1][0] if new else last
            if not follow:
                break
            wait(5.0)
    finally:
        for tracker, _ in trackers.values():
            tracker.close()
    if not trackers:
        raise RunError(f"no run below {root}")


def _committed(root: Path) -> Iterator[tuple[Tracked, Tables]]:
    """Every run below a folder, as its last commit left it, with its rows; else every run of collected tables."""
    paths = list(run_folders(root))
    for path in paths:
        manifest = read_manifest(path)
        assert manifest is not None, "run_folders finds them by it"
        run = Tracked(**labels_of(path), config=manifest["config"], created=manifest["created"], step=-1)
        yield run, read_run(path)
    if paths or (frames := collected(root)) is None:
        return
    for row in frames.runs.fillna({"created": 0.0, "config": "{}"}).itertuples():
        tables = {}
        for name, frame in frames.tables.items():
            mine = (frame["arm"] == row.arm) & (frame["factors"] == row.factors) & (frame["seed"] == row.seed)
            rows = frame[mine].drop(columns=LABELS).to_dict("records")
            tables[name] = [{k: v for k, v in one.items() if v == v} for one in rows]
        yield Tracked(row.study, row.arm, row.factors, row.seed, json.loads(row.config), row.created, -1), tables


def read_run(path: Path) -> Tables:
    """The rows of a run's tables up to its last commit, of one moment: the run may go on meanwhile, and what is
    published, or left by an earlier commit, is removed as it does."""
    def moment() -> tuple[int | None, int]:
        return (read_manifest(path) or {}).get("finished"), last_step(path)

    while True:
        before = finished, _ = moment()
        with contextlib.suppress(FileNotFoundError):
            tables = {name: read_rows(path, name, finished).to_pylist() for name in GIVEN}
            if moment() == before:
                return tables


def values_of(tables: Tables) -> dict[int, dict[str, float]]:
    """The numbers of the rows by step, in order; what is no number, or was not measured, is left out."""
    values: dict[int, dict[str, float]] = {}
    for table, keys in GIVEN.items():
        for row in tables.get(table, []):
            names = "".join(f"/{key}_{row[key]}" for key in keys[1:])
            values.setdefault(row["step"], {}).update(
                {f"{table}/{column}{names}": float(value) for column, value in row.items()
                 if column not in keys and isinstance(value, int | float)})
    return dict(sorted(values.items()))


def _points(run: Tracked, tables: Tables) -> Iterator[tuple[int, float, Mapping[str, float]]]:
    """What `Tracker.log` takes for every step. Its time is the run's creation and the seconds of all steps so far."""
    values = values_of(tables)
    taken = {row["step"]: row.get("seconds_step") or 0.0 for row in tables.get("steps", [])}
    ends = itertools.accumulate((taken.get(step, 0.0) for step in values), initial=run.created)
    next(ends)
    for (step, numbers), end in zip(values.items(), ends, strict=True):
        yield step, end, numbers
