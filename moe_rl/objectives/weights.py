"""The weights of tokens in a loss: aggregations and corrections, over the whole mini-batch. Micro-batches and ranks
receive slices of them and only add."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from moe_rl.errors import ConfigError
from moe_rl.objectives.losses import LEVELS as RATIO_LEVELS
from moe_rl.objectives.losses import CorrectionInputs, LossInputs, Mask, PerToken, segment_level, sequence_level
from moe_rl.objectives.terms import ESTIMATORS
from moe_rl.registry import Component, NotNegative, Positive, PositiveShare, lookup, needs

Counted = Literal["live", "all"]
Level = Literal["token", "segment", "geometric", "product"]


# -------------------------------------------------------------------------------------------------------- aggregations
# Functions of the response mask. Weights are float64, 0 outside the response. N counts sequences: with rows="live"
# those with a response token (verl, ROLL, NeMo-RL, OpenRLHF), with rows="all" all (TRL, ms-swift, slime, SkyRL). At
# equal lengths L, without empty rows, seq_mean_token_mean = token_mean = seq_mean_token_sum_norm(horizon=L).
def seq_mean_token_mean(mask: Mask, *, rows: Counted = "live") -> PerToken:
    """1 / (N·|y_i|): mean over sequences of the mean over tokens.

    GSPO, arXiv 2507.18071, eq. 2 and 6: 1/G Σ_i 1/|y_i| Σ_t, averaged over queries.
    """
    return mask.double() / (mask.sum(1, keepdim=True).clamp(min=1) * _sequences(mask, rows))


def token_mean(mask: Mask) -> PerToken:
    """1 / Σ_i |y_i|: every token alike (DAPO, arXiv 2503.14476, eq. 8)."""
    return mask.double() / mask.sum().clamp(min=1)


def seq_mean_token_sum(mask: Mask, *, rows: Counted = "live") -> PerToken:
    """1 / N: mean over sequences of the sum over tokens (MiniRL, arXiv 2512.01374)."""
    return mask.double() / _sequences(mask, rows)


def seq_mean_token_sum_norm(
    mask: Mask, *, horizon: Annotated[float, Field(gt=0, allow_inf_nan=False)], rows: Counted = "live"
) -> PerToken:
    """1 / (N·horizon): the horizon is often `max_new_tokens` (Dr. GRPO, arXiv 2503.20783). No default:
    some peers take the width of a batch, which changes with its padding."""
    return mask.double() / (_sequences(mask, rows) * horizon)


def token_sum(mask: Mask) -> PerToken:
    """1: the sum, which grows with the mini-batch (verl's `token-sum`)."""
    return mask.double()


def _sequences(mask: Mask, rows: str) -> Int[Tensor, ""]:
    """N, at least 1."""
    return (mask.any(1) | (rows == "all")).sum().clamp(min=1)


AGGREGATIONS: dict[str, Callable[..., PerToken]] = {
    "seq_mean_token_mean": seq_mean_token_mean,
    "token_mean": token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "token_sum": token_sum,
}


# --------------------------------------------------------------------------------------------------------- corrections
# For tokens of another distribution: factors on the weights of a loss, without gradient. ρ = π_old / π_engine of a
# token. Under `Arm.corrections` a factor of 0 leaves a token in |y| and in N (as in TRL, slime and NeMo-RL); under
# `Arm.filters` the same function takes it out of both (verl's `rollout_rs`). Missing inputs raise ConfigError.
@needs("engine")
def truncated(
    x: CorrectionInputs,
    *,
    cap: Positive = 2.0,
    low: NotNegative = 0.0,
    level: Level = "token",
    batch_normalized: bool = False,
) -> PerToken:
    """min(max(ρ, low), cap): truncated importance sampling, at one of `LEVELS`.

    Ionides 2008; for RL with two engines, Yao et al. 2025. 2 as in verl and slime; `low` as in OpenRLHF.
    `batch_normalized`: over its mean over the tokens of the mini-batch, at other levels over its sequences (verl).
    """
    rho = _rho(x, "truncated", level).clamp(*_check_band("truncated", low, cap))
    if batch_normalized:
        of_rows = sequence_level(torch.where(x.mask, rho, 0).double(), x.mask).amax(1)[x.mask.any(1)]
        mean = (rho[x.mask].double() if level == "token" else of_rows).mean()
        rho = rho / torch.where(mean > 0, mean, 1)  # NaN without tokens
    return rho


@needs("engine")
def cis(x: CorrectionInputs, *, lam: NotNegative = 2.3, floor: PositiveShare = 5e-3) -> PerToken:
    """min(ρ, 1 + lam · max(1 − π_old, floor)): calibrated importance sampling, by token.

    CIS-RL, arXiv 2609.32444, with the defaults of its code. floor 1: truncated(cap=1 + lam); lam inf:
    truncated(cap=inf).
    """
    rho = _rho(x, "cis", "token")
    return rho.minimum(1 + lam * (1 - torch.where(x.mask, x.old_logprobs, 0).exp()).clamp(min=floor)).detach()


@needs("engine")
def masked(x: CorrectionInputs, *, high: float, low: NotNegative = 0.0, level: Level = "token") -> PerToken:
    """ρ · 1[low ≤ ρ ≤ high]: MIS (Liu & Li 2025). IcePop, arXiv 2510.18855, has .5 and 5;
    TRL's default is masked(high=3, level="product"). Degenerate: masked(high=inf) is truncated(cap=inf)."""
    rho = _rho(x, "masked", level)
    return torch.where(_is_inside(rho, *_check_band("masked", low, high)), rho, 0)


@needs("engine")
def rejected(
    x: CorrectionInputs,
    *,
    high: float,
    low: NotNegative = 0.0,
    statistic: Literal["ratio", "k2", "k3", "abs"] = "ratio",
    level: Level | Literal["max"] = "geometric",
) -> PerToken:
    """1[low ≤ v ≤ high]: rejection sampling (Geo-RS, Liu & Li 2025).

    v is ρ at a level or, by `statistic`, "k2", "k3" or "abs" of KL(π_engine ‖ π_old) per token, summed (level
    "product") or averaged ("geometric", "segment"). With level="max" every token of a sequence must be inside (Trust
    Region Masking, arXiv 2512.23075). verl: token_*, seq_sum_*, seq_mean_*, seq_max_*; its k1 bounds 1/ρ. Times
    `truncated`: NeMo-RL's seq-mask-tis.
    """
    of = "token" if level == "max" else level
    if statistic == "ratio":
        value = _rho(x, "rejected", of)
    else:
        value = LEVELS[of](ESTIMATORS[statistic](_log_rho(x, "rejected")), x.mask)
    inside = _is_inside(value, *_check_band("rejected", low, high)) | ~x.mask
    return (inside.all(1, keepdim=True).expand(inside.shape) if level == "max" else inside).to(value.dtype)


@needs("engine", "mini_batch")
def m2po(x: CorrectionInputs, *, threshold: NotNegative = 0.04) -> PerToken:
    """0 for the largest (log ρ)² until the mean of the others is below the threshold.

    M2PO, arXiv 2510.01161, of π_old as in AReaL; equal ones go together.
    """
    squared = _log_rho(x, "m2po").double() ** 2
    ordered = squared[x.mask].sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    out = pad(ordered, (0, 1), value=math.inf)[(means < threshold).sum()]
    return (squared < out).to(x.old_logprobs.dtype)


@needs("engine")
def vaco(x: CorrectionInputs, *, bound: NotNegative) -> PerToken:
    """0 where A · log ρ > 0 in a sequence with mean |ρ − 1| > bound.

    VACO, arXiv 2603.01365, as in open-instruct at e6c3044; later it takes the total variation of probabilities.
    """
    off = sequence_level((_rho(x, "vaco", "token") - 1).abs(), x.mask) > bound
    return 1 - (off & (x.advantages * _log_rho(x, "vaco") > 0)).to(x.old_logprobs.dtype)


@needs("policy")
def opsm(x: LossInputs, *, delta: float, against: Literal["engine", "old"] = "engine") -> PerToken:
    """0 where A < 0 and 1/|y| Σ_t log(π_sampler/π_θ) > delta, else 1. Off-policy sequence masking.

    DeepSeek-V3.2, arXiv 2512.02556, eq. 9; delta, in nats, is not published. The sampler is the engine (paper, TRL), or
    π_old with `against="old"` (ms-swift). π_θ is that of the ratio. delta=inf: 1.
    """
    log_ratio = x.log_ratio.detach() + (_log_rho(x, "opsm") if against == "engine" else 0)
    return 1 - ((x.advantages < 0) & (-sequence_level(log_ratio, x.mask) > delta)).to(log_ratio.dtype)


@needs("policy")
def current(
    x: LossInputs,
    *,
    rule: Literal["truncated", "masked", "rejected"] = "truncated",
    options: Mapping[str, Any] | None = None,
) -> PerToken:
    """`truncated`, `masked` or `rejected` of π_θ/π_engine.

    The ratio takes the place of ρ in `rule`, which has `options`; without gradient. verl's bypass_mode with loss_type
    reinforce is `reinforce+current(…)+anchor=engine`; there rejection also leaves |y| and N.
    """
    options = dict(options or {})
    if options.get("batch_normalized"):
        raise ConfigError("current(options={batch_normalized: true}) needs a mean over the mini-batch. Remove it.")
    correction = lookup("rule of current", Component(rule, **options), {name: CORRECTIONS[name] for name in OF_RATIOS})
    return correction(replace(x, old_logprobs=(x.old_logprobs + x.log_ratio).detach()))


def finished(x: CorrectionInputs) -> PerToken:
    """0 in truncated responses, else 1. As a filter, DAPO's overlong filtering (arXiv 2503.14476, sec. 3.4)."""
    if x.finished is None:
        raise ConfigError("the correction finished needs finished: whether each response ended by itself")
    return x.finished.to(x.old_logprobs.dtype)


LEVELS: dict[str, Callable[[Tensor, Mask], Tensor]] = {
    "token": RATIO_LEVELS["token"],
    "segment": segment_level,
    "geometric": sequence_level,
    "product": RATIO_LEVELS["product"],
}
"""Of log ρ, 0 outside the response. "Sequence" is the product in verl, TRL and SkyRL, the geometric mean in ms-swift
and open-instruct, so no level has that name."""


def _log_rho(x: CorrectionInputs, part: str) -> Tensor:
    if x.rollout_logprobs is None:
        raise ConfigError(f"{part} compares π_old with the engine. Give rollout_logprobs.")
    return torch.where(x.mask, x.old_logprobs - x.rollout_logprobs, 0).detach()


def _rho(x: CorrectionInputs, part: str, level: str) -> PerToken:
    """ρ at a level, 1 outside the response; finite, since inf · 0 is NaN."""
    log_rho = LEVELS[level](_log_rho(x, part), x.mask)
    return log_rho.exp().clamp(max=torch.finfo(log_rho.dtype).max)


def _is_inside(value: Tensor, low: float, high: float) -> Tensor:
    return (low <= value) & (value <= high)


def _check_band(part: str, low: float, high: float) -> tuple[float, float]:
    if not low <= high:
        raise ConfigError(f"{part}: {low:g} to {high:g} is no range. Use low <= high.")
    return low, high


CORRECTIONS: dict[str, Callable[..., PerToken]] = {
    "truncated": truncated,
    "cis": cis,
    "masked": masked,
    "rejected": rejected,
    "m2po": m2po,
    "vaco": vaco,
    "opsm": opsm,
    "finished": finished,
    "current": current,
}
OF_RATIOS = ("truncated", "masked", "rejected")
"""Corrections by ρ alone, row by row."""
