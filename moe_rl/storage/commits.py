"""The rows and checkpoints of a run as they reach the disk: a commit adds its own rows and touches no earlier ones.

    commit/step=<n>/checkpoint/         of the last commit; that this folder is there makes step n committed
    commit/step=<n>/checkpoint.sha256   the digest of its names and bytes, written with it
    tables/<table>/step=<n>.parquet     a part: the rows that came between the commit before and that of step n
    <table>.parquet                     every row up to the step at which the run finished; its parts are gone then

A part of a later step than the last commit was left by a kill: it counts for nothing and is never read.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from moe_rl.errors import RunError
from moe_rl.storage.columns import TABLES, ordered, unknown

Row = dict[str, Any]
"""A value that was not measured is simply absent."""
MOST_ROWS = 10**8
WRITTEN = ("steps", "updates", "layers")
"""Tables that every run which has finished has, with or without rows; others may be younger than it."""


def replaced(file: Path) -> Path:
    """A file that is about to be written in a folder that somebody may have sent: a link, which leads anywhere, is
    removed."""
    if file.is_symlink():
        file.unlink()
    return file


def check_rows(name: str, rows: list[Row]) -> None:
    """Raise RunError for a table or a column that the data dictionary does not explain."""
    if name not in TABLES:
        raise RunError(f"there is no table {name!r}, only {', '.join(TABLES)}. Add it, and the keys of its rows, to "
                       "TABLES in moe_rl/storage/columns.py.")
    if bad := unknown(name, {key for row in rows for key in row}):
        raise RunError(f"table {name!r} has columns that moe_rl/storage/columns.toml does not explain: "
                       f"{', '.join(sorted(bad))}. Add their unit and formula there, or begin their names with own_.")


def to_table(rows: list[Row]) -> pa.Table:
    """Rows as an Arrow table: columns in the order of the data dictionary, absent values null (NaN stays NaN)."""
    names = {key for row in rows for key in row}
    return pa.table({c: pa.array([row.get(c) for row in rows]) for c in ordered(names)})


def latest_commit(path: Path) -> Path | None:
    """The folder of a run's last commit, or None before the first."""
    return max(_commits(path), key=step_of, default=None)


def last_step(path: Path) -> int:
    """The step of a run's last commit; 0 before the first."""
    commit = latest_commit(path)
    return 0 if commit is None else step_of(commit)


def step_of(path: Path) -> int:
    """The step after which a commit, or a part of a table, is named."""
    return int(path.name.removesuffix(".parquet").removeprefix("step="))


def add_parts(path: Path, step: int, rows: Mapping[str, list[Row]]) -> None:
    """Write the rows that the commit of `step` shall add, durably; they count once that commit exists."""
    committed = latest_commit(path)
    for name in TABLES:
        folder = path / "tables" / name
        for n, part in _parts(path, name).items():
            if committed is None or n > step_of(committed):
                part.unlink()
            elif part.parent != folder:
                folder.mkdir(parents=True, exist_ok=True)
                part.rename(folder / f"step={n:06d}.parquet")  # it would go with its commit
        if rows[name]:
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"step={step:06d}.parquet"
            pq.write_table(to_table(rows[name]), part)
            fsync(part)
        if folder.exists():
            for changed in (folder, folder.parent, path):
                fsync(changed)


def drop_commits(path: Path, *, but: Path) -> None:
    """Remove the commits before the one named."""
    for old in set(_commits(path)) - {but}:
        shutil.rmtree(old)


def read_rows(path: Path, name: str, finished: int | None, *, beyond: bool = True) -> pa.Table:
    """The committed rows of one table of one run; no columns at all where there are none.

    `finished` is the step at which the run finished, if it has. It may have gone on since: without `beyond`, what was
    committed after that step is left out. Raises RunError for a damaged file.
    """
    whole, commit = path / f"{name}.parquet", latest_commit(path)
    if finished is not None and name in WRITTEN and not whole.exists():
        raise RunError(f"{whole} is missing, although the run has finished. Restore it from a copy, or delete {path} "
                       "and run it again.")
    # By rows, not by files alone: a kill may fall between the publishing of two tables, or of tables and manifest.
    step, pieces, start = pc.field("step"), [], -1
    if finished is not None and whole.exists():
        pieces, start = [_rows(whole, step <= finished)], finished
    if beyond and commit is not None:
        parts = _parts(path, name)
        pieces += [_rows(parts[n], step > start) for n in sorted(parts) if start < n <= step_of(commit)]
    pieces = [piece for piece in pieces if piece.num_rows]
    if not pieces:
        return pa.table({})
    table = pa.concat_tables(pieces, promote_options="permissive")
    return table.select(ordered(table.column_names))


def publish(path: Path, finished: int | None) -> None:
    """Write every committed row of each table into one file at the run's root."""
    for name in TABLES:
        aside = path / f".tmp-{name}.parquet"
        pq.write_table(read_rows(path, name, finished), aside)
        fsync(aside)
        aside.rename(path / f"{name}.parquet")


def drop_parts(path: Path) -> None:
    """Remove the parts of a run that has published its tables and says so in its manifest."""
    shutil.rmtree(path / "tables", ignore_errors=True)


def read_parquet(file: Path) -> pa.Table:
    """A file as it is. Raises RunError for one that is damaged, and for more rows than MOST_ROWS."""
    try:
        with pq.ParquetFile(file) as opened:  # read_table would make a column of "seed=0" in the path, and is slower
            if (rows := opened.metadata.num_rows) > MOST_ROWS:  # a few bytes can hold them
                raise RunError(f"{file} has {rows} rows, which may not fit in memory; at most {MOST_ROWS} are read")
            return opened.read()
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, OSError) as error:
        raise RunError(f"{file} cannot be read ({error}). Restore it from a copy, or delete {file.parent} and run it "
                       "again.") from error


def fsync(path: Path) -> None:
    """Have the file's bytes, or the folder's names, on the disk before anything that comes later."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rows(file: Path, which: pc.Expression) -> pa.Table:
    table = read_parquet(file)
    return table.filter(which) if table.num_rows else table


def _commits(path: Path) -> list[Path]:
    """Not what file managers and people put beside them."""
    return [p for p in (path / "commit").glob("step=*") if re.fullmatch(r"step=\d+", p.name) and p.is_dir()]


def _parts(path: Path, name: str) -> dict[int, Path]:
    """By their steps. Earlier versions kept whole tables in each commit: that of the last one is a part too."""
    files = (path / "tables" / name).glob("step=*")
    found = {step_of(p): p for p in files if re.fullmatch(r"step=\d+\.parquet", p.name)}
    commit = latest_commit(path)
    if commit is not None and (whole := commit / f"{name}.parquet").exists():
        found = {step_of(commit): whole}
    return found
