"""The tables of many runs as pandas frames, and where two runs differ."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from moe_rl.errors import OLD_NAMES, RunError, renamed
from moe_rl.registry import import_component
from moe_rl.registry import unknown as no_such
from moe_rl.storage.columns import TABLES, pooled, timing
from moe_rl.storage.commits import read_parquet, read_rows
from moe_rl.storage.comparable import require_comparable
from moe_rl.storage.folder import ENDED, differing, folder_name, read_manifest, run_folders, state

LABELS = ["study", "arm", "condition", "seed", "code"]
"""Columns that every frame starts with: which run a row belongs to, and the code that wrote it."""
PLAIN = ("hash", "created", "finished_at", "seconds", "checkpoint", "device", "threads")
NESTED = ("config", "packages", "git", "inputs", "declared")
"""Columns of `runs` that come from the manifest; the latter hold JSON, `packages` also the processor. Null where a run
is older than what they say."""


@renamed(cells="conditions", cell="condition")
@dataclass(frozen=True)
class Frames:
    """Rows of all runs of a study: `runs` has a row per run, `frames["steps"]` is the frame of the table `steps`, and
    `left_out` says what is not there because it has not finished."""

    runs: pd.DataFrame
    tables: Mapping[str, pd.DataFrame]
    left_out: tuple[str, ...] = ()

    def __getitem__(self, table: str) -> pd.DataFrame:
        return self.tables[table]

    @property
    def conditions(self) -> list[str]:
        """The conditions, in the order of the runs."""
        return list(self.runs["condition"].unique())

    def condition(self, condition: str) -> Frames:
        """The rows of one condition."""
        return self._with("condition", condition)

    def run(self, arm: str, seed: int) -> Frames:
        """The rows of one run, of frames of one condition."""
        return self._with("arm", arm)._with("seed", seed)

    def select(self, paths: Sequence[Path]) -> Frames:
        """The rows of some runs, and of what was left out only those."""
        wanted = {tuple(labels_of(path).values()) for path in paths}
        chosen = self._where(lambda f: [key in wanted for key in f[LABELS[:4]].itertuples(index=False, name=None)])
        return replace(chosen, left_out=tuple(t for t in self.left_out if t.startswith(tuple(f"{p} (" for p in paths))))

    def to_pandas(self, table: str = "runs") -> pd.DataFrame:
        """A table with a column for each factor behind its labels, such as `optimizer.lr`: a number where all values
        are numbers. A factor that is called as a column of the table gets the name `condition.<factor>`."""
        if table != "runs" and table not in self.tables:
            no_such("table", table, ["runs", *self.tables])
        frame = (self.runs if table == "runs" else self.tables[table]).copy()
        settings = {condition: settings_of(condition) for condition in frame["condition"].unique()}
        for i, key in enumerate(dict.fromkeys(key for values in settings.values() for key in values)):
            name = key if key not in frame else f"condition.{key}"
            frame.insert(
                sum(label in frame for label in LABELS) + i,
                name,
                frame["condition"].map(lambda one, key=key: settings[one].get(key)),
            )
        return frame

    def to_latex(self, *metrics: str, arms: Sequence[str] = ()) -> str:
        """Arms and metrics as a table for LaTeX with booktabs: the mean over seeds and, from n = 4 on, its interval."""
        return import_component("table", "latex", "moe_rl.results.tables:latex")(self, metrics, arms)

    def of_arms(self, arms: Sequence[str], known: Sequence[str] = ()) -> Frames:
        """The rows of some arms. Raises ConfigError for one that is not `known`, by default those of the runs."""
        for arm in arms:
            if arm not in (known or set(self.runs["arm"])):
                no_such("arm", arm, known or self.runs["arm"].unique())
        chosen = self._where(lambda frame: frame["arm"].isin(arms))
        if chosen.runs.empty:
            raise RunError(f"no finished run of the arms {', '.join(arms)}")
        return replace(chosen, left_out=self.left_out)

    def _with(self, label: str, value: object) -> Frames:
        return self._where(lambda frame: frame[label] == value)

    def _where(self, rows: Callable[[pd.DataFrame], Any]) -> Frames:
        tables = {name: table[rows(table)] if len(table) else table for name, table in self.tables.items()}
        return Frames(self.runs[rows(self.runs)] if len(self.runs) else self.runs, tables)


def settings_of(condition: str) -> dict[str, float | str]:
    """The settings that a condition names: `optimizer.lr=0.0004,task=x` → numbers and words.

    As in the run's path, where every character of a word beyond letters, digits and `._+-` reads `_`.
    """
    pairs = (part.partition("=") for part in condition.split(",") if "=" in part)
    return {key: _number(text) for key, _, text in pairs}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Difference:
    """The first row in which a column of two runs differs, or, without a column, that one run alone has."""

    table: str
    row: dict[str, Any]
    column: str | None
    a: Any
    b: Any
    relative: float
    """The largest difference of the column, over its largest value; infinite where one of them has no number."""

    @property
    def step(self) -> int:
        """The step of that row."""
        return self.row["step"]


def load_study(root: Path, *, unfinished: bool = False, mix_code: bool = False) -> Frames:
    """The frames of every finished run below `root` (a study, an arm or a run), of a folder of runs or of tables that
    `collect` wrote.

    With `unfinished`, runs that still go on or were interrupted contribute the rows of their last commit. Raises
    RunError when there is no run, or when they are not `comparable`, as runs of different code, inputs or settings are
    not, unless `mix_code`; ConfigError for a label that is no `folder_name`.
    """
    tables = None if any(run_folders(root)) else collected(root)  # runs go on, so they know more than tables of them
    frames = tables or _from_runs(root, unfinished)
    for label in ("study", "arm", "condition"):
        for name in frames.runs[label].unique():
            folder_name(label, name)
    if not mix_code:
        require_comparable(root, frames.runs)
    return frames


def collected(root: Path) -> Frames | None:
    """The frames that `collect` wrote into `root` or, for an arm, a condition or a run of such a study, above it; None
    where there are none."""
    here = Path(root).absolute()
    folder = next((f for f in [here, *here.parents][:4] if (f / "runs.parquet").exists()), None)
    if folder is None:
        return None
    tables = {name: pd.DataFrame(columns=[*LABELS, *keys]) for name, keys in pooled().items()}
    for name in ("runs", *pooled()):
        if name in ("runs", "steps") or (folder / f"{name}.parquet").exists():  # the others may have no rows
            frame = read_parquet(folder / f"{name}.parquet").to_pandas()
            if "factors" in frame:
                raise RunError(f"{folder / name}.parquet has {OLD_NAMES}")
            tables[name] = frame.astype({c: "float64" for c in frame.select_dtypes("float32")})
    runs = tables.pop("runs")
    frames = Frames(runs.assign(**{c: None for c in (*PLAIN, *NESTED) if c not in runs}), tables)
    for label, part in zip(LABELS[1:4], here.relative_to(folder).parts, strict=False):
        value = int(part.removeprefix("seed=")) if label == "seed" and part.startswith("seed=") else part
        frames = frames._with(label, value)
    if frames.runs.empty:
        raise RunError(f"the tables in {folder} contain no run {root}")
    return frames


def _from_runs(root: Path, unfinished: bool) -> Frames:
    runs: list[dict[str, Any]] = []
    left_out: list[str] = []
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in pooled()}
    for path in run_folders(root):
        manifest, now = read_manifest(path), state(path)
        assert manifest is not None, "run_folders finds them by it"
        last = math.inf
        if now["state"] not in ENDED and not unfinished:
            left_out.append(f"{path} ({now['state']}, step {now['step']} of {now['steps']})")
            if "finished" not in manifest:
                continue
            last = manifest["finished"]  # an extension of a finished run, whose steps so far are shown
            manifest["config"]["steps"], now = last, {"state": "finished", "step": last}
        labels = labels_of(path) | {"code": " then ".join(manifest["code"])}
        runs.append(labels | {"path": str(path), "state": now["state"], "step": now["step"]} | _described(manifest))
        for name in pooled():
            frame = read_table(path, name)
            frame = frame[frame["step"] <= last]
            tables[name].append(frame.assign(**labels)[[*LABELS, *frame.columns]])
    if not runs:
        why = f"; unfinished: {'; '.join(left_out)}" if left_out else ""
        raise RunError(f"no finished run below {root}{why}")
    filled = {name: [part for part in parts if len(part)] or parts[:1] for name, parts in tables.items()}
    joined = {name: pd.concat(parts, ignore_index=True) for name, parts in filled.items()}
    return Frames(pd.DataFrame(runs), joined, tuple(left_out))


def _described(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest as columns of `runs`; what is nested is JSON, so that a row can be run again as it stands."""
    plain = {k: manifest.get(k) for k in PLAIN}
    nested = {k: None if manifest.get(k) is None else json.dumps(manifest[k], sort_keys=True) for k in NESTED}
    return {"steps": manifest["config"]["steps"], **plain, **nested}


def read_table(path: Path, name: str) -> pd.DataFrame:
    """One table of one run, up to its last commit; empty before the first."""
    frame = read_rows(path, name).to_pandas()
    return frame if len(frame.columns) else pd.DataFrame(columns=list(TABLES[name]))


def labels_of(path: Path) -> dict[str, Any]:
    """Study, arm, condition and seed of a run, from its path. Raises RunError for one that was renamed."""
    *_, study, arm, condition, name = ("", "", "", *Path(path).absolute().parts)
    if not re.fullmatch(r"seed=\d+", name):
        raise RunError(f"the name of the run folder {path} contains no seed. Rename it to seed=<n>.")
    return {"study": study, "arm": arm, "condition": condition, "seed": int(name.removeprefix("seed="))}


# ---------------------------------------------------------------------- two runs
def differences(
    a: Mapping[str, pd.DataFrame], b: Mapping[str, pd.DataFrame], *, narrow: bool = False, measured: bool = False
) -> Iterator[Difference]:
    """Every column that both runs have and in which they differ, those of its cost aside.

    Equality is exact, or of float32 numbers if `narrow`. With `measured`, rows in which `a` has no value are ignored.
    """
    for name, keys in TABLES.items():
        if name not in a or name not in b:
            continue
        x, y = (table[name].set_index(list(keys)).sort_index() for table in (a, b))
        if len(alone := x.index.symmetric_difference(y.index)):
            in_a = alone[0] in x.index
            yield Difference(name, _row(name, alone[0]), None, in_a, not in_a, np.inf)
        both = x.index.intersection(y.index)
        x, y = x.loc[both], y.loc[both]
        for column in x.columns.intersection(y.columns, sort=False):
            if column not in LABELS and not timing(column):
                yield from _difference(name, column, x[column], y[column], narrow, measured)


def _difference(
    table: str, column: str, a: pd.Series, b: pd.Series, narrow: bool, measured: bool
) -> Iterator[Difference]:
    numbers = is_numeric_dtype(a) and is_numeric_dtype(b)  # else names, as of a benchmark
    x, y = (series.to_numpy("float32" if narrow and numbers else None) for series in (a, b))
    lacking = a.isna().to_numpy(), b.isna().to_numpy()
    differ = (x != y) & ~(lacking[0] & (lacking[1] | measured))
    if differ.any():
        first = int(np.flatnonzero(differ)[0])
        relative = np.inf
        if numbers and not (lacking[0] != lacking[1])[differ].any():
            x, y = x.astype(float), y.astype(float)
            with np.errstate(invalid="ignore"):
                relative = float(np.nanmax(np.abs(x - y)) / np.nanmax(np.maximum(np.abs(x), np.abs(y))))
        yield Difference(table, _row(table, a.index[first]), column, _plain(x[first]), _plain(y[first]), relative)


def diff(a: Path, b: Path) -> Difference | None:
    """The earliest row in which two runs differ, or None. Equality is exact. A column that one run alone has counts.

    Within a step, rows of the other tables come before the row of `steps`.
    """
    for path in (a, b):
        read_run_manifest(path)
    left, right = ({name: read_table(path, name) for name in TABLES} for path in (a, b))
    for name in TABLES:
        columns = left[name].columns.union(right[name].columns, sort=False)
        left[name], right[name] = (tables[name].reindex(columns=columns) for tables in (left, right))
    order = {name: i for i, name in enumerate([*(name for name in TABLES if name != "steps"), "steps"])}
    different = differences(left, right)
    return min(different, key=lambda d: (d.step, order[d.table], *d.row.values()), default=None)


def settings_that_differ(a: Path, b: Path) -> dict[str, tuple[Any, Any]]:
    """Everything but rows in which two runs differ: configuration, code, packages, threads, final checkpoint."""
    keys = ("config", "code", "inputs", "packages", "device", "threads", "finished", "checkpoint")
    left, right = ({key: read_run_manifest(path).get(key) for key in keys} for path in (a, b))
    return differing(left, right)


def read_run_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a run. Raises RunError where there is none."""
    manifest = read_manifest(Path(path))
    if manifest is None:
        raise RunError(f"{path} is not a run: it has no manifest.json. See `moe-rl runs list`.")
    return manifest


def _row(table: str, index: Any) -> dict[str, Any]:
    keys = TABLES[table]
    return dict(zip(keys, map(_plain, index if len(keys) > 1 else [index]), strict=True))


def _plain(value: Any) -> Any:
    """A NumPy number as a Python one."""
    return value.item() if hasattr(value, "item") else value
