"""Levels of the importance ratio: from a token's log-ratio to that of its sequence."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

PerToken = Float[Tensor, "batch time"]


def sequence_level(log_ratio: PerToken, mask: Bool[Tensor, "batch time"]) -> PerToken:
    """log s_i = 1/|y_i| Σ_t log w[i,t], at each of its response tokens (GSPO, arXiv 2507.18071, eq. 8).

    |y_i| is counted in `mask`, so a sequence must not be split between calls.
    """
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean, 0)


def sequence_value(log_ratio: PerToken, mask: Bool[Tensor, "batch time"]) -> PerToken:
    """log s[i,t] = sg[log s_i] + log π_θ − sg[log π_θ]: the sequence's value, the token's gradient (eq. 15)."""
    sequence = sequence_level(log_ratio, mask).detach()
    return sequence + torch.where(mask, log_ratio - log_ratio.detach(), 0)
