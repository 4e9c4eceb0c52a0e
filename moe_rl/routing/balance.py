"""What is done to routers outside of an objective: their dtype, the bias that balances them, and a loss that does so
though nobody asked for it."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.errors import ConfigError
from moe_rl.routing.sites import find_sites, plain_name
from moe_rl.routing.trace import RoutingTrace

BIAS = "e_score_correction_bias"
CORRECTION_BIAS = re.compile(r"(^|\.)(e_score_correction_bias|score_correction_bias|expert_bias)$")
"""What families and trainers call the bias with which a router chooses, and does not weigh."""


def keep_routers_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the parameters of every routing site in `dtype`, and cast what a site reads to that of its weights.

    Its logits and combine weights are then of this dtype; the experts read hidden states of the model's.
    """
    for site in find_sites(model):
        site.module.to(dtype)
        site.module.register_forward_pre_hook(_cast, with_kwargs=True)


def _cast(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    dtype = next(module.parameters()).dtype

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}


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


# ---------------------------------------------------------------------- balancing that nobody asked for
def auxiliary_loss(model: nn.Module, coefficient: float | None = None) -> str | None:
    """What the load-balancing loss in a model's configuration will do in training, in words; None where there is none.

    `coefficient` is the trainer's, where it has one of its own. Transformers adds the loss to its own `loss` where
    `output_router_logits` is set; trainers that take the coefficient alone as a wish are TRL (pull request 7248) and
    NeMo Automodel (NeMo-RL, pull request 3169: gradient norm 1.88 in place of 0.1).
    """
    for module in model.modules():  # the first with a configuration, inside whatever wraps it
        if (config := getattr(module, "config", None)) is not None:
            break
    else:
        return None
    text = getattr(config, "get_text_config", lambda: config)()
    given = getattr(text, "router_aux_loss_coef", None) if coefficient is None else coefficient
    if not given:
        return None
    if coefficient is not None:
        adds = "this trainer adds it to its loss"
    elif any(getattr(c, "output_router_logits", False) for c in (config, text)):
        adds = "with output_router_logits=True its forward adds it to its loss"
    else:
        adds = "TRL and NeMo Automodel add it to theirs, transformers where output_router_logits is set"
    return (f"{type(module).__name__} ({text.model_type}) has a load-balancing loss, router_aux_loss_coef={given:g}: "
            f"{adds}. It counts what routers prefer, pulls on them in every step, under replay away from the forced "
            "experts, and is no part of the objective. To be without it: router_aux_loss_coef=0.0.")


def named_correction_biases(model: nn.Module) -> dict[str, Tensor]:
    """Copies of every correction bias of a model, by name; of a sharded one this rank's part."""
    found = (*model.named_buffers(), *model.named_parameters())
    here = {name: getattr(x, "to_local", lambda x=x: x)() for name, x in found if CORRECTION_BIAS.search(name)}
    return {plain_name(name): x.detach().clone() for name, x in here.items()}
