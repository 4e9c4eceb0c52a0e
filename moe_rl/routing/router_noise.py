"""Volatility as an assigned dose: routers moved along a direction of their own while a mini-batch is trained on.

Where routes change by themselves, so does everything that changes them; a dose that is drawn by lot and given to all
arms alike is a cause. Sampling, scoring of π_old and evaluation never see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_rl import ranks
from moe_rl.errors import RoutingError
from moe_rl.routing.intercept import hooked
from moe_rl.routing.sites import find_sites, layer_matrices, router_matrices

LastStep = Callable[[nn.Parameter], Tensor | None]
"""The optimizer's last step on a parameter, up to a factor; None before the first."""


@dataclass(frozen=True)
class Noise:
    """How far the weights are moved, which ones, and which way."""

    target: str
    """`weights`: the routers compute with W + size · std(W) · u, so gates and sets move, and replay cuts off the sets'
    part. `choice`: the experts are those of the moved router, their gates those of W, so that sets alone move, and
    replay is exactly immune. `other_weights`: every matrix of the decoder's layers moves but the routers': routes
    change with the hidden states alone."""
    size: float
    """In standard deviations of each matrix; 0 is no dose. In bfloat16 doses below .01 are rounded away in part.
    Adapters on a router are matrices of their own."""
    seed: int
    """Of a random direction u: standard normal, one per matrix, the same for all weights that W has had."""
    direction: str = "random"
    """`random`, or `last_step`: u is the optimizer's last step on W over its root mean square, so that the weights go
    on along the way that they took."""


@contextmanager
def disturbed(model: nn.Module, noise: Noise | None, last_step: LastStep | None = None) -> Iterator[None]:
    """Forwards of `model` inside the block, and their backwards, under a dose; the weights are then exactly as before,
    whatever happens in it. A forward under replay takes its routes from the trace: there the target `weights` acts
    through the gates alone, and `choice` not at all. Raises RoutingError for a model without routers, and for a
    direction `last_step` where there was none."""
    if noise is None or not noise.size:
        yield
        return
    sites = find_sites(model)
    with ExitStack() as scope:
        if noise.target == "choice":
            scope.enter_context(hooked(
                sites, "moved", lambda site, index: shifted(router_matrices(site), noise, index, last_step)
            ))
        elif noise.target == "other_weights":
            scope.enter_context(shifted(layer_matrices(model), noise, 0, last_step))
        else:
            weights: set[int] = set()
            for index, site in enumerate(sites):
                matrices = router_matrices(site)
                own = {id(matrix) for matrix in matrices}
                if not own & weights:  # sites may share theirs
                    scope.enter_context(shifted(matrices, noise, index, last_step))
                weights |= own
        yield


@contextmanager
def shifted(
    matrices: Sequence[nn.Parameter], noise: Noise, index: int, last_step: LastStep | None = None
) -> Iterator[None]:
    """Matrices that are moved inside the block and put back bit for bit; `index` keeps random directions apart."""
    along = directions(matrices, noise.seed, index) if noise.direction == "random" else steps(matrices, last_step)
    kept = [matrix.detach().clone() for matrix in matrices]
    try:
        for matrix, u in zip(matrices, along, strict=True):
            matrix.data.add_(ranks.cut_as(matrix, noise.size * ranks.join_shards(matrix.detach()).std() * u))
        yield
    finally:
        for matrix, weight in zip(matrices, kept, strict=True):
            matrix.data.copy_(weight)


def directions(matrices: Sequence[Tensor], seed: int, index: int) -> list[Tensor]:
    """u of some matrices: drawn on the CPU in float32, so that every device and dtype has the same."""
    generator = torch.Generator().manual_seed((seed + index) % 2**63)
    return [torch.randn(m.shape, generator=generator).to(m.device, m.dtype) for m in matrices]


def steps(matrices: Sequence[nn.Parameter], last_step: LastStep | None) -> list[Tensor]:
    """The optimizer's last step on some matrices, each over its root mean square."""
    found = [None if last_step is None else last_step(matrix) for matrix in matrices]
    if any(step is None or not step.any() for step in found):
        raise RoutingError("router noise along the optimizer's last step, but the optimizer has not changed these "
                           "weights yet. Use the direction 'random'.")
    return [step / step.square().mean().sqrt() for step in found if step is not None]
