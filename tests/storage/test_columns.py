"""The data dictionary."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_rl.storage import columns


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


def test_what_is_measured_outside_the_package_is_named_own():
    """Without an entry of its own; under any other new name a column stays refused."""
    for table in columns.TABLES:
        assert columns.unknown(table, {"own_heat", "ownheat", "mine_heat"}) == {"ownheat", "mine_heat"}
    assert columns.entry("own_heat").unit == "own"


def test_a_term_of_any_name_has_its_column():
    assert not columns.unknown("updates", {"term_small"}) and columns.unknown("steps", {"term_small"})


def test_columns_stand_in_the_order_of_the_dictionary_and_open_families_by_name():
    names = ["own_b", "nonsense", "memory_peak_mb", "own_a", "term_z", "loss", "step"]
    assert columns.ordered(names) == ["step", "term_z", "loss", "memory_peak_mb", "own_a", "own_b"]
