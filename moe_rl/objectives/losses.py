"""Losses, one pure function each, beside its equation; to be minimised: −Σ weights[b, t] · objective[b, t].

Those that need statistics of a whole mini-batch are in `batch_losses`. PPO's clip is `grpo` with a range of (0.2, 0.2).
Unless it says otherwise, every loss has REINFORCE's gradient at π_θ = π_old.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from moe_rl.objectives.base import LossInputs, LossOutput
from moe_rl.objectives.batch_losses import BATCH_LOSSES
from moe_rl.objectives.ratios import LEVELS, at_level, sequence_level, sequence_value
from moe_rl.objectives.regions import clipped, detached, exponential, finite, one_advantage, outside, require, surrogate


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
    require(dual >= 1 and cap >= 1, f"grpo(dual={dual:g}, cap={cap:g}): below 1 they would clip tokens that have not "
             "moved; usual are 3 for dual and 4 for cap, and inf turns them off")  # fmt: skip
    require(log_clamp > 0, f"grpo(log_clamp={log_clamp:g}): nats must be positive, usually 20; inf turns it off")
    token = x.log_ratio
    ratio = at_level(level, token.clamp(-log_clamp, log_clamp), x.mask)
    found = clipped(x, ratio, clip_low, min(clip_high, cap - 1), min(dual, max(cap, 1 + clip_high)))
    cut = (token.detach().abs() > log_clamp) & (x.advantages != 0) & (found.clipped_by == 0)
    return replace(found, clipped_by=torch.where(cut, token.detach().sign().to(torch.int8), found.clipped_by))


def gspo(x: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """One ratio per sequence: s[i] = exp(1/|y_i| Σ_t log w[i,t]); objective min(s·A, clip(s)·A).

    GSPO, arXiv 2507.18071, eq. 6 and 8; bounds of section 5.1, chosen there for responses of thousands of tokens.
    Raises ConfigError for advantages that differ within a sequence: they need `gspo_token`.
    """
    one_advantage(x, "gspo", "gspo_token")
    return clipped(x, sequence_level(x.log_ratio, x.mask), clip_low, clip_high)


def gspo_token(x: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """GSPO with an advantage per token: s[i,t] = sg[s_i] · π_θ(y[i,t]) / sg[π_θ(y[i,t])]; min(s·A, clip(s)·A).

    GSPO, arXiv 2507.18071, eq. 14 and 15 (sg stops the gradient). Equal to `gspo` in value and gradient when a sequence
    has one advantage and equal weights.
    """
    return clipped(x, sequence_value(x.log_ratio, x.mask), clip_low, clip_high)


def gmpo(x: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4, level: str = "sequence") -> LossOutput:
    """exp(1/|y_i| Σ_t κ[i,t]) · A, κ = log w, but at most clip_high where A > 0 and at least −clip_low where A < 0.

    GMPO, arXiv 2507.20673, with its range, in nats: the geometric mean of clipped token ratios; a clipped token keeps
    its part in it. `level="product"`: without 1/|y_i|, an ablation of the paper. One token: GRPO clipped to
    [e^−clip_low, e^clip_high]; an infinite range: GSPO without one. One advantage per sequence, else ConfigError.
    """
    one_advantage(x, "gmpo", "grpo or gspo_token")
    require(level in ("sequence", "product"), f"gmpo(level={level!r}): choose sequence or product")
    above, below = outside(x, x.log_ratio.detach(), clip_low, clip_high, middle=0.0)
    kappa = torch.where(above, clip_high, torch.where(below, -clip_low, x.log_ratio))
    ratio = at_level(level, kappa, x.mask)
    return surrogate(x, exponential(x, ratio), ratio, above, below)


def sapo(x: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05, level: str = "token") -> LossOutput:
    """4/τ · σ(τ·(w − 1)) · A, τ = tau_pos where A > 0, else tau_neg: a token's gradient is w · sech²(τ(w−1)/2) · A.

    SAPO, arXiv 2511.20347, with its τ. Nothing is clipped: the gate closes smoothly on both sides. As τ → 0 the
    gradient is w · A. Another level of `ratios` makes, e.g., a soft GSPO.
    """
    require(tau_pos > 0 and tau_neg > 0, f"sapo(tau_pos={tau_pos:g}, tau_neg={tau_neg:g}): both must be positive")
    log_ratio = at_level(level, x.log_ratio, x.mask)
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(x.advantages > 0, tau_pos)
    return surrogate(x, 4 / tau * torch.sigmoid(tau * (finite(log_ratio) - 1)), log_ratio)


def crossed(
    x: LossInputs, *, weigh: str = "token", clip: str = "sequence", clip_low: float = 0.2, clip_high: float = 0.27
) -> LossOutput:
    """GRPO and GSPO taken apart: a token's gradient is weight · A · ∇ log π, and 0 where it is clipped.

    `weigh` says which ratio is the weight: w[i,t] of the token (GSPO, arXiv 2507.18071, eq. 12), s[i] of the sequence
    (eq. 10), that of its segment, the product over the response, or none. `clip` says which of them the range bounds.
    (token, token) has GRPO's gradient, (sequence, sequence) GSPO's; a clipped token keeps its value, which no gradient
    follows.
    """
    choices = ("token", "sequence", "none", "segment", "product")
    require({weigh, clip} <= set(choices),
             f"crossed(weigh={weigh!r}, clip={clip!r}): each is one of {', '.join(choices)}")  # fmt: skip
    token = x.log_ratio.detach()
    weight, bounded = (at_level(name, token, x.mask) if name in LEVELS else 0 * token for name in (weigh, clip))
    above, below = outside(x, bounded.exp(), clip_low, clip_high)
    kept = x.mask & ~above & ~below
    ratio = exponential(x, weight + torch.where(kept, x.logprobs - x.logprobs.detach(), 0))
    return surrogate(x, ratio, weight, above, below)


# ------------------------------------------------------- log π times a weight without gradient: REINFORCE where it is 1
def reinforce(x: LossInputs) -> LossOutput:
    """A · log π (Williams 1992). No ratio is used: the one it reports bounds nothing.

    Kimi k1.5 and DRO are this with the k2 term against π_old; GPG and RLOO, with advantages of their own.
    """
    return detached(x, torch.ones_like(x.logprobs), x.log_ratio)


def cispo(x: LossInputs, *, clip_low: float = math.inf, clip_high: float = 4.0, mask: str = "none") -> LossOutput:
    """sg[clip(w, 1 − clip_low, 1 + clip_high)] · A · log π, w of the token: no token loses its gradient.

    CISPO, arXiv 2506.13585, eq. 4 and 5: the paper turns the lower bound off and gives no number for the upper one; 4
    is SkyRL's cap of 5. Bounds are distances from 1; TRL and ms-swift give the cap itself. `mask="unified"` takes out
    what PPO's clip with this range would (eq. 7). Bounds of 0: REINFORCE; of inf: w · A · ∇ log π.
    """
    require(mask in ("none", "unified"), f"cispo(mask={mask!r}): choose none or unified")
    ratio = x.log_ratio.detach().exp()
    lost = outside(x, ratio, clip_low, clip_high)
    return detached(x, ratio.clamp(1 - clip_low, 1 + clip_high), x.log_ratio, *(lost if mask == "unified" else ()))


def minirl(x: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.27) -> LossOutput:
    """sg[M · w] · A · log π, M = 0 where PPO's clip takes the gradient: GRPO's gradient.

    MiniRL, arXiv 2512.01374, with its range. Its weight is π_θ / π_engine = w · π_old / π_engine, whose second factor
    is a correction (`truncated`, there at 5); it has no length norm, and advantages that no deviation divides.
    """
    ratio = x.log_ratio.detach().exp()
    return detached(x, ratio, x.log_ratio, *outside(x, ratio, clip_low, clip_high))


def band(x: LossInputs, *, low: float = 0.5, high: float = 5.0) -> LossOutput:
    """sg[w] · A · log π where low ≤ w ≤ high, whatever the sign of A, and nothing outside.

    GLM-5, arXiv 2602.15763, against the engine (`anchor="engine"`); the band is IcePop's (arXiv 2510.18855), which is
    one of π_old / π_engine, a correction. [0, inf]: w · A · ∇ log π.
    """
    require(0 <= low <= 1 <= high, f"band(low={low:g}, high={high:g}): it must hold 1, where nothing has moved")
    ratio, pushed = x.log_ratio.detach().exp(), x.mask & (x.advantages != 0)
    return detached(x, ratio, x.log_ratio, pushed & (ratio > high), pushed & (ratio < low))


def dppo(
    x: LossInputs, *, kind: str = "tv", low: float | None = None, high: float | None = None, cap: float = math.inf
) -> LossOutput:
    """min(w, cap) · A where the token's probability has not moved too far to the side that A pushes to, else nothing.

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
    weight = torch.where(above | below | (x.advantages == 0) | (x.weights == 0), 0, log_ratio.exp().clamp(max=cap))
    return surrogate(x, weight * (1 + (x.log_ratio - log_ratio)), log_ratio, above, below)


def topr(x: LossInputs, *, level: str = "product") -> LossOutput:
    """sg[1 where A > 0, else min(w, 1)] · A · log π: what is good is imitated, what is bad tapers off.

    TOPR, arXiv 2503.14286, eq. 8, with w of the whole response; ROLL has the token's (`level="token"`). Both ask for
    the sign of the reward, this for that of A. A > 0 alone: REINFORCE; A < 0 alone, by token: CISPO within [0, 1].
    """
    log_ratio = at_level(level, x.log_ratio.detach(), x.mask)
    return detached(x, log_ratio.clamp(max=0).masked_fill(x.advantages > 0, 0).exp(), log_ratio)


def vespo(
    x: LossInputs, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> LossOutput:
    """sg[w^k · e^(λ(1 − w))] · A · log π, w the product over the response; k and λ by the sign of A.

    VESPO, arXiv 2602.10693, with TRL's defaults. The weight goes to 0 on both sides of w = 1. TRL cuts log w to
    [log 1e-8, 20] and that of tokens to ±20; here nothing is cut. k = λ = 0: REINFORCE.
    """
    require(all(one >= 0 for one in (k_pos, lambda_pos, k_neg, lambda_neg)), f"vespo(k_pos={k_pos:g}, lambda_pos="
             f"{lambda_pos:g}, k_neg={k_neg:g}, lambda_neg={lambda_neg:g}): none may be negative")  # fmt: skip
    log_ratio = at_level("product", x.log_ratio.detach(), x.mask)
    positive, negative = (k * log_ratio - rate * (finite(log_ratio) - 1)
                          for k, rate in ((k_pos, lambda_pos), (k_neg, lambda_neg)))  # fmt: skip
    return detached(x, torch.where(x.advantages > 0, positive, negative).exp(), log_ratio)


LOSSES: dict[str, Callable[..., LossOutput]] = {
    "grpo": grpo, "gspo": gspo, "gspo_token": gspo_token, "gmpo": gmpo, "sapo": sapo, "crossed": crossed,
    "reinforce": reinforce, "cispo": cispo, "minirl": minirl, "band": band, "dppo": dppo, "topr": topr, "vespo": vespo,
    **BATCH_LOSSES,
}  # fmt: skip
CLIPS = {"grpo": "level", "gspo": "sequence", "gspo_token": "sequence", "crossed": "clip", "sat": "base"}
"""At which level of ratio a loss has its range, so that one which never clips is found out: that, or the option that
says it, be it by the name of another loss."""
