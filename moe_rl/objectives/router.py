"""Components that read routers: RSPO's weight on the ratio, and terms on routers' scores.

Probabilities are the softmax of a router's logits in every family, also where it chooses by sigmoids. Values at a token
are of the routing of its predecessor, whose output it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.objectives.losses import LOSSES, LossInputs, LossOutput
from moe_rl.objectives.spelling import suggest_field
from moe_rl.registry import Component, Share, lookup, needs, needs_of
from moe_rl.routing.inputs import RouterInputs

PerToken = Float[Tensor, "batch time"]


@needs("router")
def rspo(
    x: LossInputs, *, base: str = "gmpo", floor: Share = 0.8, options: Mapping[str, Any] | None = None
) -> LossOutput:
    """The loss `base` on the ratio γ · w, γ = sg[max(floor, exp(−mean |log p_θ(e) − log p_old(e)|))].

    The mean is over MoE layers and over the experts that π_old used, p over all experts. RSPO, arXiv 2510.23027, eq. 5
    to 11: over GMPO, floor 0.8. `base` has `options`. γ is inside the ratio, before the clip, so it is no correction. A
    floor of 1, or routers that have not moved: `base`. A fork of verl has another weight. Raises ConfigError for a base
    that needs more than log-probs."""
    loss = lookup("loss", Component(base, **(options or {})), LOSSES, suggest_field)
    if needs_of(loss):
        raise ConfigError(f"rspo(base={base!r}): the base must need log-probs only, not {sorted(needs_of(loss))}")
    router = _router(x, "rspo")
    moved = router_shift(router)
    log_floor = math.log(floor) if floor else -math.inf
    output = loss(dataclasses.replace(x, log_shift=(-moved).clamp(min=log_floor).to(x.logprobs.dtype)))
    return dataclasses.replace(output, metrics={**output.metrics, "own_router_shift": _mean(router, moved).item()})


def router_shift(router: RouterInputs) -> PerToken:
    """Mean over MoE layers and over π_old's experts of |log p_θ − log p_old|, in nats, without gradient."""
    shifts = []
    for moe_layer, (new, old) in enumerate(zip(router.log_probs, router.old_log_probs, strict=True)):
        ids = router.old_used[:, :, moe_layer]
        gap = (new.detach() - old).gather(-1, ids.clamp(min=0)).abs().where(ids >= 0, 0)
        shifts.append(gap.sum(-1) / (ids >= 0).sum(-1).clamp(min=1))
    return torch.stack(shifts).mean(0).where(router.weights > 0, 0)


@needs("router")
def router_kl(x: LossInputs, *, coef: float) -> Float[Tensor, ""]:
    """coef · Σ weights · mean over layers and experts of exp(d) − 1 − d, d = log p_old(e) − log p_θ(e), in nats.

    The "low_var_kl" (k3) of a fork of verl with RSPO's weight, over the loss's tokens. Over all experts alike it is a
    convex gap with the gradient 1 − p_old/p_θ per log-prob, not KL(p_θ ‖ p_old). 0 at equal routers.
    """
    router = _router(x, "router_kl")
    pairs = zip(router.log_probs, router.old_log_probs, strict=True)
    gap = torch.stack([(torch.expm1(old - new) - (old - new)).mean(-1) for new, old in pairs]).mean(0)
    return coef * (x.weights * torch.where(x.mask, gap, 0)).sum()


@needs("router")
def z_loss(x: LossInputs, *, coef: float) -> Float[Tensor, ""]:
    """coef · Σ over layers of the mean over tokens of (log Σ_e exp z(e))².

    ST-MoE, arXiv 2202.08906, eq. 5, where coef is 1e-3. As in Megatron-LM, the tokens are all real ones of the
    mini-batch, prompts included, and MoE layers add up. 0 for logits with Σ exp z = 1.
    """
    router = _router(x, "z_loss")
    return coef * torch.stack([_mean(router, logits.logsumexp(-1) ** 2) for logits in router.logits]).sum()


@needs("router", "load")
def load_balance(x: LossInputs, *, coef: float, routes: Literal["live", "replayed"] = "live") -> Float[Tensor, ""]:
    """coef · Σ over layers of E · Σ_e sg[f_e] · P_e, f_e the share of slots, P_e the mean probability of expert e.

    Switch, arXiv 2101.03961, eq. 4 to 6, where coef is 1e-2; f over k slots and over the tokens of `z_loss`, as in
    Megatron-LM; coef per MoE layer at even f. transformers does not divide by k, and pools the layers before f · P. f
    and P are of the whole mini-batch: where it is cut, f costs a forward of all of it. Under replay f counts the choice
    of the live routers, or the "replayed" experts."""
    router = _router(x, "load_balance")
    load = router.loads()["preferred" if routes == "live" else "used"]
    pairs = zip(load, router.log_probs, strict=True)
    return coef * torch.stack([len(f) * _mean(router, (p.exp() * f).sum(-1)) for f, p in pairs]).sum()


def _router(x: LossInputs, who: str) -> RouterInputs:
    if x.router is None:
        raise ConfigError(f"{who} needs RouterInputs. Use policy='hf', or give router in your own loop.")
    return x.router


def _mean(router: RouterInputs, values: PerToken) -> Float[Tensor, ""]:
    """The part of these rows in the mean over all real tokens of the mini-batch."""
    return (router.weights * torch.where(router.weights > 0, values, 0)).sum()


ROUTER_LOSSES: dict[str, Callable[..., LossOutput]] = {"rspo": rspo}
ROUTER_TERMS: dict[str, Callable[..., Float[Tensor, ""]]] = {
    "router_kl": router_kl,
    "z_loss": z_loss,
    "load_balance": load_balance,
}
