"""Spread of importance ratios, at token and at sequence level, and shares of clipped tokens.

r is a token's ratio π_θ / π_old (or that of two other named policies), s the length-normalised ratio of a sequence, the
geometric mean of its r (GSPO, arXiv 2507.18071, eq. 8). Log-ratios are in nats; sums are taken in float64.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from moe_rl.metrics.attribution import NO_VARIANCE, AttributionSums
from moe_rl.types import require_mask

QUANTILES = {"001": 0.001, "01": 0.01, "10": 0.1, "50": 0.5, "90": 0.9, "99": 0.99, "999": 0.999}


def ratio_statistics(log_ratio: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> dict[str, float]:
    """Statistics of log r over response tokens (`token_…`) and of log s over sequences (`sequence_…`).

    At both levels: `n`; `log_ratio_mean`, `_var` (population), `_kurtosis` (m4 / m2², 3 for a Gaussian, NaN where the
    variance is rounding), `_q…` (quantiles) and `_max` (of |log r|); `ratio_mean` (E[r] = 1 for tokens, E[s] ≤ 1);
    `ess` = (Σ r)² / (n Σ r²), of token weights and of length-normalised sequence weights; `kl_k1` = mean of -log r and
    `kl_k3` = mean of r - 1 - log r, which for tokens drawn from π_old estimate KL(π_old ‖ π_θ) per token (Schulman
    2020; of s they are no KL); `beyond_2`, the share with max(r, 1/r) > 2 (F(2) of R3, arXiv 2510.11370).

    `token_log_ratio_var_within` is the mean over sequences of 1/|y| Σ_t (log r_t - log s)² (SAPO, arXiv 2511.20347).
    Empty responses count nowhere; with no token at all every statistic is NaN and the n are 0.
    """
    tokens = log_ratio[require_mask(mask)].double().cpu().numpy()
    lengths = mask.sum(1).cpu().numpy()
    lengths = lengths[lengths > 0]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    sequences = np.bincount(owner, weights=tokens) / lengths
    within = np.bincount(owner, weights=(tokens - sequences[owner]) ** 2) / lengths
    return {
        **_spread("token", tokens),
        "token_log_ratio_var_within": float(within.mean()) if len(within) else math.nan,
        **_spread("sequence", sequences),
    }


def engine_gap(log_ratio: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> dict[str, float]:
    """The gap between a policy's log-probs and the sampling engine's at equal weights. log r is the policy's minus the
    engine's, so `engine_kl_k3` estimates KL(engine ‖ policy) per token."""
    statistics = ratio_statistics(log_ratio, mask)
    return {
        "engine_logprob_mean": log_ratio.abs()[mask].double().mean().item(),
        "engine_logprob_max": statistics["token_log_ratio_max"],
        "engine_kl_k3": statistics["token_kl_k3"],
        "engine_beyond_2": statistics["token_beyond_2"],
    }


def clip_fractions(
    lost: Int[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"] | Float[Tensor, "batch time"],
) -> dict[str, float]:
    """Shares that lost their gradient to the clip: `clip_tokens…` and `clip_sequences…` (all tokens of a sequence).

    `lost` is `LossOutput.clipped_by`; `_high` and `_low` name the bound. Without suffix the share is over tokens
    (sequences) with non-zero advantage; with `_all` over all tokens of `mask` (sequences), as in GSPO, arXiv
    2507.18071, Fig. 2. NaN over none.
    """
    active = mask & ((advantages[:, None] if advantages.ndim == 1 else advantages) != 0)
    fractions = {}
    for suffix, counted in (("", active), ("_all", mask)):
        present = counted.any(1)
        for side, hit in (("", lost != 0), ("_high", lost > 0), ("_low", lost < 0)):
            all_hit = ((hit & counted) == counted).all(1) & present
            fractions[f"clip_tokens{suffix}{side}"] = _share(hit & counted, counted)
            fractions[f"clip_sequences{suffix}{side}"] = _share(all_hit, present)
    return fractions


def attribution(
    unconstrained: Float[Tensor, "batch time"], replayed: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> AttributionSums:
    """The part of Var(log r) that goes with route changes, as sums, from the log-ratios of the same tokens and weights
    under unconstrained and under replayed routes. Tokens of a later epoch were trained on."""
    return AttributionSums.of(
        unconstrained[require_mask(mask)].double().cpu().numpy(), replayed[mask].double().cpu().numpy()
    )


def _spread(unit: str, log_ratio: NDArray[np.float64]) -> dict[str, float]:
    statistics = _moments(log_ratio) if len(log_ratio) else dict.fromkeys(_moments(np.zeros(1)), math.nan)
    return {f"{unit}_n": float(len(log_ratio))} | {f"{unit}_{name}": value for name, value in statistics.items()}


def _moments(log_ratio: NDArray[np.float64]) -> dict[str, float]:
    mean, variance, largest = log_ratio.mean(), log_ratio.var(), log_ratio.max()
    ratio = np.exp(log_ratio)
    relative = np.exp(log_ratio - largest)  # the same effective sample size, without overflow
    fourth = ((log_ratio - mean) ** 4).mean()
    statistics = {
        "log_ratio_mean": mean,
        "log_ratio_var": variance,
        "log_ratio_kurtosis": fourth / variance**2 if variance >= NO_VARIANCE else math.nan,
        **dict(zip((f"log_ratio_q{q}" for q in QUANTILES), np.quantile(log_ratio, [*QUANTILES.values()]), strict=True)),
        "log_ratio_max": np.abs(log_ratio).max(),
        "ratio_mean": ratio.mean(),
        "ess": relative.sum() ** 2 / (len(relative) * (relative**2).sum()),
        "kl_k1": -mean,
        "kl_k3": (np.expm1(log_ratio) - log_ratio).mean(),
        "beyond_2": (np.abs(log_ratio) > math.log(2)).mean(),
    }
    return {name: float(value) for name, value in statistics.items()}


def _share(part: Tensor, whole: Tensor) -> float:
    n = int(whole.sum())
    return int(part.sum()) / n if n else math.nan
