"""Levels of the importance ratio: from the log-ratio of tokens to what each token's objective sees."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.errors import ConfigError

PerToken = Float[Tensor, "batch time"]
Mask = Bool[Tensor, "batch time"]


def sequence_level(log_ratio: PerToken, mask: Mask) -> PerToken:
    """log s_i = 1/|y_i| Σ_t log w[i,t], at each of its response tokens (GSPO, arXiv 2507.18071, eq. 8).

    |y_i| is counted in `mask`, so a sequence must not be split between calls.
    """
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean, 0)


def sequence_value(log_ratio: PerToken, mask: Mask) -> PerToken:
    """log s[i,t] = sg[log s_i] + log π_θ − sg[log π_θ]: the sequence's value, the token's gradient (eq. 15)."""
    sequence = sequence_level(log_ratio, mask).detach()
    return sequence + torch.where(mask, log_ratio - log_ratio.detach(), 0)


def segment_level(log_ratio: PerToken, mask: Mask) -> PerToken:
    """The mean of log w over the token's own run of response tokens: a turn of a conversation, as in ROLL.

    One turn: the sequence's. A token that a filter takes out of `mask` ends a run, too.
    """
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    run = begins.cumsum(1)
    empty = log_ratio.new_zeros(mask.shape[0], mask.shape[1] + 1)
    sums = empty.scatter_add(1, run, torch.where(mask, log_ratio, 0))
    lengths = empty.scatter_add(1, run, mask.to(log_ratio.dtype))
    return torch.where(mask, (sums / lengths.clamp(min=1)).gather(1, run), 0)


LEVELS: dict[str, Callable[[PerToken, Mask], PerToken]] = {
    "token": lambda log_ratio, mask: log_ratio,
    "sequence": sequence_level,
    "sequence_token": sequence_value,
    "segment": segment_level,
    "product": lambda log_ratio, mask: torch.where(mask, log_ratio.sum(1, keepdim=True), 0),
}
"""`product` is Σ_t log w[i,t] at each token of a response: the ratio of whole responses."""
MEANS = ("sequence", "sequence_token", "segment")
"""Levels that are means over tokens, which stay close to 1."""


def at_level(level: str, log_ratio: PerToken, mask: Mask) -> PerToken:
    """The log-ratio at a level, 0 outside the response. Raises ConfigError for a level that is not there."""
    if level not in LEVELS:
        raise ConfigError(f"level={level!r} is no level of a ratio: choose {', '.join(LEVELS)}")
    return LEVELS[level](log_ratio, mask)
