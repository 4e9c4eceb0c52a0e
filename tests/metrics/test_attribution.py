"""The decomposition of the variance of log-ratios: closed forms, exact pooling, and where it is undefined."""

import math

import numpy as np
import pytest
import torch

from moe_rl.metrics.attribution import AttributionSums
from moe_rl.metrics.ratios import attribution


def sample(seed, n):
    rng = np.random.default_rng(seed)
    replayed = 0.1 * rng.normal(size=n) + 0.05
    return replayed + 0.2 * rng.standard_t(3, size=n) - 0.3 * replayed, replayed


def test_shares_by_hand():
    """R = (1, -1, 1, -1), J = (2, 2, -2, -2): uncorrelated, Var 1 and 4 of Var(D) = 5."""
    shares = AttributionSums.of(np.array([3.0, 1.0, -1.0, -3.0]), np.array([1.0, -1.0, 1.0, -1.0])).shares()
    assert shares == pytest.approx({"variance": 5.0, "replayed": 0.2, "routes": 0.8, "covariance": 0.0}, abs=1e-15)


def test_shares_are_those_of_numpy_and_sum_to_one():
    d, r = sample(0, 5000)
    shares = AttributionSums.of(d, r).shares()
    covariance = np.cov(r, d - r, bias=True)
    expected = [covariance[0, 0] / d.var(), covariance[1, 1] / d.var(), 2 * covariance[0, 1] / d.var()]
    assert [shares[k] for k in ("replayed", "routes", "covariance")] == pytest.approx(expected, abs=1e-12)
    assert shares["replayed"] + shares["routes"] + shares["covariance"] == pytest.approx(1, abs=1e-12)


def test_pooling_parts_equals_the_whole():
    d, r = sample(1, 5000)
    whole = AttributionSums.of(d, r)
    parts = np.array_split(np.arange(5000), 7)
    pooled = sum((AttributionSums.of(d[part], r[part]) for part in parts), AttributionSums())
    assert pooled.largest == whole.largest
    assert pooled.shares() == pytest.approx(whole.shares(), abs=1e-12)
    assert pooled.row() == pytest.approx(whole.row(), abs=1e-9)


def test_top_share_survives_pooling_when_one_part_holds_all_heavy_tokens():
    """3000 tokens with D² = 1 but for three of D² = 1000, all in the first part: 3000 of 5997."""
    d = np.ones(3000)
    d[:3] = math.sqrt(1000)
    parts = [AttributionSums.of(d[i : i + 500], 0 * d[i : i + 500]) for i in range(0, 3000, 500)]
    assert sum(parts, AttributionSums()).top_share == pytest.approx(3000 / 5997)


def test_top_share_is_undefined_beyond_the_tokens_that_are_kept():
    d = np.ones(1000)
    sums = AttributionSums.of(d, d)
    for _ in range(10):
        sums = sums + sums
    assert sums.n == 1_024_000 and math.isnan(sums.top_share)


def test_undefined_is_nan_and_never_zero():
    one = AttributionSums.of(np.array([0.3]), np.array([0.1]))
    rounding = AttributionSums.of(np.array([1e-7, -1e-7]), np.array([0.0, 0.0]))
    for sums in (AttributionSums(), one, rounding):
        assert all(math.isnan(sums.shares()[k]) for k in ("replayed", "routes", "covariance"))
    assert math.isnan(rounding.top_share) and math.isnan(AttributionSums().top_share)
    assert math.isnan(one.shares()["variance"])
    assert rounding.shares()["variance"] == pytest.approx(1e-14, rel=1e-9, abs=0)


def test_only_response_tokens_are_attributed():
    unconstrained = torch.tensor([[9.0, 3.0, 1.0], [9.0, -1.0, -3.0]])
    replayed = torch.tensor([[math.nan, 1.0, -1.0], [5.0, 1.0, -1.0]])
    sums = attribution(unconstrained, replayed, torch.tensor([[False, True, True]] * 2))
    assert (sums.n, sums.dd, sums.rr, sums.jj, sums.rj) == (4, 20.0, 4.0, 16.0, 0.0)
    assert sums.row()["attribution_sum_dd"] == 20.0 and sums.row()["attribution_n"] == 4
