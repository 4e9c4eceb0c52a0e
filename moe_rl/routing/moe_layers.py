"""Where a model routes: the meaning of a trace's MoE layer axis (`Layout`), and how the MoE layers of a model are
found.

Transformers names the router class of almost every family in `_can_record_outputs["router_logits"]`; a class whose
name ends in Router, TopKGating or Gate counts as well. In many families before transformers 5.15 another module takes
the top-k of the router's logits, in `route_tokens_to_experts`; that method is intercepted. The constants below list
the families that differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Integer, UInt8
from torch import Tensor, nn

from moe_rl.errors import RoutingError, renamed
from moe_rl.routing.ids import blocks, slots_first, unknown_id

LIGHTEST = 1e-6
"""The heaviest combine weight of a row is at least this."""
ROUTER_NAME = re.compile(r"(Router|TopKGating|MoEV1Gate)$")
OUTERMOST = re.compile(r"^(base_model\.model\.|module\.)+")
INSERTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+|_orig_mod|_\w*wrapped_module)(?=\.|$)")
"""Path components that PEFT, torch.compile, FSDP1 and checkpoint wrappers put in: the MoE layers stay the same."""
HELD = {"module": r"torch\.nn\.parallel|torch\.optim|deepspeed|accelerate", "base_model": "peft", "model": "peft"}
"""Path components that belong to a wrapper below a class of these packages, and to the model below all others."""

SELECTS = "route_tokens_to_experts"
"""The method that takes the top-k of a router's logits, where its forward does not."""
NOTHING_TO_FORCE = {"DeepseekV4HashRouter"}
"""MoE layers whose ids are a table look-up of the input ids."""
UNSUPPORTED = {
    "DogeCDMoE": "it retrieves experts by product keys, without a router",
    "NllbMoeTop2Router": "it selects by argmax and drops tokens beyond an expert's capacity",
    "SwitchTransformersTop1Router": "it selects by argmax and drops tokens beyond an expert's capacity",
    "Ernie4_5_VLMoeMoeBlock": "it has two routers per layer, each of which reads a part of the tokens only",
    "DiffusionGemmaTextRouter": "it denoises blocks of tokens in several passes, so a token has no one route",
    "PhimoeTopKRouter": "it takes one masked maximum per slot, without a top-k",
    "Inkling2LoopSparseMoeBlock": "it runs some layers several times per forward, so a token has several routes there",
    "Qwen3OmniMoeTalkerForConditionalGeneration": "it has two decoders that read different tokens; hook model.thinker",
}
"""Classes that cannot be recorded or replayed, and why."""
ATTENDS = re.compile(r"((full|sliding|chunked|indexed|reference_sliding|deepseek_sparse)_)?attention|moe|mlp|[*E1-]")
"""Names of layers that read only the tokens that a mask lets in. All others mix tokens by themselves."""
WITHOUT_POSITIONS = {"afmoe", "glm4v_moe_text", "gpt_oss", "hy_v4_vl_text", "openai_privacy_filter"}
"""Families whose masks are made without position ids; flash attention reads them by itself."""
APART_SINCE = {"glm_moe_dsa": (5, 11)}
"""Families whose packed rows see one another before this release of transformers."""


ROUTE, TWICE, OUTSIDE, ALL_ZERO, MISSING = range(5)
"""What the ids of one token at one layer are: a route, one of three faults, or marks of a missing route. Of several the
last counts."""


@dataclass(frozen=True)
class MoeLayer:
    """One place that routes."""

    name: str
    """Module path inside the model, e.g. `model.layers.3.mlp.gate`."""
    decoder_layer: int
    """Absolute index of the decoder layer; dense layers count."""
    num_experts: int
    top_k: int


@renamed(sites="moe_layers")
@dataclass(frozen=True)
class Layout:
    """The MoE layers of one architecture, in forward order: what the MoE layer axis of a trace means."""

    moe_layers: tuple[MoeLayer, ...]
    architecture: str
    """Fingerprint of the architecture (family and sizes); weights of one architecture share it."""

    @property
    def top_k(self) -> int:
        """Width of the k axis: the largest top-k of any MoE layer."""
        return max(moe_layer.top_k for moe_layer in self.moe_layers)

    @property
    def dtype(self) -> torch.dtype:
        """One byte per id up to 255 experts (255 marks an unknown row), else two (-1 marks it)."""
        return torch.uint8 if max(moe_layer.num_experts for moe_layer in self.moe_layers) <= 255 else torch.int16

    @property
    def unknown(self) -> int:
        return unknown_id(self.dtype)

    def widen(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Widen the last axis, which has the slots of one MoE layer, to `top_k`."""
        more = self.top_k - x.shape[-1]
        return nn.functional.pad(x, (0, more), value=value) if more else x

    def stack(self, ids: Sequence[Integer[Tensor, "tokens _"]]) -> Integer[Tensor, "tokens moe_layer k"]:
        """The ids of every MoE layer, wherever its layer is, as one tensor in the layout's dtype."""
        return torch.stack([self.widen(x, self.unknown).to(ids[0].device, self.dtype) for x in ids], 1)

    def require(self, other: Layout, what: str) -> None:
        """Raise unless `other` is this layout."""
        pairs = zip(self.moe_layers, other.moe_layers, strict=False)
        differ = next((f": {theirs} is {mine} here" for mine, theirs in pairs if mine != theirs), "")
        if self.architecture != other.architecture or len(self.moe_layers) != len(other.moe_layers) or differ:
            raise RoutingError(
                f"{what} is of another model, with {len(other.moe_layers)} MoE layers of architecture "
                f"{other.architecture}, not {len(self.moe_layers)} of {self.architecture}{differ}. "
                "Record the routing again with this model."
            )

    def check(self) -> None:
        """Raise unless every MoE layer could be a router."""
        if odd := [
            moe_layer for moe_layer in self.moe_layers if not 1 <= moe_layer.top_k <= moe_layer.num_experts < 2**15
        ]:
            raise RoutingError(f"no router can be {odd[0]}. Check the model's configuration.")

    def check_ids(self, ids: Integer[Tensor, "batch time moe_layer k"]) -> None:
        """Raise unless every row is unknown, or holds distinct ids in range. An all-zero row with k > 1 is refused."""
        if ids.dim() != 4 or ids.shape[2:] != (len(self.moe_layers), self.top_k):
            expected = f"[batch, time, {len(self.moe_layers)} MoE layers, {self.top_k}]"
            raise RoutingError(f"expert ids have shape {tuple(ids.shape)}; expected {expected}")
        kinds = torch.empty(ids.shape[:3], dtype=torch.uint8, device=ids.device)
        faulty = False
        for at in blocks(*ids.shape[:3], device=ids.device):
            here = kinds[at] = self.kinds_of_rows(_narrow(ids[at]), (unknown_id(ids.dtype),))
            faulty |= bool(((here > ROUTE) & (here < MISSING)).any())
        if not faulty:
            return
        for s, moe_layer in enumerate(self.moe_layers):
            kind = kinds[:, :, s]
            for hit in (kind == OUTSIDE, (kind == TWICE) | (kind == ALL_ZERO)):
                if bool(hit.any()):
                    b, t = hit.nonzero()[0].tolist()
                    why = (
                        f"but ids run from 0 to {moe_layer.num_experts - 1}. "
                        "Mark missing routing with -1 in every slot."
                        if int(kind[b, t]) == OUTSIDE
                        else "which contain an expert twice. Mark missing routing with -1; some engines write zeros."
                    )
                    experts = ids[b, t, s, : moe_layer.top_k].tolist()
                    raise RoutingError(f"{moe_layer.name}: row {b}, token {t} has experts {experts}, {why}")

    def kinds_of_rows(
        self, ids: Integer[Tensor, "*axes moe_layer k"], missing: Sequence[int]
    ) -> UInt8[Tensor, "*axes moe_layer"]:
        """The kind of every row. A route has distinct ids in range. A row is missing if all its slots hold one mark of
        `missing` that is no id of that MoE layer."""
        kinds = torch.empty(ids.shape[:-1], dtype=torch.uint8, device=ids.device)
        for k in sorted({moe_layer.top_k for moe_layer in self.moe_layers}):
            here = [s for s, moe_layer in enumerate(self.moe_layers) if moe_layer.top_k == k]
            rows = ids if len(here) == len(self.moe_layers) else ids[..., here, :k]
            experts = torch.tensor([self.moe_layers[s].num_experts for s in here], dtype=torch.int32, device=ids.device)
            of_moe_layers = _kinds(slots_first(rows), experts, missing)
            if rows is ids:
                return of_moe_layers
            kinds[..., here] = of_moe_layers
        return kinds

    def compact(self, ids: Integer[Tensor, "batch time moe_layer k"]) -> Integer[Tensor, "batch time moe_layer k"]:
        """A copy of checked ids in the dtype of the layout. Any negative one marks an unknown slot."""
        if ids.dtype in (self.dtype, torch.uint8) or self.dtype != torch.uint8:
            return ids.to(self.dtype, copy=True)
        experts = torch.empty(ids.shape, dtype=self.dtype, device=ids.device)
        for at in blocks(*ids.shape[:3], device=ids.device):
            experts[at] = ids[at].clamp(min=-1)  # which wraps to 255
        return experts

    def check_gates(self, gates: Tensor, known: Bool[Tensor, "batch time moe_layer"]) -> None:
        """Raise unless combine weights are float32 or float16, one per slot, and, where the route is known, finite, not
        negative and not all 0."""
        if gates.dtype not in (torch.float32, torch.float16) or gates.shape != (*known.shape, self.top_k):
            raise RoutingError(
                f"gate weights are {gates.dtype} of shape {tuple(gates.shape)}; expected float32 or float16 of shape "
                f"{(*known.shape, self.top_k)}"
            )
        slots = torch.arange(self.top_k) < torch.tensor([moe_layer.top_k for moe_layer in self.moe_layers])[:, None]
        weights = gates.masked_fill(~slots.to(gates.device), 0)
        bad = ((~weights.isfinite() | (weights < 0)).any(-1) | (weights.amax(-1) < LIGHTEST)) & known
        if bool(bad.any()):
            b, t, s = bad.nonzero()[0].tolist()
            raise RoutingError(
                f"{self.moe_layers[s].name}: row {b}, token {t} has gate weights {gates[b, t, s].tolist()}; "
                f"expected finite values of at least 0, with one of {LIGHTEST} or more"
            )


@dataclass(frozen=True)
class RoutingModule:
    """A router, and the facts by which hooks recognise its selection of experts."""

    module: nn.Module
    moe_layer: MoeLayer
    num_groups: int
    """Groups of a group-limited router; 0 for all others."""
    selector: nn.Module
    """The module that selects: the router, or the one whose `route_tokens_to_experts` takes the router's logits."""
    reader: nn.Module
    """The module whose forward reads the hidden states and selects: the router, or the one that holds it."""
    index: int = 0
    """On the MoE layer axis."""
    experts: nn.Module | None = None
    """The experts beside the router, where they are one module: they are given the ids."""


def find_moe_layers(model: nn.Module) -> tuple[RoutingModule, ...]:
    """Every routing MoE layer of `model`'s text decoder, in forward order.

    Multi-token-prediction layers are left out: they share layer numbers with the decoder and do not score tokens.
    Raises RoutingError for a dense model and for a family that cannot be supported.
    """
    modules = dict(_running_modules(model))
    routing = _routing_classes({family_class(module) for module in modules.values()})
    decoder = set(_text_decoder(model).modules())
    inside = {n: module for n, module in modules.items() if module in decoder and not re.search(r"(^|\.)mtp", n)}
    routers = [_router_of(name, module, inside) for name, module in inside.items() if hasattr(type(module), SELECTS)]
    candidates = {name: module for name, module in inside.items() if family_class(module) in routing}
    routers = routers or [
        _describe(name, module, module, module)
        for name, module in candidates.items()
        if not any(other.startswith(f"{name}.") for other in candidates)  # a block recorded beside its own router
    ]
    if not routers:
        raise RoutingError(f"{type(model).__name__} has no MoE layer: it is dense, or its family is not supported.")
    _require_routers(routers, inside)
    routers.sort(key=lambda s: (s.moe_layer.decoder_layer, "attention" not in s.moe_layer.name))
    holders = {n: m for n, m in inside.items() if ".experts" in n and (n.endswith(".experts") or _stacks(m))}
    experts = {f"{name}.".partition(".experts.")[0]: module for name, module in holders.items()}  # the innermost stays
    owners = [s.moe_layer.name.rpartition(".")[0] for s in routers]
    near = [experts.get(owner, experts.get(owner.rpartition(".")[0])) for owner in owners]
    return tuple(replace(s, index=i, experts=near[i]) for i, s in enumerate(routers))


def family_class(module: nn.Module) -> type:
    """The class of a module without the one that FSDP2 puts in front."""
    kind = type(module)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def derived_from(kind: type, names: Iterable[str]) -> str | None:
    """The first of these class names among a class and its bases."""
    return next((base.__name__ for base in kind.__mro__ if base.__name__ in names), None)


def layout_of(model: nn.Module) -> Layout:
    """The model's routing layout. Two checkpoints of one architecture have the same."""
    return make_layout(model, find_moe_layers(model))


def make_layout(model: nn.Module, moe_layers: tuple[RoutingModule, ...]) -> Layout:
    configs = (getattr(module, "config", None) for module in model.modules())  # DDP's wrapper has none
    config = next((config for config in configs if config is not None), None)
    config = getattr(config, "get_text_config", lambda: config)()
    sizes = [getattr(config, key, None) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")]
    digest = hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]
    layout = Layout(tuple(s.moe_layer for s in moe_layers), f"{sizes[0]}-{digest}")
    layout.check()
    return layout


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the routers, adapters included; those of the experts are left out."""
    moe_layers = tuple(f"{s.moe_layer.name}." for s in find_moe_layers(model))
    return [
        p for n, p in model.named_parameters() if "experts" not in n and plain_name(n, model).startswith(moe_layers)
    ]


def router_matrices(moe_layer: RoutingModule) -> list[nn.Parameter]:
    """The matrices that one router multiplies hidden states with; biases and experts are left out."""
    return [
        p
        for name, p in moe_layer.module.named_parameters()
        if "experts" not in name and p.dim() > 1 and not name.endswith("bias")
    ]


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Matrices of the text decoder's layers without those of routers: of attention, experts and dense layers."""
    routers = {id(matrix) for moe_layer in find_moe_layers(model) for matrix in router_matrices(moe_layer)}
    return [
        p
        for name, p in _text_decoder(model).named_parameters()
        if re.search(r"\.\d+\.", f".{name}") and p.dim() > 1 and not name.endswith("bias") and id(p) not in routers
    ]


def plain_name(name: str, model: nn.Module) -> str:
    """A path of a module or parameter, without the components of PEFT, FSDP, DDP, torch.compile and checkpointing."""
    parts = name.split(".")
    owners: Iterator[object] = accumulate(parts, lambda at, part: getattr(at, "_modules", {}).get(part), initial=model)
    own = [p for p, o in zip(parts, owners, strict=False) if p not in HELD or not re.match(HELD[p], type(o).__module__)]
    return OUTERMOST.sub("", INSERTED.sub("", f".{'.'.join(own)}").removeprefix("."))


def token_readers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The model, its text decoder and the wrappers between them, from the outside in. One of them is given the token
    ids, whichever is called."""
    decoder = _text_decoder(model)
    path = next((name for name, module in model.named_modules() if module is decoder), "").split(".")
    at = [".".join(path[:depth]) for depth in range(len(path) + 1)]
    return tuple(model.get_submodule(name) for name in dict.fromkeys(at))


def mixes_packed_rows(config: Any) -> str | None:
    """Why sequences that are packed into one row change one another in a model of this configuration: a layer type that
    mixes tokens by itself, or a family whose masks ignore position ids. None where neither is known."""
    config = getattr(config, "get_text_config", lambda: config)()
    for name in ("layer_types", "layers_block_type", "attn_type_list", "hybrid_override_pattern"):
        for kind in getattr(config, name, None) or ():
            if not ATTENDS.fullmatch(str(kind)):
                return f"{name}={kind}"
    release = tuple(int(number) for number in version("transformers").split(".")[:2])
    flash = "flash" in str(getattr(config, "_attn_implementation", ""))
    mixes = (
        release < APART_SINCE.get(config.model_type, release) or config.model_type in WITHOUT_POSITIONS and not flash
    )
    return config.model_type if mixes else None


def _describe(name: str, module: nn.Module, selector: nn.Module, reader: nn.Module) -> RoutingModule:
    moe_layer = MoeLayer(
        name=name,
        decoder_layer=_decoder_layer(name),
        num_experts=_num_experts(module, selector),
        top_k=_first(selector, "top_k", "num_experts_per_tok", "top_k_experts", "moe_topk"),
    )
    groups = next((n for key in ("num_group", "n_group") if isinstance(n := getattr(selector, key, None), int)), 0)
    return RoutingModule(module, moe_layer, groups, selector, reader)


def _router_of(name: str, selector: nn.Module, modules: dict[str, nn.Module]) -> RoutingModule:
    """The router in, or next to, a module that takes the top-k of logits."""
    for owner in (name, name.rpartition(".")[0]):
        for path in (f"{owner}.gate", f"{owner}.router"):
            if path in modules:
                return _describe(path, modules[path], selector, modules[owner])
    raise RoutingError(f"{name} ({type(selector).__name__}) chooses experts, but has no module named gate or router")


def _running_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by their plain paths, without those that PEFT keeps but does not run. A wrapper comes before its
    module."""
    idle: set[nn.Module] = set()
    for name, module in model.named_modules():
        if "modules_to_save" in module._modules:
            copies = module.modules_to_save
            active = [] if module.disable_adapters else module.active_adapters[:1]
            runs = copies[active[0]] if active else module.original_module
            idle.update(m for k in (module.original_module, *copies.values()) if k is not runs for m in k.modules())
        if module not in idle:
            yield plain_name(name, model), module


def _routing_classes(kinds: set[type]) -> set[type]:
    """The classes that select experts. Raises RoutingError for one that is not supported."""
    names: set[str] = set()
    for kind in kinds:
        if refused := derived_from(kind, UNSUPPORTED):
            raise RoutingError(f"{kind.__name__} cannot be recorded or replayed: {UNSUPPORTED[refused]}")
        outputs = getattr(kind, "_can_record_outputs", None)
        spec = outputs.get("router_logits") if isinstance(outputs, dict) else None
        targets = [getattr(s, "target_class", s) for s in (spec if isinstance(spec, list | tuple) else [spec])]
        names.update(target.__name__ for target in targets if isinstance(target, type))
    names.update(base.__name__ for kind in kinds for base in kind.__mro__ if ROUTER_NAME.search(base.__name__))
    return {kind for kind in kinds if derived_from(kind, names) and not derived_from(kind, NOTHING_TO_FORCE)}


def _require_routers(moe_layers: Sequence[RoutingModule], inside: dict[str, nn.Module]) -> None:
    """Raise unless all experts have a router of their own: a layer would be left out silently."""
    routers = [s.moe_layer.name for s in moe_layers]
    routers += [name for name, module in inside.items() if derived_from(type(module), NOTHING_TO_FORCE)]
    blocks_of = tuple(f"{router.rpartition('.')[0]}." for router in routers)
    numbers = {s.moe_layer.num_experts for s in moe_layers}
    above = {router[:end] for router in routers for end, letter in enumerate(router) if letter == "."}
    for name, module in inside.items():
        sizes = numbers & ({len(module)} if isinstance(module, nn.ModuleList) else _stacks(module))
        owner = name.rpartition(".")[0]
        alone = owner not in above and not name.startswith(blocks_of)
        scored = sizes and {len(p) for p in inside.get(owner, module).parameters() if p.dim() == 2}
        if alone and (name.endswith(".experts") or sizes & scored):
            raise RoutingError(
                f"{name} ({type(module).__name__}) holds experts, but no router of its own can be recorded. Derive the "
                "router's class from the family's, and share none."
            )


def _stacks(module: nn.Module) -> set[int]:
    """How many matrices are stacked in a module's own parameters."""
    return {len(p) for p in module._parameters.values() if p is not None and p.dim() == 3}


def _text_decoder(model: nn.Module) -> nn.Module:
    """The part of a multimodal model that reads text; its other routers do not score tokens."""
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
    """Ids in at most two bytes, so that they are compared faster. Impossible ids stay impossible."""
    return ids if ids.element_size() <= 2 else ids.clamp(-2, 2**15 - 1).to(torch.int16)


def _kinds(
    slots: Integer[Tensor, "k *axes moe_layer"], experts: Integer[Tensor, " moe_layer"], missing: Sequence[int]
) -> UInt8[Tensor, "*axes moe_layer"]:
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
    raise RoutingError(f"{type(module).__name__} looks like a router, but has no {', '.join(attributes)}")


def _decoder_layer(name: str) -> int:
    """The absolute layer index in a module path: `model.layers.3.mlp.gate` → 3."""
    number = re.search(r"\.(\d+)\.", name)
    if number is None:
        raise RoutingError(f"the path of the MoE layer {name!r} does not contain the number of its decoder layer")
    return int(number.group(1))
