"""Statistics against textbook numbers, closed forms and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from moe_rl.errors import ConfigError
from moe_rl.results import stats


def test_three_seeds_give_the_textbook_student_interval():
    # mean 2, sd 1, t(2, 0.975) = 4.302653: 2 ± 4.302653 / √3
    got = stats.interval([1, 2, 3])
    assert (got.mean, got.n, got.method) == (2, 3, "95% Student t")
    assert got.low == pytest.approx(2 - 2.484138, abs=1e-6)
    assert got.high == pytest.approx(2 + 2.484138, abs=1e-6)


def test_one_seed_has_no_interval_and_says_so():
    got = stats.interval([0.5])
    assert got.mean == 0.5 and np.isnan(got.low) and np.isnan(got.high)
    assert got.method == "one seed, no interval" and str(got) == "0.5 [–]"


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
    for n in (3, 9):
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


def test_no_seed_is_an_error():
    with pytest.raises(ConfigError, match="at least one seed"):
        stats.interval([])


@pytest.mark.parametrize("n, high", [(3, 0.7076), (5, 0.5218), (8, 0.3694), (10, 0.3085), (20, 0.1684)])
def test_no_collapse_in_n_runs_bounds_the_rate_as_in_the_tables(n, high):
    got = stats.rate(0, n)
    assert got.low == 0 and got.high == pytest.approx(high, abs=1e-4)
    assert got.high == pytest.approx(1 - 0.025 ** (1 / n), abs=1e-9)  # closed form of Clopper–Pearson at zero events


def test_sign_flip_test_counts_patterns_by_hand():
    # differences 1, 2, 3: only +++ and --- reach |mean| 2, so p = 2/8
    got = stats.paired({0: 2, 1: 3, 2: 4}, {0: 1, 1: 1, 2: 1})
    assert got.p == got.p_smallest == 0.25
    assert (got.n, got.difference.mean, got.method) == (3, 2, "exact sign flips")


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


@pytest.mark.parametrize("d", [[-0.3, -0.1, 0.3, 0.1], [0.1, 0.2, -0.3], [0.7, -0.1, -0.2, -0.4]])
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
    for n in (16, 17, 40):
        got = stats.paired(dict.fromkeys(range(n), 1.0), dict.fromkeys(range(n), 0.0))
        assert got.p_smallest <= got.p < 1e-3, n
    assert got.p_smallest == 1 / 65_536, "the observed pattern among 65,535 random ones"


def test_an_interval_without_bounds_can_be_printed():
    assert str(stats.Interval(1.0, -math.inf, math.inf, 2, "")) == "1 [-inf, inf]"
    assert str(stats.Interval(1.0, 0.5, math.inf, 2, "")) == "1 [0.5, inf]"
    assert str(stats.Interval(math.nan, math.nan, math.nan, 2, "")) == "nan [–]"


def test_an_interval_has_no_zero_with_a_sign_and_as_many_digits_on_every_processor():
    """Half of the last width is 0.001 but for the last bit, which would make a fourth digit."""
    assert str(stats.Interval(-0.0, -1e-17, 1e-17, 4, "")) == "0.000 [0.000, 0.000]"
    assert str(stats.Interval(-0.001, -0.02, 0.02, 4, "")) == "0.00 [-0.02, 0.02]"
    halves = [0.001, 0.001 * (1 + 2**-52), 0.001 * (1 - 2**-52)]
    assert {str(stats.Interval(0.0, -half, half, 4, "")) for half in halves} == {"0.000 [-0.001, 0.001]"}


def test_a_ratio_whose_bound_is_too_large_for_a_float_is_unbounded():
    got = stats.geometric([1e-200, 1e200])
    assert (got.mean, got.low, got.high) == (pytest.approx(1.0), 0.0, math.inf) and str(got) == "1 [0, inf]"


def test_kaplan_meier_of_six_runs_by_hand():
    """Events at 6 (two of six at risk) and 10 (one of one); 6, 7 and 9 are censored: S = 4/6, then 0."""
    got = stats.survival([6, 6, 10, 6, 7, 9], [True, True, True, False, False, False])
    assert got.times.tolist() == [0, 6, 7, 9, 10] and got.share == pytest.approx([1, 2 / 3, 2 / 3, 2 / 3, 0])
    assert (got.n, got.events, got.method) == (6, 3, "95% log–log Greenwood")


def test_the_interval_of_a_survival_curve_is_greenwoods_on_the_log_log_scale():
    """S = 2/3 after 2 of 6: Greenwood Σ d / (n (n − d)) = 2/24, so log(−log S) ± 1.96 √(2/24) / |log S|."""
    got, s = stats.survival([5, 5, 9, 9, 9, 9], [True, True, False, False, False, False]), 2 / 3
    half = 1.959964 * np.sqrt(2 / 24) / -np.log(s)
    assert got.low[1] == pytest.approx(s ** np.exp(half), abs=1e-6)
    assert got.high[1] == pytest.approx(s ** np.exp(-half), abs=1e-6)
    assert np.isnan(got.low[0]) and np.isnan(got.high[0]), "before the first event there is no interval"


def test_runs_without_an_event_survive_and_no_run_is_an_error():
    got = stats.survival([50, 60], [False, False])
    assert got.share.tolist() == [1, 1, 1] and got.events == 0
    with pytest.raises(ConfigError, match="at least one seed"):
        stats.survival([], [])


def test_log_rank_by_hand():
    """a: events at 1 and 2; b: censored at 3, 3. At 1: expected 2/4, variance 1/4; at 2: 1/3 and 2/9. z = (2 − 5/6) /
    √(17/36) = 1.6977, two-sided p = .0896."""
    z = (2 - 5 / 6) / np.sqrt(17 / 36)
    p = stats.log_rank(([1, 2], [True, True]), ([3, 3], [False, False]))
    assert p == pytest.approx(math.erfc(z / math.sqrt(2)), abs=1e-12) and round(p, 4) == 0.0896
    assert math.isnan(stats.log_rank(([3, 4], [False, False]), ([5], [False])))


@pytest.mark.filterwarnings("error")
def test_log_rank_of_events_at_one_time_says_nothing():
    assert math.isnan(stats.log_rank(([2, 2], [True, True]), ([2], [True])))


def test_half_is_lost_on_the_line_over_the_logarithm():
    """Best 0.8; between 2e-4 (0.6) and 8e-4 (0.2) the level 0.4 lies half way of the log: 4e-4."""
    got = stats.half_lost([1e-4, 2e-4, 8e-4], [0.8, 0.6, 0.2])
    assert got.x == pytest.approx(4e-4) and not got.censored
    assert stats.half_lost([1, 2, 4], [0.1, 0.8, 0.5]) == stats.Crossing(4.0, True), "never below 0.4: censored"
    assert stats.half_lost([1, 2, 4, 8], [0.1, 0.8, 0.0, 0.9]) == stats.Crossing(8.0, True), "past the best only"
    assert stats.half_lost([1, 2], [0.0, 0.0]) is None


def test_half_of_a_curve_with_holes_or_without_order_is_refused():
    for x, y in (([2, 1], [1, 0]), ([0, 1], [1, 0]), ([1, 2], [1, np.nan]), ([1], [1, 0])):
        with pytest.raises(ConfigError, match="positive, increasing"):
            stats.half_lost(x, y)


def test_a_shift_is_the_geometric_mean_of_ratios_within_seeds():
    """Ratios 2 and 8: geometric mean 4; of the logs, t(1, .975) · sd / √2 = 12.706 · log 2."""
    a = {0: stats.Crossing(2.0, False), 1: stats.Crossing(8.0, True), 7: stats.Crossing(1.0, False)}
    got = stats.shift(a, {0: stats.Crossing(1.0, False), 1: stats.Crossing(1.0, False)})
    assert got.ratio.mean == pytest.approx(4) and got.ratio.n == 2 and got.censored == 1
    assert got.ratio.high == pytest.approx(4 * 2**12.7062, rel=1e-3) and got.ratio.method == "95% Student t of logs"
    assert got.p == got.p_smallest == 0.5
    assert stats.geometric([1, 4]).mean == pytest.approx(2)


def test_the_smallest_effect_that_could_have_been_seen_is_cohens():
    # Cohen 1988, paired, two-sided .05, power .8: an effect of .5 sd takes 34 pairs, of .8 takes 15, of .2 takes 199
    for effect, n in ((0.5, 34), (0.8, 15), (0.2, 199)):
        assert stats.detectable(1, n) <= effect < stats.detectable(1, n - 1)
    assert stats.detectable(0.3, 10) == pytest.approx(0.3 * stats.detectable(1, 10))
    assert stats.detectable(1, 8, alpha=0.05 / 4) > stats.detectable(1, 8) > stats.detectable(1, 8, power=0.5)
    assert stats.detectable(0, 5) == 0
    assert math.isnan(stats.detectable(1, 1)) and math.isnan(stats.detectable(math.nan, 4))


def test_half_of_the_samples_with_that_effect_are_found_at_half_the_power():
    n, effect = 5, stats.detectable(2, 5, alpha=0.1, power=0.5)
    drawn = np.random.default_rng(0).normal(effect, 2, size=(40_000, n))
    t = drawn.mean(1) / drawn.std(1, ddof=1) * math.sqrt(n)
    assert (np.abs(t) > 2.131847).mean() == pytest.approx(0.5, abs=0.01)  # t(4, 0.95)
