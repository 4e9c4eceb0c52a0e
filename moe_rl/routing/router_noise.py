"""Router noise: routers moved along a direction while a mini-batch is trained on.

Unconstrained routing changes are confounded with training; randomised noise, equal in all arms, is an intervention.
Sampling, scoring of π_old and evaluation never see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_rl import ranks
from moe_rl.errors import RoutingError
from moe_rl.routing.intercept import hooked
from moe_rl.routing.moe_layers import find_moe_layers, layer_matrices, router_matrices

LastStep = Callable[[nn.Parameter], Tensor | None]
"""The optimizer's last step on a parameter, up to a factor; None before the first."""


@dataclass(frozen=True)
class Noise:
    """How far which weights are moved, and in which direction."""

    target: str
    """`weights`: routers compute with W + size · std(W) · u; gates and sets move, and replay removes the part of the
    sets. `choice`: the moved router chooses, with the gates of W; only sets move, and replay is exactly immune.
    `other_weights`: all matrices of the decoder's layers move except the routers'."""
    size: float
    """In standard deviations of each matrix; 0: no noise. In bfloat16 sizes below 0.01 are partly rounded away.
    Adapters on a router are matrices of their own."""
    seed: int
    """Of a random direction u: standard normal, one per matrix, whatever the weights are."""
    direction: str = "random"
    """`random`, or `last_step`: u is the optimizer's last step on W over its root mean square."""


@contextmanager
def disturbed(model: nn.Module, noise: Noise | None, last_step: LastStep | None = None) -> Iterator[None]:
    """Run forwards of `model` inside the block, and their backwards, under noise; afterwards the weights are exactly as
    before. Under replay the target `weights` acts through the gates alone, and `choice` not at all. Raises RoutingError
    for a model without routers, and for the direction `last_step` before the first step."""
    if noise is None or not noise.size:
        yield
        return
    moe_layers = find_moe_layers(model)
    with ExitStack() as scope:
        if noise.target == "choice":
            scope.enter_context(
                hooked(
                    moe_layers,
                    "moved",
                    lambda moe_layer, index: shifted(router_matrices(moe_layer), noise, index, last_step),
                )
            )
        elif noise.target == "other_weights":
            scope.enter_context(shifted(layer_matrices(model), noise, 0, last_step))
        else:
            weights: set[int] = set()
            for index, moe_layer in enumerate(moe_layers):
                matrices = router_matrices(moe_layer)
                own = {id(matrix) for matrix in matrices}
                if not own & weights:  # MoE layers may share theirs
                    scope.enter_context(shifted(matrices, noise, index, last_step))
                weights |= own
        yield


@contextmanager
def shifted(
    matrices: Sequence[nn.Parameter], noise: Noise, index: int, last_step: LastStep | None = None
) -> Iterator[None]:
    """Matrices that are moved inside the block and put back bit for bit; `index` keeps random directions apart."""
    along = directions(matrices, noise.seed, index) if noise.direction == "random" else steps(matrices, last_step)
    originals = [matrix.detach().clone() for matrix in matrices]
    try:
        for matrix, u in zip(matrices, along, strict=True):
            matrix.data.add_(ranks.cut_as(matrix, noise.size * ranks.join_shards(matrix.detach()).std() * u))
        yield
    finally:
        for matrix, weight in zip(matrices, originals, strict=True):
            matrix.data.copy_(weight)


def directions(matrices: Sequence[Tensor], seed: int, index: int) -> list[Tensor]:
    """u of some matrices: drawn on the CPU in float32, so that every device and dtype has the same."""
    generator = torch.Generator().manual_seed((seed + index) % 2**63)
    return [torch.randn(m.shape, generator=generator).to(m.device, m.dtype) for m in matrices]


def steps(matrices: Sequence[nn.Parameter], last_step: LastStep | None) -> list[Tensor]:
    """The optimizer's last step on some matrices, each over its root mean square."""
    last = [None if last_step is None else last_step(matrix) for matrix in matrices]
    if any(step is None or not step.any() for step in last):
        raise RoutingError("router noise: the optimizer has not changed these weights yet. Use the direction 'random'.")
    return [step / step.square().mean().sqrt() for step in last if step is not None]
