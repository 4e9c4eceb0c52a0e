"""Statistics against textbook numbers, closed forms and brute force."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from moe_rl.errors import ConfigError
from moe_rl.results import stats


def test_four_seeds_give_the_textbook_student_interval():
    # mean 2.5, sd √(5/3), t(3, 0.975) = 3.182446: 2.5 ± 3.182446 √(5/12)
    got = stats.interval([1, 2, 3, 4])
    assert (got.mean, got.n, got.method) == (2.5, 4, "95% Student t")
    assert got.low == pytest.approx(2.5 - 2.054260, abs=1e-6)
    assert got.high == pytest.approx(2.5 + 2.054260, abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fewer_than_four_values_have_no_interval_and_no_p_and_say_so(n):
    values = 0.5 + 0.1 * np.arange(n)
    pair = stats.paired(dict(enumerate(values)), dict.fromkeys(range(n), 0.0))
    for got in (stats.interval(values), stats.rate(1, n), pair.difference):
        assert np.isnan([got.low, got.high]).all() and got.method.startswith("none below n = 4")
        assert str(got).endswith(" [–]") and math.isfinite(got.mean)
    assert pair.p == pair.p_smallest == 2 / 2**n and stats.printed_p(pair.p, n) == "–", "a rule may still compare it"
    assert stats.printed_p(pair.p, 4) != "–"


@pytest.mark.parametrize("n", [1, 3, 4, 20])
def test_pairs_that_coincide_are_equal_whatever_their_number(n):
    values = dict(enumerate(np.random.default_rng(0).normal(size=n)))
    assert str(stats.paired(values, values).difference) == "equal"
    assert str(stats.paired(values, values | {0: values[0] + 1e-9}).difference) != "equal"
    assert str(stats.interval([0.0] * n)) != "equal", "a mean of zeros is no comparison"


def test_from_twelve_seeds_on_the_bootstrap_is_used_and_is_reproducible():
    values = np.random.default_rng(0).normal(size=12)
    got = stats.interval(values)
    assert got.method == "95% BCa bootstrap" and got == stats.interval(values)
    assert got.low < got.mean < got.high
    assert stats.interval(values[:11]).method == "95% Student t"


def test_bootstrap_interval_of_many_normal_values_is_the_normal_interval():
    values = np.random.default_rng(1).normal(size=400)
    got, half = stats.interval(values), 1.96 * values.std(ddof=1) / 20
    assert got.high - got.mean == pytest.approx(half, rel=0.06)
    assert got.mean - got.low == pytest.approx(half, rel=0.06)


def test_seeds_that_agree_have_an_interval_of_zero_width():
    for n in (4, 9):
        got = stats.interval([0.25] * n)
        assert (got.low, got.high) == (0.25, 0.25)


def test_a_nan_seed_is_not_dropped_silently():
    assert np.isnan(stats.interval([1, float("nan"), 2]).mean)


def test_band_is_the_interval_of_every_column():
    values = np.random.default_rng(2).normal(size=(5, 4))
    b = stats.band(values)
    for j in range(4):
        one = stats.interval(values[:, j])
        assert (b.mean[j], b.low[j], b.high[j]) == pytest.approx((one.mean, one.low, one.high), abs=1e-15)


@pytest.mark.parametrize("n, high", [(4, 0.6024), (5, 0.5218), (8, 0.3694), (10, 0.3085), (20, 0.1684)])
def test_no_collapse_in_n_runs_bounds_the_rate_as_in_the_tables(n, high):
    got = stats.rate(0, n)
    assert got.low == 0 and got.high == pytest.approx(high, abs=1e-4)
    assert got.high == pytest.approx(1 - 0.025 ** (1 / n), abs=1e-9)  # closed form of Clopper–Pearson at zero events


def test_sign_flip_test_counts_patterns_by_hand():
    # differences 1, 2, 3, 2: only ++++ and ---- reach |mean| 2, so p = 2/16
    got = stats.paired({0: 2, 1: 3, 2: 4, 3: 3}, {0: 1, 1: 1, 2: 1, 3: 1})
    assert got.p == got.p_smallest == 0.125
    assert (got.n, got.difference.mean, got.method) == (4, 2, "exact sign flips")


def test_rounding_to_float32_changes_no_p_value():
    """Of eight seeds with 100 prompts each, other patterns have exactly the observed mean."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        a, b = rng.integers(40, 56, 6) / 100, rng.integers(36, 52, 6) / 100
        d = np.rint(100 * (a - b)).astype(int)
        exact = np.mean([abs(np.dot(s, d)) >= abs(d.sum()) for s in itertools.product([1, -1], repeat=6)])
        narrow = [dict(enumerate(x.astype("float32").astype(float))) for x in (a, b)]
        assert stats.paired(*narrow).p == stats.paired(dict(enumerate(a)), dict(enumerate(b))).p == exact


def test_sign_flip_test_agrees_with_brute_force():
    d = np.random.default_rng(3).normal(0.3, 1, size=9)
    flips = [abs(np.mean(np.array(s) * d)) for s in itertools.product([1, -1], repeat=9)]
    brute = np.mean([f >= abs(d.mean()) - 1e-15 for f in flips])
    assert stats.paired(dict(enumerate(d)), dict.fromkeys(range(9), 0.0)).p == brute


@pytest.mark.parametrize("d", [[-0.3, -0.1, 0.3, 0.1], [0.1, 0.2, -0.3, 0.0], [0.7, -0.1, -0.2, -0.4]])
def test_every_pattern_reaches_a_mean_that_is_zero_but_for_rounding(d):
    assert stats.paired(dict(enumerate(d)), dict.fromkeys(range(len(d)), 0.0)).p == 1


def test_pairs_are_the_shared_seeds_only():
    got = stats.paired({0: 1.0, 1: 5.0, 7: 100.0}, {1: 4.0, 0: 0.0, 8: -100.0})
    assert got.n == 2 and got.difference.mean == 1
    with pytest.raises(ConfigError, match="share no seed"):
        stats.paired({0: 1.0}, {1: 1.0})


def test_holm_of_the_textbook_example():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.9, 0.8]) == [1, 1]
    assert stats.holm([]) == []


def test_a_pair_without_a_finite_difference_is_refused_by_its_seed():
    for odd in (math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"seeds \[1, 2\]"):
            stats.paired({0: 1.0, 1: odd, 2: 3.0}, {0: 0.0, 1: 1.0, 2: odd})


def test_no_p_lies_below_the_smallest():
    for n, smallest in ((16, 2**-15), (17, 2**-16), (40, 2**-39), (41, 2**-16)):
        got = stats.paired(dict.fromkeys(range(n), 1.0), dict.fromkeys(range(n), 0.0))
        assert got.p == got.p_smallest == smallest, n


@pytest.mark.parametrize("n", [17, 24, 33, 40])
def test_sign_flips_of_many_seeds_are_counted_exactly(n):
    """Of whole hundredths the sums can be counted one pair at a time, in integers."""
    d = np.random.default_rng(n).integers(-30, 60, n).tolist()
    counts = Counter({0: 1})
    for x in d:
        sums = Counter()
        for value, count in counts.items():
            sums[value + x] += count
            sums[value - x] += count
        counts = sums
    reached = sum(count for value, count in counts.items() if abs(value) >= abs(sum(d)))
    got = stats.paired({i: x / 100 for i, x in enumerate(d)}, dict.fromkeys(range(n), 0.0))
    assert got.p == reached / 2**n and got.method == "exact sign flips"


def test_an_interval_has_no_zero_with_a_sign_and_as_many_digits_on_every_processor():
    """Half of the last width is 0.001 but for the last bit, which would make a fourth digit."""
    assert str(stats.Interval(-0.0, -1e-17, 1e-17, 4, "")) == "0.000 [0.000, 0.000]"
    assert str(stats.Interval(-0.001, -0.02, 0.02, 4, "")) == "0.00 [-0.02, 0.02]"
    halves = [0.001, 0.001 * (1 + 2**-52), 0.001 * (1 - 2**-52)]
    assert {str(stats.Interval(0.0, -half, half, 4, "")) for half in halves} == {"0.000 [-0.001, 0.001]"}
