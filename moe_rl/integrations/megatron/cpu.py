"""Megatron-core on a machine without CUDA, for tests and small studies. Does nothing where CUDA is there.

Megatron asks for the current CUDA device, makes CUDA streams and writes device="cuda" in about 60 places. Its modules,
and only they, get a view of `torch` here in which all that means the CPU. `torch` itself stays as it is, except for
`Tensor.cuda()`, which without CUDA could only fail.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")
FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")


def use_cpu() -> None:
    """Give every module of Megatron-core that is loaded by now its view of `torch`. Call it after importing them."""
    if torch.cuda.is_available():
        return
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    view = _View(torch, cuda=_cuda(), **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES})
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = view
    # The random tracker (dropout, recompute) saves and restores the states of CUDA generators.
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # Split sizes become numpy arrays only when they come from a CUDA tensor; all_to_all wants sequences.
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    # Tied embeddings over pipeline stages ask for it.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]  # to replace it is the point


class _View(ModuleType):
    """A module seen with some attributes replaced."""

    def __init__(self, module: ModuleType, **replaced: Any):
        super().__init__(module.__name__)
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Stream:
    """Stands in for streams and events: work on the CPU is in order already."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__


def _cuda() -> ModuleType:
    """`torch.cuda` as Megatron sees it."""
    return _View(
        torch.cuda,
        current_device=lambda: CPU,
        get_rng_state=lambda device="cuda": torch.get_rng_state(),
        manual_seed=torch.default_generator.manual_seed,
        Stream=_Stream,
        Event=_Stream,
        current_stream=_Stream,
        default_stream=_Stream,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda *args: None,
    )


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The tensor factory, with device="cuda" read as the CPU."""

    def make(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make
