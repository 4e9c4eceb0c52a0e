"""AdamW and SGD as Megatron-core runs them."""

from __future__ import annotations

import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from torch import nn

from moe_rl.config import Optimizer
from moe_rl.errors import ConfigError

NAMES = {"adamw": "adam", "sgd": "sgd"}


def build_optimizer(module: nn.Module, settings: Optimizer, dtype: torch.dtype) -> MegatronOptimizer:
    """AdamW, or SGD with momentum `betas[0]`, whose groups name their factor on the learning rate, `lr_mult`: the
    routers' is `router_lr_scale` (0 = frozen). The rate itself and clipping are not its business.

    Moments and, under bf16, master weights are whole on every data-parallel rank.
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
    optimizer = get_megatron_optimizer(
        config, [module], config_overrides=get_standard_config_overrides(config) | routers
    )  # the standard ones: no decay of norms and biases
    for inner in inner_optimizers(optimizer):
        if type(inner) not in (torch.optim.AdamW, torch.optim.SGD):
            raise ConfigError(
                f"Megatron-core chose {type(inner).__name__}, an optimizer that is not tested here. Use an environment "
                "without TransformerEngine and Apex."
            )
    return optimizer


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Those of torch: Megatron has one of its own for experts that are spread over ranks."""
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
