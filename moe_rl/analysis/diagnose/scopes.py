"""What is done to a model for one forward, and undone after it: other routers, weights, dtypes, kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.errors import ConfigError
from moe_rl.integrations.cpu_kernels.experts import NAME
from moe_rl.routing.balance import keep_routers_in
from moe_rl.routing.intercept import in_order
from moe_rl.routing.sites import RoutingModule, find_sites, router_matrices

Scope = Callable[[nn.Module], AbstractContextManager[nn.Module]]
FP8_MAX = 448.0
"""Largest number of float8_e4m3fn."""


def routers_changed(change: Callable[[RoutingModule], Any], dtype: torch.dtype | None = None) -> Scope:
    """Every router is a changed copy of itself inside the scope, on request kept and computed in `dtype`; the module
    that takes the top-k of its logits, where that is another one, takes other attributes."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        names = {module: name for name, module in model.named_modules()}
        own = [(names[spec.module], spec.module) for spec in find_sites(model)]
        attributes = [(vars(spec.selector), dict(vars(spec.selector))) for spec in find_sites(model)]
        try:
            for name, module in own:
                model.set_submodule(name, copy.deepcopy(module))
            for spec in find_sites(model):
                with torch.no_grad():
                    change(spec)
            if dtype is not None:
                keep_routers_in(model, dtype)
            yield model
        finally:
            for name, module in own:
                model.set_submodule(name, module)
            for now, before in attributes:
                now.update(before)

    return scope


def weights_rounded(rounded: Callable[[Tensor], Tensor]) -> Scope:
    """The routers' matrices take other values."""
    return routers_changed(lambda spec: [p.copy_(rounded(p.detach().float())) for p in router_matrices(spec)])


def matrices_rounded(rounded: Callable[[Tensor], Tensor]) -> Scope:
    """All matrices but routers, embeddings and the head take other values."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        routers = {id(p) for spec in find_sites(model) for p in router_matrices(spec)}
        chosen = [p for n, p in model.named_parameters() if p.dim() > 1 and id(p) not in routers
                  and not any(part in n for part in ("embed", "lm_head"))]
        with _values(chosen, (rounded(p.detach().float()) for p in chosen)):
            yield model

    return scope


def weights_of(other: nn.Module, picks: Callable[[str], bool]) -> Scope:
    """The weights that `picks` names are those of another model. A tied head that is picked alone comes apart from the
    embedding, and the other way round."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        theirs, mine = _tensors(other), _tensors(model)
        if missing := sorted(n for n, x in mine.items() if n in theirs and theirs[n].shape != x.shape
                             or n not in theirs and picks(n) and not n.endswith("inv_freq")):
            raise ConfigError(f"the other checkpoint is no version of this one: {missing[0]} differs in shape or is "
                              "not there.")
        names = [n for n in mine if n in theirs and picks(n)]
        with _untied(model, names) as own, _values([own[n] for n in names], (theirs[n] for n in names)):
            yield model

    return scope


@contextmanager
def _untied(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """The model's weights by name, where one that is picked and shared with one that is not is a copy of its own."""
    every = _tensors(model)
    shared = {n for n in names if any(x is every[n] and m not in names for m, x in every.items())}
    for name in shared:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(every[name].detach().clone(), requires_grad=False))
    try:
        yield _tensors(model)
    finally:
        for name in shared:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, every[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


@contextmanager
def _values(tensors: Sequence[Tensor], values: Iterable[Tensor]) -> Iterator[None]:
    """Other values inside the scope, made one after the other; the old ones are kept beside."""
    kept = [x.detach().clone() for x in tensors]
    try:
        with torch.no_grad():
            for x, value in zip(tensors, values, strict=True):
                x.copy_(value)
        yield
    finally:
        with torch.no_grad():
            for x, old in zip(tensors, kept, strict=True):
                x.copy_(old)


def in_dtype(dtype: torch.dtype) -> Scope:
    """A copy of the model whose parameters are in `dtype`, `runnable` there; buffers stay."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.data = parameter.data.to(dtype)
        with runnable(twin):
            yield twin

    return scope


def experts_by(name: str) -> Scope:
    """Another of transformers' implementations of the experts. Raises ConfigError for a model that has no such one."""

    @contextmanager
    def scope(model: Any) -> Iterator[nn.Module]:
        own = model.config._experts_implementation
        if name == "grouped_mm" and not _groups(model):
            raise ConfigError("no experts by grouped_mm: it multiplies rows of a multiple of 16 bytes only.")
        try:
            model.set_experts_implementation(name)
        except (AttributeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"no experts by {name}: {error}") from error
        try:
            yield model
        finally:
            model.set_experts_implementation(own)

    return scope


def runnable(model: Any) -> AbstractContextManager[Any]:
    """The model, with its experts one by one where they are too narrow for grouped products in its dtype."""
    by = getattr(model.config, "_experts_implementation", None)
    return nullcontext() if by not in ("grouped_mm", NAME) or _groups(model) else experts_by("eager")(model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """The model in eval mode; what was in training mode is so again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield model
    finally:
        for module in training:
            module.training = True


def _groups(model: nn.Module) -> bool:
    """Whether torch can multiply all experts at once: it wants rows of a multiple of 16 bytes."""
    experts = (p for p in model.parameters() if p.dim() == 3)
    return all(size * p.element_size() % 16 == 0 for p in experts for size in p.shape[1:])


# ---------------------------------------------------------------------- small parts
def to_fp8_and_back(weight: Tensor, axis: int | None = None) -> Tensor:
    """Rounded to e4m3, with the largest |w| of a row (`axis` -1) or of the tensor (None) at 448; unscaled with `axis`
    0."""
    if axis == 0:
        return weight.to(torch.float8_e4m3fn).float()
    largest = weight.abs().amax() if axis is None else weight.abs().amax(-1, keepdim=True)
    scale = (largest / FP8_MAX).clamp(min=1e-12)
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def flip_renormalising(module: Any, told: bool) -> None:
    """Make a router that renormalises its combine weights hand out raw ones, or the other way round."""
    if isinstance(getattr(module, "norm_topk_prob", None), bool):
        module.norm_topk_prob = not told
    else:  # softmax over all experts, read at the chosen ones
        module.register_forward_hook(_raw_weights)


def _raw_weights(module: nn.Module, args: Any, output: Any) -> Any:
    (logits, weights, ids), order = in_order(output)
    scores = logits.float()
    made = (scores >= 0).all() and (scores.sum(-1) - 1).abs().max() < 1e-3  # before transformers 5.6
    raw = (scores if made else scores.softmax(-1)).gather(-1, ids).to(weights.dtype)
    return tuple((logits, raw, ids)[i] for i in order or (0, 1, 2))
