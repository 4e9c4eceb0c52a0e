"""Losses, one pure function each, with its equation; to be minimised: −Σ weights[b, t] · objective[b, t].

PPO's clip is `grpo` with a range of (0.2, 0.2). Unless stated otherwise, every loss has REINFORCE's gradient at
π_θ = π_old. The last losses need statistics of a whole mini-batch.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from moe_rl.errors import ConfigError, renamed
from moe_rl.registry import AtLeastOne, Component, NotNegative, Positive, PositiveShare, Share, lookup, needs, needs_of
from moe_rl.routing.inputs import RouterInputs

PerToken = Float[Tensor, "batch time"]
Mask = Bool[Tensor, "batch time"]
Bound = float | PerToken
Level = Literal["token", "sequence", "sequence_token", "segment", "product"]
Crossed = Literal["token", "sequence", "none", "segment", "product"]


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


@renamed(trust="importance_weights", marks="batch_statistics")
@dataclass(frozen=True, kw_only=True)
class LossInputs(CorrectionInputs):
    """The same rows at their update. Only `logprobs` has a gradient, and `entropy` and `router` where a part needs
    them."""

    logprobs: PerToken
    """log π_θ."""
    weights: PerToken
    """The aggregation, for a loss times the corrections: these rows of what was computed over the whole mini-batch."""
    importance_weights: PerToken | None = None
    """These rows of the product of the corrections over the whole mini-batch; None: they are computed of these rows."""
    batch_statistics: PerToken | None = None
    """These rows of `LossOutput.batch_statistics` of the whole mini-batch; None: these rows are all of it."""
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


@renamed(marks="batch_statistics")
@dataclass(frozen=True)
class LossOutput:
    """A loss and its effect on every token."""

    loss: Float[Tensor, ""]
    """To be minimised; differentiable with respect to the log-probs of the policy."""
    log_ratio: PerToken
    """The loss's log importance ratio in nats, detached, 0 outside the response. At sequence level each token has the
    value of its sequence."""
    clipped_by: Int8[Tensor, "batch time"]
    """+1 where the upper bound took a response token's gradient, -1 where the lower one did, else 0."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that add up over the parts of a mini-batch, e.g. the value of each term."""
    batch_statistics: PerToken | None = None
    """Statistics of the whole mini-batch, per token, of a loss with `needs("mini_batch")`. It is first called on all of
    it, without gradient; its parts get these in `LossInputs.batch_statistics`."""


# --------------------------------------------------------------------------------------- levels of the importance ratio
def sequence_level(log_ratio: PerToken, mask: Mask) -> PerToken:
    """log s_i = 1/|y_i| Σ_t log w[i,t], at each of its response tokens (GSPO, arXiv 2507.18071, eq. 8)."""
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean, 0)


def sequence_value(log_ratio: PerToken, mask: Mask) -> PerToken:
    """log s[i,t] = sg[log s_i] + log π_θ − sg[log π_θ]: the sequence's value, the token's gradient (eq. 15)."""
    sequence = sequence_level(log_ratio, mask).detach()
    return sequence + torch.where(mask, log_ratio - log_ratio.detach(), 0)


def segment_level(log_ratio: PerToken, mask: Mask) -> PerToken:
    """The mean of log w over the token's own run of tokens in `mask`: a turn of a conversation, as in ROLL. One turn:
    the sequence's."""
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


# -------------------------------------------------------------------------------------------------------- shared parts
def find_outside(x: LossInputs, ratio: PerToken, low: Bound, high: Bound, middle: float = 1.0) -> tuple[Mask, Mask]:
    """Where a ratio is above middle + high and A > 0, and where it is below middle − low and A < 0, both strictly."""
    up, down = x.mask & (x.advantages > 0), x.mask & (x.advantages < 0)
    return up & (ratio > middle + high), down & (ratio < middle - low)


def clip_surrogate(x: LossInputs, log_ratio: PerToken, low: Bound, high: Bound, far: float = math.inf) -> LossOutput:
    """The pessimistic min(r·A, clip(r, 1−low, 1+high)·A) of PPO (arXiv 1707.06347, eq. 7), r = exp(log_ratio); where
    A < 0, at least far·A (arXiv 1912.09729). A gradient is lost where r is *strictly* outside the range."""
    ratio = log_ratio.detach().exp()
    above, below = find_outside(x, ratio, low, high)
    beyond = x.mask & (x.advantages < 0) & (ratio > far)
    inside = exponential(x, log_ratio, above | below | beyond)
    bounded = torch.where(above, 1 + high, torch.where(below, 1 - low, torch.where(beyond, far, inside)))
    return surrogate(x, bounded, log_ratio, above | beyond, below)


def exponential(x: LossInputs, log_ratio: PerToken, lost: Mask | bool = False) -> PerToken:
    """exp(log_ratio), and 1 without gradient where it is lost or has a factor of 0: inf would become 0 · inf."""
    return log_ratio.masked_fill((x.advantages == 0) | (x.weights == 0) | lost, 0).exp()


def finite_exp(log_ratio: PerToken) -> PerToken:
    """exp(log_ratio), bounded by its type; without gradient beyond."""
    return log_ratio.clamp(max=math.log(torch.finfo(log_ratio.dtype).max) - 1).exp()


def surrogate(x: LossInputs, ratio: PerToken, log_ratio: PerToken, *lost: Mask) -> LossOutput:
    """−Σ weights · ratio · A, differentiable in `ratio`. `lost` = (clipped above, clipped below)."""
    loss = -(x.weights.detach() * torch.where(x.mask, ratio * x.advantages.detach(), 0)).sum()
    above, below = lost or (torch.zeros_like(x.mask), torch.zeros_like(x.mask))
    return LossOutput(loss, log_ratio.detach(), above.to(torch.int8) - below.to(torch.int8))


def weigh_logprobs(x: LossInputs, weight: PerToken, log_ratio: PerToken, *lost: Mask) -> LossOutput:
    """−Σ weights · sg(weight) · A · log π, without gradient where it is lost."""
    counts = x.mask & (x.advantages != 0) & (x.weights != 0)
    trained = functools.reduce(torch.logical_and, [~where for where in lost], counts)
    weight = torch.where(trained, weight.detach(), 0)
    return surrogate(x, weight * torch.where(weight != 0, x.logprobs, 0), log_ratio, *lost)


def require_one_advantage(x: LossInputs, name: str, instead: str) -> None:
    """Raise ConfigError where advantages differ within a response of a loss that has one ratio for all of it."""
    highest = x.advantages.masked_fill(~x.mask, -torch.inf).amax(1, keepdim=True)
    if bool((x.mask & (x.advantages != highest)).any()):
        raise ConfigError(f"{name} has one advantage per sequence, but they differ within a sequence. Use {instead}.")


# -------------------------------------------------------------------------------------------------- losses with a ratio
def grpo(
    x: LossInputs,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.27,
    level: Level = "token",
    dual: AtLeastOne = math.inf,
    cap: AtLeastOne = math.inf,
    log_clamp: Positive = math.inf,
) -> LossOutput:
    """min(min(w, cap)·A, clip(w)·A), not below dual·A where A < 0; w = π_θ/π_old of the token, or at another `level`.

    GSPO, arXiv 2507.18071, eq. 2 and 3 (Shao et al. 2024), with the two bounds of its section 5.1. The KL term is
    `terms.kl`. Options that are off at inf:

    - `dual`: max(…, c·A) where A < 0 (arXiv 1912.09729; c = 3 in verl).
    - `cap`: min(min(w, δ)·A, clip(w)·A), INTELLECT-2's two-sided clip (arXiv 2505.07291). From 1 + clip_high on it is
      `dual`; below, it bounds the ratio where A > 0, and 1 + clip_high where A < 0.
    - `log_clamp`: log w cut to ± that many nats first, without gradient beyond (20 in verl, OpenRLHF and SkyRL).

    At level "sequence" the advantage of one token moves its whole sequence, as in TRL: that is not GSPO-token.
    """
    token = x.log_ratio  # on the bound its gradient is kept, which torch's clamp drops since 2.15
    bounded = torch.where(token.detach().abs() > log_clamp, token.detach().sign() * log_clamp, token)
    ratio = LEVELS[level](bounded, x.mask)
    output = clip_surrogate(x, ratio, clip_low, min(clip_high, cap - 1), min(dual, max(cap, 1 + clip_high)))
    cut = (token.detach().abs() > log_clamp) & (x.advantages != 0) & (output.clipped_by == 0)
    return replace(output, clipped_by=torch.where(cut, token.detach().sign().to(torch.int8), output.clipped_by))


def gspo(x: LossInputs, *, clip_low: NotNegative = 3e-4, clip_high: NotNegative = 4e-4) -> LossOutput:
    """min(s·A, clip(s)·A), s[i] = exp(1/|y_i| Σ_t log w[i,t]): one ratio per sequence.

    GSPO, arXiv 2507.18071, eq. 6 and 8; bounds of section 5.1, for responses of thousands of tokens. Raises ConfigError
    for advantages that differ within a sequence: they need `gspo_token`.
    """
    require_one_advantage(x, "gspo", "gspo_token")
    return clip_surrogate(x, sequence_level(x.log_ratio, x.mask), clip_low, clip_high)


def gspo_token(x: LossInputs, *, clip_low: NotNegative = 3e-4, clip_high: NotNegative = 4e-4) -> LossOutput:
    """min(s·A, clip(s)·A), s[i,t] = sg[s_i] · π_θ / sg[π_θ]: an advantage per token.

    GSPO, arXiv 2507.18071, eq. 14 and 15 (sg stops the gradient). One advantage and equal weights per sequence: `gspo`.
    """
    return clip_surrogate(x, sequence_value(x.log_ratio, x.mask), clip_low, clip_high)


def gmpo(
    x: LossInputs,
    *,
    clip_low: NotNegative = 0.4,
    clip_high: NotNegative = 0.4,
    level: Literal["sequence", "product"] = "sequence",
) -> LossOutput:
    """exp(1/|y_i| Σ_t κ[i,t]) · A, κ = log w, ≤ clip_high for A > 0, ≥ −clip_low for A < 0.

    GMPO, arXiv 2507.20673, with its range, in nats: the geometric mean of clipped token ratios. `level="product"`:
    without 1/|y_i|, an ablation of the paper. One token: GRPO clipped to [e^−clip_low, e^clip_high]; an infinite range:
    GSPO without one. One advantage per sequence, else ConfigError.
    """
    require_one_advantage(x, "gmpo", "grpo or gspo_token")
    above, below = find_outside(x, x.log_ratio.detach(), clip_low, clip_high, middle=0.0)
    kappa = torch.where(above, clip_high, torch.where(below, -clip_low, x.log_ratio))
    ratio = LEVELS[level](kappa, x.mask)
    return surrogate(x, exponential(x, ratio), ratio, above, below)


def sapo(x: LossInputs, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05, level: Level = "token") -> LossOutput:
    """4/τ · σ(τ·(w − 1)) · A, τ = tau_pos for A > 0, else tau_neg. A token's gradient is w · sech²(τ(w−1)/2) · A.

    SAPO, arXiv 2511.20347, with its τ. Nothing is clipped: the gate closes smoothly on both sides. As τ → 0 the
    gradient is w · A. Level "sequence" makes a soft GSPO.
    """
    log_ratio = LEVELS[level](x.log_ratio, x.mask)
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(x.advantages > 0, tau_pos)
    return surrogate(x, 4 / tau * torch.sigmoid(tau * (finite_exp(log_ratio) - 1)), log_ratio)


def crossed(
    x: LossInputs,
    *,
    weigh: Crossed = "token",
    clip: Crossed = "sequence",
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.27,
) -> LossOutput:
    """weight · A · ∇ log π, 0 where clipped; weight and clip of token or sequence.

    `weigh` is the weight: w[i,t] of the token (GSPO, arXiv 2507.18071, eq. 12), s[i] of the sequence (eq. 10), the
    ratio of its segment, the product over the response, or none. `clip` is the one that the range bounds. (token,
    token) has GRPO's gradient, (sequence, sequence) GSPO's; a clipped token keeps its value.
    """
    token = x.log_ratio.detach()
    weight, bounded = (LEVELS[name](token, x.mask) if name in LEVELS else 0 * token for name in (weigh, clip))
    above, below = find_outside(x, bounded.exp(), clip_low, clip_high)
    inside = x.mask & ~above & ~below
    ratio = exponential(x, weight + torch.where(inside, x.logprobs - x.logprobs.detach(), 0))
    return surrogate(x, ratio, weight, above, below)


# ------------------------------------------------------- log π times a weight without gradient: REINFORCE where it is 1
def reinforce(x: LossInputs) -> LossOutput:
    """A · log π (Williams 1992). No ratio is used: the one it reports bounds nothing."""
    return weigh_logprobs(x, torch.ones_like(x.logprobs), x.log_ratio)


def cispo(
    x: LossInputs,
    *,
    clip_low: NotNegative = math.inf,
    clip_high: NotNegative = 4.0,
    mask: Literal["none", "unified"] = "none",
) -> LossOutput:
    """sg[clip(w, 1 − clip_low, 1 + clip_high)] · A · log π.

    CISPO, arXiv 2506.13585, eq. 4 and 5, without lower bound; the upper one is not published, 4 is SkyRL's cap of 5.
    Bounds are distances from 1; TRL and ms-swift give the cap itself. `mask="unified"` also masks as PPO's clip with
    this range (eq. 7). Bounds of 0: REINFORCE; of inf: w · A · ∇ log π.
    """
    ratio = x.log_ratio.detach().exp()
    lost = find_outside(x, ratio, clip_low, clip_high)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return weigh_logprobs(x, weight, x.log_ratio, *(lost if mask == "unified" else ()))


def minirl(x: LossInputs, *, clip_low: NotNegative = 0.2, clip_high: NotNegative = 0.27) -> LossOutput:
    """sg[M · w] · A · log π, M = 0 where PPO's clip has no gradient: GRPO's gradient.

    MiniRL, arXiv 2512.01374, with its range. Its weight π_θ / π_engine is w times a correction (`truncated`, there at
    5); it has no length norm and no deviation.
    """
    ratio = x.log_ratio.detach().exp()
    return weigh_logprobs(x, ratio, x.log_ratio, *find_outside(x, ratio, clip_low, clip_high))


def band(x: LossInputs, *, low: Share = 0.5, high: AtLeastOne = 5.0) -> LossOutput:
    """sg[w] · A · log π for low ≤ w ≤ high, else 0.

    GLM-5, arXiv 2602.15763, against the engine (`anchor="engine"`); the band is that of IcePop (arXiv 2510.18855), a
    correction. [0, inf]: w · A · ∇ log π.
    """
    ratio, pushed = x.log_ratio.detach().exp(), x.mask & (x.advantages != 0)
    return weigh_logprobs(x, ratio, x.log_ratio, pushed & (ratio > high), pushed & (ratio < low))


def dppo(
    x: LossInputs,
    *,
    kind: Literal["tv", "kl"] = "tv",
    low: NotNegative | None = None,
    high: NotNegative | None = None,
    cap: AtLeastOne = math.inf,
) -> LossOutput:
    """min(w, cap) · A, 0 if the probability has moved too far in the direction of A.

    DPPO, arXiv 2602.04879, eq. 13 and 14, there with `anchor="engine"`. A token whose π went up under A > 0, or down
    under A < 0, is lost where the distance is > high, or > low: |π − π_old| for "tv"; for "kl" KL(π_old ‖ π) of two
    outcomes, this token or another. The gradient is sg[min(w, cap)] · A · ∇ log π. None: 0.15 for tv and 0.05 for kl,
    verl's recipe (SkyRL and prime-rl: 0.2 for tv). Bounds of 1 for tv, cap inf: w · A.
    """
    low, high = ({"tv": 0.15, "kl": 0.05}[kind] if bound is None else bound for bound in (low, high))
    log_ratio, old = x.log_ratio.detach(), torch.where(x.mask, x.old_logprobs, 0)
    distance = ((old + log_ratio).exp() - old.exp()).abs()
    if kind == "kl":
        other, old_other = -torch.expm1((old + log_ratio).clamp(max=0)), -torch.expm1(old)
        distance = torch.xlogy(old_other, old_other) - torch.xlogy(old_other, other) - old.exp() * log_ratio
    above = x.mask & (x.advantages > 0) & (log_ratio > 0) & (distance > high)
    below = x.mask & (x.advantages < 0) & (log_ratio < 0) & (distance > low)
    return _weigh_kept(x, above, below, cap)


def ipo(x: LossInputs, *, threshold: NotNegative = 0.1) -> LossOutput:
    """w · A, 0 where |π − π_old| > threshold, in whichever direction A pushes.

    prime-rl's loss "ipo", there with `anchor="engine"`, with its threshold. `dppo` has two bounds, each on the side
    that A pushes to. The gradient is w · A · ∇ log π. threshold 1: w · A.
    """
    log_ratio, old = x.log_ratio.detach(), torch.where(x.mask, x.old_logprobs, 0)
    far = x.mask & (x.advantages != 0) & (((old + log_ratio).exp() - old.exp()).abs() > threshold)
    return _weigh_kept(x, far & (log_ratio > 0), far & (log_ratio < 0))


def cppo(
    x: LossInputs, *, threshold: NotNegative = 0.2, budget: NotNegative = 0.02, last: PositiveShare = 0.8
) -> LossOutput:
    """w · A, 0 where A pushes π away from π_old and v_t · |π − π_old| > min(δ, δ + b · V − S).

    CPPO, arXiv 2606.10968, eq. 8 to 11 and 22, there with `anchor="engine"`: δ is the threshold (0.15 for dense
    models). v_t falls from 1 to `last` over a response. V and S are the sums of v and of v · |π − π_old| over the
    tokens before. b is the 90 % quantile of |π − π_old| in the response, within [budget, 2 · budget]. The gradient is w
    · A · ∇ log π.
    """
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
def a3po(
    x: LossInputs, *, clip_low: NotNegative = 0.2, clip_high: NotNegative = 0.2, high: Positive = math.inf
) -> LossOutput:
    """PPO's clip of π_θ/π_prox, times v = π_prox/π_old where v ≤ high; π_prox = sg[π_old · w^α], α = 1 − 1/lag.

    A-3PO, arXiv 2512.06547, in the log-linear form of AReaL (high = 5), with `anchor="engine"`. π_prox is the policy
    one step behind π_θ; at lag 0 and 1 the loss is `grpo` with this range.
    """
    if x.lag is None:
        raise ConfigError("a3po needs the lag: how many steps old the weights were that sampled each token")
    log_ratio, share = x.log_ratio.detach(), 1 / x.lag.clamp(min=1)
    weight = finite_exp((1 - share) * log_ratio)
    weighted = replace(x, weights=x.weights * torch.where(weight > high, 0, weight))
    return clip_surrogate(weighted, share * log_ratio + (x.log_ratio - log_ratio), clip_low, clip_high)


def topr(x: LossInputs, *, level: Level = "product") -> LossOutput:
    """sg[1 for A > 0, else min(w, 1)] · A · log π.

    TOPR, arXiv 2503.14286, eq. 8, with w of the whole response; ROLL has the token's (`level="token"`). Both use the
    sign of the reward. A > 0 alone: REINFORCE; A < 0 alone, by token: CISPO within [0, 1].
    """
    log_ratio = LEVELS[level](x.log_ratio.detach(), x.mask)
    return weigh_logprobs(x, log_ratio.clamp(max=0).masked_fill(x.advantages > 0, 0).exp(), log_ratio)


def vespo(
    x: LossInputs,
    *,
    k_pos: NotNegative = 2.0,
    lambda_pos: NotNegative = 3.0,
    k_neg: NotNegative = 3.0,
    lambda_neg: NotNegative = 2.0,
) -> LossOutput:
    """sg[w^k · e^(λ(1 − w))] · A · log π, w of the response.

    VESPO, arXiv 2602.10693, with TRL's defaults, without its cuts of log w. k = λ = 0: REINFORCE.
    """
    log_ratio = LEVELS["product"](x.log_ratio.detach(), x.mask)
    positive, negative = (
        k * log_ratio - rate * (finite_exp(log_ratio) - 1) for k, rate in ((k_pos, lambda_pos), (k_neg, lambda_neg))
    )
    return weigh_logprobs(x, torch.where(x.advantages > 0, positive, negative).exp(), log_ratio)


# ------------------------------------------ statistics of the whole mini-batch; without them, of the rows of the call
@needs("mini_batch")
def clip_cov(
    x: LossInputs,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    share: Share = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    seed: int = 0,
) -> LossOutput:
    """PPO's clip without a random `share` of tokens whose covariance is in (low, high).

    Clip-Cov, arXiv 2505.22617: cov = (A − mean A) · (log π − mean log π), means over the mini-batch's response tokens;
    share · tokens, at least one, have neither value nor gradient, and count as clipped on the side of their advantage.
    The draw depends on `seed` and the candidates' positions alone. Defaults are verl's. share 0: `grpo`.
    """
    if not low < high:
        raise ConfigError(f"clip_cov(low={low:g}, high={high:g}) needs low < high")
    clipped = clip_surrogate(x, x.log_ratio, clip_low, clip_high)
    statistics = x.batch_statistics
    if statistics is None:
        cov = _covariance(x)
        candidates = (x.mask & (clipped.clipped_by == 0) & (cov > low) & (cov < high)).flatten().nonzero()[:, 0]
        which = zlib.crc32(candidates.cpu().numpy().tobytes())
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(which ^ seed))
        statistics = _mark_first(x, candidates[order.to(candidates.device)], share)
    gone = x.mask & (statistics > 0)
    output = clip_surrogate(replace(x, advantages=x.advantages.masked_fill(gone, 0)), x.log_ratio, clip_low, clip_high)
    side = torch.where(gone, x.advantages, output.clipped_by).sign().to(torch.int8)
    return replace(output, clipped_by=side, batch_statistics=statistics)


@needs("mini_batch")
def kl_cov(x: LossInputs, *, share: Share = 2e-4, coef: NotNegative = 0.1) -> LossOutput:
    """w · A, − coef · |log w| at the `share` of tokens with the highest covariance (`clip_cov`).

    KL-Cov, arXiv 2505.22617: at least one token; of equals the first. Defaults are verl's; SkyRL has coef 1. The
    penalty has the weights and corrections of the loss. share or coef 0: w · A. At π_θ = π_old rounding decides the
    sign of the penalty's gradient.
    """
    highest = _covariance(x).masked_fill(~x.mask, -torch.inf).flatten().argsort(descending=True, stable=True)
    statistics = _mark_first(x, highest, share) if x.batch_statistics is None else x.batch_statistics
    output = surrogate(x, exponential(x, x.log_ratio), x.log_ratio)
    penalty = torch.where(statistics > 0, x.log_ratio.abs(), 0)
    return replace(output, loss=output.loss + coef * (x.weights.detach() * penalty).sum(), batch_statistics=statistics)


@needs("mini_batch")
def sat(
    x: LossInputs,
    *,
    base: Literal["grpo", "gspo"] = "grpo",
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    quantile: Share = 0.9,
    exponent: Positive = 2.0,
) -> LossOutput:
    """PPO's clip; its range contracts on the side where a token already differs from the engine.

    SAT, arXiv 2607.18722: d = sg[log π_θ − log π_engine], q the quantile of |d| over the mini-batch's response tokens,
    h = 1 where |d| ≤ q or q = 0, else 1 / (1 + (|d|/q)^exponent); the upper bound is 1 + clip_high · h where d > 0, the
    lower 1 − clip_low · h where d < 0. Our choices: the form of the Hill kernel, linear interpolation of the quantile,
    and `gspo_token` for base "gspo". The paper takes q over a micro-batch; its range, 0.2, is for tokens. quantile 1:
    the base itself.
    """
    if x.rollout_logprobs is None:
        raise ConfigError("sat needs rollout_logprobs, the log-probs of the engine")
    gap = torch.where(x.mask, x.log_ratio + x.old_logprobs - x.rollout_logprobs, 0).detach()
    sizes = gap.abs()
    statistics = x.batch_statistics
    if statistics is None:
        statistics = torch.full_like(gap, sizes[x.mask].quantile(quantile).item() if bool(x.mask.any()) else 0.0)
    hill = torch.where((sizes > statistics) & (statistics > 0), 1 / (1 + (sizes / statistics) ** exponent), 1)
    ratio = x.log_ratio if base == "grpo" else sequence_value(x.log_ratio, x.mask)
    low, high = clip_low * torch.where(gap < 0, hill, 1), clip_high * torch.where(gap > 0, hill, 1)
    return replace(clip_surrogate(x, ratio, low, high), batch_statistics=statistics)


@needs("mini_batch", "entropy")
def high_entropy(
    x: LossInputs, *, share: PositiveShare = 0.2, base: str = "grpo", options: Mapping[str, Any] | None = None
) -> LossOutput:
    """The loss `base` at the `share` of tokens with the highest entropy, 0 at the others.

    arXiv 2506.01939, with its 20 %: entropies of at least the quantile 1 − share, interpolated linearly, over the
    mini-batch's response tokens (TRL and ms-swift: of a micro-batch). The others stay in |y| and N. `base` has
    `options`. share 1: `base`. Raises ConfigError for a base that needs more than log-probs.
    """
    loss = lookup("loss", Component(base, **(options or {})), LOSSES)
    if needs_of(loss) or x.entropy is None:
        raise ConfigError(f"high_entropy(base={base!r}) needs entropy, and a base that needs log-probs only")
    entropy, statistics = x.entropy.detach(), x.batch_statistics
    if statistics is None:
        least = entropy[x.mask].quantile(1 - share) if bool(x.mask.any()) else 0.0
        statistics = (x.mask & (entropy >= least)).to(entropy.dtype)
    output = loss(replace(x, weights=x.weights * statistics, batch_statistics=None))
    return replace(output, clipped_by=torch.where(statistics > 0, output.clipped_by, 0), batch_statistics=statistics)


def _covariance(x: LossInputs) -> PerToken:
    """(A − mean A) · (log π − mean log π), means over the response tokens; 0 elsewhere, without gradient."""
    return torch.mul(*(torch.where(x.mask, y - y[x.mask].mean(), 0) for y in (x.advantages, x.logprobs.detach())))


def _weigh_kept(x: LossInputs, above: Mask, below: Mask, cap: float = math.inf) -> LossOutput:
    """min(w, cap) · A, 0 where a bound took the token; the gradient is sg[min(w, cap)] · A · ∇ log π."""
    log_ratio = x.log_ratio.detach()
    weight = torch.where(above | below | (x.advantages == 0) | (x.weights == 0), 0, log_ratio.exp().clamp(max=cap))
    return surrogate(x, weight * (1 + (x.log_ratio - log_ratio)), log_ratio, above, below)


def _mark_first(x: LossInputs, order: Int[Tensor, " tokens"], share: float) -> PerToken:
    """1 at the first of some tokens, a share of the response tokens, at least one; 0 elsewhere."""
    count = max(1, int(share * int(x.mask.sum()))) if share else 0
    return torch.zeros_like(x.logprobs.detach()).flatten().index_fill(0, order[:count], 1).view_as(x.mask)


LOSSES: dict[str, Callable[..., LossOutput]] = {
    "grpo": grpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "sapo": sapo,
    "crossed": crossed,
    "reinforce": reinforce,
    "cispo": cispo,
    "minirl": minirl,
    "band": band,
    "dppo": dppo,
    "ipo": ipo,
    "cppo": cppo,
    "a3po": a3po,
    "topr": topr,
    "vespo": vespo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "sat": sat,
    "high_entropy": high_entropy,
}
CLIPS = {"grpo": "level", "gspo": "sequence", "gspo_token": "sequence", "crossed": "clip", "sat": "base"}
"""The level of ratio that a loss bounds, or the option that names it, or another loss."""
