"""The objectives of `why_gspo`: GRPO and GSPO taken apart into what weighs a token's gradient and what clips it.

Each has the signature of `moe_rl.losses.grpo_loss`. The gradient of a token is weight · A · ∇ log π, 0 where clipped:

| weight | factor of a token's gradient |
|---|---|
| token | w[i,t] = π_θ / π_old (GSPO, arXiv 2507.18071, eq. 12) |
| sequence | s[i] = exp(mean_t log w[i,t]) (eq. 10) |
| none | 1 |

`clip` names the ratio that the range bounds: w[i,t], s[i], or none. `token_token` has GRPO's gradient and
`sequence_sequence` GSPO's, for advantages per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moe_rl.losses import LossOutput, grpo_loss, sequence_mean_weights

DUAL = 3.0
"""Cap of the ratio at negative advantages (dual clip, Ye et al. 2020, arXiv 1912.09729)."""
SHRINK = 0.56
"""√0.32: in the pilot of `small` at 4e-4 replay leaves 32 % of the variance of GRPO's log-ratios."""
DROPPED = 0.38
"""What GSPO clips there, mean over the second to eighth mini-batch."""


def crossed(weight: str, clip: str) -> Callable[..., LossOutput]:
    """The objective whose token gradients are weighted by one ratio and clipped by another."""

    def loss(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float,
        weights: Tensor | None = None,
    ) -> LossOutput:  # fmt: skip
        token = torch.where(mask, (logprobs - old_logprobs).detach(), 0)
        sequence = torch.where(mask, token.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1), 0)
        log_ratios = {"token": token, "sequence": sequence, "none": torch.zeros_like(token)}
        a, bounded = advantages[:, None], log_ratios[clip].exp()
        above, below = mask & (a > 0) & (bounded > 1 + clip_high), mask & (a < 0) & (bounded < 1 - clip_low)
        kept = mask & ~above & ~below
        ratio = (log_ratios[weight] + torch.where(kept, logprobs - logprobs.detach(), 0)).exp()
        weights = sequence_mean_weights(mask) if weights is None else weights
        objective = torch.where(mask, ratio * a, 0)
        return LossOutput(-(weights * objective).sum(), log_ratios[weight], above.to(torch.int8) - below.to(torch.int8))

    return loss


token_token, token_sequence, token_none = (crossed("token", clip) for clip in ("token", "sequence", "none"))
sequence_token, sequence_sequence, sequence_none = (crossed("sequence", c) for c in ("token", "sequence", "none"))
none_token, none_sequence, none_none = (crossed("none", clip) for clip in ("token", "sequence", "none"))


def dual_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float,
    weights: Tensor | None = None,
) -> LossOutput:  # fmt: skip
    """GRPO, whose ratios also lose their gradient above DUAL where the advantage is negative."""
    log_ratio = torch.where(mask, (logprobs - old_logprobs).detach(), 0)
    high = (advantages[:, None] < 0) & (log_ratio > math.log(DUAL))
    capped = torch.where(high, old_logprobs + math.log(DUAL), logprobs)
    output = grpo_loss(capped, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, weights=weights)
    return LossOutput(output.loss, log_ratio, output.lost + high.to(torch.int8))


def shrunk(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float,
    weights: Tensor | None = None,
) -> LossOutput:  # fmt: skip
    """GRPO whose weights and clipping see w^SHRINK: log-ratios of the variance that replay leaves, but no replay."""
    old = logprobs.detach() - SHRINK * (logprobs.detach() - old_logprobs)
    return grpo_loss(logprobs, old, advantages, mask, clip_low=clip_low, clip_high=clip_high, weights=weights)


def random_mask(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float,
    weights: Tensor | None = None,
) -> LossOutput:  # fmt: skip
    """GRPO that drops whole responses at random, as many as GSPO clips: a control for training on less.

    Nothing is dropped where every ratio is 1. Drawn from the old log-probs, so that a resumed run drops the same.
    """
    if torch.where(mask, logprobs - old_logprobs, 0).abs().max() < 1e-4:
        dropped = torch.zeros_like(mask)
    else:
        generator = torch.Generator().manual_seed(int(old_logprobs.double().sum().abs() * 1e9) % 2**63)
        dropped = mask & (torch.rand(len(mask), 1, generator=generator) < DROPPED).to(mask.device)
    weights = sequence_mean_weights(mask) if weights is None else weights
    output = grpo_loss(
        logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, weights=weights * ~dropped
    )
    return LossOutput(output.loss, output.log_ratio, torch.where(dropped, 1, output.lost).to(torch.int8))
