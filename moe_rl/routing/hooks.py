"""`record_routing` and `replay_routing`: the scopes in which routes are read from a model's forward, or forced on it.

Inside a scope every routing site's forward runs under a torch function mode that sees the site's own final top-k
(`selection.py`). Recording reads the ids there; replay answers `(scores.gather(ids), ids)` instead, so that the
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
from moe_rl.routing.intercept import checkpoints_bound, hooked, tokens_noted
from moe_rl.routing.selection import Replay
from moe_rl.routing.sites import Layout, RoutingModule, family_class, find_sites, make_layout, since
from moe_rl.routing.trace import RoutingTrace

JOIN = ("Record each micro-batch in its own block, and join them with RoutingTrace.cat(traces, input_ids, "
        "attention_mask). After beam search, use take().")

__all__ = ["Recording", "Replay", "RouterScores", "record_routing", "replay_routing"]


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
        raise RoutingError(f"replay_routing needs a RoutingTrace, not a {type(trace).__name__}. Make one of expert ids "
                           "with RoutingTrace.from_ids(ids, layout_of(model), attention_mask=…).")
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
        raise RoutingError("replay reached no router: no forward of this model ran inside the block. Call the model "
                           "inside it.")
    if replay.pending:
        raise RoutingError(
            f"{len(replay.pending)} checkpointed layers were not backpropagated inside the replay block, so their "
            "gradients would be wrong. Call backward inside the block."
        )


def _require_tokens(trace: RoutingTrace, shape: torch.Size, tokens: Integer[Tensor, "batch time"] | None) -> None:
    """The forward must read the tokens that were routed, in the same padding; embeddings have a shape alone."""
    if shape != trace.attention_mask.shape:
        raise RoutingError(f"the forward has tokens of shape {tuple(shape)}, but the trace has "
                           f"{tuple(trace.attention_mask.shape)}. Replay the trace of these tokens.")
    if trace.tokens is not None and tokens is not None:
        same = (tokens == trace.tokens.to(tokens.device)) | ~trace.attention_mask.to(tokens.device)
        if not bool(same.all()):
            b, t = (~same).nonzero()[0].tolist()
            raise RoutingError(
                f"the trace is of other tokens: row {b}, position {t} is token {int(tokens[b, t])} in the forward, and "
                f"{int(trace.tokens[b, t])} in the trace. Align paddings with trace.align(attention_mask)."
            )


# ---------------------------------------------------------------------- what a recording holds
@dataclass(frozen=True)
class RouterScores:
    """How sure the routers were, in one forward. Without gradient, float32."""

    ids: Integer[Tensor, "batch time site k"]
    """The used experts, as a trace has them, -1 where a site uses fewer than k."""
    gates: Float[Tensor, "batch time site k"]
    """Combine weights of the used experts, as the family computes them."""
    log_probs: Float[Tensor, "batch time site k"]
    """log softmax over all experts of the router's logits, at the used experts."""
    margins: Float[Tensor, "batch time site"]
    """k-th minus (k+1)-th choice score: in the router's own units, bias included, infinite where k = all experts."""
    all_log_probs: tuple[Float[Tensor, "batch time _"], ...]
    """The whole log softmax, per site."""

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
            all_log_probs=tuple(join(site) for site in zip(*(p.all_log_probs for p in parts), strict=True)),
        )

    def rows(self, index: Tensor | slice, time: int) -> RouterScores:
        """The given rows and the first `time` columns."""
        return self.each(lambda x: x[index][:, :time])

    def to(self, device: torch.device | str) -> RouterScores:
        """The same scores on another device."""
        return self.each(lambda x: x.to(device))

    def each(self, change: Callable[[Tensor], Tensor]) -> RouterScores:
        """A change to every tensor, all of which have rows and columns."""
        sites = tuple(map(change, self.all_log_probs))
        return RouterScores(change(self.ids), change(self.gates), change(self.log_probs), change(self.margins), sites)

    def log_probs_at(self, ids: Integer[Tensor, "batch time site k"]) -> Float[Tensor, "batch time site k"]:
        """Log-probabilities of other ids than the used ones (-1 allowed; its value means nothing)."""
        return torch.stack([p.gather(-1, ids[:, :, s].clamp(min=0)) for s, p in enumerate(self.all_log_probs)], 2)


@dataclass
class Recording:
    """Routes of the forwards run inside a `record_routing` scope."""

    layout: Layout
    scored: bool = False
    graphed: bool = False
    _ids: list[list[Tensor]] = field(default_factory=list)
    """Per site, the [tokens, k] ids of each forward."""
    _read: list[tuple[torch.Size | None, Tensor | None]] = field(default_factory=list)
    """The shape [batch, time] of what each forward read, and the ids; None for one that was given embeddings."""
    _reading: tuple[torch.Size | None, Tensor | None] = (None, None)
    """The same of the forward now running, until it reaches its first site."""
    _scores: list[list[dict[str, Tensor]]] = field(default_factory=list)
    _logits: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def __repr__(self) -> str:
        read = [len(call) for call in self._ids[0]]
        what = [name for name, kept in (("scores", self.scored), ("logits", self.graphed)) if kept]
        return (f"Recording({len(read)} forward{'s' * (len(read) != 1)}, {sum(read)} tokens, {len(self.layout.sites)} "
                f"sites{''.join(f', {name}' for name in what)})")

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self._ids = [[] for _ in self.layout.sites]
        self._read, self._reading = [], (None, None)
        self._scores = [[] for _ in self.layout.sites]
        self._logits = [None for _ in self.layout.sites]

    def take(self) -> Integer[Tensor, "tokens site k"]:
        """Rows of the last forward, batch-major, in the layout's narrow dtype; then forget everything.

        For engines that gather or repeat rows between forwards, which `trace` could not put in order.
        """
        self._require_forward()
        ids = self.layout.stack([calls[-1] for calls in self._ids])
        self.clear()
        return ids

    def trace(
        self, input_ids: Integer[Tensor, "batch time"], attention_mask: Bool[Tensor, "batch time"] | None = None
    ) -> RoutingTrace:
        """The routes of `input_ids`, from one forward or from a prefill and decode forwards of the same rows.

        The last column may never have been an input (it was sampled last); it is unknown then. Padding is unknown.
        Raises RoutingError for tokens that the forwards did not read, as after beam search, which moves rows, and
        assisted decoding, which takes tokens back. Not compared are padding, and embeddings, of which only the
        shape is known; and rows that exchange their caches while they read the same tokens look alike.
        """
        self._require_forward()
        batch, time = input_ids.shape
        pieces = [call.shape[0] for call in self._ids[0]]
        columns = sum(pieces) // batch
        if any(piece % batch for piece in pieces) or columns not in (time, time - 1):
            raise RoutingError(
                f"the forwards in this block read {pieces} tokens, which are not one pass over {batch} rows of {time} "
                f"(or {time - 1}) tokens. {JOIN}"
            )
        forwards = [self.layout.stack(sites).unflatten(0, (batch, -1)) for sites in zip(*self._ids, strict=True)]
        ids = torch.cat(forwards, 1).to(input_ids.device)
        ids = nn.functional.pad(ids, (0, 0, 0, 0, 0, time - columns), value=self.layout.unknown)
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        mask = mask.to(input_ids.device)
        self._require_read(input_ids, mask, [piece // batch for piece in pieces])
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
        """Logits of every site's router in the last forward, with their graph, for `batch` rows. Needs
        `record_routing(model, logits=True)`."""
        if not self.graphed:
            raise RoutingError("router logits were not recorded. Use record_routing(model, logits=True).")
        self._require_forward()
        return tuple(x.reshape(batch, -1, x.shape[-1]) for x in self._logits if x is not None)

    def _require_forward(self) -> None:
        calls = [len(c) for c in self._ids]
        if min(calls) != max(calls) or not calls[0]:
            ran = f"the MoE layers ran {min(calls)} to {max(calls)} times" if max(calls) else "no MoE layer ran"
            raise RoutingError(f"{ran} inside the block. Run whole forwards of the recorded model inside it.")

    def _require_read(
        self, tokens: Integer[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], widths: list[int]
    ) -> None:
        """Raise unless the forwards, each of which read so many columns, read these tokens, padding aside."""
        read, start = [], 0
        for (shape, here), width in zip(self._read, widths, strict=True):
            if shape is not None and shape != (len(tokens), width):
                raise RoutingError(
                    f"a recorded forward has {shape[0]} rows of {shape[1]} tokens, not {len(tokens)} rows of {width}. "
                    f"{JOIN}"
                )
            read.append(tokens[:, start : start + width] if here is None else here.to(tokens.device))
            start += width
        joined = torch.cat(read, 1)
        other = (joined != tokens[:, :start]) & mask[:, :start]
        if bool(other.any()):
            b, t = other.nonzero()[0].tolist()
            raise RoutingError(
                f"the recorded forwards are of other tokens: row {b}, position {t} is token {int(tokens[b, t])} here, "
                f"and {int(joined[b, t])} there. After beam search, use take() after each forward, or record a new "
                "forward of these tokens."
            )

    # ------------------------------------------------------------------ for the sites
    def reads(self, shape: torch.Size, tokens: Integer[Tensor, "batch time"] | None) -> None:
        """A forward was given these tokens, or embeddings; of what its wrapper was given they are made."""
        self._reading = (shape, self._reading[1] if tokens is None else tokens)

    def routed(
        self, site: int, used: Integer[Tensor, "tokens k"], scores: dict[str, Tensor] | None, logits: Tensor | None
    ) -> None:
        """A site used these experts, and chose them by these scores, made of these logits."""
        if site == 0:
            (shape, tokens), self._reading = self._reading, (None, None)
            fits = shape is not None and shape.numel() == len(used)
            # A copy: the caller may go on filling the buffer that these are a part of.
            ids = tokens.clone() if fits and tokens is not None and tokens.shape == shape else None
            self._read.append((shape if fits else None, ids))
        self._ids[site].append(used.detach())
        if scores is not None:
            self._scores[site] = [scores]
        self._logits[site] = logits


def read_logits(spec: RoutingModule, output: Any) -> Float[Tensor, "tokens experts"]:
    """The logits of one site's forward as its router hands them out, with their graph.

    Nothing is computed here: under activation checkpointing it would not be computed again. Raises RoutingError for
    routers that do not return (logits, gates of the chosen, ...), and where the forward has no graph.
    """
    name = family_class(spec.module).__name__
    logits = output[0] if isinstance(output, tuple) and len(output) > 2 else None
    if logits is None or logits.shape[-1:] != (spec.site.num_experts,):
        raise RoutingError(f"{name} does not return its logits, so a loss cannot use them. Leave the term out"
                           f"{since(name)}.")
    if not torch.is_grad_enabled():
        raise RoutingError(
            f"{spec.site.name} runs without a graph, as in re-entrant activation checkpointing, so its router gets no "
            "gradient. Use activation_checkpointing=True instead."
        )
    return logits


def read_scores(spec: RoutingModule, used: Tensor, choice: Tensor, output: Any) -> dict[str, Tensor]:
    """Gates, log-probabilities and margins of one site's forward, from its output and the scores it chose by.

    Raises RoutingError for the few families whose routers do not return (logits, gates of the chosen, ...).
    """
    experts, k = spec.site.num_experts, spec.site.top_k
    choice = choice.reshape(-1, experts).float()
    logits, gates = output[:2] if isinstance(output, tuple) and len(output) > 2 else (choice, choice)
    if logits.shape != choice.shape or gates.shape != used.shape:
        name = family_class(spec.module).__name__
        raise RoutingError(f"{name} does not return its logits and gate weights. Record without scores{since(name)}.")
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
