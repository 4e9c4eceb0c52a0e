"""How the tokens of a mini-batch weigh in its loss: a function of the response mask, over the whole mini-batch.

Micro-batches and ranks receive slices of the weights and only add, so how a mini-batch is cut changes nothing. Weights
are float64, 0 outside the response. N counts sequences: with rows="live" those that have a response token (verl, ROLL,
NeMo-RL, OpenRLHF), with rows="all" empty and wholly filtered ones too (TRL, ms-swift, slime, SkyRL). At equal lengths
L, without empty rows, seq_mean_token_mean = token_mean = seq_mean_token_sum_norm(horizon=L).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.lookup import unknown

Mask = Bool[Tensor, "batch time"]
Weights = Float[Tensor, "batch time"]


def seq_mean_token_mean(mask: Mask, *, rows: str = "live") -> Weights:
    """1 / (N·|y_i|): the mean over sequences of the mean over tokens.

    GSPO, arXiv 2507.18071, eq. 2 and 6: 1/G Σ_i 1/|y_i| Σ_t, averaged over queries.
    """
    return mask.double() / (mask.sum(1, keepdim=True).clamp(min=1) * _sequences(mask, rows))


def token_mean(mask: Mask) -> Weights:
    """1 / Σ_i |y_i|: every token alike, so that long responses weigh more (DAPO, arXiv 2503.14476, eq. 8)."""
    return mask.double() / mask.sum().clamp(min=1)


def seq_mean_token_sum(mask: Mask, *, rows: str = "live") -> Weights:
    """1 / N: the mean over sequences of the sum over tokens, as policy gradients are (MiniRL, arXiv 2512.01374)."""
    return mask.double() / _sequences(mask, rows)


def seq_mean_token_sum_norm(mask: Mask, *, horizon: float, rows: str = "live") -> Weights:
    """1 / (N·horizon): sums, over one length for all, often `max_new_tokens` (Dr. GRPO, arXiv 2503.20783). No default:
    some peers take the width of a batch, which changes with its padding. Raises ConfigError unless 0 < horizon < ∞."""
    if not 0 < horizon < math.inf:
        raise ConfigError(f"seq_mean_token_sum_norm(horizon={horizon:g}): a number of tokens, by which sums are "
                          "divided, must be positive and finite; usually it is max_new_tokens")
    return mask.double() / (_sequences(mask, rows) * horizon)


def token_sum(mask: Mask) -> Weights:
    """1: the plain sum; the gradient grows with the mini-batch (verl's `token-sum`)."""
    return mask.double()


def _sequences(mask: Mask, rows: str) -> Int[Tensor, ""]:
    """N, at least 1. Raises ConfigError for another way to count."""
    if rows not in ("live", "all"):
        unknown("way to count rows", rows, ("live", "all"))
    return (mask.any(1) | (rows == "all")).sum().clamp(min=1)


AGGREGATIONS: dict[str, Callable[..., Weights]] = {
    "seq_mean_token_mean": seq_mean_token_mean,
    "token_mean": token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "token_sum": token_sum,
}
