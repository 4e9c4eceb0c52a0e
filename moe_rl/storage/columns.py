"""The data dictionary: every column of every table, with its unit, formula and source, as `columns.toml` has them.

One place. `RunFolder.add` refuses a row with a column that has no entry there, and `docs/columns.md` is generated
from it.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

TABLES = {
    "steps": ("step",),
    "updates": ("step", "update"),
    "layers": ("step", "moe_layer"),
    "lags": ("step", "lag"),
    "evaluations": ("step", "benchmark", "problem", "sample"),
    "rollouts": ("step", "rollout"),
}
"""Each table and the columns that name one of its rows, the first of which is its step. A table more is an entry here,
and one for each of its columns in `columns.toml`."""
TEXTS = ("rollouts",)
"""Those that people read, run by run; the others are pooled."""
COMPLETIONS = ("evaluations", "rollouts")
"""Those of which a row is one completion; their means are columns of `steps`."""


@dataclass(frozen=True)
class Column:
    """One entry. `tables` are those the column may appear in, separated by spaces."""

    name: str
    tables: str
    unit: str
    formula: str
    source: str = ""


DICTIONARY: Mapping[str, tuple[Column, ...]] = {
    title: tuple(Column(name, *entry) for name, entry in entries.items())
    for title, entries in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
"""The entries of `columns.toml` under its titles, as the page shows them."""


def pooled() -> dict[str, tuple[str, ...]]:
    """The tables that are read of many runs at once, and their keys."""
    return {name: keys for name, keys in TABLES.items() if name not in TEXTS}


def expand(name: str) -> list[str]:
    """The names of a family: `a_{x,y}` gives `a_x` and `a_y`; several braces give all combinations."""
    parts = [p[1:-1].split(",") if p.startswith("{") else [p] for p in re.split(r"(\{[^}]*\})", name)]
    return ["".join(choice) for choice in itertools.product(*parts)]


COLUMNS: dict[str, Column] = {n: c for group in DICTIONARY.values() for c in group for n in expand(c.name)}
"""Every single column name and the entry that explains it, in the order in which tables show them."""
COST = {n for title, group in DICTIONARY.items() if title.startswith("Cost") for c in group for n in expand(c.name)}
"""What a run took, which is no result of it."""


def entry(name: str) -> Column | None:
    """What explains a column: its own entry, or that of its open family."""
    return COLUMNS.get(_listed(name))


def ordered(names: Iterable[str]) -> list[str]:
    """Columns in the order of the dictionary, those of an open family by name; without those it does not explain."""
    place = {name: i for i, name in enumerate(COLUMNS)}
    return sorted((name for name in names if entry(name)), key=lambda name: (place[_listed(name)], name))


def _listed(name: str) -> str:
    """The name under which the dictionary would list a column."""
    return name if name in COLUMNS else f"{name.partition('_')[0]}_*"


def unknown(table: str, names: set[str]) -> set[str]:
    """Those of the names that the dictionary does not allow in this table."""
    return {n for n in names if (column := entry(n)) is None or table not in column.tables.split()}


def timing(name: str) -> bool:
    """Whether a column may differ between two runs that are otherwise identical."""
    return name in COST or name.startswith(("seconds_", "memory_"))  # of earlier versions, too
