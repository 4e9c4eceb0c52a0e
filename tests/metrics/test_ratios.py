"""Statistics of importance ratios and clip fractions, on numbers whose statistics are known."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from moe_rl.metrics.ratios import clip_fractions, ratio_statistics

LOG2 = math.log(2)


def test_statistics_by_hand():
    """Two sequences, r = (2, 1/2, 1, 1) and (4, 4), and padding that must not count. s = 1 and 4."""
    log_ratio = torch.tensor([[9, LOG2, -LOG2, 0, 0], [9, 2 * LOG2, 2 * LOG2, 9, 9]], dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    got = ratio_statistics(torch.cat([log_ratio, torch.full((1, 5), math.nan)]), mask)
    expected = {
        "token_n": 6,
        "token_log_ratio_mean": 4 * LOG2 / 6,
        "token_log_ratio_var": (10 / 6 - (4 / 6) ** 2) * LOG2**2,
        "token_log_ratio_q50": LOG2 / 2,
        "token_log_ratio_max": 2 * LOG2,
        "token_ratio_mean": 12.5 / 6,
        "token_ess": 12.5**2 / (6 * 38.25),
        "token_kl_k1": -4 * LOG2 / 6,
        "token_kl_k3": (12.5 - 6 - 4 * LOG2) / 6,
        "token_beyond_2": 2 / 6,  # a ratio of 2 is not beyond 2
        "token_log_ratio_var_within": (2 * LOG2**2 / 4 + 0) / 2,
        "sequence_n": 2,
        "sequence_log_ratio_mean": LOG2,
        "sequence_log_ratio_var": LOG2**2,
        "sequence_log_ratio_kurtosis": 1.0,
        "sequence_ratio_mean": 2.5,
        "sequence_ess": 25 / (2 * 17),
        "sequence_beyond_2": 0.5,
    }
    assert {k: got[k] for k in expected} == pytest.approx(expected, abs=1e-12)


def test_spread_agrees_with_numpy_and_scipy():
    rng = np.random.default_rng(0)
    x = 0.1 * rng.standard_t(4, size=(40, 50))
    got = ratio_statistics(torch.tensor(x), torch.ones(40, 50, dtype=torch.bool))
    assert got["token_log_ratio_kurtosis"] == pytest.approx(stats.kurtosis(x.ravel(), fisher=False), rel=1e-10)
    for name, q in (("001", 0.001), ("01", 0.01), ("10", 0.1), ("50", 0.5), ("90", 0.9), ("99", 0.99), ("999", 0.999)):
        assert got[f"token_log_ratio_q{name}"] == np.quantile(x, q)
    assert got["token_log_ratio_var_within"] == pytest.approx(x.var(axis=1).mean(), rel=1e-12)
    assert got["sequence_log_ratio_var"] == pytest.approx(x.mean(axis=1).var(), rel=1e-12)


def test_on_policy_ratios_are_one_and_fully_effective():
    got = ratio_statistics(torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool))
    for unit in ("token", "sequence"):
        assert got[f"{unit}_ess"] == 1 and got[f"{unit}_ratio_mean"] == 1 and got[f"{unit}_log_ratio_var"] == 0
        assert math.isnan(got[f"{unit}_log_ratio_kurtosis"])


def test_kurtosis_of_rounding_noise_is_undefined():
    noise = 1e-7 * torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert math.isnan(ratio_statistics(noise, torch.ones(3, 4, dtype=torch.bool))["token_log_ratio_kurtosis"])


def test_effective_sample_size_of_huge_ratios_does_not_overflow():
    got = ratio_statistics(torch.tensor([[600.0, 600.0, 0.0, 0.0]]), torch.ones(1, 4, dtype=torch.bool))
    assert got["token_ess"] == pytest.approx(0.5)


def test_k3_of_tiny_ratios_keeps_its_digits():
    """k3 = x²/2 + x³/6: written as exp(x) - 1 - x it would be rounding."""
    got = ratio_statistics(torch.full((1, 4), 1e-8, dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool))
    assert got["token_kl_k3"] == pytest.approx(5e-17, rel=1e-6, abs=0)


def test_without_tokens_everything_is_nan_and_n_is_zero():
    full = ratio_statistics(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
    none = ratio_statistics(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert list(none) == list(full)
    assert none.pop("token_n") == 0 and none.pop("sequence_n") == 0
    assert all(math.isnan(value) for value in none.values())


def test_clip_fractions_by_hand():
    """Four sequences of 3, 2, 2 and 1 tokens; the third has advantage 0."""
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    lost = torch.tensor([[0, 1, 0, 1], [0, -1, -1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.int8)
    expected = {
        "clip_tokens": 4 / 6,
        "clip_tokens_high": 2 / 6,
        "clip_tokens_low": 2 / 6,
        "clip_sequences": 1 / 3,
        "clip_sequences_high": 0,
        "clip_sequences_low": 1 / 3,
        "clip_tokens_all": 4 / 8,
        "clip_tokens_all_high": 2 / 8,
        "clip_tokens_all_low": 2 / 8,
        "clip_sequences_all": 1 / 4,
        "clip_sequences_all_high": 0,
        "clip_sequences_all_low": 1 / 4,
    }
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, 2.0])
    assert clip_fractions(lost, mask, advantages) == pytest.approx(expected)
    assert clip_fractions(lost, mask, advantages[:, None].expand(5, 4)) == pytest.approx(expected)


def test_clip_fractions_without_any_advantage_are_nan_not_zero():
    mask = torch.ones(2, 3, dtype=torch.bool)
    got = clip_fractions(torch.zeros(2, 3, dtype=torch.int8), mask, torch.zeros(2))
    assert math.isnan(got["clip_tokens"]) and math.isnan(got["clip_sequences_high"]) and got["clip_tokens_all"] == 0
