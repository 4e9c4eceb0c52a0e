"""Activation checkpointing under recording and replay: every layer is recomputed with the experts of its forward.

Left alone, a recomputation that is off by rounding would choose others, and one after its replay scope would choose
freely. Recomputations of several micro-batches may come in any order, and twice where a graph is retained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_rl.routing.intercept import SiteForward, hooked, recomputing
from moe_rl.routing.sites import RoutingModule
from moe_rl.routing.stand_in import StandIn, opened

if TYPE_CHECKING:
    from moe_rl.routing.hooks import Replay


class CheckpointedForward:
    """The forward of one checkpointed layer, for its recomputation: under which replay it ran, the ids it used."""

    def __init__(self, replay: Replay | None):
        self.replay = replay
        self.ids: dict[int, Tensor] = {}

    def keep(self, site: int, used: Tensor, choice: Tensor, output: Any) -> None:
        self.ids[site] = used.detach()


class LayerCheckpoint(StandIn):
    """Stands in for the function by which transformers checkpoints one layer."""

    attribute = "_gradient_checkpointing_func"

    def __init__(self, owner: nn.Module, modules: tuple[RoutingModule, ...]):
        super().__init__(owner)
        self.modules = modules

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.idle or not torch.is_grad_enabled():
            return self.original(function, *args, **kwargs)
        replay = SiteForward.of(self.modules[0], 0).replay
        forward = CheckpointedForward(replay)
        if replay is not None:
            replay.pending.add(forward)

        def run(*inner: Any, **inner_kwargs: Any) -> Any:
            if not recomputing():
                with hooked(self.modules, "listeners", forward.keep):
                    return function(*inner, **inner_kwargs)
            if replay is not None:
                replay.pending.discard(forward)
            with hooked(self.modules, "replays", replay), hooked(self.modules, "recomputed", forward):
                return function(*inner, **inner_kwargs)

        return self.original(run, *args, **kwargs)


@contextmanager
def checkpoints_bound(model: nn.Module, modules: tuple[RoutingModule, ...]) -> Iterator[None]:
    """Recompute every layer that is checkpointed inside the block with the experts and the replay of its forward."""
    owners = [m for m in model.modules() if LayerCheckpoint.attribute in m.__dict__]
    with opened([LayerCheckpoint.on(owner, modules) for owner in owners], "scopes", object()):
        yield
