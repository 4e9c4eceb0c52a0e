"""Where a model routes: find every site of any supported Hugging Face family, without a list of models.

Transformers names the router class of almost every family in `_can_record_outputs["router_logits"]`; a class whose
name ends in Router, TopKGating or Gate is taken as well. The few families that route elsewhere are listed below.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing.trace import Layout, Site

ROUTER_NAME = re.compile(r"(Router|TopKGating|MoEV1Gate)$")
WRAPPER_PREFIX = re.compile(r"^(base_model\.model\.|_orig_mod\.|_fsdp_wrapped_module\.|module\.)+")

SELECTS_OUTSIDE_ROUTER = {"DbrxRouter": "DbrxFFN"}
"""Routers that only return logits, with the class that takes the top-k."""
NOTHING_TO_FORCE = {"DeepseekV4HashRouter"}
"""Sites whose ids are a table look-up of the input ids."""
UNSUPPORTED = {
    "DogeCDMoE": "retrieves experts by product keys, without a router",
    "NllbMoeTop2Router": "selects by argmax with capacity drops",
    "SwitchTransformersTop1Router": "selects by argmax with capacity drops",
}


@dataclass(frozen=True)
class RoutingModule:
    """A module whose forward selects experts, and what the hooks must know to recognise that selection."""

    module: nn.Module
    site: Site
    num_groups: int
    """Groups of a group-limited router; 1 for all others."""


def find_sites(model: nn.Module) -> tuple[RoutingModule, ...]:
    """Every routing site of `model`, in forward order.

    Multi-token-prediction layers are left out: they share layer numbers with the decoder and do not score tokens.
    Raises RoutingError for a dense model and, by name and with the reason, for a family that cannot be supported.
    """
    targets = _recorded_classes(model)
    found = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in UNSUPPORTED:
            raise RoutingError(f"{kind} cannot be recorded or replayed: it {UNSUPPORTED[kind]}.")
        routes = kind in targets or ROUTER_NAME.search(kind)
        outside = kind in SELECTS_OUTSIDE_ROUTER or kind in NOTHING_TO_FORCE
        if not routes or outside or re.search(r"(^|\.)mtp", name):
            continue
        num_experts = _num_experts(module)
        site = Site(
            name=WRAPPER_PREFIX.sub("", name),
            decoder_layer=_decoder_layer(name),
            num_experts=num_experts,
            top_k=_first(module, "top_k", "num_experts_per_tok"),
        )
        found.append(RoutingModule(module, site, getattr(module, "num_group", None) or 1))
    if not found:
        raise RoutingError(
            f"{type(model).__name__} has no routing site: it is a dense model, or routes in an unsupported way. "
            "Recording and replaying routes needs a Mixture-of-Experts model."
        )
    return tuple(found)


def layout_of(model: nn.Module) -> Layout:
    """The model's routing layout. Two checkpoints of one architecture have the same."""
    return make_layout(model, find_sites(model))


def make_layout(model: nn.Module, sites: tuple[RoutingModule, ...]) -> Layout:
    config = getattr(model, "config", None)
    sizes = [
        getattr(config, key, None) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    ]
    digest = hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]
    return Layout(tuple(s.site for s in sites), f"{sizes[0]}-{digest}")


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that belong to the routing sites themselves, not to the experts beside them."""
    found = [p for s in find_sites(model) for n, p in s.module.named_parameters() if "expert" not in n]
    return list(dict.fromkeys(found))


def _recorded_classes(model: nn.Module) -> set[str]:
    """Names of the classes that transformers records router logits from."""
    names = set()
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for spec in recorded if isinstance(recorded, list | tuple) else [recorded]:
            target = getattr(spec, "target_class", spec)
            if isinstance(target, type):
                names.add(SELECTS_OUTSIDE_ROUTER.get(target.__name__, target.__name__))
    return names


def _num_experts(module: nn.Module) -> int:
    bias = getattr(module, "e_score_correction_bias", None)
    if isinstance(bias, Tensor):  # counts what is routed over, zero-computation experts included
        return bias.numel()
    return _first(module, "num_router_classes", "num_experts", "num_local_experts", "n_routed_experts")


def _first(module: nn.Module, *attributes: str) -> int:
    """The first of these attributes that the module, its experts or its configuration has."""
    for owner in (module, getattr(module, "experts", None), getattr(module, "config", None)):
        for attribute in attributes:
            value = getattr(owner, attribute, None)
            if isinstance(value, int):
                return value
    raise RoutingError(
        f"{type(module).__name__} looks like a router, but has none of {', '.join(attributes)}: "
        "its selection cannot be recognised, so it can be neither recorded nor replayed."
    )


def _decoder_layer(name: str) -> int:
    """The absolute layer index in a module path: `model.layers.3.mlp.gate` → 3."""
    number = re.search(r"\.(\d+)\.", name)
    if number is None:
        raise RoutingError(f"cannot tell the decoder layer of routing site {name!r} from its path.")
    return int(number.group(1))
