"""What losses are made of: where a range bounds a ratio, and what becomes of the tokens inside and outside of it."""

from __future__ import annotations

import functools
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.objectives.base import LossInputs, LossOutput

PerToken = Float[Tensor, "batch time"]
Where = Bool[Tensor, "batch time"]
Bound = float | PerToken


def outside(x: LossInputs, ratio: PerToken, low: Bound, high: Bound, middle: float = 1.0) -> tuple[Where, Where]:
    """Where a ratio is beyond middle + high and A > 0, and where below middle − low and A < 0, both strictly."""
    if not all(bool((torch.as_tensor(bound) >= 0).all()) for bound in (low, high)):  # no text for tensors every time
        raise ConfigError(f"a clip range of ({low}, {high}) is no range: ratios are clipped to [1 - clip_low, 1 + "
                          "clip_high], so both must be >= 0 (inf turns a side off)")
    up, down = x.mask & (x.advantages > 0), x.mask & (x.advantages < 0)
    return up & (ratio > middle + high), down & (ratio < middle - low)


def clipped(x: LossInputs, log_ratio: PerToken, low: Bound, high: Bound, far: float = math.inf) -> LossOutput:
    """The pessimistic min(r·A, clip(r, 1−low, 1+high)·A) of PPO (arXiv 1707.06347, eq. 7), r = exp(log_ratio); where
    A < 0, at least far·A (arXiv 1912.09729).

    A gradient is lost only where r is *strictly* outside the range on the side its advantage pushes to; on the bound
    both branches are equal and it is kept, as `torch.minimum` of `torch.clamp` would have it.
    """
    ratio = log_ratio.detach().exp()
    above, below = outside(x, ratio, low, high)
    beyond = x.mask & (x.advantages < 0) & (ratio > far)
    kept = exponential(x, log_ratio, above | below | beyond)
    bounded = torch.where(above, 1 + high, torch.where(below, 1 - low, torch.where(beyond, far, kept)))
    return surrogate(x, bounded, log_ratio, above | beyond, below)


def exponential(x: LossInputs, log_ratio: PerToken, lost: Where | bool = False) -> PerToken:
    """exp(log_ratio), and 1 where no gradient may follow, or for a weight of 0: that of a ratio which overflows would
    become 0 · inf."""
    return log_ratio.masked_fill((x.advantages == 0) | (x.weights == 0) | lost, 0).exp()


def finite(log_ratio: PerToken) -> PerToken:
    """exp(log_ratio), at most what its type can hold; without gradient beyond."""
    return log_ratio.clamp(max=math.log(torch.finfo(log_ratio.dtype).max) - 1).exp()


def surrogate(x: LossInputs, ratio: PerToken, log_ratio: PerToken, *lost: Where) -> LossOutput:
    """−Σ weights · ratio · A, the gradient that of `ratio`; `lost` is whose the upper and the lower bound took."""
    loss = -(x.weights.detach() * torch.where(x.mask, ratio * x.advantages.detach(), 0)).sum()
    above, below = lost or (torch.zeros_like(x.mask), torch.zeros_like(x.mask))
    return LossOutput(loss, log_ratio.detach(), above.to(torch.int8) - below.to(torch.int8))


def detached(x: LossInputs, weight: PerToken, log_ratio: PerToken, *lost: Where) -> LossOutput:
    """−Σ weights · sg(weight) · A · log π: every token's gradient its own weight · A, and none where it is lost."""
    counts = x.mask & (x.advantages != 0) & (x.weights != 0)
    kept = functools.reduce(torch.logical_and, [~where for where in lost], counts)
    weight = torch.where(kept, weight.detach(), 0)
    return surrogate(x, weight * torch.where(weight != 0, x.logprobs, 0), log_ratio, *lost)


def one_advantage(x: LossInputs, name: str, instead: str) -> None:
    """Raise ConfigError where advantages differ within a response of a loss that has one ratio for all of it."""
    highest = x.advantages.masked_fill(~x.mask, -torch.inf).amax(1, keepdim=True)
    require(not bool((x.mask & (x.advantages != highest)).any()),
            f"{name} has one ratio and one advantage per sequence, but got advantages that differ within one: use "
            f"{instead}, which takes an advantage per token")


def require(fulfilled: bool, message: str) -> None:
    """Raise ConfigError with the message unless that is so."""
    if not fulfilled:
        raise ConfigError(message)
