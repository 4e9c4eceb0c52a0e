"""Terms of a loss: coefficient · Σ weights · something per token. Weights are the aggregation's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.objectives.losses import LossInputs, finite_exp
from moe_rl.registry import Positive, needs

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda e: -e,
    "k2": lambda e: e**2 / 2,
    "k3": lambda e: torch.expm1(e) - e,
    "abs": lambda e: e.abs(),
}
"""Of KL(π ‖ q), in nats, from a token of π by e = log q − log π (Schulman, "Approximating KL divergence", 2020)."""


@needs("reference", when=lambda against="reference", **_: against == "reference")
def kl(
    x: LossInputs,
    *,
    coef: float,
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3",
    against: Literal["reference", "old"] = "reference",
    ratio: bool = False,
    clamp: Positive = math.inf,
) -> Float[Tensor, ""]:
    """coef · Σ weights · k(e), e = log q − log π_θ, q = π_ref or π_old: KL(π_θ ‖ q).

    Its gradient per log-prob is 1 for k1 (of nothing, on average), −e for k2 (on policy, of KL(π_θ ‖ q)), 1 − exp(e)
    for k3 (of KL(q ‖ π_θ); GRPO, arXiv 2402.03300, eq. 4); k1+ and k3+ have their value and k2's gradient (verl).
    `ratio`: r·k, r = π_θ/π_old, for tokens of π_old; its gradient is r·(k + k′) (DeepSeek-V3.2, arXiv 2512.02556).
    `clamp`: k within ± so many nats, beyond it without gradient, which k1+ and k3+ keep (verl, ms-swift, NeMo-RL: 10).
    `reinforce` with k2 against π_old is Kimi k1.5 (arXiv 2501.12599, eq. 3).

    Both policies are scored under the same routes: else a replaying arm would be pulled away from its forced experts at
    equal weights (by 0.9 nats under a placebo).
    """
    if against == "old":
        e = -x.log_ratio
    elif x.ref_logprobs is None:
        raise ConfigError(f"the term kl(coef={coef:g}) needs ref_logprobs, the log-probs of the reference policy")
    else:
        e = torch.where(x.mask, x.ref_logprobs.detach() - x.logprobs, 0)
    value = ESTIMATORS[estimator.removesuffix("+")](e.detach())
    square = "+" in estimator
    k = ESTIMATORS["k2" if square else estimator](e if square else e.masked_fill(value.abs() > clamp, 0))  # no 0 · inf
    if square or clamp < math.inf:
        k = value.clamp(-clamp, clamp) + (k - k.detach())
    if ratio:
        k = k * finite_exp(x.log_ratio)  # likewise
    return coef * (x.weights * k).sum()


@needs("entropy")
def entropy(x: LossInputs, *, coef: float) -> Float[Tensor, ""]:
    """−coef · Σ weights · entropy, in nats."""
    if x.entropy is None:
        raise ConfigError(f"the term entropy(coef={coef:g}) needs the entropy of every token, which is missing")
    return -coef * (x.weights * torch.where(x.mask, x.entropy, 0)).sum()


TERMS: dict[str, Callable[..., Float[Tensor, ""]]] = {"kl": kl, "entropy": entropy}
