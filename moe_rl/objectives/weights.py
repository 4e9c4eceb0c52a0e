"""How the tokens of a mini-batch weigh in its loss: aggregations and corrections, over the whole mini-batch.

Micro-batches and ranks receive slices of the weights and only add, so how a mini-batch is cut changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from moe_rl.errors import ConfigError
from moe_rl.objectives.losses import LEVELS as RATIO_LEVELS
from moe_rl.objectives.losses import CorrectionInputs, LossInputs, Mask, PerToken, segment_level, sequence_level
from moe_rl.objectives.terms import ESTIMATORS
from moe_rl.registry import Component, lookup, needs, unknown


# -------------------------------------------------------------------------------------------------------- aggregations
# Functions of the response mask. Weights are float64, 0 outside the response. N counts sequences: with rows="live"
# those that have a response token (verl, ROLL, NeMo-RL, OpenRLHF), with rows="all" empty and wholly filtered ones too
# (TRL, ms-swift, slime, SkyRL). At equal lengths L, without empty rows, seq_mean_token_mean = token_mean =
# seq_mean_token_sum_norm(horizon=L).
def seq_mean_token_mean(mask: Mask, *, rows: str = "live") -> PerToken:
    """1 / (N·|y_i|): mean over sequences of the mean over tokens.

    GSPO, arXiv 2507.18071, eq. 2 and 6: 1/G Σ_i 1/|y_i| Σ_t, averaged over queries.
    """
    return mask.double() / (mask.sum(1, keepdim=True).clamp(min=1) * _sequences(mask, rows))


def token_mean(mask: Mask) -> PerToken:
    """1 / Σ_i |y_i|: every token alike (DAPO, arXiv 2503.14476, eq. 8)."""
    return mask.double() / mask.sum().clamp(min=1)


def seq_mean_token_sum(mask: Mask, *, rows: str = "live") -> PerToken:
    """1 / N: mean over sequences of the sum over tokens (MiniRL, arXiv 2512.01374)."""
    return mask.double() / _sequences(mask, rows)


def seq_mean_token_sum_norm(mask: Mask, *, horizon: float, rows: str = "live") -> PerToken:
    """1 / (N·horizon): the horizon is often `max_new_tokens` (Dr. GRPO, arXiv 2503.20783). No default:
    some peers take the width of a batch, which changes with its padding. Raises ConfigError unless 0 < horizon < ∞."""
    if not 0 < horizon < math.inf:
        raise ConfigError(f"seq_mean_token_sum_norm(horizon={horizon:g}): the number of tokens must be positive and "
                          "finite, usually max_new_tokens")
    return mask.double() / (_sequences(mask, rows) * horizon)


def token_sum(mask: Mask) -> PerToken:
    """1: the sum, which grows with the mini-batch (verl's `token-sum`)."""
    return mask.double()


def _sequences(mask: Mask, rows: str) -> Int[Tensor, ""]:
    """N, at least 1. Raises ConfigError for another way to count."""
    if rows not in ("live", "all"):
        unknown("way to count rows", rows, ("live", "all"))
    return (mask.any(1) | (rows == "all")).sum().clamp(min=1)


AGGREGATIONS: dict[str, Callable[..., PerToken]] = {
    "seq_mean_token_mean": seq_mean_token_mean,
    "token_mean": token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "token_sum": token_sum,
}


# --------------------------------------------------------------------------------------------------------- corrections
# For tokens that another distribution sampled: factors on the weights of a loss, without gradient. ρ = π_old / π_engine
# of a token. Under `Arm.corrections` a factor of 0 leaves a token in |y| and in N (as TRL, slime and NeMo-RL do); under
# `Arm.filters` the same function takes it out of both (verl's `rollout_rs`). Degenerate: where the engine agrees, every
# ρ is 1. Options out of range raise ConfigError, and so does what is not given.
@needs("engine")
def truncated(
    x: CorrectionInputs, *, cap: float = 2.0, low: float = 0.0, level: str = "token", batch_normalized: bool = False
) -> PerToken:
    """min(max(ρ, low), cap): truncated importance sampling, at one of `LEVELS`.

    The cap bounds the variance and biases towards 0 where the ratio exceeds it (Ionides 2008; for RL with two engines,
    Yao et al. 2025). 2 as in verl and slime; `low` as in OpenRLHF. `batch_normalized`: over its mean over the tokens of
    the mini-batch, at other levels over its sequences (verl).
    """
    if not cap > 0:
        raise ConfigError(f"truncated(cap={cap:g}): the cap of importance weights must be positive, usually 2")
    rho = _rho(x, "truncated", level).clamp(*_check_band("truncated", low, cap))
    if batch_normalized:
        of_rows = sequence_level(torch.where(x.mask, rho, 0).double(), x.mask).amax(1)[x.mask.any(1)]
        mean = (rho[x.mask].double() if level == "token" else of_rows).mean()
        rho = rho / torch.where(mean > 0, mean, 1)  # of no token it is NaN
    return rho


@needs("engine")
def masked(x: CorrectionInputs, *, high: float, low: float = 0.0, level: str = "token") -> PerToken:
    """ρ · 1[low ≤ ρ ≤ high]: MIS (Liu & Li 2025). IcePop, arXiv 2510.18855, has .5 and 5;
    TRL's default is masked(high=3, level="product"). Degenerate: masked(high=inf) is truncated(cap=inf)."""
    rho = _rho(x, "masked", level)
    return torch.where(_is_inside(rho, *_check_band("masked", low, high)), rho, 0)


@needs("engine")
def rejected(
    x: CorrectionInputs, *, high: float, low: float = 0.0, statistic: str = "ratio", level: str = "geometric"
) -> PerToken:
    """1[low ≤ v ≤ high]: rejection sampling (Geo-RS, Liu & Li 2025).

    v is ρ at a level or, by `statistic`, "k2", "k3" or "abs" of KL(π_engine ‖ π_old) per token, summed (level
    "product") or averaged ("geometric", "segment"). With level="max" every token of a sequence must be inside (Trust
    Region Masking, arXiv 2512.23075). verl: token_*, seq_sum_*, seq_mean_*, seq_max_*; its k1 bounds 1/ρ.
    Times `truncated`, sequences are chosen and tokens weighed (NeMo-RL's seq-mask-tis).
    """
    if statistic not in (choices := ("ratio", "k2", "k3", "abs")):
        unknown("statistic of rejected", statistic, choices)
    of = "token" if level == "max" else level
    value = _rho(x, "rejected", of) if statistic == "ratio" else _at(
        of, ESTIMATORS[statistic](_log_rho(x, "rejected")), x.mask)
    inside = _is_inside(value, *_check_band("rejected", low, high)) | ~x.mask
    return (inside.all(1, keepdim=True).expand(inside.shape) if level == "max" else inside).to(value.dtype)


@needs("engine")
def m2po(x: CorrectionInputs, *, threshold: float = 0.04) -> PerToken:
    """0 for the largest (log ρ)² until the mean of the others is below the threshold.

    M2PO, arXiv 2510.01161, of π_old as in AReaL, which keeps one token at least; equal ones go together here.
    """
    squared = _log_rho(x, "m2po").double() ** 2
    ordered = squared[x.mask].sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    out = pad(ordered, (0, 1), value=math.inf)[(means < _check_band("m2po", threshold, math.inf)[0]).sum()]
    return (squared < out).to(x.old_logprobs.dtype)


@needs("engine")
def vaco(x: CorrectionInputs, *, bound: float) -> PerToken:
    """0 where A · log ρ > 0 in a sequence with mean |ρ − 1| > bound.

    VACO, arXiv 2603.01365, as in open-instruct at e6c3044; later it takes the total variation of probabilities.
    """
    off = sequence_level((_rho(x, "vaco", "token") - 1).abs(), x.mask) > _check_band("vaco", bound, math.inf)[0]
    return 1 - (off & (x.advantages * _log_rho(x, "vaco") > 0)).to(x.old_logprobs.dtype)


@needs("policy")
def opsm(x: LossInputs, *, delta: float, against: str = "engine") -> PerToken:
    """0 where A < 0 and 1/|y| Σ_t log(π_sampler/π_θ) > delta, else 1. Off-policy sequence masking.

    DeepSeek-V3.2, arXiv 2512.02556, eq. 9; delta, in nats, is not published. The sampler is the engine (paper, TRL), or
    π_old with `against="old"` (ms-swift). π_θ is that of the ratio, before the update. Degenerate: delta=inf is 1.
    """
    if against not in ("engine", "old"):
        unknown("policy that opsm compares with", against, ("engine", "old"))
    log_ratio = x.log_ratio.detach() + (_log_rho(x, "opsm") if against == "engine" else 0)
    return 1 - ((x.advantages < 0) & (-sequence_level(log_ratio, x.mask) > delta)).to(log_ratio.dtype)


@needs("policy")
def current(x: LossInputs, *, rule: str = "truncated", options: Mapping[str, Any] | None = None) -> PerToken:
    """`truncated`, `masked` or `rejected` of π_θ/π_engine.

    In the place of ρ, by `rule`, which has `options`; without gradient. verl's bypass_mode with loss_type reinforce is
    `reinforce+current(…)+anchor=engine`; there rejection also leaves |y| and N. Where π_θ = π_old: the rule itself.
    """
    options = dict(options or {})
    if options.get("batch_normalized"):
        raise ConfigError("current(options={batch_normalized: true}) needs a mean over the mini-batch, but π_θ is "
                          "known for a part of it only. Remove the option.")
    found = lookup("rule of current", Component(rule, **options), {name: CORRECTIONS[name] for name in OF_RATIOS})
    return found(replace(x, old_logprobs=(x.old_logprobs + x.log_ratio).detach()))


def finished(x: CorrectionInputs) -> PerToken:
    """0 in truncated responses, else 1. As a filter, DAPO's overlong filtering (arXiv 2503.14476, sec. 3.4)."""
    if x.finished is None:
        raise ConfigError("finished masks truncated responses. Give finished: whether each response ended by itself.")
    return x.finished.to(x.old_logprobs.dtype)


LEVELS: dict[str, Callable[[Tensor, Mask], Tensor]] = {
    "token": RATIO_LEVELS["token"],
    "segment": segment_level,
    "geometric": sequence_level,
    "product": RATIO_LEVELS["product"],
}
"""Of log ρ, 0 outside the response. "Sequence" is the product in verl, TRL and SkyRL, the geometric mean
in ms-swift and open-instruct: nothing here is called that."""


def _at(level: str, values: Tensor, mask: Mask) -> Tensor:
    if level not in LEVELS:
        unknown("level of a correction", level, LEVELS)
    return LEVELS[level](values, mask)


def _log_rho(x: CorrectionInputs, part: str) -> Tensor:
    if x.rollout_logprobs is None:
        raise ConfigError(f"{part} compares π_old with the engine. Give rollout_logprobs.")
    return torch.where(x.mask, x.old_logprobs - x.rollout_logprobs, 0).detach()


def _rho(x: CorrectionInputs, part: str, level: str) -> PerToken:
    """ρ at a level, 1 outside the response; finite, since inf · 0 is NaN."""
    log_rho = _at(level, _log_rho(x, part), x.mask)
    return log_rho.exp().clamp(max=torch.finfo(log_rho.dtype).max)


def _is_inside(value: Tensor, low: float, high: float) -> Tensor:
    return (low <= value) & (value <= high)


def _check_band(part: str, low: float, high: float) -> tuple[float, float]:
    if not 0 <= low <= high:
        raise ConfigError(f"{part}: {low:g} to {high:g} is not a valid range. Use 0 <= low <= high.")
    return low, high


CORRECTIONS: dict[str, Callable[..., PerToken]] = {
    "truncated": truncated, "masked": masked, "rejected": rejected, "m2po": m2po, "vaco": vaco, "opsm": opsm,
    "finished": finished, "current": current,
}  # fmt: skip
OF_RATIOS = ("truncated", "masked", "rejected")
"""Corrections that are functions of ρ alone, row by row."""
