"""Losses, one pure function each, beside its equation; to be minimised: −Σ weights[b, t] · objective[b, t].

First the types, the levels of the importance ratio and what losses are made of; then the losses; last those that need
statistics of a whole mini-batch. PPO's clip is `grpo` with a range of (0.2, 0.2). Unless it says otherwise, every loss
has REINFORCE's gradient at π_θ = π_old.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.registry import Component, lookup, needs, needs_of
from moe_rl.routing.inputs import RouterInputs

PerToken = Float[Tensor, "batch time"]
Mask = Bool[Tensor, "batch time"]
Bound = float | PerToken


@dataclass(frozen=True, kw_only=True)
class CorrectionInputs:
    """Some rows of a mini-batch before its update, as corrections and filters get them: π_θ is not known yet.

    Everything is 0 or without meaning outside the response, `mask`; log-probs are of the batch's tokens, in nats, at
    the run's temperature. Raises ConfigError where shapes differ.
    """

    old_logprobs: PerToken
    """log π_old: what the ratio is taken against."""
    mask: Mask
    """Response tokens; it may have holes, which tools or an environment wrote."""
    advantages: PerToken
    """Per token; a method with one advantage per sequence finds the same number at all of its tokens."""
    rollout_logprobs: PerToken | None = None
    """log π_engine: as the engine that sampled reported it."""
    ref_logprobs: PerToken | None = None
    """log π_ref, under the routes of `logprobs`."""
    finished: Mask | None = None
    """Whether the token's response ended by itself, and was not cut off."""

    def __post_init__(self) -> None:
        shapes = {name: tuple(x.shape) for name, x in vars(self).items() if isinstance(x, Tensor)}
        if len(set(shapes.values())) > 1:
            raise ConfigError(f"the inputs of a loss must have one shape (batch, time), but their shapes are {shapes}")


@dataclass(frozen=True, kw_only=True)
class LossInputs(CorrectionInputs):
    """The same rows at their update. Only `logprobs` has a gradient, and `entropy` and `router` where a part needs
    them."""

    logprobs: PerToken
    """log π_θ."""
    weights: PerToken
    """The aggregation, for a loss times the corrections: these rows of what was computed over the whole mini-batch."""
    trust: PerToken | None = None
    """These rows of the product of the corrections over the whole mini-batch; None: they are computed of these rows."""
    marks: PerToken | None = None
    """These rows of `LossOutput.marks` of the whole mini-batch; None: these rows are all of it."""
    entropy: PerToken | None = None
    """Of the distribution each token was drawn from, in nats."""
    ratio_logprobs: PerToken | None = None
    """log π_θ under the ratio's own routes, where they are not the gradient's; without gradient."""
    router: RouterInputs | None = None
    """The routers behind every token."""
    lag: PerToken | None = None
    """Steps between the weights that drew a token and those that the step began with."""
    log_shift: PerToken | None = None
    """Log of a factor on every token's ratio, before its region, in nats; without gradient."""

    @property
    def log_ratio(self) -> PerToken:
        """log π_θ − log π_old, and `log_shift`, at response tokens, 0 elsewhere, whatever the padding holds.

        With `ratio_logprobs` its value is that of the ratio's routes, and its gradient that of `logprobs`.
        """
        difference = self.logprobs - self.old_logprobs.detach()
        if self.ratio_logprobs is not None:
            difference = self.ratio_logprobs - self.old_logprobs.detach() + (self.logprobs - self.logprobs.detach())
        if self.log_shift is not None:
            difference = difference + self.log_shift.detach()
        return torch.where(self.mask, difference, 0)


@dataclass(frozen=True)
class LossOutput:
    """A loss and what it did to every token."""

    loss: Float[Tensor, ""]
    """To be minimised; differentiable with respect to the log-probs of the policy."""
    log_ratio: PerToken
    """Log importance ratio the method used, in nats, detached, 0 outside the response. At sequence level it is the
    sequence's value at each of its tokens."""
    clipped_by: Int8[Tensor, "batch time"]
    """+1 where the upper bound took a response token's gradient, -1 where the lower one did, else 0."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that add up over the parts of a mini-batch, e.g. the value of each term."""
    marks: PerToken | None = None
    """What a loss that is marked `needs("mini_batch")` found out about its tokens from statistics of all of them. It is
    asked for it on the whole mini-batch first, without gradient; its parts then find it in `LossInputs.marks`, so that
    how a mini-batch is cut changes nothing."""


# --------------------------------------------------------------------------------------- levels of the importance ratio
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
        raise ConfigError(f"level={level!r} is not a level of a ratio. Choose {', '.join(LEVELS)}.")
    return LEVELS[level](log_ratio, mask)


# ---------------------------------------------------------------------------------------------- what losses are made of
def find_outside(x: LossInputs, ratio: PerToken, low: Bound, high: Bound, middle: float = 1.0) -> tuple[Mask, Mask]:
    """Mask a ratio is beyond middle + high and A > 0, and where below middle − low and A < 0, both strictly."""
    if not all(bool((torch.as_tensor(bound) >= 0).all()) for bound in (low, high)):  # no text for tensors every time
        raise ConfigError(f"clip_low={low} and clip_high={high} must be at least 0: ratios are clipped to [1 - "
                          "clip_low, 1 + clip_high]. inf turns a side off.")
    up, down = x.mask & (x.advantages > 0), x.mask & (x.advantages < 0)
    return up & (ratio > middle + high), down & (ratio < middle - low)


def clip_surrogate(x: LossInputs, log_ratio: PerToken, low: Bound, high: Bound, far: float = math.inf) -> LossOutput:
    """The pessimistic min(r·A, clip(r, 1−low, 1+high)·A) of PPO (arXiv 1707.06347, eq. 7), r = exp(log_ratio); where
    A < 0, at least far·A (arXiv 1912.09729).

    A gradient is lost only where r is *strictly* outside the range on the side its advantage pushes to; on the bound
    both branches are equal and it is kept, as `torch.minimum` of `torch.clamp` would have it.
    """
    ratio = log_ratio.detach().exp()
    above, below = find_outside(x, ratio, low, high)
    beyond = x.mask & (x.advantages < 0) & (ratio > far)
    kept = exponential(x, log_ratio, above | below | beyond)
    bounded = torch.where(above, 1 + high, torch.where(below, 1 - low, torch.where(beyond, far, kept)))
    return surrogate(x, bounded, log_ratio, above | beyond, below)


def exponential(x: LossInputs, log_ratio: PerToken, lost: Mask | bool = False) -> PerToken:
    """exp(log_ratio), and 1 where no gradient may follow, or for a weight of 0: that of a ratio which overflows would
    become 0 · inf."""
    return log_ratio.masked_fill((x.advantages == 0) | (x.weights == 0) | lost, 0).exp()


def finite_exp(log_ratio: PerToken) -> PerToken:
    """exp(log_ratio), at most what its type can hold; without gradient beyond."""
    return log_ratio.clamp(max=math.log(torch.finfo(log_ratio.dtype).max) - 1).exp()


def surrogate(x: LossInputs, ratio: PerToken, log_ratio: PerToken, *lost: Mask) -> LossOutput:
    """−Σ weights · ratio · A, the gradient that of `ratio`; `lost` is whose the upper and the lower bound took."""
    loss = -(x.weights.detach() * torch.where(x.mask, ratio * x.advantages.detach(), 0)).sum()
    above, below = lost or (torch.zeros_like(x.mask), torch.zeros_like(x.mask))
    return LossOutput(loss, log_ratio.detach(), above.to(torch.int8) - below.to(torch.int8))


def weigh_logprobs(x: LossInputs, weight: PerToken, log_ratio: PerToken, *lost: Mask) -> LossOutput:
    """−Σ weights · sg(weight) · A · log π: every token's gradient its own weight · A, and none where it is lost."""
    counts = x.mask & (x.advantages != 0) & (x.weights != 0)
    kept = functools.reduce(torch.logical_and, [~where for where in lost], counts)
    weight = torch.where(kept, weight.detach(), 0)
    return surrogate(x, weight * torch.where(weight != 0, x.logprobs, 0), log_ratio, *lost)


def require_one_advantage(x: LossInputs, name: str, instead: str) -> None:
    """Raise ConfigError where advantages differ within a response of a loss that has one ratio for all of it."""
    highest = x.advantages.masked_fill(~x.mask, -torch.inf).amax(1, keepdim=True)
    require(not bool((x.mask & (x.advantages != highest)).any()),
            f"{name} has one ratio and one advantage per sequence, but the advantages differ within a sequence. Use "
            f"{instead}, which takes one advantage per token.")


def require(fulfilled: bool, message: str) -> None:
    """Raise ConfigError with the message unless that is so."""
    if not fulfilled:
        raise ConfigError(message)


# -------------------------------------------------------------------------------------------------- losses with a ratio
def grpo(
    x: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.27, level: str = "token", dual: float = math.inf,
    cap: float = math.inf, log_clamp: float = math.inf,
) -> LossOutput:  # fmt: skip
    """min(min(w, cap)·A, clip(w)·A), not below dual·A where A < 0; w = π_θ/π_old of the token, or at another `level`.

    GSPO, arXiv 2507.18071, eq. 2 and 3 (Shao et al. 2024), with the two bounds of its section 5.1, and without the KL
    term, which is `terms.kl`. Options, each off at inf, and another `level` of `ratios`:

    - `dual`: max(…, c·A) where A < 0: a ratio beyond c has no gradient there either (arXiv 1912.09729; c = 3 in verl).
    - `cap`: min(min(w, δ)·A, clip(w)·A), INTELLECT-2's two-sided clip (arXiv 2505.07291). From 1 + clip_high on it is
      `dual`; below, it bounds the ratio where A > 0, and 1 + clip_high where A < 0.
    - `log_clamp`: log w cut to ± that many nats before anything else; beyond, it keeps its value and has no gradient.
      verl, OpenRLHF and SkyRL cut at 20 without asking.

    At level "sequence" the advantage of one token moves its whole sequence, as in TRL: that is not GSPO-token.
    """
    require(dual >= 1 and cap >= 1, f"grpo(dual={dual:g}, cap={cap:g}): both must be at least 1, usually dual=3 and "
                                    "cap=4; inf turns one off")  # fmt: skip
    require(log_clamp > 0, f"grpo(log_clamp={log_clamp:g}): the limit in nats must be positive, usually 20; inf turns "
                           "it off")
    token = x.log_ratio  # on the bound its gradient is kept, which torch's clamp drops since 2.15
    bounded = torch.where(token.detach().abs() > log_clamp, token.detach().sign() * log_clamp, token)
    ratio = at_level(level, bounded, x.mask)
    found = clip_surrogate(x, ratio, clip_low, min(clip_high, cap - 1), min(dual, max(cap, 1 + clip_high)))
    cut = (token.detach().abs() > log_clamp) & (x.advantages != 0) & (found.clipped_by == 0)
    return replace(found, clipped_by=torch.where(cut, token.detach().sign().to(torch.int8), found.clipped_by))


def gspo(x: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """min(s·A, clip(s)·A), s[i] = exp(1/|y_i| Σ_t log w[i,t]): one ratio per sequence.

    GSPO, arXiv 2507.18071, eq. 6 and 8; bounds of section 5.1, chosen there for responses of thousands of tokens.
    Raises ConfigError for advantages that differ within a sequence: they need `gspo_token`.
    """
    require_one_advantage(x, "gspo", "gspo_token")
    return clip_surrogate(x, sequence_level(x.log_ratio, x.mask), clip_low, clip_high)


def gspo_token(x: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """min(s·A, clip(s)·A), s[i,t] = sg[s_i] · π_θ / sg[π_θ]: an advantage per token.

    GSPO, arXiv 2507.18071, eq. 14 and 15 (sg stops the gradient). Equal to `gspo` in value and gradient when a sequence
    has one advantage and equal weights.
    """
    return clip_surrogate(x, sequence_value(x.log_ratio, x.mask), clip_low, clip_high)


def gmpo(x: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4, level: str = "sequence") -> LossOutput:
    """exp(1/|y_i| Σ_t κ[i,t]) · A, κ = log w, ≤ clip_high for A > 0, ≥ −clip_low for A < 0.

    GMPO, arXiv 2507.20673, with its range, in nats: the geometric mean of clipped token ratios; a clipped token keeps
    its part in it. `level="product"`: without 1/|y_i|, an ablation of the paper. One token: GRPO clipped to
    [e^−clip_low, e^clip_high]; an infinite range: GSPO without one. One advantage per sequence, else ConfigError.
    """
    require_one_advantage(x, "gmpo", "grpo or gspo_token")
    require(level in ("sequence", "product"), f"gmpo(level={level!r}): choose sequence or product")
    above, below = find_outside(x, x.log_ratio.detach(), clip_low, clip_high, middle=0.0)
    kappa = torch.where(above, clip_high, torch.where(below, -clip_low, x.log_ratio))
    ratio = at_level(level, kappa, x.mask)
    return surrogate(x, exponential(x, ratio), ratio, above, below)


def sapo(x: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05, level: str = "token") -> LossOutput:
    """4/τ · σ(τ·(w − 1)) · A, τ = tau_pos for A > 0, else tau_neg. A token's gradient is w · sech²(τ(w−1)/2) · A.

    SAPO, arXiv 2511.20347, with its τ. Nothing is clipped: the gate closes smoothly on both sides. As τ → 0 the
    gradient is w · A. Another level of `ratios` makes, e.g., a soft GSPO.
    """
    require(tau_pos > 0 and tau_neg > 0, f"sapo(tau_pos={tau_pos:g}, tau_neg={tau_neg:g}): both must be positive")
    log_ratio = at_level(level, x.log_ratio, x.mask)
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(x.advantages > 0, tau_pos)
    return surrogate(x, 4 / tau * torch.sigmoid(tau * (finite_exp(log_ratio) - 1)), log_ratio)


def crossed(
    x: LossInputs, *, weigh: str = "token", clip: str = "sequence", clip_low: float = 0.2, clip_high: float = 0.27
) -> LossOutput:
    """weight · A · ∇ log π, 0 where clipped; weight and clip of token or sequence.

    `weigh` says which ratio is the weight: w[i,t] of the token (GSPO, arXiv 2507.18071, eq. 12), s[i] of the sequence
    (eq. 10), that of its segment, the product over the response, or none. `clip` says which of them the range bounds.
    (token, token) has GRPO's gradient, (sequence, sequence) GSPO's; a clipped token keeps its value, which no gradient
    follows.
    """
    choices = ("token", "sequence", "none", "segment", "product")
    require({weigh, clip} <= set(choices),
             f"crossed(weigh={weigh!r}, clip={clip!r}): choose each from {', '.join(choices)}")  # fmt: skip
    token = x.log_ratio.detach()
    weight, bounded = (at_level(name, token, x.mask) if name in LEVELS else 0 * token for name in (weigh, clip))
    above, below = find_outside(x, bounded.exp(), clip_low, clip_high)
    kept = x.mask & ~above & ~below
    ratio = exponential(x, weight + torch.where(kept, x.logprobs - x.logprobs.detach(), 0))
    return surrogate(x, ratio, weight, above, below)


# ------------------------------------------------------- log π times a weight without gradient: REINFORCE where it is 1
def reinforce(x: LossInputs) -> LossOutput:
    """A · log π (Williams 1992). No ratio is used: the one it reports bounds nothing.

    Kimi k1.5 and DRO are this with the k2 term against π_old; GPG and RLOO, with advantages of their own.
    """
    return weigh_logprobs(x, torch.ones_like(x.logprobs), x.log_ratio)


def cispo(x: LossInputs, *, clip_low: float = math.inf, clip_high: float = 4.0, mask: str = "none") -> LossOutput:
    """sg[clip(w, 1 − clip_low, 1 + clip_high)] · A · log π.

    CISPO, arXiv 2506.13585, eq. 4 and 5: the paper turns the lower bound off and gives no number for the upper one; 4
    is SkyRL's cap of 5. Bounds are distances from 1; TRL and ms-swift give the cap itself. `mask="unified"` takes out
    what PPO's clip with this range would (eq. 7). Bounds of 0: REINFORCE; of inf: w · A · ∇ log π.
    """
    require(mask in ("none", "unified"), f"cispo(mask={mask!r}): choose none or unified")
    ratio = x.log_ratio.detach().exp()
    lost = find_outside(x, ratio, clip_low, clip_high)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return weigh_logprobs(x, weight, x.log_ratio, *(lost if mask == "unified" else ()))


def minirl(x: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.27) -> LossOutput:
    """sg[M · w] · A · log π, M = 0 where PPO's clip has no gradient: GRPO's gradient.

    MiniRL, arXiv 2512.01374, with its range. Its weight is π_θ / π_engine = w · π_old / π_engine, whose second factor
    is a correction (`truncated`, there at 5); it has no length norm, and advantages that no deviation divides.
    """
    ratio = x.log_ratio.detach().exp()
    return weigh_logprobs(x, ratio, x.log_ratio, *find_outside(x, ratio, clip_low, clip_high))


def band(x: LossInputs, *, low: float = 0.5, high: float = 5.0) -> LossOutput:
    """sg[w] · A · log π for low ≤ w ≤ high, else 0.

    GLM-5, arXiv 2602.15763, against the engine (`anchor="engine"`); the band is IcePop's (arXiv 2510.18855), which is
    one of π_old / π_engine, a correction. [0, inf]: w · A · ∇ log π.
    """
    require(0 <= low <= 1 <= high, f"band(low={low:g}, high={high:g}): the range must contain 1, the ratio before an "
                                   "update")
    ratio, pushed = x.log_ratio.detach().exp(), x.mask & (x.advantages != 0)
    return weigh_logprobs(x, ratio, x.log_ratio, pushed & (ratio > high), pushed & (ratio < low))


def dppo(
    x: LossInputs, *, kind: str = "tv", low: float | None = None, high: float | None = None, cap: float = math.inf
) -> LossOutput:
    """min(w, cap) · A, 0 if the probability has moved too far in the direction of A.

    DPPO, arXiv 2602.04879, eq. 13 and 14; the paper anchors at the engine (`anchor="engine"`). A token whose π went up
    under A > 0, or down under A < 0, is lost where the distance is > high, or > low: |π − π_old| for "tv"; for "kl"
    KL(π_old ‖ π) of two outcomes, this token or another. The gradient is sg[min(w, cap)] · A · ∇ log π. None: 0.15 for
    tv and 0.05 for kl, verl's recipe (SkyRL and prime-rl: 0.2 for tv). Bounds of 1 for tv, cap inf: w · A.
    """
    require(kind in ("tv", "kl"), f"dppo(kind={kind!r}): choose tv or kl")
    low, high = ({"tv": 0.15, "kl": 0.05}[kind] if bound is None else bound for bound in (low, high))
    require(low >= 0 and high >= 0 and cap >= 1,
             f"dppo(low={low:g}, high={high:g}, cap={cap:g}): bounds must be >= 0 and the cap >= 1")  # fmt: skip
    log_ratio, old = x.log_ratio.detach(), torch.where(x.mask, x.old_logprobs, 0)
    distance = ((old + log_ratio).exp() - old.exp()).abs()
    if kind == "kl":
        other, old_other = -torch.expm1((old + log_ratio).clamp(max=0)), -torch.expm1(old)
        distance = torch.xlogy(old_other, old_other) - torch.xlogy(old_other, other) - old.exp() * log_ratio
    above = x.mask & (x.advantages > 0) & (log_ratio > 0) & (distance > high)
    below = x.mask & (x.advantages < 0) & (log_ratio < 0) & (distance > low)
    return _weigh_kept(x, above, below, cap)


def ipo(x: LossInputs, *, threshold: float = 0.1) -> LossOutput:
    """w · A, 0 where |π − π_old| > threshold, in whichever direction A pushes.

    prime-rl's loss "ipo", which anchors at the engine (`anchor="engine"`), with its threshold: `dppo` has two bounds,
    each on the side that A pushes to. The gradient is w · A · ∇ log π. threshold 1: w · A.
    """
    require(threshold >= 0, f"ipo(threshold={threshold:g}): the distance of probabilities must be from 0 to 1")
    log_ratio, old = x.log_ratio.detach(), torch.where(x.mask, x.old_logprobs, 0)
    far = x.mask & (x.advantages != 0) & (((old + log_ratio).exp() - old.exp()).abs() > threshold)
    return _weigh_kept(x, far & (log_ratio > 0), far & (log_ratio < 0))


def cppo(x: LossInputs, *, threshold: float = 0.2, budget: float = 0.02, last: float = 0.8) -> LossOutput:
    """w · A, 0 where A pushes π away from π_old and v_t · |π − π_old| > min(δ, δ + b · V − S).

    CPPO, arXiv 2606.10968, eq. 8 to 11, with the distance of the sampled token, and eq. 22: δ is the threshold. v_t
    falls from 1 to `last` over a response. V and S are the sums of v and of v · |π − π_old| over the tokens before. b
    is the 90 % quantile of |π − π_old| in the response, at least the budget and at most twice that. The paper anchors
    at the engine (`anchor="engine"`), and has δ = 0.15 for dense models. The gradient is w · A · ∇ log π.
    """
    require(threshold >= 0 and budget >= 0 and 0 < last <= 1,
            f"cppo(threshold={threshold:g}, budget={budget:g}, last={last:g}): the threshold and the budget must be at "
            "least 0, and last above 0 and at most 1")  # fmt: skip
    log_ratio, old = x.log_ratio.detach(), torch.where(x.mask, x.old_logprobs, 0)
    distance = torch.where(x.mask, ((old + log_ratio).exp() - old.exp()).abs(), torch.nan)
    bound = distance.nanquantile(0.9, dim=-1, keepdim=True).clamp(budget, 2 * budget)
    place, length = x.mask.cumsum(-1) - 1, x.mask.sum(-1, keepdim=True)
    weights = torch.where(x.mask, 1 - (1 - last) * place / (length - 1).clamp(min=1), 0)
    spent = weights * distance.nan_to_num()
    left = bound * (weights.cumsum(-1) - weights) - (spent.cumsum(-1) - spent)
    far = x.mask & (x.advantages * log_ratio > 0) & (spent > threshold + left.clamp(max=0))
    return _weigh_kept(x, far & (log_ratio > 0), far & (log_ratio < 0))


@needs("lag")
def a3po(x: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, high: float = math.inf) -> LossOutput:
    """PPO's clip of π_θ/π_prox, times v = π_prox/π_old where v ≤ high; π_prox = sg[π_old · w^α], α = 1 − 1/lag.

    A-3PO, arXiv 2512.06547, in the log-linear form of AReaL, whose example leaves tokens out of the loss where v is
    above 5. π_prox stands for the policy one step behind π_θ; α = 0 at lag 0 and 1, where the loss is `grpo` with this
    range. π_old is what drew the tokens: `anchor="engine"`.
    """
    if x.lag is None:
        raise ConfigError("a3po needs the lag: how many steps old the weights were that sampled each token. Give lag.")
    require(high > 0, f"a3po(high={high:g}): the largest weight of a token must be positive; inf keeps all")
    log_ratio, share = x.log_ratio.detach(), 1 / x.lag.clamp(min=1)
    weight = finite_exp((1 - share) * log_ratio)
    kept = replace(x, weights=x.weights * torch.where(weight > high, 0, weight))
    return clip_surrogate(kept, share * log_ratio + (x.log_ratio - log_ratio), clip_low, clip_high)


def topr(x: LossInputs, *, level: str = "product") -> LossOutput:
    """sg[1 for A > 0, else min(w, 1)] · A · log π.

    TOPR, arXiv 2503.14286, eq. 8, with w of the whole response; ROLL has the token's (`level="token"`). Both ask for
    the sign of the reward, this for that of A. A > 0 alone: REINFORCE; A < 0 alone, by token: CISPO within [0, 1].
    """
    log_ratio = at_level(level, x.log_ratio.detach(), x.mask)
    return weigh_logprobs(x, log_ratio.clamp(max=0).masked_fill(x.advantages > 0, 0).exp(), log_ratio)


def vespo(
    x: LossInputs, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> LossOutput:
    """sg[w^k · e^(λ(1 − w))] · A · log π, w of the response.

    VESPO, arXiv 2602.10693, with TRL's defaults. The weight goes to 0 on both sides of w = 1. TRL cuts log w to
    [log 1e-8, 20] and that of tokens to ±20; here nothing is cut. k = λ = 0: REINFORCE.
    """
    require(all(one >= 0 for one in (k_pos, lambda_pos, k_neg, lambda_neg)), f"vespo(k_pos={k_pos:g}, "
                                                                             f"lambda_pos={lambda_pos:g}, "
                                                                             f"k_neg={k_neg:g}, "
                                                                             f"lambda_neg={lambda_neg:g}): all must be "
                                                                             "at least 0")  # fmt: skip
    log_ratio = at_level("product", x.log_ratio.detach(), x.mask)
    positive, negative = (k * log_ratio - rate * (finite_exp(log_ratio) - 1)
                          for k, rate in ((k_pos, lambda_pos), (k_neg, lambda_neg)))  # fmt: skip
    return weigh_logprobs(x, torch.where(x.advantages > 0, positive, negative).exp(), log_ratio)


# ------------------- statistics of the whole mini-batch under π_θ, as marks; without marks the given rows are all of it
@needs("mini_batch")
def clip_cov(
    x: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, share: float = 2e-4, low: float = 1.0,
    high: float = 5.0, seed: int = 0,
) -> LossOutput:  # fmt: skip
    """PPO's clip without a random `share` of tokens whose covariance is in (low, high).

    Clip-Cov, arXiv 2505.22617: cov = (A − mean A) · (log π − mean log π), means over the mini-batch's response tokens;
    share · tokens, at least one, have neither value nor gradient, and are reported as clipped on the side their
    advantage pushes to. The draw is a function of `seed` and of which tokens the candidates are, so that rounding, or
    another engine, draws the same ones. Defaults are verl's. share 0: `grpo` with this range.
    """
    found = clip_surrogate(x, x.log_ratio, clip_low, clip_high)
    marks = x.marks
    if marks is None:
        cov = _covariance(x)
        kept = (x.mask & (found.clipped_by == 0) & (cov > low) & (cov < high)).flatten().nonzero()[:, 0]
        which = zlib.crc32(kept.cpu().numpy().tobytes())
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(which ^ seed))
        marks = _mark_first(x, kept[order.to(kept.device)], share)
    gone = x.mask & (marks > 0)
    found = clip_surrogate(replace(x, advantages=x.advantages.masked_fill(gone, 0)), x.log_ratio, clip_low, clip_high)
    side = torch.where(gone, x.advantages, found.clipped_by).sign().to(torch.int8)
    return replace(found, clipped_by=side, marks=marks)


@needs("mini_batch")
def kl_cov(x: LossInputs, *, share: float = 2e-4, coef: float = 0.1) -> LossOutput:
    """w · A, − coef · |log w| at the `share` of tokens with the highest covariance (`clip_cov`).

    KL-Cov, arXiv 2505.22617: at least one token; of equals the first. Defaults are verl's; SkyRL has coef 1. The
    penalty is weighed and corrected as the loss is. share or coef 0: w · A. At π_θ = π_old rounding decides the sign of
    the penalty's gradient, so there the cut into micro-batches changes it.
    """
    require(coef >= 0, f"kl_cov(coef={coef:g}): the coefficient must be at least 0")
    highest = _covariance(x).masked_fill(~x.mask, -torch.inf).flatten().argsort(descending=True, stable=True)
    marks = _mark_first(x, highest, share) if x.marks is None else x.marks
    found = surrogate(x, exponential(x, x.log_ratio), x.log_ratio)
    penalty = torch.where(marks > 0, x.log_ratio.abs(), 0)
    return replace(found, loss=found.loss + coef * (x.weights.detach() * penalty).sum(), marks=marks)


@needs("mini_batch")
def sat(
    x: LossInputs, *, base: str = "grpo", clip_low: float = 0.2, clip_high: float = 0.2, quantile: float = 0.9,
    exponent: float = 2.0,
) -> LossOutput:  # fmt: skip
    """PPO's clip; its range contracts on the side where a token already differs from the engine.

    SAT, arXiv 2607.18722: d = sg[log π_θ − log π_engine], q the quantile of |d| over the mini-batch's response tokens,
    h = 1 where |d| ≤ q or q = 0, else 1 / (1 + (|d|/q)^exponent); the upper bound is 1 + clip_high · h where d > 0, the
    lower 1 − clip_low · h where d < 0. What was read of the paper leaves open: the kernel beyond its name, Hill (this
    one falls to 1/2 right past q), how the quantile interpolates (here linearly), and what GSPO's one ratio does with
    bounds of tokens: base "gspo" is `gspo_token`, which clips each alone. The paper takes q over a micro-batch. Its
    range, 0.2, is for tokens. quantile 1: the base itself.
    """
    require(base in ("grpo", "gspo"), f"sat(base={base!r}): choose grpo or gspo")
    require(0 <= quantile <= 1 and exponent > 0,
            f"sat(quantile={quantile:g}, exponent={exponent:g}): quantile must be a share of tokens, and exponent "
            "positive")  # fmt: skip
    if x.rollout_logprobs is None:
        raise ConfigError("sat needs the log-probs of the engine. Give rollout_logprobs.")
    gap = torch.where(x.mask, x.log_ratio + x.old_logprobs - x.rollout_logprobs, 0).detach()
    sizes = gap.abs()
    marks = x.marks
    if marks is None:
        marks = torch.full_like(gap, sizes[x.mask].quantile(quantile).item() if bool(x.mask.any()) else 0.0)
    hill = torch.where((sizes > marks) & (marks > 0), 1 / (1 + (sizes / marks) ** exponent), 1)
    ratio = x.log_ratio if base == "grpo" else sequence_value(x.log_ratio, x.mask)
    low, high = clip_low * torch.where(gap < 0, hill, 1), clip_high * torch.where(gap > 0, hill, 1)
    return replace(clip_surrogate(x, ratio, low, high), marks=marks)


@needs("mini_batch", "entropy")
def high_entropy(
    x: LossInputs, *, share: float = 0.2, base: str = "grpo", options: Mapping[str, Any] | None = None
) -> LossOutput:
    """The loss `base` at the `share` of tokens with the highest entropy, 0 at the others.

    arXiv 2506.01939, with its 20 %: entropies of at least the quantile 1 − share, interpolated linearly, over the
    mini-batch's response tokens. The others stay in |y| and N. TRL and ms-swift take the quantile over a micro-batch.
    `base` has `options`. share 1: `base`. Raises ConfigError for a base that needs more than log-probs.
    """
    require(0 < share <= 1, f"high_entropy(share={share:g}): the share of tokens must be above 0 and at most 1")
    loss = lookup("loss", Component(base, **(options or {})), LOSSES)
    require(not needs_of(loss), f"high_entropy(base={base!r}): the base must be a loss that needs log-probs only")
    if x.entropy is None:
        raise ConfigError("high_entropy selects tokens by their entropy. Give entropy.")
    entropy, marks = x.entropy.detach(), x.marks
    if marks is None:
        least = entropy[x.mask].quantile(1 - share) if bool(x.mask.any()) else 0.0
        marks = (x.mask & (entropy >= least)).to(entropy.dtype)
    found = loss(replace(x, weights=x.weights * marks, marks=None))
    return replace(found, clipped_by=torch.where(marks > 0, found.clipped_by, 0), marks=marks)


def _covariance(x: LossInputs) -> PerToken:
    """(A − mean A) · (log π − mean log π), means over the response tokens; 0 elsewhere, without gradient."""
    return torch.mul(*(torch.where(x.mask, y - y[x.mask].mean(), 0) for y in (x.advantages, x.logprobs.detach())))


def _weigh_kept(x: LossInputs, above: Mask, below: Mask, cap: float = math.inf) -> LossOutput:
    """min(w, cap) · A, 0 where a bound took the token; the gradient is sg[min(w, cap)] · A · ∇ log π."""
    log_ratio = x.log_ratio.detach()
    weight = torch.where(above | below | (x.advantages == 0) | (x.weights == 0), 0, log_ratio.exp().clamp(max=cap))
    return surrogate(x, weight * (1 + (x.log_ratio - log_ratio)), log_ratio, above, below)


def _mark_first(x: LossInputs, order: Int[Tensor, " tokens"], share: float) -> PerToken:
    """1 at the first of some tokens, as many as are that share of the response tokens, at least one; 0 elsewhere."""
    require(0 <= share <= 1, f"share={share:g}: a share of tokens must be from 0 to 1")
    count = max(1, int(share * int(x.mask.sum()))) if share else 0
    return torch.zeros_like(x.logprobs.detach()).flatten().index_fill(0, order[:count], 1).view_as(x.mask)


LOSSES: dict[str, Callable[..., LossOutput]] = {
    "grpo": grpo, "gspo": gspo, "gspo_token": gspo_token, "gmpo": gmpo, "sapo": sapo, "crossed": crossed,
    "reinforce": reinforce, "cispo": cispo, "minirl": minirl, "band": band, "dppo": dppo, "ipo": ipo, "cppo": cppo,
    "a3po": a3po, "topr": topr, "vespo": vespo, "clip_cov": clip_cov, "kl_cov": kl_cov, "sat": sat,
    "high_entropy": high_entropy,
}  # fmt: skip
CLIPS = {"grpo": "level", "gspo": "sequence", "gspo_token": "sequence", "crossed": "clip", "sat": "base"}
"""At which level of ratio a loss has its range, so that one which never clips is found out: that, or the option that
says it, be it by the name of another loss."""
