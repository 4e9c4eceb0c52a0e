"""Streams of random numbers: pinned values, and positions that could meet."""

from __future__ import annotations

import numpy as np
import pytest

from moe_rl.seeds import derive


def test_the_values_that_every_table_was_made_with():
    assert derive(4, 0, 0) == 3907349408121823587
    assert derive(1, 2, 3) == 6498626229777268288
    assert derive(1, 2, 3, 4, 5) == 8931086815356491135
    largest = (2**32 - 1, 0, 7)
    assert derive(*largest) == int(np.random.SeedSequence(largest).generate_state(1, np.uint64)[0] >> 1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_positions_that_zeros_could_fill_up_to_another_are_refused(count):
    """Three numbers and four with a last 0 are one position to SeedSequence: 5 and more are not filled up."""
    assert [np.random.SeedSequence(p).generate_state(1)[0] for p in ((1, 2, 3), (1, 2, 3, 0))].count(0) == 0
    with pytest.raises((ValueError, TypeError)):
        derive(*range(1, count + 1))


@pytest.mark.parametrize("position", [(2**32, 0, 0), (1, -1, 2), (1, 2, 3, 4, 2**32), (1, 2, 3, 2**40, 5)])
def test_numbers_that_would_be_cut_into_several_are_refused_with_the_position(position):
    with pytest.raises(ValueError, match=rf"\({position[0]}, .*0 to 2\^32 - 1"):
        derive(*position)


def test_neighbouring_positions_differ():
    grid = [derive(a, b, c) for a in range(6) for b in range(6) for c in range(6)]
    grid += [derive(1, 2, 3, i, j) for i in range(8) for j in range(8)]
    assert len(set(grid)) == len(grid) and all(0 <= seed < 2**63 for seed in grid)
