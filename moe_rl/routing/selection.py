"""How the selection inside a routing site is recognised, and under replay answered: a torch function mode.

The family's own code makes logits, scores and combine weights; only the ids that its final top-k returns are others.
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
from moe_rl.routing.sites import RoutingModule, since
from moe_rl.routing.trace import RoutingTrace

TOPK = frozenset({torch.topk, torch.Tensor.topk})
MASK = frozenset({torch.masked_fill, torch.Tensor.masked_fill})
MAXIMUM = frozenset({torch.max, torch.Tensor.max})
SQUASH = frozenset({torch.softmax, torch.Tensor.softmax, nn.functional.softmax, torch.sigmoid, torch.Tensor.sigmoid,
                    nn.functional.sigmoid, nn.functional.softplus})
"""What makes positive scores of logits."""


@dataclass(eq=False)
class Replay:
    """A replay scope's view of what it does."""

    routes: RoutingTrace
    coverage: float
    """Share of (token, site) pairs that are forced; the rest routes freely."""
    free: Integer[Tensor, " rows"]
    """Tokens, batch-major, of which some site's route is unknown; padding among them."""
    partial: bool
    """Whether some of them are real tokens."""
    pending: set[CheckpointedForward] = field(default_factory=set)
    """Forwards of checkpointed layers whose recomputation is still to come."""
    _own: dict[int, Tensor] = field(default_factory=dict)
    """Per site, the [tokens, k] ids of the last forward's own top-k, in the layout's narrow dtype."""

    @staticmethod
    def of(trace: RoutingTrace) -> Replay:
        unknown = ~trace.known.all(-1)
        partial = bool((unknown & trace.attention_mask).any())
        return Replay(trace, trace.coverage, unknown.flatten().nonzero()[:, 0], partial)

    @property
    def ran(self) -> bool:
        return len(self.routes.layout.sites) - 1 in self._own

    @property
    def preferred(self) -> RoutingTrace:
        """What each router would have picked in the last forward, given the hidden states that replay made upstream.

        Not the natural routes: those need a forward without replay.
        """
        if not self.ran:
            raise RoutingError("no forward has run inside the replay block yet")
        layout = self.routes.layout
        ids = layout.stack([self._own[site] for site in sorted(self._own)]).unflatten(0, self.routes.shape[:2])
        mask = self.routes.attention_mask.to(ids.device)
        tokens = None if self.routes.tokens is None else self.routes.tokens.to(ids.device)
        ids = ids.masked_fill(~mask[..., None, None], layout.unknown)
        return RoutingTrace.from_ids(ids, layout, tokens=tokens, attention_mask=mask, check=False)

    # ------------------------------------------------------------------ for the sites
    def ids(self, site: int, scores: Float[Tensor, "tokens experts"]) -> Integer[Tensor, "tokens k"]:
        """A new tensor of the ids for the site whose choice scores these are; -1 where unknown."""
        layout, (batch, time) = self.routes.layout, self.routes.shape[:2]
        if scores.shape[0] != batch * time:
            raise RoutingError(
                f"{layout.sites[site].name}: the forward has {scores.shape[0]} tokens, but the trace has {batch} rows "
                f"of {time}"
            )
        ids = self.routes.experts[:, :, site, : layout.sites[site].top_k].flatten(0, 1).to(scores.device).long()
        return ids.masked_fill_(ids == layout.unknown, -1) if len(self.free) else ids

    def weighed(self, site: int, output: Any, router: str) -> Any:
        """A site's output with the trace's combine weights, where it has any. Raises RoutingError for a `router` that
        hands out something else than (logits, combine weights, ids)."""
        if self.routes.gates is None:
            return output
        spec = self.routes.layout.sites[site]
        gates = self.routes.gates[:, :, site, : spec.top_k].flatten(0, 1)
        if not (isinstance(output, tuple) and len(output) == 3 and output[1].shape == gates.shape):
            raise RoutingError(f"{spec.name} ({router}) does not return (logits, gate weights, ids), so its gate "
                               "weights cannot be replayed. Replay ids only (routes='old_policy' or 'rollout', or "
                               f"replace(trace, gates=None)){since(router)}.")
        gates = gates.to(output[1].device, output[1].dtype)
        known = self.routes.known[:, :, site].flatten()[:, None].to(gates.device)
        return output[0], torch.where(known, gates, output[1]) if len(self.free) else gates, output[2]

    def saw(self, site: int, own: Integer[Tensor, "tokens k"]) -> None:
        self._own[site] = own.to(self.routes.layout.dtype)


class CheckpointedForward:
    """The forward of one checkpointed layer, for its recomputation: under which replay it ran, the ids it used."""

    def __init__(self, replay: Replay | None):
        self.replay = replay
        self.ids: dict[int, Tensor] = {}

    def keep(self, site: int, used: Tensor, choice: Tensor, output: Any) -> None:
        self.ids[site] = used.detach()


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
        self.squashed: tuple[Tensor, Tensor] | None = None
        """The positive scores that the router chooses by, and their logits; None: it chooses by logits."""
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
            squashed = func(scores, *args, **kwargs)
            if self.hits == 0:
                self.squashed = squashed, scores
            return squashed
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
                ids = kept(ids, self.own, flat.softmax(-1) if self.squashed is None else flat, keep)
        self.used = ids
        return ids

    def with_logits(self, output: Any) -> Any:
        """What a router hands out, with its logits where it hands out the scores made of them: Gemma 4, and many before
        transformers 5.6."""
        if self.squashed is None or not isinstance(output, tuple) or output[0] is not self.squashed[0]:
            return output
        return self.squashed[1].reshape(output[0].shape), *output[1:]

    def require_complete(self) -> None:
        """Raise unless the one selection was seen."""
        expected = self.spec.site.top_k if self.spec.by_maxima else 1
        if self.hits != expected:
            raise RoutingError(
                f"{self.spec.site.name} ({type(self.spec.module).__name__}) called top-k over "
                f"{self.spec.site.num_experts} experts {self.hits} times instead of {expected}, so its routing cannot "
                "be recorded or replayed. Switch off kernels that replace the router (fused, compiled)."
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
                "its routing cannot be replayed. Call eval() on the model; it still gets gradients."
            )
        if self.replay is not None and self.replay.routes.keep:
            raise RoutingError(f"{self.spec.site.name} ({type(self.spec.module).__name__}) has no single score per "
                               "expert, so soft replay is not possible. Use another route source.")
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
