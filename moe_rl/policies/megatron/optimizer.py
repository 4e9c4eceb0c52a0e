"""AdamW as Megatron-core runs it, and checkpoints of weights and moments that any layout can read.

Megatron's own optimizer checkpoints name moments by their place in a chain of optimizers that depends on the layout.
Here they are named after their weight and cut like it.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from torch import Tensor, nn

from moe_rl.config import Optimizer
from moe_rl.errors import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(module: nn.Module, settings: Optimizer, dtype: torch.dtype) -> MegatronOptimizer:
    """AdamW with the routers at `router_lr_scale` times the learning rate (0 = frozen). Clipping is not its business.

    Moments and, under bf16, master weights are whole on every data-parallel rank: Megatron's distributed optimizer
    loses them in a checkpoint unless TransformerEngine is there.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=False,
    )
    routers = {ParamKey(name="*.router.weight"): {"max_lr": settings.lr * settings.router_lr_scale}}
    optimizer = get_megatron_optimizer(config, [module], config_overrides=routers)
    for part in _chain(optimizer):
        if not isinstance(part.optimizer, torch.optim.AdamW):
            raise ConfigError(
                f"Megatron-core chose {type(part.optimizer).__name__}, as it does where TransformerEngine or Apex is "
                "installed; its checkpoints are not tested here. Use an environment without them."
            )
    for group in optimizer.param_groups:
        group["lr"] = group["max_lr"]
    return optimizer


def save(folder: Path, model: GPTModel, optimizer: MegatronOptimizer) -> None:
    """Weights, moments and the number of steps; each rank writes its part."""
    # Its own is a Manager: another process per rank, which imports the whole program, for saves in the background.
    filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()
    dist.barrier()  # the folder is there
    dist_checkpointing.save(_contents(model, optimizer), str(folder))
    dist.barrier()  # all parts are written


@torch.no_grad()
def load(folder: Path, model: GPTModel, optimizer: MegatronOptimizer) -> None:
    """Read what `save` wrote, in whatever layout."""
    contents = dist_checkpointing.load(_contents(model, optimizer), str(folder))
    model.load_state_dict(contents["model"])
    for name, state, master in _states(model, optimizer):
        for key in MOMENTS:
            state[key].copy_(contents[key][name])
        if master is not None:
            master.copy_(contents["master"][name])
        state["step"].fill_(contents["step"])


def _contents(model: GPTModel, optimizer: MegatronOptimizer) -> dict[str, Any]:
    """The sharded state: what is where, and how it is cut."""
    weights = model.sharded_state_dict()
    contents: dict[str, Any] = {"model": weights, "step": 0, **{key: {} for key in (*MOMENTS, "master")}}
    for name, state, master in _states(model, optimizer):
        parts = {key: state[key] for key in MOMENTS} | ({} if master is None else {"master": master})
        for key, tensor in parts.items():
            contents[key][name] = make_sharded_optimizer_tensor(weights[name], tensor, prefix=f"optimizer.{key}")
        contents["step"] = int(state["step"])
    return contents


def _states(model: nn.Module, optimizer: MegatronOptimizer) -> Iterator[tuple[str, dict[str, Tensor], Tensor | None]]:
    """Every weight's name, its optimizer state (made where no step was taken yet), its fp32 master under bf16."""
    states = {}
    for part in _chain(optimizer):
        for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
            state = part.optimizer.state[parameter]
            if not state:
                state |= {"step": torch.zeros(()), **{key: torch.zeros_like(parameter) for key in MOMENTS}}
            states[id(parameter)] = state
    for name, parameter in model.named_parameters():
        master = getattr(parameter, "main_param", None)
        yield name, states[id(parameter if master is None else master)], master


def _chain(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Megatron keeps an optimizer of its own for expert weights that are spread over ranks."""
    return getattr(optimizer, "chained_optimizers", [optimizer])
