"""`record_routing` and `replay_routing`: the scopes in which routes are read from a model's forward, or forced on it.

Inside a scope every router's forward runs under a torch function mode that sees the router's own final top-k
(`selection.py`). Recording reads the ids there. Replay answers `(scores.gather(ids), ids)`, so the family's own code
makes the combine weights from the live router's scores, and gradient reaches the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from moe_rl.errors import NotFinite, RoutingError
from moe_rl.routing.intercept import forwards_watched, hooked
from moe_rl.routing.moe_layers import Layout, RoutingModule, family_class, find_moe_layers, make_layout
from moe_rl.routing.selection import Replay, chosen
from moe_rl.routing.trace import RoutingTrace, require_same

JOIN = "Record each micro-batch in its own block, and join them with RoutingTrace.cat. After beam search, use take()."

__all__ = ["Recording", "Replay", "RouterScores", "record_routing", "replay_routing"]


# ---------------------------------------------------------------------- the two scopes
@contextmanager
def record_routing(
    model: nn.Module, scores: bool | Literal["where_possible"] = False, logits: bool = False
) -> Iterator[Recording]:
    """Record the experts that every forward of `model` in this thread uses inside the block, replayed ones included.

    A recomputation under activation checkpointing uses the experts of its forward and is not recorded. `scores` also
    keeps gates, router log-probabilities and margins of the last forward; "where_possible" sets `Recording.scored` to
    False for a family that does not return them. `logits` keeps the routers' logits with their graph. Raises
    RoutingError for a model without routers, and at the end of a forward that left one out.

        with record_routing(model) as recording:
            model(input_ids)
        routes = recording.trace(input_ids)
    """
    modules = find_moe_layers(model)
    recording = Recording(make_layout(model, modules), scored=bool(scores), graphed=logits)

    def listen(moe_layer: int, used: Tensor, choice: Tensor, output: Any) -> None:
        read = None
        try:
            read = read_scores(modules[moe_layer], used, choice, output) if recording.scored else None
        except RoutingError:
            if scores != "where_possible":
                raise
            recording.scored = False
        recording.routed(
            moe_layer, chosen(used, choice), read, read_logits(modules[moe_layer], output) if logits else None
        )

    with hooked(modules, "listeners", listen), forwards_watched(model, modules, recording.reads):
        yield recording


@contextmanager
def replay_routing(model: nn.Module, trace: RoutingTrace | None, *, part: bool = False) -> Iterator[Replay | None]:
    """Force the experts of `trace` on every forward of `model` in this thread inside the block; `None` does nothing.

    Only ids are forced: gates come from the live router, so its gradient flows, unless the trace has `gates`. With
    `keep`, an id is forced only while the live router scores it high enough. The forward must read the trace's tokens,
    in its padding. Forward *and* backward belong inside the block, so that activation checkpointing recomputes under
    the same routes. Scopes may be nested, one per micro-batch, for a single backward. `part`: the trace is a slice of a
    larger one, and may know no route. Raises RoutingError for a trace that does not fit or, unless it is a part, knows
    nothing; if no forward ran, or one left a router out; and if a checkpointed forward was not backpropagated before
    the block ended, since its gradients would come from other experts.
    """
    if trace is None:
        yield None
        return
    if not isinstance(trace, RoutingTrace):
        raise RoutingError(
            f"replay_routing needs a RoutingTrace, not a {type(trace).__name__}: RoutingTrace.from_ids(ids, "
            "layout_of(model), attention_mask=…)"
        )
    modules = find_moe_layers(model)
    make_layout(model, modules).require(trace.layout, "the trace")
    if not part:
        trace.require_known()
    replay = Replay.of(trace)
    with hooked(modules, "replays", replay) as moe_layers:
        for moe_layer in moe_layers:
            moe_layer.require_eager()

        def check(shape: torch.Size, tokens: Tensor | None) -> None:
            if moe_layers[0].replay is replay:  # an inner scope's forward reads other tokens
                _require_tokens(trace, shape, tokens)

        with forwards_watched(model, modules, check):
            yield replay
    if not replay.ran:
        raise RoutingError("replay reached no router. Call the model inside the block.")
    if replay.pending:
        raise RoutingError(
            f"{len(replay.pending)} checkpointed layers were not backpropagated inside the replay block. Call backward "
            "inside it: else their gradients are wrong."
        )


def _require_tokens(trace: RoutingTrace, shape: torch.Size, tokens: Integer[Tensor, "batch time"] | None) -> None:
    """Raise unless the forward reads the routed tokens, in the same padding. Of embeddings only the shape is known."""
    if shape != trace.attention_mask.shape:
        raise RoutingError(
            f"the forward has tokens of shape {tuple(shape)}, but the trace has {tuple(trace.attention_mask.shape)}"
        )
    if tokens is not None and trace.tokens is not None:
        require_same(trace.tokens, tokens, trace.attention_mask)


# ---------------------------------------------------------------------- what a recording holds
@dataclass(frozen=True)
class RouterScores:
    """How sure the routers were, in one forward. Without gradient, float32."""

    ids: Integer[Tensor, "batch time moe_layer k"]
    """The used experts, as a trace has them, -1 where an MoE layer uses fewer than k."""
    gates: Float[Tensor, "batch time moe_layer k"]
    """Combine weights of the used experts, as the family computes them."""
    log_probs: Float[Tensor, "batch time moe_layer k"]
    """log softmax over all experts of the router's logits, at the used experts."""
    margins: Float[Tensor, "batch time moe_layer"]
    """k-th minus (k+1)-th choice score: in the router's own units, bias included, infinite where k = all experts."""
    all_log_probs: tuple[Float[Tensor, "batch time _"], ...]
    """The whole log softmax, per MoE layer."""

    @staticmethod
    def cat(parts: Sequence[RouterScores], time: int) -> RouterScores:
        """Scores of consecutive rows, their time axis widened with zeros."""

        def join(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([nn.functional.pad(x, [0] * 2 * (x.dim() - 2) + [0, time - x.shape[1]]) for x in tensors])

        return RouterScores(
            ids=join([p.ids for p in parts]),
            gates=join([p.gates for p in parts]),
            log_probs=join([p.log_probs for p in parts]),
            margins=join([p.margins for p in parts]),
            all_log_probs=tuple(join(moe_layer) for moe_layer in zip(*(p.all_log_probs for p in parts), strict=True)),
        )

    def rows(self, index: Tensor | slice, time: int) -> RouterScores:
        """The given rows and the first `time` columns."""
        return self.each(lambda x: x[index][:, :time])

    def to(self, device: torch.device | str) -> RouterScores:
        """The same scores on another device."""
        return self.each(lambda x: x.to(device))

    def each(self, change: Callable[[Tensor], Tensor]) -> RouterScores:
        """A change to every tensor, all of which have rows and columns."""
        moe_layers = tuple(map(change, self.all_log_probs))
        return RouterScores(
            change(self.ids), change(self.gates), change(self.log_probs), change(self.margins), moe_layers
        )

    def log_probs_at(self, ids: Integer[Tensor, "batch time moe_layer k"]) -> Float[Tensor, "batch time moe_layer k"]:
        """Log-probabilities of other ids than the used ones (-1 allowed; its value means nothing)."""
        return torch.stack([p.gather(-1, ids[:, :, s].clamp(min=0)) for s, p in enumerate(self.all_log_probs)], 2)


@dataclass
class Recording:
    """Routes of the forwards run inside a `record_routing` scope."""

    layout: Layout
    scored: bool = False
    graphed: bool = False
    _ids: list[list[Tensor]] = field(default_factory=list)
    """Per MoE layer, the [tokens, k] ids of each forward."""
    _read: list[tuple[torch.Size | None, Tensor | None]] = field(default_factory=list)
    """The shape [batch, time] of what each forward read, and the ids; None for one that was given embeddings."""
    _reading: tuple[torch.Size | None, Tensor | None] = (None, None)
    """The same of the forward now running, until it reaches its first MoE layer."""
    _scores: list[list[dict[str, Tensor]]] = field(default_factory=list)
    _logits: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Delete everything recorded so far."""
        self._ids = [[] for _ in self.layout.moe_layers]
        self._read, self._reading = [], (None, None)
        self._scores = [[] for _ in self.layout.moe_layers]
        self._logits = [None for _ in self.layout.moe_layers]

    def take(self) -> Integer[Tensor, "tokens moe_layer k"]:
        """Rows of the last forward, batch-major, in the layout's narrow dtype, unknown where a router had no finite
        scores; then clear. For engines that gather or repeat rows between forwards."""
        self._require_forward()
        ids = self.layout.stack([calls[-1] for calls in self._ids])
        self.clear()
        return ids

    def trace(
        self, input_ids: Integer[Tensor, "batch time"], attention_mask: Bool[Tensor, "batch time"] | None = None
    ) -> RoutingTrace:
        """The routes of `input_ids`, from one forward or from a prefill and decode forwards of the same rows.

        The last column is unknown if it was no input (it was sampled last). Padding is unknown. Raises NotFinite where
        a router had no finite scores for a token, and RoutingError for tokens that the forwards did not read, as after
        beam search and assisted decoding. Padding and embeddings are not compared.
        """
        self._require_forward()
        batch, time = input_ids.shape
        pieces = [call.shape[0] for call in self._ids[0]]
        columns = sum(pieces) // batch
        if any(piece % batch for piece in pieces) or columns not in (time, time - 1):
            raise RoutingError(
                f"the forwards in this block read {pieces} tokens, not one pass over {batch} rows of {time} (or "
                f"{time - 1}). {JOIN}"
            )
        forwards = [
            self.layout.stack(moe_layers).unflatten(0, (batch, -1)) for moe_layers in zip(*self._ids, strict=True)
        ]
        ids = torch.cat(forwards, 1).to(input_ids.device)
        ids = nn.functional.pad(ids, (0, 0, 0, 0, 0, time - columns), value=self.layout.unknown)
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        mask = mask.to(input_ids.device)
        self._require_read(input_ids, mask, [piece // batch for piece in pieces])
        self.require_routes(ids[:, :columns], mask[:, :columns])
        if attention_mask is not None:
            ids = ids.masked_fill(~mask[..., None, None], self.layout.unknown)
        return RoutingTrace.from_ids(ids, self.layout, tokens=input_ids, attention_mask=mask, check=False)

    def scores(self, batch: int) -> RouterScores:
        """Router scores of the last forward, for `batch` rows. Needs `record_routing(model, scores=True)`."""
        if not self.scored:
            raise RoutingError("router scores were not recorded. Use record_routing(model, scores=True).")
        self._require_forward()

        def rows(key: str, slots: bool = False) -> list[Tensor]:
            values = [calls[-1][key] for calls in self._scores]
            return [(self.layout.widen(v) if slots else v).unflatten(0, (batch, -1)) for v in values]

        ids = self.layout.stack([calls[-1] for calls in self._ids]).unflatten(0, (batch, -1))
        return RouterScores(
            ids=ids.to(torch.int16).masked_fill(ids == self.layout.unknown, -1),
            gates=torch.stack(rows("gates", slots=True), 2),
            log_probs=torch.stack(rows("log_probs", slots=True), 2),
            margins=torch.stack(rows("margins"), 2),
            all_log_probs=tuple(rows("all_log_probs")),
        )

    def logits(self, batch: int) -> tuple[Float[Tensor, "batch time _"], ...]:
        """Logits of every MoE layer's router in the last forward, with their graph, for `batch` rows. Needs
        `record_routing(model, logits=True)`."""
        if not self.graphed:
            raise RoutingError("router logits were not recorded. Use record_routing(model, logits=True).")
        self._require_forward()
        return tuple(x.reshape(batch, -1, x.shape[-1]) for x in self._logits if x is not None)

    def _require_forward(self) -> None:
        calls = [len(c) for c in self._ids]
        if min(calls) != max(calls) or not calls[0]:
            least = self.layout.moe_layers[calls.index(min(calls))].name
            ran = f"{least} ran {min(calls)} times, others {max(calls)}," if max(calls) else "no MoE layer ran"
            raise RoutingError(f"{ran} inside the block. Run whole forwards of the recorded model inside it.")

    def _require_read(
        self, tokens: Integer[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], widths: list[int]
    ) -> None:
        """Raise unless the forwards read these tokens, padding aside; `widths` are their numbers of columns."""
        read, start = [], 0
        for (shape, here), width in zip(self._read, widths, strict=True):
            if shape is not None and shape != (len(tokens), width):
                raise RoutingError(f"a recorded forward has shape {tuple(shape)}, not {(len(tokens), width)}. {JOIN}")
            read.append(tokens[:, start : start + width] if here is None else here.to(tokens.device))
            start += width
        require_same(torch.cat(read, 1), tokens[:, :start], mask[:, :start], "the recorded forwards are", advice=JOIN)

    def require_routes(self, ids: Integer[Tensor, "batch time moe_layer k"], mask: Bool[Tensor, "batch time"]) -> None:
        """Raise NotFinite if a router had no finite scores for a real token."""
        lost = ((ids[..., 0] == self.layout.unknown) & mask[..., None]).sum((0, 1)).tolist()
        if any(lost):
            raise NotFinite(f"{lost_routes(self.layout, lost)} Go back to an earlier checkpoint of the weights.")

    # ------------------------------------------------------------------ for the MoE layers
    def reads(self, shape: torch.Size, tokens: Integer[Tensor, "batch time"] | None) -> None:
        """Note the tokens, or embeddings, of a forward; embeddings are made of the tokens of its wrapper."""
        self._reading = (shape, self._reading[1] if tokens is None else tokens)

    def routed(
        self, moe_layer: int, used: Integer[Tensor, "tokens k"], scores: dict[str, Tensor] | None, logits: Tensor | None
    ) -> None:
        """Note the experts that an MoE layer used, its scores and its logits."""
        if moe_layer == 0:
            (shape, tokens), self._reading = self._reading, (None, None)
            fits = shape is not None and shape.numel() == len(used)
            # A copy: the caller may go on filling this buffer.
            ids = tokens.clone() if fits and tokens is not None and tokens.shape == shape else None
            self._read.append((shape if fits else None, ids))
        self._ids[moe_layer].append(used.detach())
        if scores is not None:
            self._scores[moe_layer] = [scores]
        self._logits[moe_layer] = logits


def lost_routes(layout: Layout, lost: Sequence[float]) -> str:
    """Say which router had no finite scores first, and for how many tokens."""
    moe_layer, n = next((moe_layer, n) for moe_layer, n in zip(layout.moe_layers, lost, strict=True) if n)
    return f"{moe_layer.name}: the router's scores are not finite for {int(n)} tokens, which have no route there."


def read_logits(spec: RoutingModule, output: Any) -> Float[Tensor, "tokens experts"]:
    """The logits that a router returns, with their graph.

    Nothing is computed here: activation checkpointing would not compute it again. Raises RoutingError for routers that
    do not return (logits, gates of the chosen, ...), and where the forward has no graph.
    """
    logits = output[0] if isinstance(output, tuple) and len(output) > 2 else None
    if logits is None or logits.shape[-1:] != (spec.moe_layer.num_experts,):
        raise RoutingError(f"{family_class(spec.module).__name__} does not return its logits. Leave the term out.")
    if not torch.is_grad_enabled():
        raise RoutingError(
            f"{spec.moe_layer.name} runs without a graph, as in re-entrant activation checkpointing. Use "
            "activation_checkpointing=True."
        )
    return logits


def read_scores(spec: RoutingModule, used: Tensor, choice: Tensor, output: Any) -> dict[str, Tensor]:
    """Gates, log-probabilities and margins of one router, from its output and its choice scores. Raises RoutingError
    for the few families whose routers do not return (logits, gates of the chosen, ...)."""
    experts, k = spec.moe_layer.num_experts, spec.moe_layer.top_k
    choice = choice.reshape(-1, experts).float()
    logits, gates = output[:2] if isinstance(output, tuple) and len(output) > 2 else (choice, choice)
    if logits.shape != choice.shape or gates.shape != used.shape:
        name = family_class(spec.module).__name__
        raise RoutingError(f"{name} does not return its logits and gate weights. Record without scores.")
    log_probs = logits.detach().float().log_softmax(-1)
    if k < experts:
        top = choice.topk(k + 1, dim=-1).values
        margins = top[:, -2] - top[:, -1]
    else:
        margins = choice.new_full(choice.shape[:1], float("inf"))
    return {
        "gates": gates.detach().float(),
        "log_probs": log_probs.gather(-1, used),
        "margins": margins,
        "all_log_probs": log_probs,
    }
