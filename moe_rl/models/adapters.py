"""Low-rank adapters (LoRA, arXiv 2106.09685) by PEFT, inside a model that stays of its class."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl import ranks
from moe_rl.errors import ConfigError
from moe_rl.routing.moe_layers import find_moe_layers

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The targets of adapters by default."""


def add_adapters(model: Any, rank: int, alpha: float, targets: Sequence[str], seed: int, wide: bool = False) -> None:
    """Put adapters of scale alpha / rank beside the linear maps whose path ends in one of `targets`, drawn from `seed`,
    and freeze all else. `wide`: they are float32, else of the dtype of their map. The model computes what it did until
    they are trained. Raises ConfigError for targets of which the model has none, for routers, which replay needs as
    they are, for experts in one tensor, and for embeddings."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("lora needs the package peft. Run pip install peft.") from error
    routers = [moe_layer.module for moe_layer in find_moe_layers(model)]
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=[*targets])  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise ConfigError(f"lora_targets={[*targets]}: {error}") from error
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    refused = {
        "routers, or experts in one tensor": any(hasattr(m, "parameter_name") for m in model.modules()),
        "routers": routers != [moe_layer.module for moe_layer in find_moe_layers(model)]
        or any(map(find_layers, routers)),
        "the embedding or the head": any(hasattr(end, "get_base_layer") for end in ends),
    }
    if what := next((what for what, there in refused.items() if there), None):
        raise ConfigError(f"lora_targets={[*targets]} names {what}, which have to stay as they are. Remove them.")
    for p in model.parameters() if wide else ():
        if p.requires_grad:
            p.data = p.data.float()


def draw_adapters(model: nn.Module, add: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """The weights of the adapters that `add` puts into a model on the meta device, which is of no use afterwards. PEFT
    draws them where the model's own weights are, so these become one number on the CPU, expanded."""
    for module in model.modules():
        for name, p in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape)))
    add(model)
    return adapter_weights(model)


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """What is trained of a model with adapters, by name; nothing of a model without."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return trained if find_layers(model) else {}


def find_layers(model: nn.Module) -> dict[str, Any]:
    """The adapted layers of a model by their path, without those of single parameters (PEFT's target_parameters)."""
    named = model.named_modules()
    return {n: m for n, m in named if hasattr(m, "get_base_layer") and not hasattr(m, "parameter_name")}


def remove_adapters(model: Any) -> Any:
    """The model with its linear maps in the place of adapted ones; what the adapters learned is lost."""
    for name, layer in find_layers(model).items():
        model.set_submodule(name, layer.base_layer)
    return model


def plain_state(model: nn.Module) -> dict[str, Tensor | nn.Module]:
    """The state dict by the names that a model without adapters has; adapted layers in the place of their weights."""
    layers, state = find_layers(model), model.state_dict()
    if not layers:
        return dict(state)
    plain: dict[str, Tensor | nn.Module] = {}
    for name, tensor in state.items():
        owner, inside, kind = name.rpartition(".base_layer.")
        if inside and owner in layers:
            plain[f"{owner}.{kind}"] = tensor if layers[owner].disable_adapters else layers[owner]
        elif not any(name.startswith(f"{path}.") for path in layers):
            plain[name] = tensor
    return plain


@torch.no_grad()
def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state dict with adapters merged, W + alpha / rank · B A, added in float32. Collective for adapted layers that
    are cut over ranks, which come whole."""
    for name, value in plain_state(model).items():
        if isinstance(value, Tensor):
            yield name, value
        else:
            gathered = {id(p): nn.Parameter(ranks.join_shards(p.detach()).clone(), False) for p in value.parameters()}
            layer: Any = copy.deepcopy(value, gathered)
            dtype = layer.get_base_layer().weight.dtype
            layer.float().merge()
            yield name, getattr(layer.get_base_layer(), name.rpartition(".")[2]).to(dtype)
