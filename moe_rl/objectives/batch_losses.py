"""Losses with statistics of the whole mini-batch under π_θ, as marks; without marks the given rows are all of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.lookup import needs
from moe_rl.objectives.base import LossInputs, LossOutput
from moe_rl.objectives.ratios import sequence_value
from moe_rl.objectives.regions import clipped, exponential, require, surrogate

PerToken = Float[Tensor, "batch time"]


@needs("mini_batch")
def clip_cov(
    x: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, share: float = 2e-4, low: float = 1.0,
    high: float = 5.0, seed: int = 0,
) -> LossOutput:  # fmt: skip
    """PPO's clip without a few tokens, drawn from those that it keeps and whose covariance is in (low, high).

    Clip-Cov, arXiv 2505.22617: cov = (A − mean A) · (log π − mean log π), means over the mini-batch's response tokens;
    share · tokens, at least one, have neither value nor gradient, and are reported as clipped on the side their
    advantage pushes to. The draw is a function of `seed` and of which tokens the candidates are, so that rounding, or
    another engine, draws the same ones. Defaults are verl's. share 0: `grpo` with this range.
    """
    found = clipped(x, x.log_ratio, clip_low, clip_high)
    marks = x.marks
    if marks is None:
        cov = _covariance(x)
        kept = (x.mask & (found.clipped_by == 0) & (cov > low) & (cov < high)).flatten().nonzero()[:, 0]
        which = zlib.crc32(kept.cpu().numpy().tobytes())
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(which ^ seed))
        marks = _marked(x, kept[order.to(kept.device)], share)
    gone = x.mask & (marks > 0)
    found = clipped(replace(x, advantages=x.advantages.masked_fill(gone, 0)), x.log_ratio, clip_low, clip_high)
    side = torch.where(gone, x.advantages, found.clipped_by).sign().to(torch.int8)
    return replace(found, clipped_by=side, marks=marks)


@needs("mini_batch")
def kl_cov(x: LossInputs, *, share: float = 2e-4, coef: float = 0.1) -> LossOutput:
    """w · A, without a range, − coef · |log w| at the share of tokens whose covariance (`clip_cov`) is highest.

    KL-Cov, arXiv 2505.22617: at least one token; of equals the first. Defaults are verl's; SkyRL has coef 1. The
    penalty is weighed and corrected as the loss is. share or coef 0: w · A.
    """
    require(coef >= 0, f"kl_cov(coef={coef:g}): it pulls back to π_old, so it must be >= 0")
    highest = _covariance(x).masked_fill(~x.mask, -torch.inf).flatten().argsort(descending=True, stable=True)
    marks = _marked(x, highest, share) if x.marks is None else x.marks
    found = surrogate(x, exponential(x, x.log_ratio), x.log_ratio)
    penalty = torch.where(marks > 0, x.log_ratio.abs(), 0)
    return replace(found, loss=found.loss + coef * (x.weights.detach() * penalty).sum(), marks=marks)


@needs("mini_batch")
def sat(
    x: LossInputs, *, base: str = "grpo", clip_low: float = 0.2, clip_high: float = 0.2, quantile: float = 0.9,
    exponent: float = 2.0,
) -> LossOutput:  # fmt: skip
    """PPO's clip, whose range contracts on the side to which a token is off the engine already.

    SAT, arXiv 2607.18722: d = sg[log π_θ − log π_engine], q the quantile of |d| over the mini-batch's response tokens,
    h = 1 where |d| ≤ q or q = 0, else 1 / (1 + (|d|/q)^exponent); the upper bound is 1 + clip_high · h where d > 0, the
    lower 1 − clip_low · h where d < 0. What was read of the paper leaves open: the kernel beyond its name, Hill (this
    one falls to 1/2 right past q), how the quantile interpolates (here linearly), and what GSPO's one ratio does with
    bounds of tokens: base "gspo" is `gspo_token`, which clips each alone. The paper takes q over a micro-batch. Its
    range, 0.2, is for tokens. quantile 1: the base itself.
    """
    require(base in ("grpo", "gspo"), f"sat(base={base!r}): choose grpo or gspo")
    require(0 <= quantile <= 1 and exponent > 0,
            f"sat(quantile={quantile:g}, exponent={exponent:g}): a share of tokens, and a positive number")  # fmt: skip
    if x.rollout_logprobs is None:
        raise ConfigError("sat reads the distance to the engine, but there are no rollout_logprobs")
    gap = torch.where(x.mask, x.log_ratio + x.old_logprobs - x.rollout_logprobs, 0).detach()
    sizes = gap.abs()
    marks = x.marks
    if marks is None:
        marks = torch.full_like(gap, sizes[x.mask].quantile(quantile).item() if bool(x.mask.any()) else 0.0)
    hill = torch.where((sizes > marks) & (marks > 0), 1 / (1 + (sizes / marks) ** exponent), 1)
    ratio = x.log_ratio if base == "grpo" else sequence_value(x.log_ratio, x.mask)
    low, high = clip_low * torch.where(gap < 0, hill, 1), clip_high * torch.where(gap > 0, hill, 1)
    return replace(clipped(x, ratio, low, high), marks=marks)


def _covariance(x: LossInputs) -> PerToken:
    """(A − mean A) · (log π − mean log π), means over the response tokens; 0 elsewhere, without gradient."""
    return torch.mul(*(torch.where(x.mask, y - y[x.mask].mean(), 0) for y in (x.advantages, x.logprobs.detach())))


def _marked(x: LossInputs, order: Int[Tensor, " tokens"], share: float) -> PerToken:
    """1 at the first of some tokens, as many as are that share of the response tokens, at least one; 0 elsewhere."""
    require(0 <= share <= 1, f"share={share:g} is no share of the tokens: it goes from 0 to 1")
    count = max(1, int(share * int(x.mask.sum()))) if share else 0
    return torch.zeros_like(x.logprobs.detach()).flatten().index_fill(0, order[:count], 1).view_as(x.mask)


BATCH_LOSSES: dict[str, Callable[..., LossOutput]] = {"clip_cov": clip_cov, "kl_cov": kl_cov, "sat": sat}
