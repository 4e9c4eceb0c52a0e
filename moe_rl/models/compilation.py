"""Compile what lies between the routers: attention, experts, dense blocks and norms, each in place.

The routers, the MoE blocks and the decoder layers stay eager, so that recording and replay reach every router. A layer
that is compiled as one breaks at each of them, and under activation checkpointing it compiles nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from moe_rl.errors import ConfigError
from moe_rl.registry import unknown
from moe_rl.routing.moe_layers import find_moe_layers

RECOMPILE_LIMIT = 64
"""Graphs of one kind of part. torch's own limit, 8, is reached by lengths of 1, gradients on and off, and adapters."""
Parts = Mapping[str, list[nn.Module]]


def check_backend(backend: str | None) -> None:
    """Raise ConfigError for a backend that torch.compile does not have."""
    if backend is not None and backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        unknown("backend of torch.compile", backend, known)


def decoder_layers(model: Any) -> nn.ModuleList | None:
    """The layers of a model's decoder; None for a model without a list of them."""
    layers = getattr(getattr(model, "get_decoder", lambda: None)(), "layers", None)
    return layers if isinstance(layers, nn.ModuleList) else None


def find_parts(model: nn.Module) -> Parts:
    """What can be compiled in the decoder layers, by the name that it has there; layers share graphs of one name.

    A layer's child without a router in it is a part as a whole. Of one with a router (the MoE block) the children are:
    experts, shared experts. Single linear maps and lists of modules are left out.
    """
    layers = decoder_layers(model)
    if layers is None:
        raise ConfigError(f"compile: {type(model).__name__} has no list of decoder layers. Leave compile out.")
    routers = {id(moe_layer.module) for moe_layer in find_moe_layers(model)}

    def visit(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            inside = {id(m) for m in child.modules()}
            if inside & routers:
                if id(child) not in routers:
                    yield from visit(child, f"{path}{name}.")
            elif not isinstance(child, nn.Linear | nn.ModuleList) and any(True for _ in child.parameters()):
                yield f"{path}{name}", child

    parts: dict[str, list[nn.Module]] = {}
    for layer in layers:
        for name, part in visit(layer, ""):
            parts.setdefault(name, []).append(part)
    return parts


def compile_parts(model: nn.Module, backend: str = "inductor", dtype: torch.dtype | None = None) -> Parts:
    """Compile the parts of a model in place and return those that are. Names in the state dict stay. A copy of the
    model is not compiled.

    `dtype` is that of the computation (default: of the weights). Experts are compiled in bfloat16 alone: of others
    transformers traces a loop over experts that waits for the device. Before FSDP2 wraps the layers; `try_parts` then
    runs them once.
    """
    import torch._dynamo as dynamo

    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    parts = {name: modules for name, modules in find_parts(model).items() if not _falls_back(modules[0], dtype)}
    for modules in parts.values():
        _compile(modules, backend)
    return parts


def _falls_back(part: nn.Module, dtype: torch.dtype | None) -> bool:
    stacked = [p for p in part.parameters(recurse=False) if p.dim() == 3]  # experts × out × in
    return any((dtype or p.dtype) != torch.bfloat16 for p in stacked)


def _compile(modules: list[nn.Module], backend: str) -> None:
    for module in modules:
        module.compile(backend=backend, dynamic=True, fullgraph=True)


def undo(modules: list[nn.Module]) -> None:
    """Let the modules run eagerly again."""
    for module in modules:
        module._compiled_call_impl = None


def try_parts(model: Any, parts: Parts, backend: str = "inductor") -> Parts:
    """The compiled parts that a forward and a backward go through; the others run eagerly from then on, with a warning
    that names them. Gradients are dropped. Collective where the model is spread over ranks."""
    try:
        _run(model)
        return parts
    except Exception as error:  # dynamo and inductor raise dozens of classes
        first = error
    for modules in parts.values():
        undo(modules)
    _run(model)  # what fails eagerly, too, is no matter of compilation
    compiled, reasons = {}, []
    for name, modules in parts.items():
        _compile(modules, backend)
        try:
            _run(model)
            compiled[name] = modules
        except Exception as error:
            undo(modules)
            reasons.append(f"{name} ({type(modules[0]).__name__}: {str(error).strip().splitlines()[0]})")
    warnings.warn(
        f"{type(model).__name__} runs these parts eagerly, which cannot be compiled: "
        f"{'; '.join(reasons) or f'none alone, all together ({first})'}.",
        stacklevel=2,
    )
    return compiled


def _run(model: Any) -> None:
    device = next(model.parameters()).device
    tokens = torch.arange(16, device=device).view(2, 8) % model.config.get_text_config().vocab_size
    with torch.enable_grad():
        model(input_ids=tokens, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def run_eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """The scope in which compiled parts run eagerly: for decoding, where every layer's attention with a cache would be
    a graph of its own."""
    if all(module._compiled_call_impl is None for module in model.modules()):
        return nullcontext()  # importing dynamo takes seconds
    return torch.compiler.set_stance("force_eager")
