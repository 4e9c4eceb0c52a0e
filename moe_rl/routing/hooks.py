"""`record_routing` and `replay_routing`: the scopes in which routes are read from a model's forward, or forced on it.

Inside a scope every routing site's forward runs under a torch function mode that sees the site's own final top-k
(`intercept.py`). Recording reads the ids there; replay answers `(scores.gather(ids), ids)` instead, so that the
family's own code makes the combine weights from the live router's scores, and gradient reaches the router through
them. There is no formula per family, no argument threaded through a model, and nothing left behind after the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing.checkpointing import CheckpointedForward, checkpoints_bound
from moe_rl.routing.intercept import hooked, tokens_noted
from moe_rl.routing.recording import Recording, stack_sites
from moe_rl.routing.scores import RouterScores, read_logits, read_scores
from moe_rl.routing.sites import find_sites, make_layout, since
from moe_rl.routing.trace import RoutingTrace

__all__ = ["Recording", "Replay", "RouterScores", "record_routing", "replay_routing"]


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
            raise RoutingError("no forward has run inside the replay scope yet.")
        layout = self.routes.layout
        ids = stack_sites([self._own[site] for site in sorted(self._own)], layout).unflatten(0, self.routes.shape[:2])
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
                f"{layout.sites[site].name}: the forward has {scores.shape[0]} tokens, "
                f"the trace {batch} rows of {time}."
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
            raise RoutingError(f"{spec.name} ({router}) does not hand out (logits, combine weights, ids) and nothing "
                               "else, so its combine weights cannot be recalled. Replay ids alone: routes='old_policy'"
                               " or 'rollout', or replace(trace, gates=None)." + since(router))
        gates = gates.to(output[1].device, output[1].dtype)
        known = self.routes.known[:, :, site].flatten()[:, None].to(gates.device)
        return output[0], torch.where(known, gates, output[1]) if len(self.free) else gates, output[2]

    def saw(self, site: int, own: Integer[Tensor, "tokens k"]) -> None:
        self._own[site] = own.to(self.routes.layout.dtype)


# ---------------------------------------------------------------------- the two scopes
@contextmanager
def record_routing(model: nn.Module, scores: bool = False, logits: bool = False) -> Iterator[Recording]:
    """Record the experts that every forward of `model` inside the block uses, replayed ones included.

    A recomputation under activation checkpointing is not recorded again; it uses the experts of its forward. `scores`
    also keeps gates, router log-probabilities and margins of the last forward, `logits` the routers' logits with their
    graph. Raises RoutingError for a model without routers. `Recording.trace` knows the tokens that each forward read,
    and refuses others.

        with record_routing(model) as recording:
            model(input_ids)
        routes = recording.trace(input_ids)
    """
    modules = find_sites(model)
    recording = Recording(make_layout(model, modules), scored=scores, graphed=logits)

    def listen(site: int, used: Tensor, choice: Tensor, output: Any) -> None:
        read = read_scores(modules[site], used, choice, output) if scores else None
        recording.routed(site, used, read, read_logits(modules[site], output) if logits else None)

    with hooked(modules, "listeners", listen), checkpoints_bound(model, modules), tokens_noted(model, recording.reads):
        yield recording


@contextmanager
def replay_routing(
    model: nn.Module, trace: RoutingTrace | None, *, part: bool = False
) -> Iterator[Replay | None]:
    """Force the experts of `trace` on every forward of `model` inside the block; `None` does nothing.

    Only ids are forced: gates come from the live router, so its gradient flows, unless the trace has `gates` of its
    own; with `keep` only ids that the live router still scores high enough are. The forward must read the trace's
    tokens, in its padding. Forward *and* backward belong inside the block, so that activation checkpointing
    recomputes under the same routes; scopes may be nested, one per micro-batch, for a single backward. `part` says
    that the trace is some rows of a larger one, and may by chance know no route at all. Raises RoutingError for a trace
    that does not fit or, unless it is a part, knows nothing; if no forward ran; and if a checkpointed forward was not
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
    if not part:
        trace.require_known()
    replay = Replay.of(trace)
    with hooked(modules, "replays", replay) as sites, checkpoints_bound(model, modules):

        def check(shape: torch.Size, tokens: Tensor | None) -> None:
            if sites[0].replay is replay:  # an inner scope's forward reads other tokens
                _require_tokens(trace, shape, tokens)

        with tokens_noted(model, check):
            yield replay
    if not replay.ran:
        raise RoutingError("replay reached no router: no forward of this model ran inside the block.")
    if replay.pending:
        raise RoutingError(
            f"{len(replay.pending)} checkpointed layers were not backpropagated inside the replay block; outside it "
            "they would be recomputed under other routes and the gradients would be wrong. Call backward inside."
        )


# ---------------------------------------------------------------------- small parts
def _require_tokens(trace: RoutingTrace, shape: torch.Size, tokens: Integer[Tensor, "batch time"] | None) -> None:
    """The forward must read the tokens that were routed, in the same padding; embeddings have a shape alone."""
    if shape != trace.attention_mask.shape:
        raise RoutingError(f"the forward reads tokens of shape {tuple(shape)}, the trace has "
                           f"{tuple(trace.attention_mask.shape)}.")
    if trace.tokens is not None and tokens is not None:
        same = (tokens == trace.tokens.to(tokens.device)) | ~trace.attention_mask.to(tokens.device)
        if not bool(same.all()):
            b, t = (~same).nonzero()[0].tolist()
            raise RoutingError(
                f"the trace holds the routes of other tokens: row {b}, position {t} is token {int(tokens[b, t])} in "
                f"the forward, {int(trace.tokens[b, t])} in the trace. Align paddings with trace.align(attention_mask)."
            )
