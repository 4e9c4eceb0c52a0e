"""A second device on a machine that has one: tensors that compute on the CPU, and refuse whatever CUDA's would.

An operation on a tensor from there and one from here raises, as it does between CUDA and CPU: but for numbers, copies,
and indices from here into a tensor from there. So does `numpy()`. To torch the device is called `meta`, whose backward
runs on any machine; values are real, so that whatever depends on them goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = "meta"
ATEN = torch.ops.aten
INDEXING = {
    ATEN.index.Tensor,
    ATEN._unsafe_index.Tensor,
    ATEN.index_put.default,
    ATEN.index_put_.default,
    ATEN._index_put_impl_.default,
}
CROSSING = {ATEN.copy_.default, ATEN._to_copy.default}


class There(Tensor):
    """A tensor of the second device; `here` computes for it."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        layout = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        made = Tensor._make_wrapper_subclass(cls, here.size(), device=torch.device(DEVICE), **layout)
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operation, where its tensors are."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = [x for x in tensors if isinstance(x, There)]
    indices = tree_leaves(args[1]) if func in INDEXING and isinstance(args[0], There) else []
    others = [x for x in tensors if not isinstance(x, There) and x.dim() and not any(x is index for index in indices)]
    if there and others and func not in CROSSING:
        raise RuntimeError(
            f"{func}: tensors on two devices, {[tuple(x.shape) for x in there]} there and "
            f"{[tuple(x.shape) for x in others]} here"
        )
    if func is ATEN.copy_.default:
        func(*tree_map_only(There, lambda x: x.here, args), **kwargs)
        return args[0]
    target = kwargs.get("device")
    goes_there = bool(there) if target is None else torch.device(target).type == DEVICE
    plain_args, plain = tree_map_only(There, lambda x: x.here, (args, kwargs))
    if target is not None and goes_there:
        plain["device"] = torch.device("cpu")
    if func is ATEN.histc.default and there and args[0].dtype == torch.int:  # CUDA counts integers, a CPU floats
        found = func(plain_args[0].float(), *plain_args[1:], **plain).int()
    else:
        found = func(*plain_args, **plain)
    own = {id(x.here): x for x in there}  # what is changed in place is returned as itself
    return tree_map_only(Tensor, lambda x: own[id(x)] if id(x) in own else There(x) if goes_there else x, found)


class _Computes(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return computed(func, args, kwargs or {})


class _Makes(TorchFunctionMode):
    """What never reaches an operation: tensors made of numbers, and numbers made of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == DEVICE:
            return There(func(*args, **kwargs | {"device": "cpu"}))
        if func is Tensor.tolist and isinstance(args[0], There):
            return args[0].here.tolist()
        return func(*args, **kwargs)


@contextmanager
def second_device() -> Iterator[None]:
    """Inside, `meta` is a device that computes."""
    with _Computes(), _Makes():
        yield


def moved(model: nn.Module) -> nn.Module:
    """The model, its parameters and buffers there."""
    parameters = {id(p): nn.Parameter(There(p.detach()), p.requires_grad) for p in model.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else parameters[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else There(buffer)
    return model
