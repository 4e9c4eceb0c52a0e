"""What losses and terms read of routers: those of π_θ, with gradient, and those of π_old."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing.hooks import Recording, Replay, RouterScores
from moe_rl.routing.trace import RoutingTrace

PerToken = Float[Tensor, "batch time"]
Load = Mapping[str, tuple[Float[Tensor, " _"], ...]]


@dataclass(frozen=True)
class Routed:
    """The routing of one forward over `inputs`, of which some are `followed` by a real token; to be read after it."""

    inputs: Tensor
    followed: Tensor
    recording: Recording
    replay: Replay | None

    @functools.cached_property
    def traces(self) -> tuple[RoutingTrace, RoutingTrace | None]:
        """Routes used, and under replay those preferred."""
        return self.recording.trace(self.inputs, self.followed), self.replay.preferred if self.replay else None


@dataclass(frozen=True, kw_only=True)
class RouterInputs:
    """The routers behind some rows of a mini-batch. Values at a token are of the routing of its predecessor, whose
    output it is; the first token of a row has none. MoE layers are in forward order, and may differ in their
    experts."""

    logits: tuple[Float[Tensor, "batch time _"], ...]
    """Per MoE layer, of π_θ's router over all experts, with gradient, in at least float32."""
    used: Int[Tensor, "batch time moe_layer k"]
    """Experts that computed the token, those replayed included; -1 where there is none."""
    preferred: Int[Tensor, "batch time moe_layer k"]
    """Experts that the live routers of the same forward picked: the used ones, unless it replays."""
    old_log_probs: tuple[Float[Tensor, "batch time _"], ...]
    """Per MoE layer, the log-softmax of π_old's router, under the routes of this forward."""
    old_used: Int[Tensor, "batch time moe_layer k"]
    """Experts that π_old used there."""
    weights: PerToken
    """1 / n at the n tokens of the whole mini-batch, prompts included, that some router routed; 0 elsewhere."""
    load: Load | None = None
    """Share of the whole mini-batch's slots that every expert fills, per MoE layer, for `preferred` and for `used`;
    None: these rows are all of it."""

    @functools.cached_property
    def log_probs(self) -> tuple[Float[Tensor, "batch time _"], ...]:
        """Per MoE layer, the log-softmax of π_θ's router over all experts, with gradient."""
        return tuple(logits.log_softmax(-1) for logits in self.logits)

    def loads(self) -> Load:
        """`load`, or that of these rows."""
        if self.load is not None:
            return self.load
        experts = [logits.shape[-1] for logits in self.logits]
        return {kind: shares(getattr(self, kind), self.weights, experts) for kind in ("preferred", "used")}

    @staticmethod
    def of_one_token() -> RouterInputs:
        """One MoE layer with two experts, for trying a part."""
        zeros, first = torch.zeros(1, 1, 2), torch.zeros(1, 1, 1, 1, dtype=torch.long)
        return RouterInputs(
            logits=(zeros,),
            used=first,
            preferred=first,
            old_log_probs=(zeros.log_softmax(-1),),
            old_used=first,
            weights=torch.ones(1, 1),
        )

    @staticmethod
    def of(old: RouterScores | None, routed: Routed, weights: PerToken, load: Load | None) -> RouterInputs:
        """From a forward that was recorded with its logits, and the scores of π_old's routers at the same rows. Raises
        RoutingError where these are missing."""
        if old is None:
            raise RoutingError("the batch has no old_scores. Set policy.score(batch, routes, scores=True).scores.")
        used, preferred = routed.traces
        logits = routed.recording.logits(len(routed.inputs))
        return RouterInputs(
            logits=tuple(_produced(x if x.dtype == torch.float64 else x.float()) for x in logits),
            used=_produced(used.ids(), -1),
            preferred=_produced((preferred or used).ids(), -1),
            old_log_probs=tuple(_produced(x[:, :-1]) for x in old.all_log_probs),
            old_used=_produced(old.ids[:, :-1].long(), -1),
            weights=weights,
            load=load,
        )


def token_weights(attention_mask: Bool[Tensor, "batch time"], response_mask: Bool[Tensor, "batch time"]) -> PerToken:
    """`RouterInputs.weights` of a whole mini-batch, float64. The first token of a row has no predecessor. A row without
    a response does not count: ranks fill their batches with such rows."""
    real = attention_mask & response_mask.any(1, keepdim=True)
    real[:, :1] = False
    return real.double() / real.sum().clamp(min=1)


def load_of(weights: PerToken, used: RoutingTrace, preferred: RoutingTrace | None) -> Load:
    """`RouterInputs.load` of a whole mini-batch, from a forward of it and the weights of its tokens."""
    experts = [moe_layer.num_experts for moe_layer in used.layout.moe_layers]
    traces = {"preferred": preferred or used, "used": used}
    return {
        kind: shares(_produced(trace.ids()[:, :-1].to(weights.device), -1), weights, experts)
        for kind, trace in traces.items()
    }


def shares(
    ids: Int[Tensor, "batch time moe_layer k"], weights: PerToken, experts: list[int]
) -> tuple[Float[Tensor, " _"], ...]:
    """Σ weights of the tokens at which an expert fills a slot, over k, per MoE layer; -1 is no slot."""
    loads = []
    for moe_layer, count in enumerate(experts):
        here = ids[:, :, moe_layer]
        k = (here >= 0).sum(-1, keepdim=True).clamp(min=1)
        filled = torch.where(here >= 0, weights[..., None] / k, 0)
        loads.append(filled.new_zeros(count).index_add(0, here.clamp(min=0).flatten(), filled.flatten()))
    return tuple(loads)


def _produced(x: Tensor, value: float = 0.0) -> Tensor:
    """Values at inputs [batch, time - 1, …], moved to the tokens that they produced [batch, time, …]."""
    return nn.functional.pad(x, [0] * 2 * (x.dim() - 2) + [1, 0], value=value)
