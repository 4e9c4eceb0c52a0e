"""Volatility as an assigned dose: routers moved along a random direction while a mini-batch is trained on.

Where routes change by themselves, so does everything that changes them; a dose that is drawn by lot and given to all
arms alike is a cause. Sampling, scoring of π_old and evaluation never see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moe_rl.routing.intercept import hooked
from moe_rl.routing.sites import RoutingModule, find_sites, router_matrices


@dataclass(frozen=True)
class Dose:
    """How far the routers are moved, and which way."""

    form: str
    """`weights`: the routers compute with W + size · std(W) · u, so gates and sets move, and replay cuts off the sets'
    part. `choice`: the experts are those of the moved router, their gates those of W, so that sets alone move, and
    replay is exactly immune."""
    size: float
    """In standard deviations of each router matrix; 0 is no dose. In bfloat16 doses below .01 are rounded away in part.
    Adapters on a router are matrices of their own."""
    seed: int
    """Of the direction u: standard normal, one per router matrix, the same for all weights that W has had."""


@contextmanager
def disturbed(model: nn.Module, dose: Dose | None) -> Iterator[None]:
    """Forwards of `model` inside the block, and their backwards, under a dose; the weights are then exactly as before,
    whatever happens in it. A forward under replay takes its routes from the trace: there only the form `weights` acts,
    through the gates. Raises RoutingError for a model without routers."""
    if dose is None or not dose.size:
        yield
        return
    sites = find_sites(model)
    with ExitStack() as scope:
        if dose.form == "choice":
            scope.enter_context(hooked(sites, "moved", partial(moved, dose=dose)))
        else:
            weights: set[int] = set()
            for index, site in enumerate(sites):
                own = {id(matrix) for matrix in router_matrices(site)}
                if not own & weights:  # sites may share theirs
                    scope.enter_context(moved(site, index, dose=dose))
                weights |= own
        yield


@contextmanager
def moved(site: RoutingModule, index: int, *, dose: Dose) -> Iterator[None]:
    """One site's router matrices, moved inside the block and put back bit for bit."""
    matrices = router_matrices(site)
    kept = [matrix.detach().clone() for matrix in matrices]
    try:
        for matrix, u in zip(matrices, directions(matrices, dose.seed, index), strict=True):
            matrix.data.add_(dose.size * matrix.detach().std() * u)
        yield
    finally:
        for matrix, weight in zip(matrices, kept, strict=True):
            matrix.data.copy_(weight)


def directions(matrices: Sequence[Tensor], seed: int, index: int) -> list[Tensor]:
    """u of each matrix of a site: drawn on the CPU in float32, so that every device and dtype has the same."""
    generator = torch.Generator().manual_seed((seed + index) % 2**63)
    return [torch.randn(m.shape, generator=generator).to(m.device, m.dtype) for m in matrices]
