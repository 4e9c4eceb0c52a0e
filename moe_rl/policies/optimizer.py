"""The optimizer of a policy: its groups, one clipped step, and what a checkpoint holds of it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl import ranks
from moe_rl.config import Optimizer
from moe_rl.errors import ConfigError, Diverged, RunError
from moe_rl.models.adapters import adapter_weights
from moe_rl.models.master_weights import TrainedWeights, is_narrow
from moe_rl.routing.moe_layers import router_parameters
from moe_rl.seeds import derive


def make_optimizer(weights: TrainedWeights, settings: Optimizer) -> torch.optim.Optimizer:
    """With the routers in groups of their own, at `router_lr_scale` times the learning rate (0 = frozen), and norms and
    biases in groups without weight decay."""
    if not weights.own:
        raise ConfigError("the model has no trainable parameter.")
    routers = {id(p) for p in router_parameters(weights.model)}
    decayed = {id(p) for name, p in weights.model.named_parameters() if p.ndim >= 2 and not name.endswith("bias")}
    groups = [
        {
            "params": [weights[p] for p in weights.own if (id(p) in routers, id(p) in decayed) == (router, decay)],
            "scale": settings.router_lr_scale if router else 1.0,
            "weight_decay": settings.weight_decay if decay else 0.0,
        }
        for router in (False, True)
        for decay in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    common: dict[str, Any] = {"lr": settings.lr, "fused": True}
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.betas[0], **common)
    if settings.name == "adamw_8bit":
        return adamw_8bit()(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, **common)


def adamw_8bit() -> Callable[..., torch.optim.Optimizer]:
    """What makes torchao's optimizer, whose moments have 8 bits in blocks of 256, and which rounds bfloat16 weights
    stochastically. Raises ConfigError without torchao."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError("optimizer.name='adamw_8bit' needs the package torchao. Run pip install torchao.") from error
    return partial(AdamW8bit, bf16_stochastic_round=True)


def take_step(
    weights: TrainedWeights,
    optimizer: torch.optim.Optimizer,
    settings: Optimizer,
    update: int,
    whose: str = "",
    locate: Callable[[], str] = str,
) -> tuple[float, bool]:
    """One step along the clipped gradients, which are gone then; their norm before, and whether they were clipped.
    Updates are counted from 1. Raises Diverged where a gradient is not finite, with what `locate` says of it."""
    limit = settings.grad_clip or float("inf")
    trained = weights.parameters()
    gradients = (p.grad for p in trained if p.grad is not None)
    wide = [nn.utils.get_total_norm([g.float()]) if is_narrow(g.dtype) else g for g in gradients]
    total = ranks.join_shards(nn.utils.get_total_norm(wide))  # a norm in bfloat16 has three digits
    norm = total.item()
    if not math.isfinite(norm):
        raise Diverged(
            f"the{whose} gradient norm is {norm}, so a step would destroy the weights. Lower the{whose} "
            f"learning rate. {locate()}".rstrip()
        )
    if norm + 1e-6 > limit:  # else torch would multiply every gradient by 1; the constant is its own
        nn.utils.clip_grads_with_norm_(trained, limit, total)
    for group in optimizer.param_groups:
        rate = settings.lr_at(update) * group["scale"]
        group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
    with _rounding(trained[0].device, update, norm) if settings.name == "adamw_8bit" else nullcontext():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    weights.write_back()
    return norm, norm > limit


@contextmanager
def _rounding(device: torch.device, update: int, norm: float) -> Iterator[None]:
    """The global generator, from which torchao draws how it rounds, in a state of this update: a resumed run repeats
    it, and runs with other gradients have other ones."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(derive(update, *struct.unpack("<II", struct.pack("<d", norm))))
        yield


@torch.no_grad()
def compute_cosine_with(last: list[Tensor], parameters: Iterable[nn.Parameter]) -> float | None:
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


def last_step(weights: TrainedWeights, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor | None:
    """Where the optimizer last moved a parameter of the model, up to a factor and without weight decay; None before its
    first step. Read off the moments, so that a resumed run knows it."""
    settings = optimizer.param_groups[0]
    state = {name: ranks.join_shards(x) for name, x in optimizer.state.get(weights[parameter], {}).items()}
    if "exp_avg_sq" in state:  # AdamW
        variance = state["exp_avg_sq"] / (1 - settings["betas"][1] ** state["step"])
        return -state["exp_avg"] / (variance.sqrt() + settings["eps"])
    momentum = state.get("momentum_buffer")
    return None if momentum is None else -momentum


SAMPLE = 4096
"""Entries of a parameter that `narrow_sample` looks at, at most."""


def narrow_sample(weights: TrainedWeights) -> list[Tensor]:
    """A copy of evenly spaced entries of every trained parameter that the model has in fewer bits than float32."""
    flat = [p.detach().flatten() for p in weights.own if is_narrow(p.dtype)]
    return [x[:: max(1, len(x) // SAMPLE)].clone() for x in flat]


def share_changed(before: list[Tensor], after: list[Tensor]) -> float:
    """The share of entries that differ between two samples, every parameter weighed by its entries in them."""
    differing = torch.cat([a != b for a, b in zip(before, after, strict=True)])
    return int(differing.sum()) / len(differing)  # one wait for the device


def write_state(
    to: Path, moments: Path, weights: TrainedWeights, optimizer: torch.optim.Optimizer, updates: int
) -> None:
    """A module, or its adapters alone, into the safetensors file `to`; masters, optimizer and number of updates into
    another; bit-exact."""
    from safetensors.torch import save_file, save_model

    to.parent.mkdir(parents=True, exist_ok=True)
    if adapters := adapter_weights(weights.model):
        save_file(adapters, to)
    else:
        save_model(weights.model, str(to))
    state: dict[str, Any] = {"optimizer": optimizer.state_dict(), "updates": updates}
    if weights.masters:
        state["masters"] = [master.detach() for master in weights.masters.values()]
    torch.save(state, moments)


@torch.no_grad()
def read_state(
    file: Path, moments: Path, weights: TrainedWeights, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    """Put back what `write_state` wrote; returns the number of updates. Raises RunError where one of the two, writer
    and reader, has float32 masters and the other has none."""
    from safetensors.torch import load_file, load_model

    state = torch.load(moments, map_location=device, weights_only=True)
    masters = state.get("masters", [])
    if len(masters) != len(weights.masters):
        raise RunError(
            f"{moments} holds {len(masters)} float32 master weights, but this policy has {len(weights.masters)}. Go on "
            "with the same master_weights, or begin a new run."
        )
    if adapters := adapter_weights(weights.model):
        stored = load_file(file, device=str(device))
        for name, mine in adapters.items():
            mine.copy_(stored[name])
    else:
        load_model(weights.model, str(file), device=str(device))
    for master, saved in zip(weights.masters.values(), masters, strict=True):
        master.copy_(saved)
    try:
        optimizer.load_state_dict(state["optimizer"])
    except ValueError as error:
        raise RunError(f"{moments} holds the state of other groups of weights ({error}). Begin a new run.") from error
    return state["updates"]
