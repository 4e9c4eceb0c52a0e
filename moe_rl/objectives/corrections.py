"""Corrections for tokens that another distribution drew: factors on the weights of a loss, without gradient.

ρ = π_old / π_engine of a token. Under `Arm.corrections` a factor of 0 leaves a token in |y| and in N (as TRL, slime and
NeMo-RL do); under `Arm.filters` the same function takes it out of both (verl's `rollout_rs`, ROLL). Degenerate: where
the engine agrees, every ρ is 1. Options out of range raise ConfigError, and so does what is not given.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from moe_rl.errors import ConfigError
from moe_rl.lookup import needs, unknown
from moe_rl.objectives import ratios
from moe_rl.objectives.base import LossInputs
from moe_rl.objectives.terms import ESTIMATORS

Factors = Float[Tensor, "batch time"]
Mask = Bool[Tensor, "batch time"]


@needs("engine")
def truncated(
    x: LossInputs, *, cap: float = 2.0, low: float = 0.0, level: str = "token", batch_normalized: bool = False
) -> Factors:
    """min(max(ρ, low), cap), ρ at one of `LEVELS`: truncated importance sampling.

    The cap bounds the variance and biases towards 0 where the ratio exceeds it (Ionides 2008; for RL with two engines,
    Yao et al. 2025). 2 as in verl and slime; `low` as in OpenRLHF. `batch_normalized`: over its mean over the tokens of
    the mini-batch, at other levels over its sequences (verl).
    """
    if not cap > 0:
        raise ConfigError(f"truncated(cap={cap:g}): the cap of importance weights must be positive, usually 2")
    rho = _rho(x, "truncated", level).clamp(*_band("truncated", low, cap))
    if batch_normalized:
        of_rows = ratios.sequence_level(torch.where(x.mask, rho, 0).double(), x.mask).amax(1)[x.mask.any(1)]
        mean = (rho[x.mask].double() if level == "token" else of_rows).mean()
        rho = rho / torch.where(mean > 0, mean, 1)  # of no token it is NaN
    return rho


@needs("engine")
def masked(x: LossInputs, *, high: float, low: float = 0.0, level: str = "token") -> Factors:
    """ρ · 1[low ≤ ρ ≤ high]: masked importance sampling (MIS, Liu & Li 2025). IcePop, arXiv 2510.18855, has .5 and 5;
    TRL's default is masked(high=3, level="product"). Degenerate: masked(high=inf) is truncated(cap=inf)."""
    rho = _rho(x, "masked", level)
    return torch.where(_inside(rho, *_band("masked", low, high)), rho, 0)


@needs("engine")
def rejected(
    x: LossInputs, *, high: float, low: float = 0.0, statistic: str = "ratio", level: str = "geometric"
) -> Factors:
    """1[low ≤ v ≤ high]: rejection sampling, weight 1 inside a band; by default geometric (Geo-RS, Liu & Li 2025).

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
    inside = _inside(value, *_band("rejected", low, high)) | ~x.mask
    return (inside.all(1, keepdim=True).expand(inside.shape) if level == "max" else inside).to(value.dtype)


@needs("engine")
def m2po(x: LossInputs, *, threshold: float = 0.04) -> Factors:
    """0 for the largest (log ρ)² until the mean of the others, over the mini-batch's tokens, is below the threshold.

    M2PO, arXiv 2510.01161, of π_old as in AReaL, which keeps one token at least; equal ones go together here.
    """
    squared = _log_rho(x, "m2po").double() ** 2
    ordered = squared[x.mask].sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    out = pad(ordered, (0, 1), value=math.inf)[(means < _band("m2po", threshold, math.inf)[0]).sum()]
    return (squared < out).to(x.old_logprobs.dtype)


@needs("engine")
def vaco(x: LossInputs, *, bound: float) -> Factors:
    """0 where A · log ρ > 0 in a sequence whose mean |ρ − 1| > bound, since that would take it further off.

    VACO, arXiv 2603.01365, as in open-instruct at e6c3044; later it takes the total variation of probabilities.
    """
    off = ratios.sequence_level((_rho(x, "vaco", "token") - 1).abs(), x.mask) > _band("vaco", bound, math.inf)[0]
    return 1 - (off & (x.advantages * _log_rho(x, "vaco") > 0)).to(x.old_logprobs.dtype)


@needs("policy")
def opsm(x: LossInputs, *, delta: float, against: str = "engine") -> Factors:
    """0 where A < 0 and 1/|y| Σ_t log(π_sampler/π_θ) > delta, else 1: off-policy sequence masking.

    DeepSeek-V3.2, arXiv 2512.02556, eq. 9; delta, in nats, is not published. The sampler is the engine (paper, TRL), or
    π_old with `against="old"` (ms-swift). π_θ is that of the ratio, before the update. Degenerate: delta=inf is 1.
    """
    if against not in ("engine", "old"):
        unknown("policy that opsm compares with", against, ("engine", "old"))
    log_ratio = x.log_ratio.detach() + (_log_rho(x, "opsm") if against == "engine" else 0)
    return 1 - ((x.advantages < 0) & (-ratios.sequence_level(log_ratio, x.mask) > delta)).to(log_ratio.dtype)


def finished(x: LossInputs) -> Factors:
    """0 in responses that were cut off, else 1: as a filter, DAPO's overlong filtering (arXiv 2503.14476, sec. 3.4)."""
    if x.finished is None:
        raise ConfigError("finished leaves out responses that were cut off, but which were is not given")
    return x.finished.to(x.old_logprobs.dtype)


# ---------------------------------------------------------------------- ρ and its levels
LEVELS: dict[str, Callable[[Tensor, Mask], Tensor]] = {
    "token": ratios.LEVELS["token"],
    "segment": ratios.segment_level,
    "geometric": ratios.sequence_level,
    "product": ratios.LEVELS["product"],
}
"""Of log ρ, 0 outside the response. "Sequence" is the product in verl, TRL and SkyRL, the geometric mean
in ms-swift and open-instruct: nothing here is called that."""


def _at(level: str, values: Tensor, mask: Mask) -> Tensor:
    if level not in LEVELS:
        unknown("level of a correction", level, LEVELS)
    return LEVELS[level](values, mask)


def _log_rho(x: LossInputs, part: str) -> Tensor:
    if x.rollout_logprobs is None:
        raise ConfigError(f"{part} weighs π_old against the engine, but there are no rollout_logprobs")
    return torch.where(x.mask, x.old_logprobs - x.rollout_logprobs, 0).detach()


def _rho(x: LossInputs, part: str, level: str) -> Factors:
    """ρ at a level, 1 outside the response; finite, since inf · 0 is NaN."""
    log_rho = _at(level, _log_rho(x, part), x.mask)
    return log_rho.exp().clamp(max=torch.finfo(log_rho.dtype).max)


def _inside(value: Tensor, low: float, high: float) -> Tensor:
    return (low <= value) & (value <= high)


def _band(part: str, low: float, high: float) -> tuple[float, float]:
    if not 0 <= low <= high:
        raise ConfigError(f"{part}: {low:g} to {high:g} is no band: what is compared with its bounds is at least 0")
    return low, high


CORRECTIONS: dict[str, Callable[..., Factors]] = {
    "truncated": truncated, "masked": masked, "rejected": rejected, "m2po": m2po, "vaco": vaco, "opsm": opsm,
    "finished": finished,
}  # fmt: skip
