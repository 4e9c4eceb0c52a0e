"""What is changed in a model for one forward: scopes, which leave the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.errors import ConfigError
from moe_rl.integrations.cpu_kernels.experts import NAME
from moe_rl.models.load import keep_routers_in
from moe_rl.routing.intercept import in_order
from moe_rl.routing.moe_layers import RoutingModule, find_moe_layers, router_matrices

Scope = Callable[[nn.Module], AbstractContextManager[nn.Module]]


def change_routers(change: Callable[[RoutingModule], Any], dtype: torch.dtype | None = None) -> Scope:
    """Every router is a changed copy of itself inside the scope, on request kept and computed in `dtype`; the module
    that takes the top-k of its logits, where that is another one, takes other attributes."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        names = {module: name for name, module in model.named_modules()}
        routers = {names[spec.module]: spec.module for spec in find_moe_layers(model)}
        attributes = [(vars(spec.selector), dict(vars(spec.selector))) for spec in find_moe_layers(model)]
        try:
            for name, module in routers.items():
                model.set_submodule(name, copy.deepcopy(module))
            with torch.no_grad():
                for spec in find_moe_layers(model):
                    change(spec)
            if dtype is not None:
                keep_routers_in(model, dtype)
            yield model
        finally:
            for name, module in routers.items():
                model.set_submodule(name, module)
            for now, before in attributes:
                now.update(before)

    return scope


def change_weights(select: Callable[[nn.Module], Sequence[Tensor]], change: Callable[[Tensor], Tensor]) -> Scope:
    """The selected weights of the model take other values."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        chosen = select(model)
        with _values(chosen, (change(x.detach().float()) for x in chosen)):
            yield model

    return scope


def select_routers(model: nn.Module) -> list[Tensor]:
    return [p for spec in find_moe_layers(model) for p in router_matrices(spec)]


def select_matrices(model: nn.Module) -> list[Tensor]:
    """All matrices but routers, embeddings and the head."""
    routers = {id(p) for p in select_routers(model)}
    named = [(n, p) for n, p in model.named_parameters() if p.dim() > 1 and id(p) not in routers]
    return [p for n, p in named if "embed" not in n and "lm_head" not in n]


def select_shared_experts(model: nn.Module) -> list[Tensor]:
    """The last matrices of the shared experts."""
    return [p for n, p in model.named_parameters() if "shared_expert" in n and "down_proj" in n]


def take_weights(other: nn.Module, picks: Callable[[str], bool]) -> Scope:
    """The weights that `picks` names are those of another model. A tied head that is picked alone comes apart from the
    embedding, and the other way round."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        theirs, mine = _tensors(other), _tensors(model)
        names = [n for n in mine if picks(n) and not n.endswith("inv_freq")]
        if odd := [n for n in names if n not in theirs or theirs[n].shape != mine[n].shape]:
            raise ConfigError(f"{odd[0]} is missing in the other checkpoint, or has another shape")
        shared = {n for n in names if any(x is mine[n] and m not in names for m, x in mine.items())}
        for name in shared:
            copied = nn.Parameter(mine[name].detach().clone(), requires_grad=False)
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], copied)
        own = _tensors(model)
        try:
            with _values([own[n] for n in names], (theirs[n] for n in names)):
                yield model
        finally:
            for name in shared:
                setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], mine[name])

    return scope


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


@contextmanager
def _values(tensors: Sequence[Tensor], values: Iterable[Tensor]) -> Iterator[None]:
    """Other values inside the scope, made one after the other; the old ones are kept beside."""
    before = [x.detach().clone() for x in tensors]
    try:
        with torch.no_grad():
            for x, value in zip(tensors, values, strict=True):
                x.copy_(value)
        yield
    finally:
        with torch.no_grad():
            for x, old in zip(tensors, before, strict=True):
                x.copy_(old)


def cast_to(dtype: torch.dtype) -> Scope:
    """A copy of the model whose parameters are in `dtype`, `make_runnable` there; buffers stay."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.data = parameter.data.to(dtype)
        with make_runnable(twin):
            yield twin

    return scope


@contextmanager
def make_runnable(model: Any) -> Iterator[Any]:
    """The model, with its experts one by one where they are too narrow for grouped products in its dtype."""
    own = getattr(model.config, "_experts_implementation", None)
    narrow = own in ("grouped_mm", NAME) and not _groups(model)
    if narrow:
        model.set_experts_implementation("eager")
    try:
        yield model
    finally:
        if narrow:
            model.set_experts_implementation(own)


def _groups(model: nn.Module) -> bool:
    """Whether torch can multiply all experts at once: it wants rows of a multiple of 16 bytes."""
    experts = (p for p in model.parameters() if p.dim() == 3)
    return all(size * p.element_size() % 16 == 0 for p in experts for size in p.shape[1:])


def flip_renormalising(module: Any, renormalises: bool) -> None:
    """Make a router that renormalises its combine weights hand out raw ones, or the other way round."""
    if isinstance(getattr(module, "norm_topk_prob", None), bool):
        module.norm_topk_prob = not renormalises
    else:  # softmax over all experts, read at the chosen ones
        module.register_forward_hook(_raw_weights)


def _raw_weights(module: nn.Module, args: Any, output: Any) -> Any:
    (logits, weights, ids), order = in_order(output)
    scores = logits.float()
    made = (scores >= 0).all() and (scores.sum(-1) - 1).abs().max() < 1e-3  # before transformers 5.6
    raw = (scores if made else scores.softmax(-1)).gather(-1, ids).to(weights.dtype)
    return tuple((logits, raw, ids)[i] for i in order or (0, 1, 2))
