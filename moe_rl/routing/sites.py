"""Where a model routes: what the site axis of a trace means (`Layout`), and how every site of any supported family of
Hugging Face models is found, without a list of models.

Transformers names the router class of almost every family in `_can_record_outputs["router_logits"]`; a class whose
name ends in Router, TopKGating or Gate is taken as well. Where the router hands its logits to a module that takes the
top-k of them, in `route_tokens_to_experts`, as in many families before transformers 5.15, that method is intercepted.
The few families that differ are listed below.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Integer, UInt8
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing.ids import blocks, slots_first, unknown_id

LIGHTEST = 1e-6
"""The heaviest combine weight of a row is at least this."""
ROUTER_NAME = re.compile(r"(Router|TopKGating|MoEV1Gate)$")
WRAPPERS = re.compile(r"^(base_model\.model\.|_orig_mod\.|_fsdp_wrapped_module\.|module\.)+")
ADAPTERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
"""Path components that PEFT puts in: a model and its adapted version have the same sites."""

SELECTS = "route_tokens_to_experts"
"""The method that takes the top-k of a router's logits, where its forward does not."""
SELECTS_BY_MAXIMA = {"PhimoeTopKRouter"}
"""Routers that take one masked maximum per slot, without a top-k."""
NOTHING_TO_FORCE = {"DeepseekV4HashRouter"}
"""Sites whose ids are a table look-up of the input ids."""
UNSUPPORTED = {
    "DogeCDMoE": "it retrieves experts by product keys, without a router",
    "NllbMoeTop2Router": "it selects by argmax and drops tokens beyond an expert's capacity",
    "SwitchTransformersTop1Router": "it selects by argmax and drops tokens beyond an expert's capacity",
    "Ernie4_5_VLMoeMoeBlock": "it has two routers per layer, each of which reads a part of the tokens only",
    "DiffusionGemmaTextRouter": "it denoises blocks of tokens in several passes, so a token has no one route",
    "Inkling2LoopSparseMoeBlock": "it runs some layers several times per forward, so a token has several routes there",
    "Qwen3OmniMoeTalkerForConditionalGeneration": "it has two decoders that read different tokens; hook model.thinker",
}
"""Classes that cannot be recorded or replayed, and why."""
COMPLETE_SINCE = {
    "GraniteMoeTopKGating": "5.13",
    "GraniteMoeHybridTopKGating": "5.13",
    "GraniteMoeSharedTopKGating": "5.13",
    "LongcatFlashTopkRouter": "5.19",
}
"""Routers that hand out no logits or no combine weights, and the release of transformers from which on they do."""


ROUTE, TWICE, OUTSIDE, ALL_ZERO, MISSING = range(5)
"""What the ids of one token at one layer are: a route, one of three faults, or marks of a missing route. Where several
hold, it is the last."""


@dataclass(frozen=True)
class Site:
    """One place that routes."""

    name: str
    """Module path inside the model, e.g. `model.layers.3.mlp.gate`."""
    decoder_layer: int
    """Absolute index of the decoder layer; dense layers count."""
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class Layout:
    """The sites of one architecture, in forward order: what the site axis of a trace means."""

    sites: tuple[Site, ...]
    architecture: str
    """Fingerprint of the architecture (family and sizes); weights of one architecture share it."""

    @property
    def top_k(self) -> int:
        """Width of the k axis: the largest top-k of any site."""
        return max(site.top_k for site in self.sites)

    @property
    def dtype(self) -> torch.dtype:
        """One byte per id up to 255 experts (255 marks an unknown row), else two (-1 marks it)."""
        return torch.uint8 if max(site.num_experts for site in self.sites) <= 255 else torch.int16

    @property
    def unknown(self) -> int:
        return unknown_id(self.dtype)

    def widen(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Widen the last axis, which has the slots of one site, to `top_k`."""
        more = self.top_k - x.shape[-1]
        return nn.functional.pad(x, (0, more), value=value) if more else x

    def stack(self, ids: Sequence[Integer[Tensor, "tokens _"]]) -> Integer[Tensor, "tokens site k"]:
        """The ids of every site, wherever its layer is, as one tensor in the layout's dtype."""
        return torch.stack([self.widen(x, self.unknown).to(ids[0].device, self.dtype) for x in ids], 1)

    def require(self, other: Layout, what: str) -> None:
        """Raise unless `other` is this layout."""
        if self.architecture != other.architecture or len(self.sites) != len(other.sites):
            raise RoutingError(
                f"{what} is of another model: it has {len(other.sites)} MoE layers of architecture "
                f"{other.architecture}, this model has {len(self.sites)} of {self.architecture}. Record the routing "
                "again with this model."
            )
        for mine, theirs in zip(self.sites, other.sites, strict=True):
            if mine != theirs:
                raise RoutingError(f"{what} does not fit the model: it has {theirs}, the model has {mine}")

    def check(self) -> None:
        """Raise unless this layout, of a file or of a model's configuration, could be a model's."""
        for site in self.sites:
            sizes = (site.decoder_layer, site.num_experts, site.top_k)
            if not all(type(x) is int for x in sizes) or not isinstance(site.name, str) \
                    or not (site.decoder_layer >= 0 and 1 <= site.top_k <= site.num_experts < 2**15):
                raise RoutingError(f"no router can be {site}. Check the model's configuration, or the trace.")
        if not self.sites or not isinstance(self.architecture, str):
            raise RoutingError(f"the trace has {len(self.sites)} MoE layers of architecture {self.architecture!r}. "
                               "Record it again.")

    def check_ids(self, ids: Integer[Tensor, "batch time site k"]) -> None:
        """Raise unless every row is unknown, or holds distinct ids in range (so an all-zero row with k > 1 is refused).
        """
        if ids.dim() != 4 or ids.shape[2:] != (len(self.sites), self.top_k):
            expected = f"[batch, time, {len(self.sites)} sites, {self.top_k}]"
            raise RoutingError(f"expert ids have shape {tuple(ids.shape)}; expected {expected}")
        kinds = torch.empty(ids.shape[:3], dtype=torch.uint8, device=ids.device)
        faulty = False
        for at in blocks(*ids.shape[:3], device=ids.device):
            found = kinds[at] = self.kinds_of_rows(_narrow(ids[at]), (unknown_id(ids.dtype),))
            faulty |= bool(((found > ROUTE) & (found < MISSING)).any())
        if not faulty:
            return
        for s, site in enumerate(self.sites):
            kind = kinds[:, :, s]
            for hit in (kind == OUTSIDE, (kind == TWICE) | (kind == ALL_ZERO)):
                if bool(hit.any()):
                    b, t = hit.nonzero()[0].tolist()
                    why = (f"but ids run from 0 to {site.num_experts - 1}. Mark missing routing with -1 in every slot."
                           if int(kind[b, t]) == OUTSIDE else "which contain an expert twice. Mark missing "
                           "routing with -1; some engines write zeros.")
                    experts = ids[b, t, s, : site.top_k].tolist()
                    raise RoutingError(f"{site.name}: row {b}, token {t} has experts {experts}, {why}")

    def kinds_of_rows(
        self, ids: Integer[Tensor, "*axes site k"], missing: Sequence[int]
    ) -> UInt8[Tensor, "*axes site"]:
        """What every row is. A route has distinct ids in range; a row is missing if all its slots hold one mark of
        `missing`, which is no id of that site."""
        kinds = torch.empty(ids.shape[:-1], dtype=torch.uint8, device=ids.device)
        for k in sorted({site.top_k for site in self.sites}):
            here = [s for s, site in enumerate(self.sites) if site.top_k == k]
            rows = ids if len(here) == len(self.sites) else ids[..., here, :k]
            experts = torch.tensor([self.sites[s].num_experts for s in here], dtype=torch.int32, device=ids.device)
            found = _kinds(slots_first(rows), experts, missing)
            if rows is ids:
                return found
            kinds[..., here] = found
        return kinds

    def compact(self, ids: Integer[Tensor, "batch time site k"]) -> Integer[Tensor, "batch time site k"]:
        """Ids that were checked, in the dtype of the layout; any negative one marks an unknown slot."""
        if ids.dtype in (self.dtype, torch.uint8) or self.dtype != torch.uint8:
            return ids.to(self.dtype)
        experts = torch.empty(ids.shape, dtype=self.dtype, device=ids.device)
        for at in blocks(*ids.shape[:3], device=ids.device):
            experts[at] = ids[at].clamp(min=-1)  # which wraps to 255
        return experts

    def check_gates(self, gates: Tensor, known: Bool[Tensor, "batch time site"]) -> None:
        """Raise unless combine weights are float32 or float16, one per slot, and where a route is known finite, not
        negative and not all 0."""
        if gates.dtype not in (torch.float32, torch.float16) or gates.shape != (*known.shape, self.top_k):
            raise RoutingError(f"gate weights have dtype {gates.dtype} and shape {tuple(gates.shape)}; expected "
                               f"float32 or float16, one per id: {(*known.shape, self.top_k)}")
        slots = torch.arange(self.top_k) < torch.tensor([site.top_k for site in self.sites])[:, None]
        weights = gates.masked_fill(~slots.to(gates.device), 0)
        bad = ((~weights.isfinite() | (weights < 0)).any(-1) | (weights.amax(-1) < LIGHTEST)) & known
        if bool(bad.any()):
            b, t, s = bad.nonzero()[0].tolist()
            raise RoutingError(f"{self.sites[s].name}: row {b}, token {t} has gate weights {gates[b, t, s].tolist()}; "
                               f"expected finite values of at least 0, with one of {LIGHTEST} or more")


@dataclass(frozen=True)
class RoutingModule:
    """A router, and what the hooks must know to recognise its selection of experts."""

    module: nn.Module
    site: Site
    num_groups: int
    """Groups of a group-limited router; 0 for all others."""
    selector: nn.Module
    """The module that selects: the router, or the one whose `route_tokens_to_experts` takes the router's logits."""
    reader: nn.Module
    """The module whose forward reads the hidden states and selects: the router, or the one that holds it."""

    @property
    def by_maxima(self) -> bool:
        return family_class(self.module).__name__ in SELECTS_BY_MAXIMA


def find_sites(model: nn.Module) -> tuple[RoutingModule, ...]:
    """Every routing site of `model`'s text decoder, in forward order.

    Multi-token-prediction layers are left out: they share layer numbers with the decoder and do not score tokens.
    Raises RoutingError for a dense model and, by name and with the reason, for a family that cannot be supported.
    """
    modules = dict(_running_modules(model))
    routing = _routing_classes({family_class(module) for module in modules.values()})
    decoder = set(_text_decoder(model).modules())
    inside = {n: module for n, module in modules.items() if module in decoder and not re.search(r"(^|\.)mtp", n)}
    found = [_beside(name, module, inside) for name, module in inside.items() if hasattr(type(module), SELECTS)]
    candidates = {name: module for name, module in inside.items() if family_class(module) in routing}
    found = found or [
        _describe(name, module, module, module)
        for name, module in candidates.items()
        if not any(other.startswith(f"{name}.") for other in candidates)  # a block recorded beside its own router
    ]
    if not found:
        raise RoutingError(
            f"{type(model).__name__} has no MoE layer: it is dense, or its family is not supported. Use a "
            "Mixture-of-Experts model."
        )
    return tuple(sorted(found, key=lambda s: (s.site.decoder_layer, "attention" not in s.site.name)))


def family_class(module: nn.Module) -> type:
    """A module's class as its family has it: FSDP2 puts one of its own in front of those that it cuts by themselves."""
    kind = type(module)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def layout_of(model: nn.Module) -> Layout:
    """The model's routing layout. Two checkpoints of one architecture have the same."""
    return make_layout(model, find_sites(model))


def make_layout(model: nn.Module, sites: tuple[RoutingModule, ...]) -> Layout:
    of_modules = (getattr(module, "config", None) for module in model.modules())  # DDP's wrapper has none
    config = next((config for config in of_modules if config is not None), None)
    config = getattr(config, "get_text_config", lambda: config)()
    sizes = [
        getattr(config, key, None) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    ]
    digest = hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]
    layout = Layout(tuple(s.site for s in sites), f"{sizes[0]}-{digest}")
    layout.check()
    return layout


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the routing sites themselves, adapters on them included, not of the experts beside them."""
    sites = tuple(f"{s.site.name}." for s in find_sites(model))
    found = [p for n, p in model.named_parameters() if plain_name(n).startswith(sites) and "experts" not in n]
    return list(dict.fromkeys(found))


def router_matrices(site: RoutingModule) -> list[nn.Parameter]:
    """What one site multiplies hidden states with to get its scores; biases and experts beside it are left out."""
    return [p for name, p in site.module.named_parameters() if "experts" not in name and p.dim() > 1
            and not name.endswith("bias")]


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Matrices of the text decoder's layers that are not the routers': of attention, experts and dense layers."""
    routers = {id(matrix) for site in find_sites(model) for matrix in router_matrices(site)}
    return [p for name, p in _text_decoder(model).named_parameters() if re.search(r"\.\d+\.", f".{name}")
            and p.dim() > 1 and not name.endswith("bias") and id(p) not in routers]


def plain_name(name: str) -> str:
    """A module or parameter path without what PEFT, FSDP, DDP and torch.compile put in."""
    return ADAPTERS.sub("", WRAPPERS.sub("", name))


def token_readers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The model, its text decoder and the wrappers between them, from the outside in: whichever of them is called, and
    however it hands on its inputs, one of them is given the token ids."""
    decoder = _text_decoder(model)
    path = next((name for name, module in model.named_modules() if module is decoder), "").split(".")
    at = [".".join(path[:depth]) for depth in range(len(path) + 1)]
    return tuple(model.get_submodule(name) for name in dict.fromkeys(at))


def since(router: str) -> str:
    """The end of a message about missing logits or gate weights: the release of transformers that returns them."""
    return f", or use transformers >= {COMPLETE_SINCE[router]}" if router in COMPLETE_SINCE else ""


def _describe(name: str, module: nn.Module, selector: nn.Module, reader: nn.Module) -> RoutingModule:
    site = Site(
        name=plain_name(name),
        decoder_layer=_decoder_layer(name),
        num_experts=_num_experts(module, selector),
        top_k=_first(selector, "top_k", "num_experts_per_tok", "top_k_experts", "moe_topk"),
    )
    groups = next((n for key in ("num_group", "n_group") if isinstance(n := getattr(selector, key, None), int)), 0)
    return RoutingModule(module, site, groups, selector, reader)


def _beside(name: str, selector: nn.Module, modules: dict[str, nn.Module]) -> RoutingModule:
    """The site of a module that takes the top-k of logits: the router that it, or the module around it, holds."""
    for owner in (name, name.rpartition(".")[0]):
        routers = {f"{plain_name(owner)}.{attribute}" for attribute in ("gate", "router")}
        for path, module in modules.items():
            if plain_name(path) in routers and "modules_to_save" not in module._modules:
                return _describe(path, module, selector, modules[owner])
    raise RoutingError(f"{name} ({type(selector).__name__}) chooses experts, but no router named gate or router is in "
                       "it or around it. Its routing cannot be recorded or replayed.")


def _running_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, less those that PEFT keeps but does not run: the original beside an active trained copy, or the
    copies beside an original whose adapters are off."""
    idle: set[nn.Module] = set()
    for name, module in model.named_modules():
        if "modules_to_save" in module._modules:
            copies = module.modules_to_save
            active = [] if module.disable_adapters else module.active_adapters[:1]
            runs = copies[active[0]] if active else module.original_module
            kept = [module.original_module, *copies.values()]
            idle.update(m for k in kept if k is not runs for m in k.modules())
        if module not in idle:
            yield name, module


def _routing_classes(kinds: set[type]) -> set[type]:
    """Those of a model's classes whose forward selects experts. Raises RoutingError for one that is refused."""
    recorded: set[type] = set()
    for kind in kinds:
        if kind.__name__ in UNSUPPORTED:
            raise RoutingError(f"{kind.__name__} cannot be recorded or replayed: {UNSUPPORTED[kind.__name__]}")
        outputs = getattr(kind, "_can_record_outputs", None)
        spec = outputs.get("router_logits") if isinstance(outputs, dict) else None
        targets = [getattr(s, "target_class", s) for s in (spec if isinstance(spec, list | tuple) else [spec])]
        recorded.update(target for target in targets if isinstance(target, type))
    names = {kind.__name__ for kind in recorded}
    return {
        kind
        for kind in kinds
        if (kind.__name__ in names or ROUTER_NAME.search(kind.__name__)) and kind.__name__ not in NOTHING_TO_FORCE
    }


def _text_decoder(model: nn.Module) -> nn.Module:
    """The part that reads text, of models that also see or hear; their other routers do not score tokens."""
    for module in model.modules():  # the first transformers model inside DDP, PEFT or the user's own wrapper
        if (decoder_of := getattr(module, "get_decoder", None)) is not None:
            return decoder_of()
    return model


def _num_experts(module: nn.Module, selector: nn.Module) -> int:
    bias = getattr(module, "e_score_correction_bias", None)
    if isinstance(bias, Tensor):  # counts what is routed over, zero-computation experts included
        return bias.numel()
    matrix = next((p for p in module.parameters() if p.dim() == 2), None)
    rows = None if matrix is None else len(matrix)
    return _first(selector, "num_router_classes", "num_experts", "num_local_experts", "n_routed_experts", last=rows)


def _narrow(ids: Integer[Tensor, "*axes"]) -> Integer[Tensor, "*axes"]:
    """Ids in at most two bytes, so that they are compared faster: what no expert can have stays so."""
    return ids if ids.element_size() <= 2 else ids.clamp(-2, 2**15 - 1).to(torch.int16)


def _kinds(
    slots: Integer[Tensor, "k *axes site"], experts: Integer[Tensor, " site"], missing: Sequence[int]
) -> UInt8[Tensor, "*axes site"]:
    """See `Layout.kinds_of_rows`."""
    low, high = slots.amin(0).int(), slots.amax(0).int()  # in uint8, 255 equals -1

    def which(compare: Callable[..., Tensor], x: Tensor, y: Tensor | int) -> Tensor:
        """0 and 1 in the dtype of x: of bool, PyTorch vectorises less."""
        return compare(x, y, out=torch.empty_like(x))

    twice = torch.zeros_like(slots[0])
    for apart in range(1, len(slots)):
        twice |= which(torch.eq, slots[apart:], slots[:-apart]).amax(0)
    outside = which(torch.lt, low, 0) | which(torch.ge, high, experts)
    kinds = torch.maximum(twice * TWICE, outside * OUTSIDE)
    if not bool(kinds.any()):  # a mark, or zeros, would be an id outside or one that stands twice
        return kinds.to(torch.uint8)
    if len(slots) > 1:
        kinds = torch.maximum(kinds, (which(torch.eq, low, 0) & which(torch.eq, high, 0)) * ALL_ZERO)
    for mark in missing:
        is_mark = ((experts <= mark) | (mark < 0)).int() * MISSING
        kinds = torch.maximum(kinds, (which(torch.eq, low, mark) & which(torch.eq, high, mark)) * is_mark)
    return kinds.to(torch.uint8)


def _first(module: nn.Module, *attributes: str, last: int | None = None) -> int:
    """The first of these attributes that the module, its experts or its configuration has, else `last`."""
    for owner in (module, getattr(module, "experts", None), getattr(module, "config", None)):
        for attribute in attributes:
            value = getattr(owner, attribute, None)
            if isinstance(value, int):
                return value
    if last is not None:
        return last
    raise RoutingError(
        f"{type(module).__name__} looks like a router, but has no {', '.join(attributes)}. Its routing cannot be "
        "recorded or replayed."
    )


def _decoder_layer(name: str) -> int:
    """The absolute layer index in a module path: `model.layers.3.mlp.gate` → 3."""
    number = re.search(r"\.(\d+)\.", name)
    if number is None:
        raise RoutingError(f"the path of the MoE layer {name!r} does not contain the number of its decoder layer")
    return int(number.group(1))
