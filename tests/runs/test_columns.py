"""The data dictionary."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_rl.runs import columns


def test_the_committed_page_is_the_generated_one():
    page = Path(__file__).parents[2] / "docs" / "columns.md"
    assert page.read_text() == columns.markdown(), "run `make docs/columns.md`"


def test_a_family_stands_for_all_combinations():
    assert columns.expand("{a,b}_c_{d,e}") == ["a_c_d", "a_c_e", "b_c_d", "b_c_e"]
    assert columns.expand("x{,_prompt}") == ["x", "x_prompt"]
    assert columns.expand("plain") == ["plain"]


def test_no_column_has_two_entries():
    names = [n for group in columns.DICTIONARY.values() for c in group for n in columns.expand(c.name)]
    assert len(names) == len(set(names)) == len(columns.COLUMNS)


def test_every_entry_names_tables_that_exist_and_has_a_unit_and_a_formula():
    for column in columns.COLUMNS.values():
        assert set(column.tables.split()) <= set(columns.TABLES) and column.tables
        assert column.unit and column.formula


@pytest.mark.parametrize("table, name", [("steps", "reward_"), ("steps", "site"), ("layers", "reward")])
def test_a_column_is_unknown_where_no_entry_puts_it(table, name):
    assert columns.unknown(table, {name, "step"}) == {name}


def test_keys_of_every_table_are_columns_of_it():
    for table, keys in columns.TABLES.items():
        assert not columns.unknown(table, set(keys)) and keys[0] == "step"
