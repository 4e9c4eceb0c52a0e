"""A torch function mode that recognises a router's own top-k and, under replay, answers it with other ids.

The family's own code still makes logits, scores and combine weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_rl.errors import RoutingError
from moe_rl.routing.moe_layers import RoutingModule
from moe_rl.routing.trace import RoutingTrace

TOPK = frozenset({torch.topk, torch.Tensor.topk})
MASK = frozenset({torch.masked_fill, torch.Tensor.masked_fill})
SQUASH = frozenset(
    {
        torch.softmax,
        torch.Tensor.softmax,
        nn.functional.softmax,
        torch.sigmoid,
        torch.Tensor.sigmoid,
        nn.functional.sigmoid,
        nn.functional.softplus,
    }
)
"""Functions that make positive scores of logits."""
ADD = frozenset({torch.add, torch.Tensor.add, torch.Tensor.add_})


@dataclass(eq=False)
class Replay:
    """What a replay scope forces, and what its routers would have chosen."""

    routes: RoutingTrace
    coverage: float
    """Share of (token, MoE layer) pairs that are forced; the rest routes freely."""
    free: Integer[Tensor, " rows"]
    """Tokens, batch-major, of which some MoE layer's route is unknown; padding among them."""
    partial: bool
    """Whether some of them are real tokens."""
    pending: set[CheckpointedForward] = field(default_factory=set)
    """Forwards of checkpointed layers whose recomputation is still to come."""
    _own: dict[int, Tensor] = field(default_factory=dict)
    """Per MoE layer, the [tokens, k] ids of the last forward's own top-k, in the layout's narrow dtype."""

    @staticmethod
    def of(trace: RoutingTrace) -> Replay:
        unknown = ~trace.known.all(-1)
        partial = bool((unknown & trace.attention_mask).any())
        return Replay(trace, trace.coverage, unknown.flatten().nonzero()[:, 0], partial)

    @property
    def ran(self) -> bool:
        return len(self._own) == len(self.routes.layout.moe_layers)

    @property
    def preferred(self) -> RoutingTrace:
        """The experts that each router would have picked in the last forward, from hidden states made under replay.
        Unconstrained routing needs a forward without replay."""
        if not self.ran:
            raise RoutingError("no forward has run inside the replay block yet")
        layout = self.routes.layout
        ids = layout.stack([self._own[moe_layer] for moe_layer in sorted(self._own)]).unflatten(
            0, self.routes.shape[:2]
        )
        mask = self.routes.attention_mask.to(ids.device)
        tokens = None if self.routes.tokens is None else self.routes.tokens.to(ids.device)
        ids = ids.masked_fill(~mask[..., None, None], layout.unknown)
        return RoutingTrace.from_ids(ids, layout, tokens=tokens, attention_mask=mask, check=False)

    # ------------------------------------------------------------------ for the MoE layers
    def ids(self, moe_layer: int, scores: Float[Tensor, "tokens experts"]) -> Integer[Tensor, "tokens k"]:
        """A new tensor of the ids for an MoE layer with these choice scores; -1 where unknown."""
        layout, (batch, time) = self.routes.layout, self.routes.shape[:2]
        if scores.shape[0] != batch * time:
            name = layout.moe_layers[moe_layer].name
            raise RoutingError(f"{name} routes {scores.shape[0]} tokens, but the trace has {batch} rows of {time}")
        ids = (
            self.routes.experts[:, :, moe_layer, : layout.moe_layers[moe_layer].top_k]
            .flatten(0, 1)
            .to(scores.device)
            .long()
        )
        return ids.masked_fill_(ids == layout.unknown, -1) if len(self.free) else ids

    def weighed(self, moe_layer: int, output: Any, router: str) -> Any:
        """An MoE layer's output with the trace's combine weights, where it has any. Raises RoutingError for a `router`
        with another output than (logits, combine weights, ids)."""
        if self.routes.gates is None:
            return output
        spec = self.routes.layout.moe_layers[moe_layer]
        gates = self.routes.gates[:, :, moe_layer, : spec.top_k].flatten(0, 1)
        if not (isinstance(output, tuple) and len(output) == 3 and output[1].shape == gates.shape):
            raise RoutingError(
                f"{spec.name} ({router}) does not return (logits, gate weights, ids), so its gate weights cannot be "
                "replayed. Replay ids only: routes='old_policy' or 'rollout', or replace(trace, gates=None)."
            )
        gates = gates.to(output[1].device, output[1].dtype)
        known = self.routes.known[:, :, moe_layer].flatten()[:, None].to(gates.device)
        return output[0], torch.where(known, gates, output[1]) if len(self.free) else gates, output[2]

    def saw(self, moe_layer: int, own: Integer[Tensor, "tokens k"], choice: Float[Tensor, "*tokens experts"]) -> None:
        self._own[moe_layer] = chosen(own, choice).to(self.routes.layout.dtype)


@dataclass(eq=False)
class CheckpointedForward:
    """What routed in a checkpointed forward, for its recomputation."""

    calls: dict[RoutingModule, list[tuple[Replay | None, Tensor]]] = field(default_factory=dict)
    """Of every MoE layer, per call, the replay that it ran under and the [tokens, k] ids that it used."""


class Selection(TorchFunctionMode):
    """Sees, and under replay answers, the one top-k over experts inside a routing MoE layer's forward."""

    watched = TOPK | MASK | SQUASH | ADD

    def __init__(self, spec: RoutingModule, index: int, replay: Replay | None, again: Tensor | None):
        super().__init__()
        self.spec, self.index, self.replay = spec, index, replay
        self.again = again
        """Ids to use: in a recomputation those of its forward, under noise on the choice those of the moved router."""
        self.moved: Tensor | None = None
        """Under noise on the choice: ids for tokens that route freely under replay."""
        self.hits = 0
        self.squashed: tuple[Tensor, Tensor] | None = None
        """The positive scores that the router chooses by, and their logits; None: it chooses by logits."""
        self.bias: Tensor | None = None
        """The bias on these scores."""
        self.closed: Tensor | None = None
        """Under replay: the experts of closed groups."""
        self.used: Integer[Tensor, "tokens k"] | None = None
        """The ids that go to the experts."""
        self.choice: Tensor | None = None
        """The scores that the router chooses by, groups masked."""
        self.own: Integer[Tensor, "tokens k"] | None = None
        """Under replay: the ids the router would have picked."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in self.watched and args and args[0].shape[-1] == self.spec.moe_layer.num_experts:
            return self._answer(func, *args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)

    @torch.compiler.disable
    def _answer(self, func: Callable, scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        groups = self.spec.num_groups
        if func in SQUASH:
            squashed = func(scores, *args, **kwargs)
            if self.hits == 0:
                self.squashed = squashed, scores
            return squashed
        if func in ADD:
            if self.hits == 0 and isinstance(args[0], Tensor):
                self.bias = min(scores, args[0], key=Tensor.numel)
            return func(scores, *args, **kwargs)
        if func in MASK:
            if groups and self.again is not None:  # the groups of its forward's experts stay open
                args = (args[0].scatter(-1, self.again.view(*scores.shape[:-1], -1), False), *args[1:])
            if self.replay is None or not groups:
                return func(scores, *args, **kwargs)
            # Group-limited routers: the mask would take the gates of forced experts in groups that are now closed.
            self.choice, self.closed = func(scores, *args, **kwargs).detach(), args[0]
            return scores
        within_groups = groups and scores.dim() == 3 and scores.shape[1] == groups
        if within_groups or (args[0] if args else kwargs["k"]) != self.spec.moe_layer.top_k:
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
        """The trace's ids, and those that `select` takes from choice scores where the trace knows none."""
        flat = choice.reshape(-1, self.spec.moe_layer.num_experts)
        ids = replay.ids(self.index, flat) if self.again is None else self.again
        free = replay.free.to(flat.device)
        if len(free) and self.again is None:
            freely = select(flat[free]) if self.moved is None else self.moved[free]
            ids[free] = torch.where(ids[free] < 0, freely, ids[free])
        if self.again is None:  # at once: later would mean to keep the scores of every MoE layer
            self.own = select(flat)
            if keep := replay.routes.keep:
                ids = kept(ids, self.own, self._positive(flat), keep)
        self.used = ids
        return ids

    def _positive(self, choice: Float[Tensor, "tokens experts"]) -> Float[Tensor, "tokens experts"]:
        """Scores of at least 0 in the order of `choice`, which no constant in the bias moves: the softmax of logits, or
        the scores less the least bias, -inf in closed groups."""
        if self.squashed is None:
            return choice.softmax(-1)
        if self.bias is not None:
            if bool(self.bias.max() < 0):
                raise RoutingError(
                    f"the bias of {self.spec.moe_layer.name} is at most {float(self.bias.max()):g}, so groups "
                    "closed with scores of 0 would be chosen. Add a constant to the bias, or do not use soft replay."
                )
            choice = choice - self.bias.detach().min()
        return choice if self.closed is None else choice.masked_fill(self.closed.view_as(choice), -torch.inf)

    def with_logits(self, output: Any) -> Any:
        """A router's output, with logits in the place of the scores made of them (Gemma 4, many before transformers
        5.6)."""
        if self.squashed is None or not isinstance(output, tuple) or output[0] is not self.squashed[0]:
            return output
        return self.squashed[1].reshape(output[0].shape), *output[1:]

    def require_complete(self) -> None:
        """Raise unless the one selection was seen."""
        if self.hits != 1:
            raise RoutingError(
                f"{self.spec.moe_layer.name} called top-k over {self.spec.moe_layer.num_experts} experts "
                f"{self.hits} times, not once. Switch off kernels that replace the router (fused, compiled)."
            )


def chosen(ids: Integer[Tensor, "tokens k"], choice: Float[Tensor, "*tokens experts"]) -> Integer[Tensor, "tokens k"]:
    """The ids, or -1, an unknown route, where the best of the scores is not finite."""
    best = choice.reshape(len(ids), -1).amax(-1, keepdim=True)
    return ids.masked_fill(~best.isfinite(), -1)


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
    """Make (values, ids) of a selection those of `ids`, in place: a recomputation needs the autograd node of its
    forward, which reads these ids."""
    picked[1].data.copy_(ids.view_as(picked[1]))
    picked[0].data.copy_(scores.detach().gather(-1, picked[1]))
