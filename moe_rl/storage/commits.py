"""The rows and checkpoints of a run as they reach the disk: a commit adds its own rows and touches no earlier ones.

    commit/step=<n>/checkpoint/         of the last commit; this folder makes step n committed
    commit/step=<n>/checkpoint.sha256   the digest of its names and bytes, written with it
    tables/<table>/step=<n>.parquet     a part: the rows between the previous commit and that of step n

A part of a later step than the last commit was left by a kill and is never read.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moe_rl.errors import RunError
from moe_rl.storage.columns import TABLES, ordered, unknown

Row = dict[str, Any]
"""A value that was not measured is absent."""


def check_rows(name: str, rows: list[Row]) -> None:
    """Raise RunError for a table or a column that the data dictionary lacks, and for an own value that no file can
    hold."""
    if name not in TABLES:
        raise RunError(f"there is no table {name!r}, only {', '.join(TABLES)}. Add it to TABLES in storage/columns.py.")
    if bad := unknown(name, {key for row in rows for key in row}):
        raise RunError(
            f"table {name!r} has columns that moe_rl/storage/columns.toml does not explain: "
            f"{', '.join(sorted(bad))}. Add their unit and formula there, or begin their names with own_."
        )
    try:
        to_table([{key: value for key, value in row.items() if key.startswith("own_")} for row in rows])
    except (pa.ArrowException, OverflowError) as error:
        raise RunError(f"table {name!r}: an own_ column needs numbers, of a tensor its .item() ({error})") from error


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
    """The step in the name of a commit or of a part."""
    return int(path.name.removesuffix(".parquet").removeprefix("step="))


def add_parts(path: Path, step: int, rows: Mapping[str, list[Row]]) -> None:
    """Write the rows that the commit of `step` adds, durably; they count once that commit exists."""
    committed = latest_commit(path)
    for name in TABLES:
        folder = path / "tables" / name
        for part in parts(path, name):
            if committed is None or step_of(part) > step_of(committed):
                part.unlink()
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


def read_rows(path: Path, name: str) -> pa.Table:
    """The committed rows of one table of one run; no columns at all where there are none. Raises RunError for a damaged
    file and for a run of an earlier format."""
    require_parts(path)
    last = last_step(path) if latest_commit(path) is not None else -1
    tables = [read_parquet(part) for part in parts(path, name) if step_of(part) <= last]
    if not tables:
        return pa.table({})
    table = pa.concat_tables(tables, promote_options="permissive")
    return table.select(ordered(table.column_names))


def parts(path: Path, name: str) -> list[Path]:
    """The parts of one table, by their steps, uncommitted ones included."""
    files = (path / "tables" / name).glob("step=*.parquet")
    return sorted((part for part in files if re.fullmatch(r"step=\d+\.parquet", part.name)), key=step_of)


def require_parts(path: Path) -> None:
    """Raise RunError for a run with all rows of a table in one file, at its end or in a commit, as earlier versions
    wrote them."""
    if (path / "steps.parquet").exists() or any(path.glob("commit/step=*/steps.parquet")):
        raise RunError(f"{path} has the format of moe_rl 0.1.0, with its tables in one file. Read it with 0.1.0.")


def read_parquet(file: Path) -> pa.Table:
    """A file as it is. Raises RunError for a damaged one."""
    try:
        with pq.ParquetFile(file) as opened:  # read_table would make a column of "seed=0" in the path, and is slower
            return opened.read()
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, OSError) as error:
        raise RunError(
            f"{file} cannot be read ({error}). Restore it from a copy, or delete {file.parent} and run it again."
        ) from error


def fsync(path: Path) -> None:
    """Have the file's bytes, or the folder's names, on the disk before anything that comes later."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _commits(path: Path) -> list[Path]:
    """Not what file managers and people put beside them."""
    return [p for p in (path / "commit").glob("step=*") if re.fullmatch(r"step=\d+", p.name) and p.is_dir()]
