"""The data dictionary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from docs import columns_page
from moe_rl.errors import RunError
from moe_rl.storage import columns
from moe_rl.storage.commits import check_rows


def test_the_committed_page_is_the_generated_one():
    page = Path(__file__).parents[2] / "docs" / "columns.md"
    assert page.read_text() == columns_page.format_page(), "run `make docs/columns.md`"


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


@pytest.mark.parametrize("table, name", [("steps", "exact_"), ("steps", "moe_layer"), ("layers", "reward")])
def test_a_column_is_unknown_where_no_entry_puts_it(table, name):
    assert columns.unknown(table, {name, "step"}) == {name}


def test_what_is_measured_outside_the_package_is_named_own():
    """Without an entry of its own; under any other new name a column stays refused."""
    for table in columns.TABLES:
        assert columns.unknown(table, {"own_heat", "ownheat", "mine_heat"}) == {"ownheat", "mine_heat"}
    assert columns.entry("own_heat").unit == "own"


def test_columns_stand_in_the_order_of_the_dictionary_and_open_families_by_name():
    names = ["own_b", "nonsense", "memory_peak_mb", "own_a", "term_z", "loss", "step"]
    assert columns.ordered(names) == ["step", "term_z", "loss", "memory_peak_mb", "own_a", "own_b"]


def test_an_own_value_that_no_file_can_hold_is_refused_when_it_is_added():
    """Else the run would lose its steps up to the first commit."""
    check_rows("updates", [{"own_a": 1.5, "own_b": None}, {"own_a": float("nan")}])
    with pytest.raises(RunError, match=r"'updates'.*tensor\(1.\)"):
        check_rows("updates", [{"own_a": torch.tensor(1.0)}])
