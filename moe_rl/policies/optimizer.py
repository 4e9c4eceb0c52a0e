"""The optimizer of a Hugging Face module: its groups, its step, what resuming needs of both; the bias that balances
the load of experts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl import ranks
from moe_rl.config import Optimizer
from moe_rl.errors import ConfigError, Diverged, raise_os_errors
from moe_rl.routing.sites import find_sites, router_parameters
from moe_rl.routing.trace import RoutingTrace

BIAS = "e_score_correction_bias"


def optimizer_of(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """With the routers in a group of their own, at `router_lr_scale` times the learning rate (0 = frozen)."""
    routers = {id(p) for p in router_parameters(model)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter.")
    groups = [
        {"params": [p for p in trainable if id(p) not in routers], "scale": 1.0},
        {"params": [p for p in trainable if id(p) in routers], "scale": settings.router_lr_scale},
    ]
    common: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": True}
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.betas[0], **common)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, **common)


def stepped(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: Optimizer, update: int, whose: str = ""
) -> tuple[float, bool]:
    """One step along the clipped gradients, which are gone then; their norm before, and whether they were clipped.
    Updates are counted from 1. Raises Diverged where a gradient is not finite."""
    limit = settings.grad_clip or float("inf")
    total = ranks.whole(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    norm = total.item()
    if not math.isfinite(norm):
        raise Diverged(f"the{whose} gradient norm is {norm}: a step would destroy the weights. Lower the{whose} "
                       "learning rate.")
    if norm + 1e-6 > limit:  # else torch would multiply every gradient by 1; the constant is its own
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, total)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr_at(update) * group["scale"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, norm > limit


@torch.no_grad()
def cosine_with(last: list[Tensor], parameters: Iterable[nn.Parameter]) -> float | None:
    """cos(g_t, g_{t−1}) over all of them (arXiv 2603.01501), from sums in float64, before anything is clipped; None
    where one of them is 0 or there is no `last` yet, which becomes g_t."""
    now = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    if not last:
        last += [g.clone() for g in now]
        return None
    sums = torch.zeros(3, dtype=torch.float64)
    for g, before in zip(now, last, strict=True):
        a, b = g.flatten().double(), before.flatten().double()
        sums += torch.stack([a @ b, a @ a, b @ b]).cpu()
        before.copy_(g)
    return (sums[0] / (sums[1] * sums[2]).sqrt()).item() if sums[1] and sums[2] else None


def last_step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor | None:
    """Where the optimizer last moved a parameter, up to a factor and without weight decay; None before its first step.
    Read off the moments, so that a resumed run knows it."""
    settings = optimizer.param_groups[0]
    state = {name: ranks.whole(x) for name, x in optimizer.state.get(parameter, {}).items()}
    if "exp_avg_sq" in state:  # AdamW
        variance = state["exp_avg_sq"] / (1 - settings["betas"][1] ** state["step"])
        return -state["exp_avg"] / (variance.sqrt() + settings["eps"])
    momentum = state.get("momentum_buffer")
    return None if momentum is None else -momentum


def write_state(
    weights: Path, moments: Path, model: nn.Module, optimizer: torch.optim.Optimizer, updates: int
) -> None:
    """A module into a safetensors file, its optimizer and the number of its updates into another; bit-exact."""
    from safetensors.torch import save_model

    weights.parent.mkdir(parents=True, exist_ok=True)
    with raise_os_errors(weights):
        save_model(model, str(weights))
    with raise_os_errors(moments):
        torch.save({"optimizer": optimizer.state_dict(), "updates": updates}, moments)


def read_state(
    weights: Path, moments: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    """Put back what `write_state` wrote; returns the number of updates."""
    from safetensors.torch import load_model

    load_model(model, str(weights), device=str(device))
    state = torch.load(moments, map_location=device, weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    return state["updates"]


def correction_biases(model: nn.Module) -> list[Tensor]:
    """The bias with which every site's router chooses, and does not weigh. Raises ConfigError for a family whose
    routers have none of their own, and for one in a dtype that rounds small steps away."""
    found = []
    for site in find_sites(model):
        bias = getattr(site.module, BIAS, None)
        if not isinstance(bias, Tensor):
            raise ConfigError(f"optimizer.loss_free_bias: {site.site.name} ({type(site.module).__name__}) has no "
                              f"{BIAS}, so nothing is added to its scores when it chooses; families with one are "
                              "deepseek_v3, glm4_moe and their like")
        if bias.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"optimizer.loss_free_bias: the bias of {site.site.name} is {bias.dtype}, which rounds "
                              "steps of .001 away; set model.router_dtype='float32'")
        found.append(bias)
    return found


@torch.no_grad()
def balance(biases: list[Tensor], live: RoutingTrace, step: float, first: int = 0) -> None:
    """b_e += step · sign(mean count − count_e), counts of the `live` choices of real tokens: loss-free balancing, arXiv
    2408.15664, algorithm 1. Replayed choices would count what no bias can change. A count at the mean moves nothing.
    The biases are those of the sites from `first` on.
    """
    ids = live.ids()
    for site, bias in enumerate(biases, first):
        chosen = ids[:, :, site]
        count = torch.bincount(chosen[chosen >= 0], minlength=len(bias)).to(bias.device, bias.dtype)
        bias += step * (count.mean() - count).sign()
