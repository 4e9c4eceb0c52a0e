"""The table in `__init__.py` has every class once, and names the tests of this folder and others that exist."""

from __future__ import annotations

import re
from pathlib import Path

import tests.known_failures

HERE = Path(__file__).parent


def names_in(folder: Path) -> set[str]:
    files = (file for file in folder.rglob("test_*.py") if file != Path(__file__))
    return {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}


def test_the_table_has_twenty_classes_and_every_test_it_names_exists():
    table = tests.known_failures.__doc__
    assert [int(n) for n in re.findall(r"^ ?(\d+) ", table, re.M)] == list(range(1, 21))
    named = set(re.findall(r"test_\w+(?!\w|\.py)", table))
    assert names_in(HERE) <= named <= names_in(HERE.parent)
