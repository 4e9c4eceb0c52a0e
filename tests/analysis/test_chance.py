"""Chance levels against the metrics themselves on routes drawn at random, and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from moe_rl.analysis.checkpoints import chance
from moe_rl.metrics.volatility import response_change, route_change

MOE_LAYERS = ((8, 2), (8, 2), (5, 1))
"""Experts and top-k; the last MoE layer leaves its second slot unused."""
EXPERTS, K = zip(*MOE_LAYERS, strict=True)


def drawn(batch: int, time: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.full((batch, time, len(MOE_LAYERS), max(K)), -1)
    for s, (experts, k) in enumerate(MOE_LAYERS):
        found[:, :, s, :k] = torch.rand(batch, time, experts, generator=generator).argsort(-1)[..., :k]
    return found


@pytest.fixture(scope="module")
def random_routes():
    """2,000 responses of 12 tokens, of which every other one ends after 5; gates of another sum at every token."""
    before, after = drawn(2000, 12, 0), drawn(2000, 12, 1)
    mask = torch.ones(2000, 12, dtype=torch.bool)
    mask[::2, 5:] = False
    return before, after, mask, torch.rand(before.shape, generator=torch.Generator().manual_seed(2)) * 2.5


def test_by_hand():
    """Of 4 experts 2: 6 sets, 1 with both, 4 with one (of 3 in the union), 1 with none."""
    found = chance.token_levels([4, 4], [2, 2])
    assert found == pytest.approx(
        {
            "expert_change_rate": 1 / 2,
            "any_change_rate": 5 / 6,
            "any_layer_change": 35 / 36,
            "jaccard_distance": 1 - (1 + 4 / 3) / 6,
            "gate_mass_moved": 1 / 2,
            "layers_changed": 10 / 6,
        }
    )
    one = chance.response_levels([4], [1], [1])
    assert one == pytest.approx({"response_set_change": 3 / 4, "response_usage_change": 3 / 4})
    assert (
        chance.token_levels([3], [3])["any_change_rate"]
        == chance.response_levels([3], [3], [7])["response_usage_change"]
        == 0
    ), "who uses all experts cannot change"


def test_levels_of_tokens_are_what_random_routes_show(random_routes):
    before, after, mask, gates = random_routes
    measured, levels = route_change(before, after, mask, gates).row(), chance.token_levels(EXPERTS, K)
    for name, level in levels.items():
        assert measured[name] == pytest.approx(level, abs=0.01), name  # 17,000 tokens: a standard deviation of .004
    assert set(levels) == {name for name in measured if not name.startswith("volatility")}


def test_levels_of_responses_are_what_random_routes_show(random_routes):
    before, after, mask, _ = random_routes
    measured = response_change(before, after, mask, max(EXPERTS)).row()
    levels = chance.response_levels(EXPERTS, K, mask.sum(1))
    for name, level in levels.items():
        assert measured[name] == pytest.approx(level, abs=0.006), name
    assert set(levels) == set(measured)


@pytest.mark.parametrize("draws", [1, 7, 10**6])
def test_the_range_that_is_summed_holds_all_of_the_distribution(draws):
    """For one fair bit, |X − X′| of n draws has the mean n · C(2n, n) / 4^n, near √(n/π)."""
    exact = draws * math.comb(2 * draws, draws) / 4**draws if draws < 99 else math.sqrt(draws / math.pi)
    assert chance._variation(draws, 2, 1) == pytest.approx(exact / draws, rel=1e-6)
