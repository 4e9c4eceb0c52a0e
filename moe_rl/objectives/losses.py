"""Losses, one pure function each, beside its equation; to be minimised.

Every loss is −Σ weights[b, t] · objective[b, t]. No log-ratio is clamped and there is no dual clip.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.objectives.base import LossInputs, LossOutput
from moe_rl.objectives.ratios import sequence_level, sequence_value


def grpo(x: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.27) -> LossOutput:
    """Token-level ratios: w[i,t] = π_θ(y[i,t]) / π_old(y[i,t]); objective min(w·A, clip(w)·A).

    GSPO, arXiv 2507.18071, eq. 2 and 3 (Shao et al. 2024), with the two bounds of its section 5.1, and without the KL
    term, which is `terms.kl`.
    """
    return _clipped(x, x.log_ratio, clip_low, clip_high)


def gspo(x: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """One ratio per sequence: s[i] = exp(1/|y_i| Σ_t log w[i,t]); objective min(s·A, clip(s)·A).

    GSPO, arXiv 2507.18071, eq. 6 and 8; bounds of section 5.1, chosen there for responses of thousands of tokens.
    Raises ConfigError for advantages that differ within a sequence: they need `gspo_token`.
    """
    inside = x.advantages.masked_fill(~x.mask, -torch.inf).amax(1, keepdim=True)
    if bool((x.mask & (x.advantages != inside)).any()):
        raise ConfigError("gspo has one ratio and one advantage per sequence, but got advantages that differ within "
                          "one: use gspo_token, which takes an advantage per token")
    return _clipped(x, sequence_level(x.log_ratio, x.mask), clip_low, clip_high)


def gspo_token(x: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """GSPO with an advantage per token: s[i,t] = sg[s_i] · π_θ(y[i,t]) / sg[π_θ(y[i,t])]; min(s·A, clip(s)·A).

    GSPO, arXiv 2507.18071, eq. 14 and 15 (sg stops the gradient). Equal to `gspo` in value and gradient when a sequence
    has one advantage and equal weights.
    """
    return _clipped(x, sequence_value(x.log_ratio, x.mask), clip_low, clip_high)


def crossed(
    x: LossInputs, *, weigh: str = "token", clip: str = "sequence", clip_low: float = 0.2, clip_high: float = 0.27
) -> LossOutput:
    """GRPO and GSPO taken apart: a token's gradient is weight · A · ∇ log π, and 0 where it is clipped.

    `weigh` says which ratio is the weight: w[i,t] of the token (GSPO, arXiv 2507.18071, eq. 12), s[i] of the sequence
    (eq. 10), or none. `clip` says which ratio the range bounds. (token, token) has GRPO's gradient, (sequence,
    sequence) GSPO's; a clipped token keeps its value, which no gradient follows.
    """
    token = x.log_ratio.detach()
    levels = {"token": token, "sequence": sequence_level(token, x.mask), "none": torch.zeros_like(token)}
    if not {weigh, clip} <= set(levels):
        raise ConfigError(f"crossed(weigh={weigh!r}, clip={clip!r}): each is one of {', '.join(levels)}")
    bounded = levels[clip].exp()
    above, below = _outside(x, bounded, clip_low, clip_high)
    kept = x.mask & ~above & ~below
    ratio = (levels[weigh] + torch.where(kept, x.logprobs - x.logprobs.detach(), 0)).exp()
    return _output(x, ratio, levels[weigh], above, below)


def _clipped(x: LossInputs, log_ratio: Tensor, clip_low: float, clip_high: float) -> LossOutput:
    """The pessimistic min(r·A, clip(r, 1−low, 1+high)·A) of PPO (arXiv 1707.06347, eq. 7), r = exp(log_ratio).

    A gradient is lost only where r is *strictly* outside the range on the side its advantage pushes to; on the bound
    both branches are equal and it is kept, as `torch.minimum` of `torch.clamp` would have it.
    """
    above, below = _outside(x, log_ratio.detach().exp(), clip_low, clip_high)
    # Masked before the exponential: the zero gradient of a clipped ratio that overflows would become 0 · inf.
    kept = log_ratio.masked_fill(above | below, 0).exp()
    bounded = torch.where(above, 1 + clip_high, torch.where(below, 1 - clip_low, kept))
    return _output(x, bounded, log_ratio, above, below)


def _outside(x: LossInputs, ratio: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Where a ratio is beyond the upper bound and A > 0, and where beyond the lower one and A < 0."""
    if not (clip_low >= 0 and clip_high >= 0):
        raise ConfigError(
            f"a clip range of ({clip_low}, {clip_high}) is no range: ratios are clipped to [1 - clip_low, 1 + "
            "clip_high], so both must be >= 0 (inf turns a side off)"
        )
    above = x.mask & (x.advantages > 0) & (ratio > 1 + clip_high)
    return above, x.mask & (x.advantages < 0) & (ratio < 1 - clip_low)


def _output(x: LossInputs, ratio: Tensor, log_ratio: Tensor, above: Tensor, below: Tensor) -> LossOutput:
    objective = torch.where(x.mask, ratio * x.advantages.detach(), 0)
    loss = -(x.weights.detach() * objective).sum()
    return LossOutput(loss, log_ratio.detach(), above.to(torch.int8) - below.to(torch.int8))


LOSSES: dict[str, Callable[..., LossOutput]] = {
    "grpo": grpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "crossed": crossed,
}
