"""What `open_side` declares of its arms: without ratios they are one."""

from __future__ import annotations

import pandas as pd
import pytest
from open_side.study import study

from tests.test_trainer import TINY, carry_out


@pytest.mark.parametrize(("mini_batches", "same"), [(1, True), (4, False)])
@pytest.mark.filterwarnings("ignore:.*one update per step")
def test_where_no_ratio_leaves_1_a_bound_on_the_ratio_changes_no_bit(tmp_path, mini_batches, same):
    """With four updates under the dial it does, or the first line would say nothing."""
    settings = {"mini_batches": mini_batches, "steps": 3, "router_noise.scale": 20.0, "optimizer.lr": 2e-2}
    found = {
        arm.name: carry_out(TINY.replace(arm=arm, **settings), tmp_path / arm.name)["updates"] for arm in study.arms[:2]
    }
    pairs = [pd.Series.equals(*(table[column] for table in found.values())) for column in ("grad_norm", "entropy")]
    assert pairs == [same, same]
