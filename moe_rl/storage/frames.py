"""The tables of many runs as pandas frames, and the first place at which two runs part."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from moe_rl.config import hash_of
from moe_rl.errors import RunError
from moe_rl.storage.columns import TABLES, pooled, timing
from moe_rl.storage.commits import WRITTEN, read_parquet, read_rows
from moe_rl.storage.comparable import require_comparable
from moe_rl.storage.folder import ENDED, differing, folder_name, read_manifest, run_folders, state

MOST_STEPS = 10**7
REPLACING = ".replacing"
"""The file beside the tables that `collect` replaces, until all are those of one time."""
LABELS = ["study", "arm", "factors", "seed", "code"]
"""Columns that every frame starts with: which run a row belongs to, and the code that wrote it."""
PLAIN = ("hash", "created", "finished_at", "seconds", "checkpoint", "device", "threads")
NESTED = ("config", "packages", "git", "inputs", "declared")
"""Columns of `runs` that come from the manifest; the latter hold JSON, `packages` also the processor. Null where a run
is older than what they say."""


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
    def cells(self) -> list[str]:
        """The combinations of factors, in the order of the runs."""
        return list(self.runs["factors"].unique())

    def cell(self, factors: str) -> Frames:
        """The rows of one combination of factors."""
        return self._with("factors", factors)

    def run(self, arm: str, seed: int) -> Frames:
        """The rows of one run, of frames of one combination of factors."""
        return self._with("arm", arm)._with("seed", seed)

    def select(self, paths: Sequence[Path]) -> Frames:
        """The rows of some runs, and of what was left out only those."""
        wanted = {tuple(labels_of(path).values()) for path in paths}
        kept = self._where(lambda f: [key in wanted for key in f[LABELS[:4]].itertuples(index=False, name=None)])
        return replace(kept, left_out=tuple(t for t in self.left_out if t.startswith(tuple(f"{p} (" for p in paths))))

    def _with(self, label: str, value: object) -> Frames:
        return self._where(lambda frame: frame[label] == value)

    def _where(self, rows: Callable[[pd.DataFrame], Any]) -> Frames:
        return Frames(_some(self.runs, rows), _Tables(self.tables, rows))


class _Tables(Mapping[str, pd.DataFrame]):
    """Some rows of every table, taken from one when it is asked for: of several tables a figure needs one."""

    def __init__(self, whole: Mapping[str, pd.DataFrame], rows: Callable[[pd.DataFrame], Any]) -> None:
        self._whole, self._rows = whole, rows
        self._taken: dict[str, pd.DataFrame] = {}

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._taken:
            self._taken[name] = _some(self._whole[name], self._rows)
        return self._taken[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def _some(frame: pd.DataFrame, rows: Callable[[pd.DataFrame], Any]) -> pd.DataFrame:
    return frame[rows(frame)] if len(frame) else frame


@dataclass(frozen=True)
class Difference:
    """The first row in which two runs part; `column` is None where only one run has the row at all."""

    table: str
    row: dict[str, Any]
    column: str | None
    a: Any
    b: Any


def load_study(root: Path, *, unfinished: bool = False, mix_code: bool = False) -> Frames:
    """The frames of every finished run below `root` (a study, an arm or a run), of a folder of runs or of tables that
    `collect` wrote.

    With `unfinished`, runs that still go on or were interrupted contribute the rows of their last commit. Raises
    RunError when there is no run, or when they are not `comparable`, as runs of different code, inputs or settings are
    not, unless `mix_code`.
    """
    tables = None if any(run_folders(root)) else collected(root)  # runs go on, so they know more than tables of them
    frames = tables or _from_runs(root, unfinished)
    _require_readable(root, frames.runs)
    if not mix_code:
        require_comparable(root, frames.runs)
    return frames


def _require_readable(root: Path, runs: pd.DataFrame) -> None:
    """Raise ConfigError for a label that is no `folder_name`, RunError for a length that no run has: a diverged run is
    filled up to it."""
    for label in ("study", "arm", "factors"):
        for name in runs[label].unique():
            folder_name(label, name)
    if (longest := runs["steps"].max()) > MOST_STEPS:
        raise RunError(f"{root}: a run has {longest} steps, and at most {MOST_STEPS} are read. Somebody has edited it")


def collected(root: Path) -> Frames | None:
    """The frames that `collect` wrote into `root` or, for an arm, a cell or a run of such a study, above it; None where
    there are none."""
    here = Path(root).absolute()
    folders = [here, *here.parents][:4]
    folder = next((f for f in folders if (f / "runs.parquet").exists()), None)
    if folder is None:
        return None
    if not (folder / "steps.parquet").exists():
        raise RunError(f"{folder / 'steps.parquet'} is missing beside runs.parquet. Restore it from a copy, or collect "
                       "the study again.")
    tables = {name: pd.DataFrame(columns=[*LABELS, *keys]) for name, keys in pooled().items()}
    for name in ("runs", *pooled()):
        if name in ("runs", "steps") or (folder / f"{name}.parquet").exists():  # others may be younger than the folder
            frame = read_parquet(folder / f"{name}.parquet").to_pandas()
            tables[name] = frame.astype({c: "float64" for c in frame.select_dtypes("float32")})
    runs = tables.pop("runs")
    _require_whole(folder, runs, tables["steps"])
    for name, frame in tables.items():
        _require_once(str(folder), name, frame, LABELS[:4])
    frames = Frames(runs.assign(**{c: None for c in (*PLAIN, *NESTED) if c not in runs}), tables)
    for label, part in zip(LABELS[1:4], here.relative_to(folder).parts, strict=False):
        value = int(part.removeprefix("seed=")) if label == "seed" and part.startswith("seed=") else part
        frames = frames._with(label, value)
    if frames.runs.empty:
        raise RunError(f"the tables in {folder} contain no run {root}")
    return frames


def _require_whole(folder: Path, runs: pd.DataFrame, steps: pd.DataFrame) -> None:
    """Raise RunError where tables are not of one time, as after a kill while a folder was written again."""
    if (folder / REPLACING).exists():
        raise RunError(f"{folder / REPLACING} exists: the tables are being replaced, or that was interrupted. Collect "
                       "the study again, or restore the tables from a copy.")
    ended = runs[(runs["state"] == "finished") & (runs["step"] > 0)]
    known, finished, measured = ({*f[LABELS[:4]].drop_duplicates().itertuples(index=False, name=None)}
                                 for f in (runs, ended, steps))
    for alone, table in ((measured - known, "steps"), (finished - measured if measured else set(), "runs")):
        if alone:  # a trainer of one's own may write no steps at all
            example = "/".join(map(str, next(iter(alone))))
            raise RunError(f"{folder / 'steps.parquet'} and runs.parquet contain different runs ({len(alone)} in "
                           f"{table} alone, e.g. {example}). Collect the study again, or restore them from a copy.")
    checked = steps[[column for column in (*LABELS[:4], "step", "reward") if column in steps]]
    rows = dict(tuple(checked.groupby(list(LABELS[:4]), sort=False)))
    for run in ended.itertuples():
        key = tuple(getattr(run, label) for label in LABELS[:4])
        if key in rows:
            _require_rows("/".join(map(str, key)), run.step, rows[key])


def _require_once(where: str, name: str, frame: pd.DataFrame, labels: Sequence[str] = ()) -> None:
    """Raise RunError where a table has a row twice, as after two copies were joined: it would count twice."""
    keys = [*labels, *TABLES[name]]
    if len(frame) and {*keys} <= {*frame} and (twice := frame[frame.duplicated(keys)][keys]).size:
        row = ", ".join(f"{key} {value}" for key, value in twice.iloc[0].items())
        raise RunError(f"the table {name} in {where} has {len(twice)} rows twice, e.g. {row}. Restore it from a copy, "
                       "or run it again.")


def require_whole(path: Path) -> None:
    """Raise RunError where a run has finished and lacks rows of its steps, or a table, as half a copy does."""
    manifest = read_manifest(path)
    if manifest is not None and "finished" in manifest and "diverged" not in manifest:
        tables = {name: read_table(path, name, beyond=False) for name in WRITTEN}
        for name, frame in tables.items():
            _require_once(str(path), name, frame)
        _require_rows(str(path), manifest["finished"], tables["steps"])


def _require_rows(run: str, finished: int, steps: pd.DataFrame) -> None:
    """Raise RunError where a finished run lacks steps, as half a copy does, or has a reward that is no number. A
    trainer of one's own may log some steps only: one that never logs two in a row."""
    trained = steps[steps["step"] > 0].sort_values("step")
    if missing := _gaps(trained["step"], finished):
        raise RunError(f"{run} finished {finished} steps, but its table lacks {missing} of them. Restore it from a "
                       "copy, or delete it and run it again.")
    if "reward" in trained:
        if not is_numeric_dtype(trained["reward"]):
            raise RunError(f"{run} has rewards that are no numbers ({trained['reward'].dtype}). Restore its table from "
                           "a copy, or delete it and run it again.")
        known = trained["step"][np.isfinite(trained["reward"].astype(float))]
        if missing := _gaps(known, len(trained) if len(trained) == finished else 0):
            raise RunError(f"{run} finished, but its reward is missing in {missing} of its steps. Restore it from a "
                           "copy, or delete it and run it again.")


def _gaps(steps: pd.Series, finished: int) -> int:
    """How many of the steps 1 … finished are not there, where most follow one upon the other."""
    there = steps[steps <= finished].nunique()
    return max(0, finished - there) if bool((steps.diff().iloc[1:] == 1).mean() >= 0.5) else 0


def _require_hash(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise RunError where a manifest has other settings than those that its hash was made of."""
    settings = manifest["config"]
    if isinstance(settings.get("measure"), dict) and hash_of(settings) != manifest["hash"]:
        raise RunError(f"the settings in {path / 'manifest.json'} were changed: their hash is {hash_of(settings)}, and "
                       f"the run began with {manifest['hash']}. Restore it from a copy.")


def _from_runs(root: Path, unfinished: bool) -> Frames:
    runs, left_out = [], []
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in pooled()}
    for path in run_folders(root):
        manifest, now = read_manifest(path), state(path)
        assert manifest is not None, "run_folders finds them by it"
        if now["state"] not in ENDED and not unfinished:
            before = manifest.get("finished")
            shown = "" if before is None else f"; the {before} steps that it finished earlier are shown"
            left_out.append(f"{path} ({now['state']}, step {now['step']} of {now['steps']}{shown})")
            if before is None:
                continue
            manifest |= {"config": manifest["config"] | {"steps": before}}
            now |= {"state": "finished", "step": before}
        labels = labels_of(path) | {"code": " then ".join(manifest["code"])}
        _require_hash(path, manifest)
        runs.append(labels | {"path": str(path), "state": now["state"], "step": now["step"]} | _described(manifest))
        for name in pooled():
            frame = read_table(path, name, beyond=unfinished)
            _require_once(str(path), name, frame)
            if name == "steps" and now["state"] == "finished":
                _require_rows(str(path), now["step"], frame)
                if "reward" in frame and len(frame) and frame["reward"].isna().all():
                    raise RunError(f"{path} finished, but its reward is missing in every step. Run it again.")
            tables[name].append(frame.assign(**labels)[[*LABELS, *frame.columns]])
    if not runs:
        why = f"; unfinished: {'; '.join(left_out)}" if left_out else ""
        raise RunError(f"no finished run below {root}{why}")
    filled = {name: [part for part in parts if len(part)] or parts[:1] for name, parts in tables.items()}
    whole = {name: pd.concat(parts, ignore_index=True) for name, parts in filled.items()}
    return Frames(pd.DataFrame(runs), whole, tuple(left_out))


def _described(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest as columns of `runs`; what is nested is JSON, so that a row can be run again as it stands."""
    plain = {k: manifest.get(k) for k in PLAIN}
    nested = {k: None if manifest.get(k) is None else json.dumps(manifest[k], sort_keys=True) for k in NESTED}
    return {"steps": manifest["config"]["steps"], **plain, **nested}


def read_table(path: Path, name: str, *, beyond: bool = True) -> pd.DataFrame:
    """One table of one run, up to its last commit; empty before the first. Of a run that finished and was asked for
    more steps since, only what it had finished, without `beyond`."""
    frame = read_rows(path, name, (read_manifest(path) or {}).get("finished"), beyond=beyond).to_pandas()
    return frame if len(frame.columns) else pd.DataFrame(columns=list(TABLES[name]))


def labels_of(path: Path) -> dict[str, Any]:
    """Study, arm, factors and seed of a run, from its path. Raises RunError for one that was renamed."""
    *_, study, arm, factors, name = ("", "", "", *Path(path).absolute().parts)
    if not re.fullmatch(r"seed=\d+", name):
        raise RunError(f"the name of the run folder {path} contains no seed. Rename it to seed=<n>, or move it out of "
                       "its study.")
    return {"study": study, "arm": arm, "factors": factors, "seed": int(name.removeprefix("seed="))}


def settings_that_differ(a: Path, b: Path) -> dict[str, tuple[Any, Any]]:
    """Everything but numbers in which two runs differ: configuration, code, packages, threads, final checkpoint."""
    keys = ("config", "code", "inputs", "packages", "device", "threads", "finished", "checkpoint")
    left, right = ({k: _manifest(path).get(k) for k in keys} for path in (a, b))
    return differing(left, right)


def diff(a: Path, b: Path) -> Difference | None:
    """The earliest row in which two runs part, or None. Equality is exact; `seconds_*` and `memory_*` are ignored.

    Within a step the rows are compared in the order in which they arise: those of a part of the step before its own.
    """
    _manifest(a), _manifest(b)
    names = [*(name for name in TABLES if name != "steps"), "steps"]
    tables = [(name, read_table(a, name), read_table(b, name)) for name in names]
    for shared in (True, False):  # a column that one run alone has differs nowhere, unless nothing else does
        found = [d for name, left, right in tables for d in _first(name, left, right, shared)]
        if found:
            return min(found, key=lambda d: d.row["step"])
    return None


def _first(name: str, a: pd.DataFrame, b: pd.DataFrame, shared: bool) -> Iterator[Difference]:
    keys = list(TABLES[name])
    columns = [c for c in dict.fromkeys([*a.columns, *b.columns])
               if c not in keys and not timing(c) and (not shared or c in a and c in b)]
    both = a.reindex(columns=[*keys, *columns]).merge(
        b.reindex(columns=[*keys, *columns]), on=keys, how="outer", suffixes=(" a", " b"), indicator=True
    ).sort_values(keys, kind="stable", ignore_index=True)
    pairs = {c: (both[f"{c} a"], both[f"{c} b"]) for c in columns}
    differs = pd.DataFrame({c: ~((x == y) | (x.isna() & y.isna())) for c, (x, y) in pairs.items()}, index=both.index)
    parted = both[(both["_merge"] != "both") | differs.any(axis=1)]
    if parted.empty:
        return
    row = parted.iloc[0]
    where = {k: _plain(row[k]) for k in keys}
    if row["_merge"] != "both":
        yield Difference(name, where, None, *((row["_merge"] == side) for side in ("left_only", "right_only")))
    else:
        first = differs.columns[differs.loc[row.name]][0]
        yield Difference(name, where, first, *(_plain(row[f"{first} {side}"]) for side in "ab"))


def _plain(value: Any) -> Any:
    """A NumPy number as a Python one."""
    return value.item() if hasattr(value, "item") else value


def _manifest(path: Path) -> dict[str, Any]:
    manifest = read_manifest(Path(path))
    if manifest is None:
        raise RunError(f"{path} is not a run: it has no manifest.json")
    return manifest
