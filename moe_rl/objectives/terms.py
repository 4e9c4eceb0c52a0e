"""Terms added to a loss: each Σ weights · something per token, times its coefficient. Weights are the aggregation's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.lookup import needs
from moe_rl.objectives.base import LossInputs


@needs("reference")
def kl(x: LossInputs, *, coef: float) -> Float[Tensor, ""]:
    """coef · Σ weights · (exp(d) − 1 − d), d = log π_ref − log π_θ: the k3 estimate of KL(π_θ ‖ π_ref) in nats, ≥ 0.

    Schulman, "Approximating KL divergence" (2020), as GRPO uses it. Its value estimates KL(π_θ ‖ π_ref) for tokens
    drawn from π_θ; its gradient, 1 − π_ref/π_θ per log-prob, is on average that of KL(π_ref ‖ π_θ). No importance
    weight corrects for tokens drawn from π_old. Both policies are scored under the same routes: with the reference's
    own, a replaying arm would be pulled away from its forced experts at equal weights (by .9 nats under a placebo).
    """
    if x.ref_logprobs is None:
        raise ConfigError(
            f"the term kl(coef={coef:g}) compares with the reference policy, but there are no ref_logprobs: score the "
            "batch with the reference, or leave the term out"
        )
    d = torch.where(x.mask, x.ref_logprobs.detach() - x.logprobs, 0)
    return coef * (x.weights * (torch.expm1(d) - d)).sum()


@needs("entropy")
def entropy(x: LossInputs, *, coef: float) -> Float[Tensor, ""]:
    """−coef · Σ weights · entropy over response tokens, in nats: an entropy bonus."""
    if x.entropy is None:
        raise ConfigError(f"the term entropy(coef={coef:g}) needs the entropy of every token, but there is none")
    return -coef * (x.weights * torch.where(x.mask, x.entropy, 0)).sum()


TERMS: dict[str, Callable[..., Float[Tensor, ""]]] = {"kl": kl, "entropy": entropy}
