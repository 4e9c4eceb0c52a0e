"""Rival explanations of GSPO's effect, as losses: GRPO with something else that GSPO also does. See `why_gspo`."""

from __future__ import annotations

import dataclasses
import math

import torch

from moe_rl.objectives import LossInputs, LossOutput
from moe_rl.objectives.losses import grpo

DUAL = 3.0
"""Cap of the ratio at negative advantages (dual clip, Ye et al. 2020, arXiv 1912.09729)."""
SHRINK = 0.56
"""√0.32: in the pilot of `small` at 4e-4 replay leaves 32 % of the variance of GRPO's log-ratios."""
DROPPED = 0.38
"""What GSPO clips there, mean over the second to eighth mini-batch."""


def dual_clip(x: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """GRPO, whose ratios also lose their gradient above DUAL where the advantage is negative."""
    log_ratio = x.log_ratio.detach()
    high = (x.advantages < 0) & (log_ratio > math.log(DUAL))
    capped = torch.where(high, x.old_logprobs + math.log(DUAL), x.logprobs)
    output = grpo(dataclasses.replace(x, logprobs=capped), clip_low=clip_low, clip_high=clip_high)
    return LossOutput(output.loss, log_ratio, output.clipped_by + high.to(torch.int8))


def shrunk(x: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """GRPO whose weights and clipping see w^SHRINK: log-ratios of the variance that replay leaves, but no replay."""
    old = x.logprobs.detach() - SHRINK * (x.logprobs.detach() - x.old_logprobs)
    return grpo(dataclasses.replace(x, old_logprobs=old), clip_low=clip_low, clip_high=clip_high)


def random_mask(x: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """GRPO that drops whole responses at random, as many as GSPO clips: a control for training on less.

    Nothing is dropped where every ratio is 1. Drawn from the old log-probs, so that a resumed run drops the same.
    """
    if x.log_ratio.abs().max() < 1e-4:
        dropped = torch.zeros_like(x.mask)
    else:
        generator = torch.Generator().manual_seed(int(x.old_logprobs.double().sum().abs() * 1e9) % 2**63)
        dropped = x.mask & (torch.rand(len(x.mask), 1, generator=generator) < DROPPED).to(x.mask.device)
    output = grpo(dataclasses.replace(x, weights=x.weights * ~dropped), clip_low=clip_low, clip_high=clip_high)
    clipped_by = torch.where(dropped, 1, output.clipped_by).to(torch.int8)
    return LossOutput(output.loss, output.log_ratio, clipped_by)
