"""What is done to routers outside of an objective: their dtype, and the bias that balances their load."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.errors import ConfigError
from moe_rl.routing.sites import find_sites
from moe_rl.routing.trace import RoutingTrace

BIAS = "e_score_correction_bias"


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
