"""Objectives, one pure function each, beside its equation; to be minimised.

Every loss is -Σ weights[b, t] · objective[b, t]. The weights are the aggregation, computed once over a whole
mini-batch (`sequence_mean_weights`); micro-batches receive slices of them and only add, so how a mini-batch is cut
changes nothing.

Clipping is the pessimistic min(r·A, clip(r, 1-low, 1+high)·A) of PPO: a gradient is lost only where r is *strictly*
outside the range on the side its advantage pushes to. On the bound both branches are equal and the gradient is kept,
as `torch.minimum` of `torch.clamp` would have it. No log-ratio is clamped and there is no dual clip.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.types import Batch

Advantages = Float[Tensor, " batch"] | Float[Tensor, "batch time"]


@dataclass(frozen=True)
class LossOutput:
    """A loss and what it did to every token."""

    loss: Float[Tensor, ""]
    """To be minimised; differentiable with respect to the log-probs of the policy."""
    log_ratio: Float[Tensor, "batch time"]
    """Log importance ratio the objective used, in nats, detached, 0 outside the response. At sequence level it is the
    sequence's value at each of its tokens."""
    lost: Int8[Tensor, "batch time"]
    """+1 where the upper clip bound removed a response token's gradient, -1 where the lower one did, else 0."""


def sequence_mean_weights(mask: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """1 / (N·|y_i|) on response tokens, 0 elsewhere, in float64: the mean over sequences of the mean over tokens.

    GSPO, arXiv 2507.18071, eq. 2 and 6: 1/G Σ_i 1/|y_i| Σ_t, averaged over queries. N counts the sequences that have
    a response token; an empty response counts nowhere. Compute it over a whole mini-batch, then slice.
    """
    lengths = mask.sum(1, keepdim=True)
    sequences = (lengths > 0).sum()
    return mask.double() / (lengths.clamp(min=1) * sequences.clamp(min=1))


def grpo_loss(
    logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    advantages: Advantages,
    mask: Bool[Tensor, "batch time"],
    *,
    clip_low: float,
    clip_high: float,
    weights: Float[Tensor, "batch time"] | None = None,
) -> LossOutput:
    """Token-level ratios: w[i,t] = π_θ(y[i,t]) / π_old(y[i,t]); objective min(w·A, clip(w)·A).

    GSPO, arXiv 2507.18071, eq. 2 and 3 (Shao et al. 2024), with two clip bounds and without the KL term, which is
    `kl_term`. `weights=None` is the paper's aggregation over the rows given.
    """
    log_ratio = _token_log_ratio(logprobs, old_logprobs, mask)
    return _clipped(log_ratio, advantages, mask, clip_low, clip_high, weights)


def gspo_loss(
    logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch ..."],
    mask: Bool[Tensor, "batch time"],
    *,
    clip_low: float,
    clip_high: float,
    weights: Float[Tensor, "batch time"] | None = None,
) -> LossOutput:
    """One ratio per sequence: s[i] = exp(1/|y_i| Σ_t log w[i,t]); objective min(s·A, clip(s)·A).

    GSPO, arXiv 2507.18071, eq. 6 and 8. The length |y_i| is counted in `mask`, so a sequence must not be split between
    calls. Raises ConfigError for advantages per token: they need `gspo_token_loss`.
    """
    if advantages.ndim != 1:
        raise ConfigError(
            f"gspo_loss got advantages of shape {tuple(advantages.shape)}, but it has one ratio and one advantage per "
            "sequence: pass shape (batch,), or use gspo_token for advantages per token"
        )
    log_ratio = _sequence_log_ratio(_token_log_ratio(logprobs, old_logprobs, mask), mask)
    return _clipped(log_ratio, advantages, mask, clip_low, clip_high, weights)


def gspo_token_loss(
    logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    advantages: Advantages,
    mask: Bool[Tensor, "batch time"],
    *,
    clip_low: float,
    clip_high: float,
    weights: Float[Tensor, "batch time"] | None = None,
) -> LossOutput:
    """GSPO with an advantage per token: s[i,t] = sg[s_i] · π_θ(y[i,t]) / sg[π_θ(y[i,t])]; min(s·A, clip(s)·A).

    GSPO, arXiv 2507.18071, eq. 14 and 15 (sg stops the gradient). Equal to `gspo_loss` in value and gradient when a
    sequence has one advantage and equal weights.
    """
    sequence = _sequence_log_ratio(_token_log_ratio(logprobs, old_logprobs, mask), mask).detach()
    log_ratio = sequence + torch.where(mask, logprobs - logprobs.detach(), 0)
    return _clipped(log_ratio, advantages, mask, clip_low, clip_high, weights)


def kl_term(
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    weights: Float[Tensor, "batch time"],
) -> Float[Tensor, ""]:
    """Σ weights · (exp(d) - 1 - d), d = log π_ref - log π_θ: the k3 estimate of KL(π_θ ‖ π_ref) in nats, ≥ 0.

    Schulman, "Approximating KL divergence" (2020), as GRPO uses it. Its value estimates KL(π_θ ‖ π_ref) for tokens
    drawn from π_θ; its gradient, 1 - π_ref/π_θ per log-prob, is on average that of KL(π_ref ‖ π_θ). No importance
    weight corrects for tokens drawn from π_old.
    """
    d = torch.where(mask, ref_logprobs.detach() - logprobs, 0)
    return (weights * (torch.expm1(d) - d)).sum()


def truncated_weights(
    old_logprobs: Float[Tensor, "batch time"],
    rollout_logprobs: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    cap: float,
) -> Float[Tensor, "batch time"]:
    """min(π_old / π_engine, cap) per response token, detached, 1 elsewhere: truncated importance sampling.

    Corrects for tokens that the engine drew from another distribution than the trainer's π_old; the cap bounds the
    variance and biases towards 0 where the ratio exceeds it (Ionides 2008; for RL with two engines, Yao et al. 2025).
    """
    log_ratio = torch.where(mask, old_logprobs - rollout_logprobs, 0).detach()
    return log_ratio.exp().clamp(max=cap)


def entropy_term(
    entropy: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    weights: Float[Tensor, "batch time"],
) -> Float[Tensor, ""]:
    """Σ weights · entropy over response tokens, in nats; an entropy bonus subtracts it from the loss."""
    return (weights * torch.where(mask, entropy, 0)).sum()


LOSSES: dict[str, Callable[..., LossOutput]] = {"grpo": grpo_loss, "gspo": gspo_loss, "gspo_token": gspo_token_loss}

CLIP_PRESETS = {"grpo": (0.2, 0.27), "gspo": (3e-4, 4e-4), "gspo_token": (3e-4, 4e-4)}
"""(low, high) of GSPO, arXiv 2507.18071, section 5.1: chosen there for responses of thousands of tokens."""


@dataclass(frozen=True)
class Objective:
    """What an arm minimises: policy loss + kl · KL to the reference - entropy · entropy."""

    policy: Callable[..., LossOutput]
    """A function with the signature of `grpo_loss`."""
    clip_low: float
    clip_high: float
    kl: float = 0.0
    entropy: float = 0.0
    truncation: float = 0.0
    """Cap of truncated importance sampling against the engine; 0 turns it off."""

    def __call__(
        self,
        logprobs: Float[Tensor, "batch time"],
        entropy: Float[Tensor, "batch time"],
        old_logprobs: Float[Tensor, "batch time"],
        batch: Batch,
        weights: Float[Tensor, "batch time"],
    ) -> LossOutput:
        """The loss on some rows of a mini-batch. Advantages, mask and reference log-probs are those of `batch`, and
        `weights` the same rows and columns of the mini-batch's weights. `log_ratio` and `lost` are the policy loss's.

        Raises ConfigError when there is a KL coefficient and no reference.
        """
        mask = batch.response_mask
        trusted = weights
        if self.truncation:
            trusted = weights * truncated_weights(old_logprobs, batch.rollout_logprobs, mask, self.truncation)
        output = self.policy(
            logprobs, old_logprobs, batch.advantages, mask,
            clip_low=self.clip_low, clip_high=self.clip_high, weights=trusted,
        )  # fmt: skip
        loss = output.loss
        if self.kl:
            if batch.ref_logprobs is None:
                raise ConfigError(
                    f"the objective has kl={self.kl:g}, but the batch has no ref_logprobs to measure it against: "
                    "score the batch with the reference policy, or set kl=0"
                )
            loss = loss + self.kl * kl_term(logprobs, batch.ref_logprobs, mask, weights)
        if self.entropy:
            loss = loss - self.entropy * entropy_term(entropy, mask, weights)
        return dataclasses.replace(output, loss=loss)


def objective_of(arm: Arm) -> Objective:
    """The objective an arm names, with its own clip range or the preset of its loss.

    Raises ConfigError for an unknown loss and for a user's loss without a clip range; warns when a sequence-level loss
    gets a range so wide that it never clips.
    """
    policy = LOSSES[arm.loss] if arm.loss in LOSSES else _imported(arm.loss)
    clip = arm.clip or CLIP_PRESETS.get(arm.loss)
    if clip is None:
        raise ConfigError(
            f"the loss {arm.loss!r} has no preset clip range: give the arm {arm.name!r} one, e.g. clip=(0.2, 0.27)"
        )
    _check_clip(*clip)
    if policy in (gspo_loss, gspo_token_loss) and max(clip) >= 0.1:
        warnings.warn(
            f"arm {arm.name!r}: the clip range {clip[0]:g}/{clip[1]:g} never clips the sequence-level ratio of "
            f"{arm.loss}, a mean over tokens that stays within a few percent of 1, so nothing bounds its updates; "
            "the paper uses 3e-4/4e-4 (short responses need a range of their own, usually below 0.05)",
            stacklevel=2,
        )
    if arm.truncation and arm.anchor == "engine":
        raise ConfigError(
            f"arm {arm.name!r}: truncation={arm.truncation:g} weighs the trainer's π_old against the engine, but "
            "anchor='engine' takes the engine's log-probs for π_old: every weight is 1. Choose one of the two."
        )
    if arm.truncation < 0:
        raise ConfigError(f"arm {arm.name!r}: truncation={arm.truncation:g} must be positive, or 0 for none.")
    return Objective(policy, *clip, kl=arm.kl, entropy=arm.entropy, truncation=arm.truncation)


def _imported(path: str) -> Callable[..., LossOutput]:
    """A user's own loss, named `pkg.module:function`."""
    module, colon, name = path.partition(":")
    if not (colon and module and name):
        raise ConfigError(f"unknown loss {path!r}: choose {', '.join(LOSSES)}, or your own as pkg.module:function")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(f"the loss {path!r} cannot be imported ({error}): is its folder on PYTHONPATH?") from error
    if not callable(function):
        raise ConfigError(f"the module {module} has no function {name!r}, which the loss {path!r} names")
    return function


def _check_clip(low: float, high: float) -> None:
    if not (low >= 0 and high >= 0):
        raise ConfigError(
            f"a clip range of ({low}, {high}) is no range: ratios are clipped to [1 - low, 1 + high], so both must be "
            ">= 0 (inf turns a side off)"
        )


def _token_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log π_θ - log π_old at response tokens, 0 elsewhere, whatever the padding holds."""
    if not logprobs.shape == old_logprobs.shape == mask.shape:
        raise ConfigError(
            f"logprobs {tuple(logprobs.shape)}, old_logprobs {tuple(old_logprobs.shape)} and mask {tuple(mask.shape)} "
            "must have one shape (batch, time)"
        )
    return torch.where(mask, logprobs - old_logprobs.detach(), 0)


def _sequence_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The mean of a sequence's token log-ratios (eq. 8), at each of its response tokens."""
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean, 0)


def _clipped(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float, weights: Tensor | None
) -> LossOutput:
    """-Σ weights · min(r·A, clip(r, 1-low, 1+high)·A), r = exp(log_ratio)."""
    _check_clip(clip_low, clip_high)
    weights = sequence_mean_weights(mask) if weights is None else weights.detach()
    if advantages.shape not in (mask.shape, mask.shape[:1]) or weights.shape != mask.shape:
        raise ConfigError(
            f"advantages {tuple(advantages.shape)} and weights {tuple(weights.shape)} do not fit a mask of shape "
            f"{tuple(mask.shape)}: advantages are (batch,) or (batch, time), weights (batch, time)"
        )
    advantages = advantages.detach()
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages
    ratio = log_ratio.detach().exp()
    above = mask & (advantages > 0) & (ratio > 1 + clip_high)
    below = mask & (advantages < 0) & (ratio < 1 - clip_low)
    # Masked before the exponential: the zero gradient of a clipped ratio that overflows would become 0 · inf.
    kept = log_ratio.masked_fill(above | below, 0).exp()
    bounded = torch.where(above, 1 + clip_high, torch.where(below, 1 - clip_low, kept))
    objective = torch.where(mask, bounded * advantages, 0)
    return LossOutput(-(weights * objective).sum(), log_ratio.detach(), above.to(torch.int8) - below.to(torch.int8))
