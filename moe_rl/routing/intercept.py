"""How a routing site's forward is intercepted: see its final selection, and under replay answer it.

The site's forward runs under a torch function mode. The family's own code makes logits, scores and combine weights;
only the ids that its final top-k returns are others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_rl.errors import RoutingError
from moe_rl.routing.sites import RoutingModule, token_readers
from moe_rl.routing.stand_in import StandIn, opened

if TYPE_CHECKING:
    from moe_rl.routing.checkpointing import CheckpointedForward
    from moe_rl.routing.hooks import Replay

TOPK = frozenset({torch.topk, torch.Tensor.topk})
MASK = frozenset({torch.masked_fill, torch.Tensor.masked_fill})
MAXIMUM = frozenset({torch.max, torch.Tensor.max})
SQUASH = frozenset({torch.softmax, torch.Tensor.softmax, nn.functional.softmax, torch.sigmoid, torch.Tensor.sigmoid,
                    nn.functional.sigmoid, nn.functional.softplus})
"""What makes positive scores of logits."""


class SiteForward(StandIn):
    """Stands in for one routing module's `forward`."""

    attribute = "forward"

    def __init__(self, owner: nn.Module, spec: RoutingModule, index: int):
        super().__init__(owner)
        self.spec, self.index = spec, index
        self.selection = MaximaSelection if spec.by_maxima else Selection
        self.listeners: list[Callable[..., None]] = []
        self.replays: list[Replay | None] = []
        self.recomputed: list[CheckpointedForward] = []
        """The checkpointed forward that is being recomputed, if any."""
        self.moved: list[Callable[[RoutingModule, int], AbstractContextManager[None]]] = []
        """Scopes in which the router is moved (`dial.py`), for its choice alone."""

    @property
    def idle(self) -> bool:
        return not (self.listeners or self.replays or self.recomputed or self.moved)

    @property
    def replay(self) -> Replay | None:
        """That of the innermost scope."""
        return self.replays[-1] if self.replays else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.idle:
            return self.original(*args, **kwargs)
        replay = self.replay
        again = self.recomputed[-1].ids[self.index] if self.recomputed else None
        seen: Any = self.selection(self.spec, self.index, replay, again)
        if self.moved and again is None and (replay is None or replay.partial):
            seen.moved = self._choice_when_moved(*args, **kwargs)
            seen.again = seen.moved if replay is None else None
        with seen:
            output = self.original(*args, **kwargs)
        seen.require_complete()
        if replay is not None:
            output = replay.weighed(self.index, output, type(self.owner).__name__)
        if not recomputing():
            if replay is not None:
                replay.saw(self.index, seen.own)
            for listen in self.listeners:
                listen(self.index, seen.used, seen.choice, output)
        return output

    def _choice_when_moved(self, *args: Any, **kwargs: Any) -> Integer[Tensor, "tokens k"]:
        """What the moved router picks from the same hidden states."""
        if self.spec.by_maxima:
            raise RoutingError(f"{self.spec.site.name} ({type(self.spec.module).__name__}) weighs within a band below "
                               "its own maximum, so its choice cannot be moved alone; use dial.form='weights'.")
        seen = self.selection(self.spec, self.index, None, None)
        with torch.no_grad(), self.moved[-1](self.spec, self.index), seen:
            self.original(*args, **kwargs)
        seen.require_complete()
        assert seen.used is not None  # now that it is complete
        return seen.used.clone()


class Selection(TorchFunctionMode):
    """Sees, and under replay answers, the one top-k over experts inside a routing site's forward."""

    watched = TOPK | MASK | SQUASH

    def __init__(self, spec: RoutingModule, index: int, replay: Replay | None, again: Tensor | None):
        super().__init__()
        self.spec, self.index, self.replay = spec, index, replay
        self.again = again
        """Ids to use: in a recomputation those of its forward, under a dose of choice those of the moved router."""
        self.moved: Tensor | None = None
        """Under a dose of choice: ids for tokens that route freely under replay."""
        self.hits = 0
        self.squashed = False
        """Whether the router chooses by positive scores, not by logits."""
        self.used: Integer[Tensor, "tokens k"] | None = None
        """The ids that go to the experts."""
        self.choice: Tensor | None = None
        """The scores that the router chooses by, groups masked."""
        self.own: Integer[Tensor, "tokens k"] | None = None
        """Under replay: the ids the router would have picked."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in self.watched and args and args[0].shape[-1] == self.spec.site.num_experts:
            return self._answer(func, *args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)

    def _answer(self, func: Callable, scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        groups = self.spec.num_groups
        if func in SQUASH:
            self.squashed |= self.hits == 0
            return func(scores, *args, **kwargs)
        if func in MASK:
            if groups and self.again is not None:  # the groups of its forward's experts stay open
                args = (args[0].scatter(-1, self.again.view(*scores.shape[:-1], -1), False), *args[1:])
            if self.replay is None or not groups:
                return func(scores, *args, **kwargs)
            # Group-limited routers: the mask would take the gates of forced experts in groups that are now closed.
            self.choice = func(scores, *args, **kwargs).detach()
            return scores
        within_groups = groups and scores.dim() == 3 and scores.shape[1] == groups
        if within_groups or (args[0] if args else kwargs["k"]) != self.spec.site.top_k:
            return func(scores, *args, **kwargs)
        return self._select(func, scores, *args, **kwargs)

    def _select(self, func: Callable, scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        self.hits += 1
        if self.choice is None:
            self.choice = scores.detach()
        if self.replay is None:
            picked = func(scores, k, *args, **kwargs)
            if self.again is not None:
                _overwrite(picked, scores, self.again)
            self.used = picked[1].reshape(-1, k)
            return picked
        ids = self._force(self.replay, self.choice, lambda choice: func(choice, k, *args, **kwargs)[1])
        ids = ids.view(*scores.shape[:-1], k)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def _force(self, replay: Replay, choice: Tensor, select: Callable[[Tensor], Tensor]) -> Integer[Tensor, "tokens k"]:
        """The trace's ids; the router's own, which `select` takes from choice scores, where the trace knows none."""
        flat = choice.reshape(-1, self.spec.site.num_experts)
        ids = replay.ids(self.index, flat) if self.again is None else self.again
        free = replay.free.to(flat.device)
        if len(free) and self.again is None:
            freely = select(flat[free]) if self.moved is None else self.moved[free]
            ids[free] = torch.where(ids[free] < 0, freely, ids[free])
        if self.again is None:  # at once: later would mean to keep the scores of every site
            self.own = select(flat)
            if keep := replay.routes.keep:
                ids = kept(ids, self.own, flat if self.squashed else flat.softmax(-1), keep)
        self.used = ids
        return ids

    def require_complete(self) -> None:
        """Raise unless the one selection was seen."""
        expected = self.spec.site.top_k if self.spec.by_maxima else 1
        if self.hits != expected:
            raise RoutingError(
                f"{self.spec.site.name} ({type(self.spec.module).__name__}) took {self.hits} top-k over "
                f"{self.spec.site.num_experts} experts where {expected} was expected, so its routes can be neither "
                "recorded nor replayed. A fused or compiled kernel may have replaced the router: switch it off."
            )


class MaximaSelection(Selection):
    """For routers that take one masked maximum per slot and weight it within a band of near-maximal scores.

    A forced expert outside the band is let in, as one of equal standing; the rest of the band stays the router's.
    """

    watched = MAXIMUM | MASK

    def _answer(self, func: Callable, scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        if func in MAXIMUM:
            return self._maximum(func(scores, *args, **kwargs), scores)
        if self.replay is None:
            return func(scores, *args, **kwargs)
        mask, value = args
        return func(scores, mask.scatter(-1, self._turn(self.used), False), value)

    def _maximum(self, natural: Any, scores: Tensor) -> Any:
        self.hits += 1
        k = self.spec.site.top_k
        if self.spec.module.training:
            raise RoutingError(
                f"{self.spec.site.name} ({type(self.spec.module).__name__}) samples its experts in training mode, so "
                "its routes cannot be replayed. Call eval() on the model; gradients flow all the same."
            )
        if self.replay is not None and self.replay.routes.keep:
            raise RoutingError(f"{self.spec.site.name} ({type(self.spec.module).__name__}) chooses slot by slot, not "
                               "by one score per expert, so no replay of its routes can be soft.")
        if self.hits == 1:
            self.choice = scores.detach()
            if self.replay is not None:
                self._force(self.replay, self.choice, lambda choice: choice.topk(k, dim=-1).indices)
        if self.replay is None:
            if self.again is not None:
                _overwrite(natural, scores, self._turn(self.again))
            self.used = natural[1] if self.used is None else torch.cat([self.used, natural[1]], -1)
            return natural
        return torch.return_types.max((natural[0], self._turn(self.used)))

    def _turn(self, ids: Tensor | None) -> Integer[Tensor, "tokens 1"]:
        """Those of the slot whose turn it is."""
        assert ids is not None, "the first maximum of a replay fills in all slots"
        return ids[:, self.hits - 1 : self.hits]


def kept(
    ids: Integer[Tensor, "tokens k"],
    own: Integer[Tensor, "tokens k"],
    scores: Float[Tensor, "tokens experts"],
    share: float,
) -> Integer[Tensor, "tokens k"]:
    """Replayed `ids` whose score is at least `share` of the weakest one among the router's `own`; in the slots of the
    others the best of its own that are not there yet (prime-rl, pull request 2703)."""
    live = scores.gather(-1, own)
    stays = scores.gather(-1, ids) >= share * live.amin(-1, keepdim=True)
    there = (own[:, :, None] == ids.masked_fill(~stays, -1)[:, None]).any(-1)
    best = own.gather(-1, live.masked_fill(there, -torch.inf).argsort(stable=True, dim=-1, descending=True))
    turn = ((~stays).cumsum(-1) - 1).clamp(min=0)
    return torch.where(stays, ids, best.gather(-1, turn))


def _overwrite(picked: Any, scores: Tensor, ids: Integer[Tensor, "tokens k"]) -> None:
    """Make (values, ids) of a selection those of `ids`, in place: a recomputation must save what its forward saved, so
    autograd's node has to be the same, and it reads these ids."""
    picked[1].data.copy_(ids.view_as(picked[1]))
    picked[0].data.copy_(scores.detach().gather(-1, picked[1]))


@contextmanager
def hooked(modules: tuple[RoutingModule, ...], kind: str, what: Any) -> Iterator[list[SiteForward]]:
    """Put `what` among the `listeners`, `replays` or `recomputed` of every site."""
    sites = [SiteForward.on(spec.module, spec, index) for index, spec in enumerate(modules)]
    with opened(sites, kind, what):
        yield sites


@contextmanager
def tokens_noted(model: nn.Module, note: Callable[[torch.Size, Tensor | None], None]) -> Iterator[None]:
    """Hand to `note` the shape [batch, time] and the ids that a forward of `model` is given, whichever of its wrappers
    is called.

    Each wrapper on the way to the decoder notes them in turn, so the last are the decoder's. Embeddings have a shape,
    but name no ids; nor does what a wrapper of one's own takes before its `input_ids`, or in place of them.
    """
    readers = token_readers(model)
    first = {module: next(iter(inspect.signature(module.forward).parameters.values()), None) for module in readers}
    names = {module: it.name for module, it in first.items() if it and it.kind is not it.VAR_POSITIONAL}
    others = {module for module, name in names.items() if name != "input_ids"} if "input_ids" in names.values() else ()

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        tokens = kwargs.get("input_ids", args[0] if args and module not in others else None)
        embedded = kwargs.get("inputs_embeds")
        if isinstance(tokens, Tensor) and tokens.dim() == 2 and not tokens.is_floating_point():
            note(tokens.shape, tokens)
        elif isinstance(embedded, Tensor) and embedded.dim() == 3:
            note(embedded.shape[:2], None)

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in readers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def recomputing() -> bool:
    """True inside a backward pass, that is, when activation checkpointing runs a forward again."""
    return torch._C._current_graph_task_id() != -1
