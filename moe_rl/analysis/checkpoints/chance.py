"""What volatility metrics would show if routes were drawn at random: the yardstick beside a measured change.

Both routings of every token give each MoE layer k of its E experts, every set alike, independently of each other, of
other MoE layers and of other tokens. Exact, by counting sets; a metric of router probabilities has no such value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import ArrayLike


def token_levels(experts: Sequence[int], k: Sequence[int]) -> dict[str, float]:
    """Means over tokens and MoE layers, of MoE layers with so many `experts` that use `k` each."""
    moe_layers = list(zip(experts, k, strict=True))
    slots = [1 - used / there for there, used in moe_layers]
    stay = [1 / math.comb(there, used) for there, used in moe_layers]
    return {
        "expert_change_rate": float(np.mean(slots)),
        "any_change_rate": 1 - float(np.mean(stay)),
        "jaccard_distance": float(np.mean([_jaccard(*moe_layer) for moe_layer in moe_layers])),
        "gate_mass_moved": float(np.mean(slots)),  # whatever the gates: each expert leaves with that probability
        "any_layer_change": 1 - math.prod(stay),
        "layers_changed": len(moe_layers) - sum(stay),
    }


def response_levels(experts: Sequence[int], k: Sequence[int], tokens: ArrayLike) -> dict[str, float]:
    """Means over MoE layers and responses of so many `tokens` each."""
    lengths, counts = np.unique(np.asarray(tokens, dtype=int), return_counts=True)

    def mean(of: Callable[[int, int, int], float]) -> float:
        moe_layers = [[of(int(n), *moe_layer) for n in lengths] for moe_layer in zip(experts, k, strict=True)]
        return float(np.average(np.mean(moe_layers, 0), weights=counts))

    return {
        "response_set_change": mean(lambda n, there, used: (1 - used / there) ** n),
        "response_usage_change": mean(_variation),
    }


def _jaccard(experts: int, k: int) -> float:
    """1 − E[|S ∩ S′| / |S ∪ S′|], the overlap being hypergeometric."""
    ways = {o: math.comb(k, o) * math.comb(experts - k, k - o) for o in range(k + 1)}
    return 1 - sum(n * o / (2 * k - o) for o, n in ways.items()) / math.comb(experts, k)


@cache  # MoE layers of one size, and responses of one length, are many
def _variation(draws: int, things: int, each: int) -> float:
    """E ½ Σ |f − f′| of the shares of `things`, of which every draw takes `each`, twice so many draws.

    The count of one thing is binomial, X with p = each / things, so the sum is things · E|X − X′| / (2 · draws · each),
    and E|X − X′| = 2 Σ F (1 − F) over its distribution function F (Gini's mean difference).
    """
    import scipy  # is not of the small install, and imports scipy.stats, most of a second, when first asked for it

    p = each / things
    spread = 12 * math.sqrt(draws * p * (1 - p)) + 12  # beyond it F or 1 − F is 0 in doubles
    x = np.arange(max(0, math.floor(draws * p - spread)), min(draws, math.ceil(draws * p + spread)) + 1)
    below = scipy.stats.binom.cdf(x, draws, p)
    return things * float(np.sum(below * (1 - below))) / (draws * each)
