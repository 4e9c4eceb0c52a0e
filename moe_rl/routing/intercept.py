"""Temporary replacements, while scopes are open, of router forwards and of torch's hook around checkpointed forwards.

A checkpointed forward is recomputed with the experts that it used. Otherwise rounding would change them, and after the
replay scope they would be free. Recomputations may come in any order, and twice where a graph is retained.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from jaxtyping import Integer, Shaped
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from moe_rl.errors import RoutingError
from moe_rl.routing.moe_layers import (
    SELECTS,
    RoutingModule,
    family_class,
    find_moe_layers,
    mixes_packed_rows,
    token_readers,
)
from moe_rl.routing.selection import CheckpointedForward, Replay, Selection

INSIDE: ContextVar[tuple[object, ...]] = ContextVar("INSIDE", default=())
"""The scopes, by their marks, and the checkpointed forwards that this thread is inside of."""
FUNCTION, FUNCTION_APPLY = torch._C._FunctionBase, torch.autograd.Function.__dict__["apply"].__func__.__code__


@contextmanager
def inside(what: object) -> Iterator[None]:
    """Note that this thread is inside of `what`."""
    INSIDE.set((*INSIDE.get(), what))
    try:
        yield
    finally:
        INSIDE.set(tuple(other for other in INSIDE.get() if other is not what))


class StandIn:
    """Replaces one attribute of a module while at least one scope is open on it."""

    attribute: str

    def __init__(self, owner: Any):
        self.owner, self.original = owner, getattr(owner, self.attribute)
        self.previous = owner.__dict__.get(self.attribute)
        self.scopes: list[tuple[str, Any, object]] = []
        """Kind, content and mark of every scope of any thread."""

    @classmethod
    def on(cls, owner: Any, *args: Any) -> Any:
        """The replacement that is there already, or a new one."""
        current = owner.__dict__.get(cls.attribute)
        return current if isinstance(current, cls) else cls(owner, *args)

    def take_place(self) -> None:
        setattr(self.owner, self.attribute, self)

    def give_back(self) -> None:
        """Restore the attribute, unless the replacement has been wrapped meanwhile: it then only hands on."""
        if self.owner.__dict__.get(self.attribute) is not self:
            return
        delattr(self.owner, self.attribute)
        if self.previous is not None:
            setattr(self.owner, self.attribute, self.previous)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise RoutingError("a copy of the model would record or replay forever. Copy the model outside of all blocks.")


class CheckpointHook(StandIn):
    """Replaces torch's hook around a forward that is checkpointed without re-entry."""

    attribute = "_checkpoint_hook"

    @contextmanager
    def __call__(self, frame: Any) -> Iterator[None]:
        forward = CheckpointedForward()
        frame.recompute_fn = functools.partial(recompute, forward, frame.recompute_fn)
        with self.original(frame), inside(forward):
            yield


class MoeLayerForward(StandIn):
    """Replaces the `forward` of one router."""

    attribute = "forward"

    def __init__(self, owner: nn.Module, spec: RoutingModule):
        super().__init__(owner)
        self.spec, self.index = spec, spec.index
        self.handed = threading.local()
        """`on`: the ids that this thread's last call handed on to the experts, and their version counter."""

    def of_kind(self, kind: str) -> list[Any]:
        """The content of this thread's scopes of a kind, the innermost last."""
        marks = INSIDE.get()
        return [content for other, content, mark in self.scopes if other == kind and mark in marks]

    @property
    def replay(self) -> Replay | None:
        """The replay of the innermost scope."""
        return next(reversed(self.of_kind("replays")), None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replay, listeners, moved = self.replay, self.of_kind("listeners"), self.of_kind("moved")
        again, recomputed = None, self.of_kind("recomputed")
        if recomputed:
            replay, again = next(recomputed[-1][self.spec], (None, None))
        if again is None and (recomputed or recomputing()) and any(kind == "replays" for kind, *_ in self.scopes):
            raise RoutingError(
                f"{self.spec.moe_layer.name} is recomputed in a replay block, but its forward ran in none. "
                "Run both in one."
            )
        if again is None and (recomputing() or not (replay or listeners or moved)):
            self.handed.on = None
            return self.original(*args, **kwargs)
        seen: Any = Selection(self.spec, self.index, replay, again)
        if moved and again is None and (replay is None or replay.partial):
            seen.moved = self._choice_when_moved(moved[-1], *args, **kwargs)
            seen.again = seen.moved if replay is None else None
        with seen:
            output = self.original(*args, **kwargs)
        seen.require_complete()
        output, order = in_order(self.handed_out(output, *args, **kwargs))
        if replay is not None:
            output = replay.weighed(self.index, output, family_class(self.spec.module).__name__)
        for forward in checkpoints_here():
            forward.calls.setdefault(self.spec, []).append((replay, seen.used.detach()))
            if replay is not None and not recomputed:
                replay.pending.add(forward)
        if not recomputed:
            if replay is not None:
                replay.saw(self.index, seen.own, seen.choice)
            for listen in listeners:
                listen(self.index, seen.used, seen.choice, seen.with_logits(output))
        self._hand_on(seen.used, isinstance(output, tuple) and len(output) == 3)
        return self.returned(output if order is None else tuple(output[i] for i in order))

    def _hand_on(self, used: Integer[Tensor, "tokens k"], plain: bool) -> None:
        """Note the ids that the experts must be given. The few families that return more than a triple map them."""
        self.handed.on = (used, 0 if used.is_inference() else used._version) if plain else None
        hooks: Any = {} if self.spec.experts is None else self.spec.experts._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook == self.reach]:
            hooks.move_to_end(key)  # after later hooks of the user

    @torch.compiler.disable
    def reach(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        """Raise if the experts are given other ids than the router handed on, in any order."""
        on, self.handed.on = getattr(self.handed, "on", None), None  # a second call of the experts is the user's own
        used, version = on if on and not is_functorch_wrapped_tensor(on[0]) else (torch.empty(0), 0)
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and not x.is_floating_point() and x.numel() == used.numel() > 0:
                same = x.data_ptr() == used.data_ptr() or torch.equal(x.view_as(used).sort()[0], used.to(x).sort()[0])
                if not same or not used.is_inference() and used._version != version:
                    raise RoutingError(
                        f"{self.spec.moe_layer.name} chose other ids than its experts were given. Remove the hook that "
                        "changes them, and open a new block after you replace a router."
                    )

    def require_eager(self) -> None:
        """Raise for a compiled router."""
        compiled = {"_torchdynamo_orig_callable", "_torchdynamo_disable"} & {*dir(self.original)}
        if len(compiled) == 1 or getattr(self.owner, "_compiled_call_impl", None) is not None:
            raise RoutingError(
                f"{self.spec.moe_layer.name} is compiled. To replay its routes, compile all but the routers."
            )

    def handed_out(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """The router's output, from that of the replaced method."""
        return output

    def returned(self, output: Any) -> Any:
        """The output of the replaced method, from the router's."""
        return output

    def select_again(self, *args: Any, **kwargs: Any) -> None:
        """Run the router and its selection on the same hidden states."""
        self.original(*args, **kwargs)

    def _choice_when_moved(self, shifted: Callable, *args: Any, **kwargs: Any) -> Integer[Tensor, "tokens k"]:
        """The ids that the router picks from the same hidden states when its weights are shifted."""
        seen = Selection(self.spec, self.index, None, None)
        with torch.no_grad(), shifted(self.spec, self.index), seen:
            self.select_again(*args, **kwargs)
        seen.require_complete()
        assert seen.used is not None  # now that it is complete
        return seen.used.clone()


class MoeLayerSelection(MoeLayerForward):
    """Replaces the method that takes the top-k of one router's logits, and returns weights and ids."""

    attribute = SELECTS
    read: tuple[tuple, dict] | None = None
    """The arguments of the reader's last forward."""

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
    """(logits, combine weights, ids) of a router that returns these three in any order, and the order that puts them
    back. Another output stays as it is. Before transformers 5.21 routers had three orders."""
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(x, Tensor) for x in output)):
        return output, None
    integers = [i for i, x in enumerate(output) if not x.is_floating_point()]
    order = (2, 1, 0) if integers == [0] else (0, 2, 1) if integers == [1] else (0, 1, 2)  # each its own inverse
    return tuple(output[i] for i in order), order


@contextmanager
def hooked(modules: Iterable[RoutingModule], kind: str, what: Any) -> Iterator[list[MoeLayerForward]]:
    """Put `what` among the `listeners`, `replays`, `recomputed` or `moved` of every MoE layer, for this thread. Scopes
    may end in any order."""
    entry = (kind, what, object())
    kinds = {True: MoeLayerForward, False: MoeLayerSelection}
    moe_layers = [kinds[spec.selector is spec.module].on(spec.selector, spec) for spec in modules]
    stand_ins = [*moe_layers, CheckpointHook.on(torch.utils.checkpoint)]
    for stand_in in stand_ins:
        stand_in.scopes.append(entry)
        stand_in.take_place()
    try:
        with ExitStack() as scope, inside(entry[2]):
            for moe_layer in moe_layers:
                if kind == "moved" and isinstance(moe_layer, MoeLayerSelection):
                    scope.enter_context(
                        moe_layer.spec.reader.register_forward_pre_hook(moe_layer.reads, with_kwargs=True)
                    )
                if moe_layer.spec.experts is not None:
                    scope.enter_context(
                        moe_layer.spec.experts.register_forward_pre_hook(moe_layer.reach, with_kwargs=True)
                    )
            yield moe_layers
    finally:
        for stand_in in stand_ins:
            stand_in.scopes.remove(entry)
            if not stand_in.scopes:
                stand_in.give_back()


@contextmanager
def forwards_watched(model: nn.Module, modules: tuple[RoutingModule, ...], note: Callable[..., None]) -> Iterator[None]:
    """Hand to `note` the shape [batch, time] and the ids that a forward of `model`, or of a wrapper in it, is given.
    Raise RoutingError at the end of a forward of its decoder that did not run every router once.

    Each wrapper on the way to the decoder notes them in turn, so the last are the decoder's. Embeddings have a shape
    but no ids; nor has another first argument of a user's own wrapper.
    """
    readers, mark, read = token_readers(model), object(), torch.Size()
    parameters = {module: [*inspect.signature(module.forward).parameters.values()] for module in readers}
    first = {module: own[0] for module, own in parameters.items() if own}
    names = {module: p.name for module, p in first.items() if p.kind is not p.VAR_POSITIONAL}
    others = {module for module, name in names.items() if name != "input_ids"} if "input_ids" in names.values() else ()
    calls: list[list[int]] = [[] for _ in modules]  # per router, the tokens of each call in the forward that is running
    size = sum(1 for _ in readers[-1].modules())

    def elsewhere() -> bool:
        """Whether a forward is of another thread, or a recomputation."""
        return mark not in INSIDE.get() or recomputing()

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal read, calls
        if elsewhere():
            return
        _require_apart(module, {own.name: x for own, x in zip(parameters[module], args, strict=False)} | kwargs)
        calls = [[] for _ in modules]
        tokens = kwargs.get("input_ids", args[0] if args and module not in others else None)
        embedded = kwargs.get("inputs_embeds")
        if isinstance(tokens, Tensor) and tokens.dim() == 2 and not tokens.is_floating_point():
            note(read := tokens.shape, tokens)
        elif isinstance(embedded, Tensor) and embedded.dim() == 3:
            note(read := embedded.shape[:2], None)

    def routed(moe_layer: int, used: Tensor, *_: Any) -> None:
        calls[moe_layer].append(len(used))

    def end(decoder: nn.Module, *_: Any) -> None:
        if elsewhere():
            return
        times = [len(rows) for rows in calls]
        in_pieces = min(times) == max(times) and read[:1] == (1,) and 0 < sum(calls[0]) <= read.numel()
        if set(times) != {1} and not in_pieces:
            name, ran = next((spec.moe_layer.name, n) for spec, n in zip(modules, times, strict=True) if n != 1)
            raise RoutingError(
                f"{name} ran {ran} times in one forward, not once. Open a new block after a router is replaced, "
                "switched off or shared."
            )
        if sum(1 for _ in decoder.modules()) != size and find_moe_layers(model) != modules:
            raise RoutingError("the model has other MoE layers than when the block began. Open a new block.")

    with hooked(modules, "listeners", routed), ExitStack() as scope, inside(mark):
        for module in readers:
            scope.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        scope.enter_context(readers[-1].register_forward_hook(end))
        yield


def _require_apart(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Raise RoutingError for packed rows whose sequences see one another in a forward of `model` with these inputs.
    Transformers tells them apart by position ids that restart, but not with a cache or a mask [batch, time]."""
    positions, mask, lengths = (inputs.get(name) for name in ("position_ids", "attention_mask", "cu_seq_lens_q"))
    axes = len(positions) if isinstance(positions, Tensor) and positions.dim() == 3 else 0  # the first of 4 is a text's
    text = positions[0] if positions is not None and axes else positions
    restarts = isinstance(text, Tensor) and text.dim() == 2 and _restart(text, mask, 0 if axes == 3 else 1)
    config: Any = getattr(model, "config", None)
    if config is None or not restarts and (lengths is None or len(lengths) < 3):
        return
    config, own_mask = config.get_text_config(), isinstance(mask, Tensor) and mask.dim() == 4
    if (kind := mixes_packed_rows(config)) and not ((own_mask or axes == 4) and kind == config.model_type):
        raise RoutingError(f"{kind} mixes sequences that are packed into one row. Put one sequence into each row.")
    if "flash" in str(config._attn_implementation):
        apart = mask is None or bool(mask.all())
    elif mask is not None:
        apart = own_mask
    else:
        checkpointed = model.training and any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        asked = inputs.get("use_cache")
        cached = not checkpointed and (getattr(config, "use_cache", False) if asked is None else asked)
        apart = restarts and axes != 3 and not cached and inputs.get("past_key_values") is None
    if not apart:
        raise RoutingError(
            "the sequences that are packed into one row see one another. Call the model with "
            "use_cache=False, position_ids that restart in each sequence, and no attention_mask."
        )


def _restart(positions: Shaped[Tensor, "rows time"], mask: Any, least: int) -> bool:
    """Whether positions of neighbouring real tokens start again within a row: else they rise by `least`, or more."""
    masked = isinstance(mask, Tensor) and mask.dim() == 2
    real = mask[:, -positions.shape[1] :].bool().to(positions.device) if masked else torch.ones_like(positions).bool()
    return bool(((positions.diff() < least) & real[:, 1:] & real[:, :-1]).any())


def recomputing() -> bool:
    """Whether this is a backward pass, in which activation checkpointing runs a forward again."""
    return torch._C._current_graph_task_id() != -1


# ---------------------------------------------------------------------- activation checkpointing
def recompute(forward: CheckpointedForward, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run a checkpointed function again, under the replays and with the ids of its forward."""
    for replay in {replay for calls in forward.calls.values() for replay, _ in calls if replay is not None}:
        replay.pending.discard(forward)
    with hooked(forward.calls, "recomputed", {spec: iter(calls) for spec, calls in forward.calls.items()}):
        return function(*args, **kwargs)


def checkpoint_of(context: Any) -> CheckpointedForward:
    """The forward of the autograd function with this context, whose backward runs it again."""
    if not isinstance(context.apply, functools.partial):
        own: Any = weakref.WeakMethod(context.apply)  # a cycle would keep what it saves until Python collects garbage
        context.apply = functools.partial(recompute, CheckpointedForward(), lambda *gradients: own()(*gradients))
    return context.apply.args[0]


def checkpoints_here() -> list[CheckpointedForward]:
    """The checkpointed forwards that this thread is inside of: torch's without re-entry, and the forwards of autograd
    functions (torch's, fairscale's, DeepSpeed's, Megatron's)."""
    forwards = [what for what in INSIDE.get() if isinstance(what, CheckpointedForward)]
    if torch._C._is_fwd_grad_enabled() or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return forwards  # only the forward of an autograd function switches off both
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_back.f_code is FUNCTION_APPLY:
            arguments = [x for part in frame.f_locals.values() for x in (part if isinstance(part, tuple) else (part,))]
            contexts = [x for x in arguments if isinstance(x, FUNCTION)]
            forwards += [checkpoint_of(context) for context in contexts if context.next_functions]
            if not contexts and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
                forwards.append(CheckpointedForward())  # its backward cannot be seen, so it stays pending
        frame = frame.f_back
    return forwards
