"""`record_routing` and `replay_routing`: the scopes in which routes are read from a model's forward, or forced on it.

Inside a scope every routing site's forward runs under a torch function mode that sees the site's own final top-k
(`intercept.py`). Recording reads the ids there; replay answers `(scores.gather(ids), ids)` instead, so that the
family's own code makes the combine weights from the live router's scores, and gradient reaches the router through
them. There is no formula per family, no argument threaded through a model, and nothing left behind after the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing.intercept import checkpoints_bound, hooked
from moe_rl.routing.scores import RouterScores, read_scores
from moe_rl.routing.sites import find_sites, make_layout
from moe_rl.routing.trace import Layout, RoutingTrace


# ---------------------------------------------------------------------- what a scope hands out
@dataclass
class Recording:
    """Routes of the forwards run inside a `record_routing` scope."""

    layout: Layout
    scored: bool = False
    _ids: list[list[Tensor]] = field(default_factory=list)
    """Per site, the [tokens, k] ids of each forward."""
    _scores: list[list[dict[str, Tensor]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self._ids = [[] for _ in self.layout.sites]
        self._scores = [[] for _ in self.layout.sites]

    def take(self) -> Integer[Tensor, "tokens site k"]:
        """Rows of the last forward, batch-major, in the layout's narrow dtype; then forget everything.

        For engines that gather or repeat rows between forwards, which `trace` could not put in order.
        """
        self._require_forward()
        ids = self._stack([calls[-1] for calls in self._ids])
        self.clear()
        return ids

    def trace(
        self, input_ids: Integer[Tensor, "batch time"], attention_mask: Bool[Tensor, "batch time"] | None = None
    ) -> RoutingTrace:
        """The routes of `input_ids`, from one forward or from a prefill and decode forwards of the same rows.

        The last column may never have been an input (it was sampled last); it is unknown then. Padding is unknown.
        """
        self._require_forward()
        batch, time = input_ids.shape
        pieces = [call.shape[0] for call in self._ids[0]]
        columns = sum(pieces) // batch
        if any(piece % batch for piece in pieces) or columns not in (time, time - 1):
            raise RoutingError(
                f"recorded forwards of {pieces} tokens do not add up to {batch} rows of {time} (or {time - 1}) tokens. "
                "Record one forward, or a prefill and decode steps of the same rows; use take() for anything else."
            )
        forwards = zip(*self._ids, strict=True)
        ids = torch.cat([self._stack(sites).unflatten(0, (batch, -1)) for sites in forwards], 1)
        ids = nn.functional.pad(ids, (0, 0, 0, 0, 0, time - columns), value=self.layout.unknown)
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if attention_mask is not None:
            ids = ids.masked_fill(~mask[..., None, None], self.layout.unknown)
        return RoutingTrace.from_ids(ids, self.layout, tokens=input_ids, attention_mask=mask, check=False)

    def scores(self, batch: int) -> RouterScores:
        """Router scores of the last forward, for `batch` rows. Needs `record_routing(model, scores=True)`."""
        if not self.scored:
            raise RoutingError("router scores were not recorded; use record_routing(model, scores=True).")
        self._require_forward()

        def rows(key: str, k: int | None = None) -> list[Tensor]:
            values = [calls[-1][key] for calls in self._scores]
            return [(v if k is None else _pad_k(v, k)).unflatten(0, (batch, -1)) for v in values]

        k = self.layout.top_k
        return RouterScores(
            gates=torch.stack(rows("gates", k), 2),
            log_probs=torch.stack(rows("log_probs", k), 2),
            margins=torch.stack(rows("margins"), 2),
            all_log_probs=tuple(rows("all_log_probs")),
        )

    def _require_forward(self) -> None:
        calls = [len(c) for c in self._ids]
        if min(calls) != max(calls) or not calls[0]:
            raise RoutingError(
                f"the sites of the model were reached {min(calls)} to {max(calls)} times inside the scope; "
                "run whole forwards of the recorded model inside it."
            )

    def _stack(self, sites: Sequence[Tensor]) -> Integer[Tensor, "tokens site k"]:
        return _stack_sites(sites, self.layout)


@dataclass(eq=False)
class Replay:
    """A replay scope's view of what it does."""

    routes: RoutingTrace
    coverage: float
    """Share of (token, site) pairs that are forced; the rest routes freely."""
    free: Integer[Tensor, " rows"]
    """Tokens, batch-major, of which some site's route is unknown; padding among them."""
    pending: int = 0
    """Checkpointed layers whose recomputation is still to come."""
    _own: list[Callable[[], Tensor] | None] = field(default_factory=list)
    """Per site, what computes the last forward's own top-k."""

    @staticmethod
    def of(trace: RoutingTrace) -> Replay:
        if trace.coverage == 0:
            raise RoutingError("the trace holds no known route, so replay would do nothing.")
        free = (~trace.known.all(-1)).flatten().nonzero()[:, 0]
        return Replay(trace, trace.coverage, free, _own=[None] * len(trace.layout.sites))

    @property
    def ran(self) -> bool:
        return self._own[-1] is not None

    @property
    def preferred(self) -> RoutingTrace:
        """What each router would have picked in the last forward, given the hidden states that replay made upstream.

        Not the natural routes: those need a forward without replay. Computed when asked for.
        """
        if not self.ran:
            raise RoutingError("no forward has run inside the replay scope yet.")
        layout = self.routes.layout
        ids = _stack_sites([own() for own in self._own], layout).unflatten(0, self.routes.shape[:2])
        mask = self.routes.attention_mask.to(ids.device)
        ids = ids.masked_fill(~mask[..., None, None], layout.unknown)
        return RoutingTrace.from_ids(ids, layout, tokens=self.routes.tokens, attention_mask=mask, check=False)

    # ------------------------------------------------------------------ for the sites
    def ids(self, site: int, scores: Float[Tensor, "tokens experts"]) -> Integer[Tensor, "tokens k"]:
        """A new tensor of the ids for the site whose choice scores these are; -1 where unknown."""
        layout, (batch, time) = self.routes.layout, self.routes.shape[:2]
        if scores.shape[0] != batch * time:
            raise RoutingError(
                f"{layout.sites[site].name}: the forward has {scores.shape[0]} tokens, "
                f"the trace {batch} rows of {time}."
            )
        ids = self.routes.experts[:, :, site, : layout.sites[site].top_k].flatten(0, 1).to(scores.device).long()
        return ids.masked_fill_(ids == layout.unknown, -1) if len(self.free) else ids

    def saw(self, site: int, own: Callable[[], Tensor]) -> None:
        self._own[site] = own


# ---------------------------------------------------------------------- the two scopes
@contextmanager
def record_routing(model: nn.Module, scores: bool = False) -> Iterator[Recording]:
    """Record the experts that every forward of `model` inside the block uses, replayed ones included.

    A recomputation under activation checkpointing is not recorded again; it uses the experts of its forward. `scores`
    also keeps gates, router log-probabilities and margins of the last forward. Raises RoutingError for a model without
    routers.

        with record_routing(model) as recording:
            model(input_ids)
        routes = recording.trace(input_ids)
    """
    modules = find_sites(model)
    recording = Recording(make_layout(model, modules), scored=scores)

    def listen(site: int, used: Tensor, choice: Tensor, output: Any) -> None:
        recording._ids[site].append(used.detach())
        if scores:
            recording._scores[site] = [read_scores(modules[site], used, choice, output)]

    with hooked(modules, "listeners", listen), checkpoints_bound(model, modules):
        yield recording


@contextmanager
def replay_routing(model: nn.Module, trace: RoutingTrace | None) -> Iterator[Replay | None]:
    """Force the experts of `trace` on every forward of `model` inside the block; `None` does nothing.

    Only ids are forced: gates come from the live router, so its gradient flows. The forward must read the trace's
    tokens, in its padding. Forward *and* backward belong inside the block, so that activation checkpointing
    recomputes under the same routes; scopes may be nested, one per micro-batch, for a single backward. Raises
    RoutingError for a trace that does not fit, if no forward ran, and if a checkpointed forward was not
    backpropagated before the block ended (its gradients would come from other experts).
    """
    if trace is None:
        yield None
        return
    if not isinstance(trace, RoutingTrace):
        raise RoutingError(f"replay_routing needs a RoutingTrace, not a {type(trace).__name__}; of ids it is made by "
                           "RoutingTrace.from_ids(ids, layout_of(model), attention_mask=…).")
    modules = find_sites(model)
    make_layout(model, modules).require(trace.layout, "the trace")
    replay = Replay.of(trace)

    def check_input(_: nn.Module, args: tuple, kwargs: dict) -> None:
        if modules[0].module.forward.replay is replay:  # an inner scope's forward reads other tokens
            _check_input(trace, args, kwargs)

    check = model.register_forward_pre_hook(check_input, with_kwargs=True)
    try:
        with hooked(modules, "replays", replay), checkpoints_bound(model, modules, replay):
            yield replay
        if not replay.ran:
            raise RoutingError("replay reached no router: no forward of this model ran inside the block.")
        if replay.pending:
            raise RoutingError(
                f"{replay.pending} checkpointed layers were not backpropagated inside the replay block; outside it "
                "they would be recomputed under other routes and the gradients would be wrong. Call backward inside."
            )
    finally:
        check.remove()


# ---------------------------------------------------------------------- small parts
def _check_input(trace: RoutingTrace, args: tuple, kwargs: dict) -> None:
    """The forward must read the tokens that were routed, in the same padding."""
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(tokens, Tensor):
        return
    shape = tuple(trace.attention_mask.shape)
    if tokens.shape != shape:
        raise RoutingError(f"the forward reads tokens of shape {tuple(tokens.shape)}, the trace has {shape}.")
    if trace.tokens is not None:
        same = (tokens == trace.tokens.to(tokens.device)) | ~trace.attention_mask.to(tokens.device)
        if not bool(same.all()):
            b, t = (~same).nonzero()[0].tolist()
            raise RoutingError(
                f"the trace holds the routes of other tokens: row {b}, position {t} is token {int(tokens[b, t])} in "
                f"the forward, {int(trace.tokens[b, t])} in the trace. Align paddings with trace.align(attention_mask)."
            )


def _stack_sites(sites: Sequence[Tensor], layout: Layout) -> Integer[Tensor, "tokens site k"]:
    """One [tokens, k] tensor per site as one tensor in the layout's narrow dtype."""
    return torch.stack([_pad_k(ids, layout.top_k, layout.unknown).to(layout.dtype) for ids in sites], 1)


def _pad_k(x: Tensor, k: int, value: float = 0.0) -> Tensor:
    """Widen the last axis to k slots."""
    return x if x.shape[-1] == k else nn.functional.pad(x, (0, k - x.shape[-1]), value=value)
