"""The rows of runs to TensorBoard and to Weights & Biases (`wandb`): while a run trains, or afterwards (`export`).

A point is a number of a row, named `<table>/<column of the data dictionary>` and by the row's other keys, as in
`layers/expert_change_rate/moe_layer_3`. Its place on the x axis is the row's step. Single completions are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moe_rl.errors import ConfigError, RunError
from moe_rl.registry import lookup
from moe_rl.storage.columns import COMPLETIONS, TABLES
from moe_rl.storage.commits import Row
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import LABELS, labels_of, load_study
from moe_rl.storage.links import replaced

Tables = Mapping[str, Sequence[Row]]


@dataclass(frozen=True)
class Tracked:
    """What a tracker knows of a run."""

    study: str
    arm: str
    condition: str
    seed: int
    config: Mapping[str, Any]
    created: float
    """Seconds since 1970; tells the run from an earlier one in the same place."""
    step: int = -1
    """The last step that an earlier process of this run committed; later ones may come again."""

    @property
    def place(self) -> str:
        """Where it lies: study/arm/condition/seed=n."""
        return f"{self.study}/{self.arm}/{self.condition}/seed={self.seed}"


class Tracker(Protocol):
    """Interface of a tracker, made by `Class(folder, run)`. It receives the steps in order, after `run.step`."""

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """The numbers of one step; `time` in seconds since 1970."""

    def close(self) -> None:
        """The process ends, or the run."""


class TensorBoard:
    """Event files in `<folder>/<study>/<arm>/<condition>/seed=<n>`. Numbers are float32, as all of TensorBoard's."""

    package = "tensorboard"

    def __init__(self, folder: Path, run: Tracked):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(replaced(folder / run.place, folder)), purge_step=run.step + 1)
        self._writer.flush()  # what was logged after the last commit goes now

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, time)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Project: the study; group: the arm; job type: the condition. Each seed is one run, whose id is made of its place
    and the time of its creation. `WANDB_MODE=offline` writes folders for `wandb sync`."""

    package, hint = "wandb", "; WANDB_MODE=offline needs neither a login nor a network"

    def __init__(self, folder: Path, run: Tracked):
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.study,
            group=run.arm,
            job_type=run.condition,
            id=hashlib.sha256(f"{run.place} {run.created}".encode()).hexdigest()[:16],
            resume="allow",
            name=f"{run.arm}/{run.condition}/seed={run.seed}",
            config=dict(run.config),
            dir=str(folder),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
            reinit="create_new",
        )

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        if step >= self._run.starting_step:  # a resumed run has the others
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, Tracked], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


def find_tracker(text: str) -> tuple[Callable[[Path, Tracked], Tracker], Path]:
    """The tracker and the folder of `NAME`, `NAME=FOLDER` or `pkg.module:Class=FOLDER`; the folder's default is the
    tracker's name. Raises ConfigError for an unknown tracker, or one that is not installed."""
    name, _, folder = text.partition("=")
    make = lookup("tracker", name, TRACKERS)
    package = getattr(make, "package", None)
    # By its metadata: a folder of that name in the working directory can be imported, too.
    if package is not None and not any(importlib.metadata.distributions(name=package)):
        raise ConfigError(f"{package} is not installed here: pip install 'moe_rl[trackers]'")
    return make, Path(folder or name.rpartition(":")[2])


class Listeners:
    """Gives the rows of a run, as they are made, to trackers. A tracker that fails is dropped with a warning on stderr;
    the run goes on."""

    def __init__(self, targets: Sequence[str], folder: RunFolder) -> None:
        self._root, self._open = folder.path.parents[2], dict[str, Tracker]()
        config, created, step = folder.manifest["config"], folder.manifest["created"], folder.step or -1
        for text in targets:
            with self._dropping(text):
                make, where = find_tracker(text)
                self._open[text] = make(
                    where, Tracked(**labels_of(folder.path), config=config, created=created, step=step)
                )

    def __call__(self, rows: Tables) -> None:
        for step, values in values_of(rows).items():
            for text, tracker in list(self._open.items()):
                with self._dropping(text):
                    tracker.log(step, time.time(), values)

    def close(self) -> None:
        for text, tracker in list(self._open.items()):
            with self._dropping(text):
                tracker.close()

    @contextlib.contextmanager
    def _dropping(self, text: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each tracker has its own
            self._open.pop(text, None)
            print(
                f"moe-rl: warning: the tracker {text} failed and is no longer used: {error!r}. To send its rows "
                f"later, run `moe-rl runs export {self._root} --to {text}`.",
                file=sys.stderr,
                flush=True,
            )


def export(root: Path, target: str) -> Iterator[str]:
    """Give a tracker every run of a folder of runs, up to its last commit, or of collected tables. Yields a line for
    each run. Raises RunError where there is no run, and for whatever the tracker raises."""
    make, folder = find_tracker(target)
    frames = load_study(root, unfinished=True, mix_code=True)
    tables = {name: dict(iter(frame.groupby(LABELS[:4]))) for name, frame in frames.tables.items()}
    for row in frames.runs.itertuples():
        key = (row.study, row.arm, row.condition, row.seed)
        rows = {name: by_run[key].to_dict("records") for name, by_run in tables.items() if key in by_run}
        run = Tracked(*key, config=json.loads(row.config), created=row.created)
        values, end = values_of(rows), run.created
        try:
            with contextlib.closing(make(folder, run)) as tracker:
                for step, numbers in values.items():
                    end += numbers.get("steps/seconds_step", 0.0)
                    tracker.log(step, end, numbers)
        except Exception as error:
            hint = getattr(make, "hint", "")
            raise RunError(f"{target} did not accept the rows of {run.place}: {error!r}{hint}") from error
        yield f"{run.place}: {len(values)} steps"


def values_of(tables: Tables) -> dict[int, dict[str, float]]:
    """The numbers of the rows by step, in order; what is no finite number is left out."""
    values: dict[int, dict[str, float]] = {}
    for table, keys in TABLES.items():
        for row in tables.get(table, []) if table not in COMPLETIONS else ():
            names = "".join(f"/{key}_{row[key]}" for key in keys[1:])
            numbers = {
                f"{table}/{column}{names}": float(value)
                for column, value in row.items()
                if column not in (*keys, *LABELS) and isinstance(value, int | float) and math.isfinite(value)
            }
            values.setdefault(row["step"], {}).update(numbers)
    return dict(sorted(values.items()))
