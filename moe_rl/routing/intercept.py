"""What takes the place of a model's methods while scopes are open: of a router's forward, or of the method that takes
the top-k of its logits; and of the function that checkpoints a layer, so that the layer is recomputed with the experts
of its forward.

Left alone, a recomputation that is off by rounding would choose others, and one after its replay scope would choose
freely. Recomputations of several micro-batches may come in any order, and twice where a graph is retained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from jaxtyping import Integer
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing.selection import CheckpointedForward, MaximaSelection, Replay, Selection
from moe_rl.routing.sites import SELECTS, RoutingModule, family_class, token_readers


class StandIn:
    """Stands in for one attribute of a module while at least one scope is open on it."""

    attribute: str

    def __init__(self, owner: nn.Module):
        self.owner, self.original = owner, getattr(owner, self.attribute)
        self.previous = owner.__dict__.get(self.attribute)
        self.scopes: list[Any] = []

    @classmethod
    def on(cls, owner: nn.Module, *args: Any) -> Any:
        """The one that stands there already, or a new one."""
        current = owner.__dict__.get(cls.attribute)
        return current if isinstance(current, cls) else cls(owner, *args)

    @property
    def idle(self) -> bool:
        return not self.scopes

    def take_place(self) -> None:
        setattr(self.owner, self.attribute, self)

    def give_back(self) -> None:
        """Restore what was there before, unless somebody has wrapped this one meanwhile: it then only hands on."""
        if self.owner.__dict__.get(self.attribute) is not self:
            return
        delattr(self.owner, self.attribute)
        if self.previous is not None:
            setattr(self.owner, self.attribute, self.previous)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise RoutingError(
            "a copy of the model would record or replay forever. Copy the model outside of record_routing and "
            "replay_routing."
        )


@contextmanager
def opened(stand_ins: Sequence[StandIn], kind: str, what: Any) -> Iterator[None]:
    """Put `what` last in the list `kind` of each; take it off again, come what may and in whatever order."""
    for stand_in in stand_ins:
        stand_in.take_place()
        getattr(stand_in, kind).append(what)
    try:
        yield
    finally:
        for stand_in in stand_ins:
            entries = getattr(stand_in, kind)
            # The last of its kind: a recomputation puts the replay of its forward there a second time.
            del entries[max(i for i, entry in enumerate(entries) if entry is what)]
            if stand_in.idle:
                stand_in.give_back()


class SiteForward(StandIn):
    """Stands in for the `forward` of one router."""

    attribute = "forward"

    @staticmethod
    def of(spec: RoutingModule, index: int) -> SiteForward:
        kind = SiteForward if spec.selector is spec.module else SiteSelection
        return kind.on(spec.selector, spec, index)

    def __init__(self, owner: nn.Module, spec: RoutingModule, index: int):
        super().__init__(owner)
        self.spec, self.index = spec, index
        self.selection = MaximaSelection if spec.by_maxima else Selection
        self.listeners: list[Callable[..., None]] = []
        self.replays: list[Replay | None] = []
        self.recomputed: list[CheckpointedForward] = []
        """The checkpointed forward that is being recomputed, if any."""
        self.moved: list[Callable[[RoutingModule, int], AbstractContextManager[None]]] = []
        """Scopes in which the router is moved (`router_noise.py`), for its choice alone."""

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
        output, order = in_order(self.handed_out(output, *args, **kwargs))
        if replay is not None:
            output = replay.weighed(self.index, output, family_class(self.spec.module).__name__)
        if not recomputing():
            if replay is not None:
                replay.saw(self.index, seen.own)
            for listen in self.listeners:
                listen(self.index, seen.used, seen.choice, seen.with_logits(output))
        return self.returned(output if order is None else tuple(output[i] for i in order))

    def handed_out(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """What the router hands out, of what was returned here."""
        return output

    def returned(self, output: Any) -> Any:
        """What to return here, of what the router hands out."""
        return output

    def select_again(self, *args: Any, **kwargs: Any) -> None:
        """Run the router, as it is now, and its selection on the same hidden states."""
        self.original(*args, **kwargs)

    def _choice_when_moved(self, *args: Any, **kwargs: Any) -> Integer[Tensor, "tokens k"]:
        """What the moved router picks from the same hidden states."""
        if self.spec.by_maxima:
            raise RoutingError(
                f"{self.spec.site.name} ({type(self.spec.module).__name__}) couples its gate weights to the choice, so "
                "noise cannot move the choice alone. Use router_noise.target='weights'."
            )
        seen = self.selection(self.spec, self.index, None, None)
        with torch.no_grad(), self.moved[-1](self.spec, self.index), seen:
            self.select_again(*args, **kwargs)
        seen.require_complete()
        assert seen.used is not None  # now that it is complete
        return seen.used.clone()


class SiteSelection(SiteForward):
    """Stands in for the method that takes the top-k of one router's logits, and returns weights and ids."""

    attribute = SELECTS

    def __init__(self, owner: nn.Module, spec: RoutingModule, index: int):
        super().__init__(owner, spec, index)
        self.read: tuple[tuple, dict] | None = None
        """What the reader's forward was last called with, while its router may be moved."""

    def handed_out(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        logits = (*args, *kwargs.values())[-1]
        return logits.reshape(-1, logits.shape[-1]), *output

    def returned(self, output: Any) -> Any:
        return output[1:]

    def select_again(self, *args: Any, **kwargs: Any) -> None:
        assert self.read is not None, "the reader's forward calls this"
        self.give_back()
        try:
            self.spec.reader.forward(*self.read[0], **self.read[1])
        finally:
            self.take_place()

    def reads(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        self.read = args, kwargs


def in_order(output: Any) -> tuple[Any, tuple[int, ...] | None]:
    """(logits, combine weights, ids) of a router that hands out these three in any order, and the order that puts them
    back; whatever else is handed out stays as it is. Before transformers 5.21 routers had three orders."""
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(x, Tensor) for x in output)):
        return output, None
    integers = [i for i, x in enumerate(output) if not x.is_floating_point()]
    order = (2, 1, 0) if integers == [0] else (0, 2, 1) if integers == [1] else (0, 1, 2)  # each its own inverse
    return tuple(output[i] for i in order), order


@contextmanager
def hooked(modules: tuple[RoutingModule, ...], kind: str, what: Any) -> Iterator[list[SiteForward]]:
    """Put `what` among the `listeners`, `replays`, `recomputed` or `moved` of every site."""
    sites = [SiteForward.of(spec, index) for index, spec in enumerate(modules)]
    with ExitStack() as scope:
        for site in sites:
            if kind == "moved" and isinstance(site, SiteSelection):
                scope.enter_context(site.spec.reader.register_forward_pre_hook(site.reads, with_kwargs=True))
        scope.enter_context(opened(sites, kind, what))
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

    with ExitStack() as scope:
        for module in readers:
            scope.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def recomputing() -> bool:
    """True inside a backward pass, that is, when activation checkpointing runs a forward again."""
    return torch._C._current_graph_task_id() != -1


# ---------------------------------------------------------------------- activation checkpointing
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
