"""Float32 masters of weights that a model has in fewer bits."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether it is narrower than float32, so that small steps round away."""
    return dtype.itemsize < 4


class TrainedWeights:
    """The parameters that an optimizer trains, and the model that computes with them.

    They are the model's own. With `masters`, a trainable parameter that is narrower than float32 has a float32 master
    in its place: the model keeps the narrow one for forwards and backwards, and takes over the master, rounded, after
    every step (`write_back`). Each gradient is added into the master's float32 one as soon as it is made, and freed, so
    the gradients of micro-batches add up in float32. 18 bytes a parameter with AdamW (Micikevicius et al. 2018, arXiv
    1710.03740, section 3.1).
    """

    def __init__(self, model: nn.Module, masters: bool = True):
        self.model = model
        self.own = [p for p in model.parameters() if p.requires_grad]
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        if masters:
            self.masters = {p: nn.Parameter(p.detach().float()) for p in self.own if is_narrow(p.dtype)}
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_add_gradient, master))
            for parameter, master in self.masters.items()
        ]

    def __getitem__(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer trains in the place of a parameter of the model."""
        return self.masters.get(parameter, parameter)

    def parameters(self) -> list[nn.Parameter]:
        """All of them, in the order of `model.parameters()`; a tied one once."""
        return [self[p] for p in self.own]

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model."""
        for parameter, master in self.masters.items():
            parameter.copy_(master)

    def release(self) -> None:
        """Leave gradients to the model again, for another optimizer. The masters are gone with this object."""
        for hook in self.hooks:
            hook.remove()


def _add_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None, "torch calls the hook when it has accumulated one"
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad += gradient
