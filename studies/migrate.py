"""Rename the columns, settings and arms of tables and studies that moe_rl wrote before 0.2.

    python studies/migrate.py FOLDER                      # names of before → names of 0.2, in all tables below
    python studies/migrate.py FOLDER gspo=gspo_short      # and an arm

It reads collected tables (`runs.parquet`, `steps.parquet`, …) and `study.json`. A new table replaces the old one after
it was read back and found to have the same values, column by column. A second call changes nothing. In study files
(`study.py`) write `conditions=` for `cells=`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = {"factors": "condition", "site": "moe_layer"}
FAMILY = re.compile(r"^(engine_\w+_)natural(?=_|$)")
KEYS = {"cells": "conditions"}
FIGURES = {"learning_by_cell": "learning"}
Names = Mapping[str, str]


def column(name: str) -> str:
    """The name of a column since 0.2."""
    return COLUMNS.get(name) or FAMILY.sub(r"\1unconstrained", name)


def metric(text: str) -> str:
    """The name of a metric or figure: a column, `column, words`, `against:factor:column`, or code, which stays."""
    if text.startswith("against:"):
        against, factor, *of = text.split(":", 2)
        return ":".join([against, factor, *map(metric, of)])
    name, comma, words = text.partition(",")
    return text if ":" in text else f"{column(name)}{comma}{words}"


def _in_path(path: str, arms: Names) -> str:
    """A run's folder, `arm/condition/seed`, with the arm renamed."""
    arm, *rest = path.split("/")
    return "/".join([arms.get(arm, arm), *rest])


def _in_settings(text: str | None, arms: Names) -> str | None:
    """A run's settings as JSON, with the arm renamed."""
    settings = json.loads(text or "{}")
    if not text or (name := settings.get("arm", {}).get("name")) not in arms:
        return text
    settings["arm"]["name"] = arms[name]
    return json.dumps(settings, sort_keys=True)


BY_COLUMN: dict[str, Callable[[Any, Names], Any]] = {
    "arm": lambda arm, arms: arms.get(arm, arm),
    "path": _in_path,
    "config": _in_settings,
}
"""The columns that name an arm, and how it is renamed there."""


def migrate_table(path: Path, arms: Names) -> bool:
    """Rename the columns of a table, and arms in it. Returns whether anything changed. Raises SystemExit if the new
    table, read back, differs by more than names."""
    old = pq.read_table(path)
    names = [column(name) for name in old.column_names]
    if len({*names}) < len(names):
        raise SystemExit(f"{path}: it has old and new names of one column. It was kept.")
    new = old.rename_columns(names)
    for name in BY_COLUMN.keys() & set(new.column_names) if arms else ():
        new = _map(new, name, arms)
    if new.equals(old):
        return False
    aside = path.with_name(f".tmp-{path.name}")
    pq.write_table(new.replace_schema_metadata(_metadata(old.schema.metadata)), aside, compression="zstd")
    stored, back = pq.read_table(aside), {value: key for key, value in arms.items()}
    try:
        if [column(name) for name in old.column_names] != stored.column_names or old.num_rows != stored.num_rows:
            raise SystemExit(f"{path}: another shape. It was kept.")
        for name in old.column_names:
            after = stored if name not in BY_COLUMN or not arms else _map(stored, name, back)
            if not _same(old[name], after[column(name)]):
                raise SystemExit(
                    f"{path}: column {name} would have other values (a new name of an arm that is there?). It was kept."
                )
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return True


def _map(table: pa.Table, name: str, arms: Names) -> pa.Table:
    field = table.schema.field(name)
    values = pa.chunked_array([[BY_COLUMN[name](value, arms) for value in table[name].to_pylist()]], field.type)
    return table.set_column(table.column_names.index(name), field, values)


def _metadata(metadata: Mapping[bytes, bytes] | None) -> dict[bytes, bytes] | None:
    """The columns' names are in pandas' description of the table, too."""
    if metadata is None or b"pandas" not in metadata:
        return metadata and dict(metadata)
    described = json.loads(metadata[b"pandas"])
    for entry in described["columns"]:
        entry |= {key: entry[key] and column(entry[key]) for key in ("name", "field_name")}
    return {**metadata, b"pandas": json.dumps(described).encode()}


def _same(a: pa.ChunkedArray, b: pa.ChunkedArray) -> bool:
    """Bit for bit: also NaN, and the sign of zero."""
    if a.type != b.type:
        return False
    a, b = a.combine_chunks(), b.combine_chunks()
    if pa.types.is_floating(a.type):
        a, b = (x.view({16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}[x.type.bit_width]) for x in (a, b))
    return bool(a.equals(b))


def migrate_declaration(path: Path, arms: Names) -> bool:
    """Rename the keys, figures, columns and arms of a `study.json`; its texts stay as they were declared. Returns
    whether anything changed."""
    old = json.loads(path.read_text(encoding="utf-8"))
    new: dict[str, Any] = {KEYS.get(key, key): value for key, value in json.loads(json.dumps(old)).items()}
    for key in {"figures", "metrics", "further_endpoints"} & new.keys():
        new[key] = [FIGURES.get(name) or metric(name) for name in new[key]]
    if "endpoint" in new:
        new["endpoint"] = metric(new["endpoint"])
    new["arms"] = [{**arm, "name": arms.get(arm["name"], arm["name"])} for arm in new["arms"]]
    if "comparisons" in new:
        new["comparisons"] = [[arms.get(name, name) for name in pair] for pair in new["comparisons"]]
    for settings in new.get("conditions", {}).values():
        if "arms" in settings:
            settings["arms"] = [arms.get(name, name) for name in settings["arms"]]
    if new != old:
        path.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return new != old


def main(folder: str, *renamed: str) -> None:
    """Rename all below a folder, and print what changed."""
    arms = dict(pair.split("=") for pair in renamed)
    if len({*arms, *arms.values()}) < 2 * len(arms):
        raise SystemExit(f"{' '.join(renamed)}: give each name once")
    files = [*sorted(Path(folder).rglob("*.parquet")), *sorted(Path(folder).rglob("study.json"))]
    if not files:
        raise SystemExit(f"{folder} has no tables and no study.json")
    for path in files:
        changed = (migrate_table if path.suffix == ".parquet" else migrate_declaration)(path, arms)
        print(f"{path}: {'renamed; the values are equal' if changed else 'nothing to rename'}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
