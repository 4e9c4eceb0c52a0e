"""AdamW and SGD as Megatron-core runs them, and checkpoints of weights and moments that any layout can read.

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

MOMENTS: dict[type, tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}
NAMES = {"adamw": "adam", "sgd": "sgd"}


def build(module: nn.Module, settings: Optimizer, dtype: torch.dtype) -> MegatronOptimizer:
    """AdamW, or SGD with momentum `betas[0]`, whose groups name their factor on the learning rate, `lr_mult`: the
    routers' is `router_lr_scale` (0 = frozen). The rate itself and clipping are not its business.

    Moments and, under bf16, master weights are whole on every data-parallel rank: Megatron's distributed optimizer
    loses them in a checkpoint unless TransformerEngine is there.
    """
    config = OptimizerConfig(
        optimizer=NAMES[settings.name],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        sgd_momentum=settings.betas[0],
        clip_grad=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=False,
    )
    routers = {ParamKey(name="*.router.weight"): {"lr_mult": settings.router_lr_scale}}
    optimizer = get_megatron_optimizer(config, [module], config_overrides=routers)
    for part in _chain(optimizer):
        if type(part.optimizer) not in MOMENTS:
            raise ConfigError(
                f"Megatron-core chose the optimizer {type(part.optimizer).__name__}, whose checkpoints are not tested "
                "here. Use an environment without TransformerEngine and Apex."
            )
    return optimizer


def save(folder: Path, model: GPTModel, optimizer: MegatronOptimizer, updates: int) -> None:
    """Weights, moments and the number of updates; each rank writes its part."""
    # Its own is a Manager: another process per rank, which imports the whole program, for saves in the background.
    filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()
    dist.barrier()  # the folder is there
    dist_checkpointing.save(_contents(model, optimizer, updates), str(folder))
    dist.barrier()  # all parts are written


@torch.no_grad()
def load(folder: Path, model: GPTModel, optimizer: MegatronOptimizer) -> int:
    """Read what `save` wrote, in whatever layout; returns the number of updates."""
    contents = dist_checkpointing.load(_contents(model, optimizer, 0), str(folder))
    model.load_state_dict(contents["model"])
    for name, state, master in _states(model, optimizer):
        for key, moment in _tensors(state).items():
            moment.copy_(contents[key][name])
        if master is not None:
            master.copy_(contents["master"][name])
        if "step" in state:
            state["step"].fill_(contents["step"])
    return contents["step"]


def _contents(model: GPTModel, optimizer: MegatronOptimizer, updates: int) -> dict[str, Any]:
    """The sharded state: what is where, and how it is cut."""
    weights = model.sharded_state_dict()
    contents: dict[str, Any] = {"model": weights, "step": updates}
    for name, state, master in _states(model, optimizer):
        parts = _tensors(state) | ({} if master is None else {"master": master})
        for key, tensor in parts.items():
            named = contents.setdefault(key, {})
            named[name] = make_sharded_optimizer_tensor(weights[name], tensor, prefix=f"optimizer.{key}")
    return contents


def _tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The moments of one weight."""
    return {key: moment for key, moment in state.items() if key != "step"}


def _states(model: nn.Module, optimizer: MegatronOptimizer) -> Iterator[tuple[str, dict[str, Tensor], Tensor | None]]:
    """Every weight's name, its optimizer state (made where no step was taken yet), its fp32 master under bf16."""
    states = {}
    for part in _chain(optimizer):
        moments = MOMENTS[type(part.optimizer)]
        for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
            state = part.optimizer.state[parameter]
            for key in () if state else moments:
                state[key] = torch.zeros_like(parameter)
            if "exp_avg" in state:
                state.setdefault("step", torch.zeros(()))
            states[id(parameter)] = state
    for name, parameter in model.named_parameters():
        master = getattr(parameter, "main_param", None)
        yield name, states[id(parameter if master is None else master)], master


def _chain(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Megatron keeps an optimizer of its own for expert weights that are spread over ranks."""
    return getattr(optimizer, "chained_optimizers", [optimizer])
