"""`record_routing` and `replay_routing`: the only code that touches a model's forward.

Inside a scope every routing site's forward runs under a torch function mode that sees the site's own final top-k.
Recording reads the ids there; replay answers `(scores.gather(ids), ids)` instead, so that the family's own code makes
the combine weights from the live router's scores, and gradient reaches the router through them. There is no formula
per family, no argument threaded through a model, and nothing left behind after the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_rl.errors import RoutingError
from moe_rl.routing.sites import RoutingModule, find_sites, make_layout
from moe_rl.routing.trace import Layout, RoutingTrace

TOPK = (torch.topk, torch.Tensor.topk)


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

    def take(self) -> Int[Tensor, "tokens site k"]:
        """Rows of the last forward, batch-major, in the layout's narrow dtype; then forget everything.

        For engines that gather or repeat rows between forwards, which `trace` could not put in order.
        """
        self._require_forward()
        ids = self._stack([calls[-1] for calls in self._ids])
        self.clear()
        return ids

    def trace(
        self, input_ids: Int[Tensor, "batch time"], attention_mask: Bool[Tensor, "batch time"] | None = None
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

    def _stack(self, sites: Sequence[Tensor]) -> Int[Tensor, "tokens site k"]:
        return _stack_sites(sites, self.layout)


@dataclass(frozen=True)
class RouterScores:
    """How sure the routers were, in one forward. Without gradient, float32."""

    gates: Float[Tensor, "batch time site k"]
    """Combine weights of the used experts, as the family computes them."""
    log_probs: Float[Tensor, "batch time site k"]
    """log softmax over all experts of the router's logits, at the used experts."""
    margins: Float[Tensor, "batch time site"]
    """k-th minus (k+1)-th choice score: in the router's own units, bias included, infinite where k = all experts."""
    all_log_probs: tuple[Float[Tensor, "batch time experts"], ...]
    """The whole log softmax, per site."""

    @staticmethod
    def cat(parts: Sequence[RouterScores], time: int) -> RouterScores:
        """Scores of consecutive rows, their time axis widened with zeros."""

        def join(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([nn.functional.pad(x, [0] * 2 * (x.dim() - 2) + [0, time - x.shape[1]]) for x in tensors])

        return RouterScores(
            gates=join([p.gates for p in parts]),
            log_probs=join([p.log_probs for p in parts]),
            margins=join([p.margins for p in parts]),
            all_log_probs=tuple(join(site) for site in zip(*(p.all_log_probs for p in parts), strict=True)),
        )

    def log_probs_at(self, ids: Int[Tensor, "batch time site k"]) -> Float[Tensor, "batch time site k"]:
        """Log-probabilities of other ids than the used ones (-1 allowed; its value means nothing)."""
        return torch.stack([p.gather(-1, ids[:, :, s].clamp(min=0)) for s, p in enumerate(self.all_log_probs)], 2)


@dataclass
class Replay:
    """A replay scope's view of what it does."""

    routes: RoutingTrace
    coverage: float
    """Share of (token, site) pairs that are forced; the rest routes freely."""
    _preferred: list[Tensor | None]
    """Per site, the [tokens, k] ids of the last forward's own top-k."""
    _pending: int = 0
    """Checkpointed layers whose recomputation is still to come."""

    @property
    def ran(self) -> bool:
        return self._preferred[-1] is not None

    @property
    def preferred(self) -> RoutingTrace:
        """What each router would have picked in the last forward, given the hidden states that replay made upstream.

        Not the natural routes: those need a forward without replay.
        """
        if not self.ran:
            raise RoutingError("no forward has run inside the replay scope yet.")
        layout = self.routes.layout
        ids = _stack_sites(self._preferred, layout).unflatten(0, self.routes.shape[:2])
        mask = self.routes.attention_mask.to(ids.device)
        ids = ids.masked_fill(~mask[..., None, None], layout.unknown)
        return RoutingTrace.from_ids(ids, layout, tokens=self.routes.tokens, attention_mask=mask, check=False)


# ---------------------------------------------------------------------- the two scopes
@contextmanager
def record_routing(model: nn.Module, scores: bool = False) -> Iterator[Recording]:
    """Record the experts that every forward of `model` inside the block uses, replayed ones included.

    A recomputation under activation checkpointing is not recorded again. `scores` also keeps gates, router
    log-probabilities and margins of the last forward. Raises RoutingError for a model without routers.

        with record_routing(model) as recording:
            model(input_ids)
        routes = recording.trace(input_ids)
    """
    modules = find_sites(model)
    recording = Recording(make_layout(model, modules), scored=scores)

    def listen(site: int, used: Tensor, choice: Tensor, output: Any) -> None:
        recording._ids[site].append(used.detach())
        if scores:
            recording._scores[site] = [_read_scores(modules[site], used, choice, output)]

    with _hooked(modules, listener=listen):
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
    modules = find_sites(model)
    make_layout(model, modules).require(trace.layout, "the trace")
    replay = Replay(trace, trace.coverage, [None] * len(modules))
    if replay.coverage == 0:
        raise RoutingError("the trace holds no known route, so replay would do nothing.")

    def check_input(_: nn.Module, args: tuple, kwargs: dict) -> None:
        if modules[0].module.forward.replays[-1] is replay:  # an inner scope's forward reads other tokens
            _check_input(trace, args, kwargs)

    check = model.register_forward_pre_hook(check_input, with_kwargs=True)
    try:
        with _hooked(modules, replay=replay), _checkpoints_bound(model, modules, replay):
            yield replay
        if not replay.ran:
            raise RoutingError("replay reached no router: no forward of this model ran inside the block.")
        if replay._pending:
            raise RoutingError(
                f"{replay._pending} checkpointed layers were not backpropagated inside the replay block; outside it they "
                "would be recomputed under other routes and the gradients would be wrong. Call backward inside."
            )
    finally:
        check.remove()


# ---------------------------------------------------------------------- how a site's forward is intercepted
class _SiteForward:
    """Stands in for one routing module's `forward` while at least one scope is open on it."""

    def __init__(self, spec: RoutingModule, index: int):
        self.spec, self.index = spec, index
        self.original = spec.module.forward
        self.previous = spec.module.__dict__.get("forward")
        self.listeners: list[Callable[..., None]] = []
        self.replays: list[Replay] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replay = self.replays[-1] if self.replays else None
        recompute = _recomputing()
        with _FinalTopK(self.spec, self.index, replay) as seen:
            output = self.original(*args, **kwargs)
        if seen.hits != 1:
            raise RoutingError(
                f"{self.spec.site.name} ({type(self.spec.module).__name__}) took {seen.hits} top-k over "
                f"{self.spec.site.num_experts} experts where one was expected, so its routes can be neither recorded nor "
                "replayed. A fused or compiled kernel may have replaced the router: switch it off."
            )
        if not recompute:
            if replay is not None:
                replay._preferred[self.index] = seen.natural
            for listen in self.listeners:
                listen(self.index, seen.used, seen.choice, output)
        return output


class _FinalTopK(TorchFunctionMode):
    """Sees, and under replay answers, the one top-k over experts inside a routing site's forward."""

    def __init__(self, spec: RoutingModule, index: int, replay: Replay | None):
        super().__init__()
        self.spec, self.index, self.replay = spec, index, replay
        self.hits = 0
        self.used = self.choice = self.natural = None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in TOPK:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        site, groups = self.spec.site, self.spec.num_groups
        within_groups = scores.dim() == 3 and scores.shape[1] == groups
        if k == site.top_k and scores.shape[-1] == site.num_experts and not within_groups:
            return self._select(func, args, kwargs, scores)
        if self.replay is not None and groups > 1 and scores.dim() == 2 and scores.shape[-1] == groups:
            return self._open_groups(scores, k)
        return func(*args, **kwargs)

    def _select(self, func: Callable, args: tuple, kwargs: dict, scores: Tensor) -> Any:
        natural = func(*args, **kwargs)
        self.hits += 1
        self.choice = scores.detach()
        self.used = self.natural = natural[1].reshape(-1, self.spec.site.top_k)
        if self.replay is None:
            return natural
        self.used = self._forced(self.natural)
        ids = self.used.view(natural[1].shape)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def _forced(self, natural: Int[Tensor, "tokens k"]) -> Int[Tensor, "tokens k"]:
        """The trace's ids, the router's own where the trace knows none."""
        trace = self.replay.routes
        batch, time = trace.shape[:2]
        if natural.shape[0] != batch * time:
            raise RoutingError(
                f"{self.spec.site.name}: the forward has {natural.shape[0]} tokens, the trace {batch} rows of {time}."
            )
        ids = trace.experts[:, :, self.index, : natural.shape[1]].reshape(natural.shape).to(natural.device)
        return torch.where(ids == trace.layout.unknown, natural, ids.long())

    def _open_groups(self, scores: Float[Tensor, "tokens groups"], k: int) -> Any:
        """Group-limited routers: open the groups of the forced experts, or the family's mask would zero their gates."""
        trace = self.replay.routes
        ids = trace.experts[:, :, self.index, : self.spec.site.top_k].flatten(0, 1).to(scores.device).long()
        known = ids[:, :1] != trace.layout.unknown
        group = torch.where(known, ids // (self.spec.site.num_experts // self.spec.num_groups), 0)
        forced = torch.where(known, scores.detach().scatter(1, group, float("inf")), scores.detach())
        chosen = forced.topk(k, dim=-1).indices
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


@contextmanager
def _hooked(
    modules: tuple[RoutingModule, ...], listener: Callable[..., None] | None = None, replay: Replay | None = None
) -> Iterator[None]:
    """Put a listener or a replay on every site; take it off again, whatever happens inside."""
    sites = []
    for index, spec in enumerate(modules):
        current = spec.module.__dict__.get("forward")
        site = current if isinstance(current, _SiteForward) else _SiteForward(spec, index)
        spec.module.forward = site
        (site.listeners if listener else site.replays).append(listener or replay)
        sites.append(site)
    try:
        yield
    finally:
        for site in sites:
            (site.listeners if listener else site.replays).remove(listener or replay)
            if site.listeners or site.replays:
                continue
            del site.spec.module.forward
            if site.previous is not None:
                site.spec.module.forward = site.previous


@contextmanager
def _checkpoints_bound(model: nn.Module, modules: tuple[RoutingModule, ...], replay: Replay) -> Iterator[None]:
    """Bind every checkpointed layer's recomputation to this replay, and count those that are still to come.

    Several micro-batches may be recomputed in any order inside nested scopes; each must meet its own routes.
    """
    layers = [m for m in model.modules() if "_gradient_checkpointing_func" in m.__dict__]

    def bind(checkpoint: Callable) -> Callable:
        def checkpointed(function: Callable, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return checkpoint(function, *args, **kwargs)
            replay._pending += 1

            def run(*inner: Any, **inner_kwargs: Any) -> Any:
                replay._pending -= _recomputing()
                sites = [spec.module.__dict__["forward"] for spec in modules]
                for site in sites:
                    site.replays.append(replay)
                try:
                    return function(*inner, **inner_kwargs)
                finally:
                    for site in sites:
                        site.replays.pop()

            return checkpoint(run, *args, **kwargs)

        return checkpointed

    originals = [layer._gradient_checkpointing_func for layer in layers]
    for layer in layers:
        layer._gradient_checkpointing_func = bind(layer._gradient_checkpointing_func)
    try:
        yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            layer._gradient_checkpointing_func = original


# ---------------------------------------------------------------------- small parts
def _recomputing() -> bool:
    """True inside a backward pass, that is, when activation checkpointing runs a forward again."""
    return torch._C._current_graph_task_id() != -1


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
                f"the trace holds the routes of other tokens: row {b}, position {t} is token {int(tokens[b, t])} in the "
                f"forward, {int(trace.tokens[b, t])} in the trace. Align paddings with trace.align(attention_mask)."
            )


def _read_scores(spec: RoutingModule, used: Tensor, choice: Tensor, output: Any) -> dict[str, Tensor]:
    """Gates, log-probabilities and margins of one forward, from the router's own output and choice scores."""
    experts, k = spec.site.num_experts, spec.site.top_k
    choice = choice.reshape(-1, experts).float()
    parts = [p.detach() for p in output if isinstance(p, Tensor)] if isinstance(output, tuple) else []
    gates = next((p for p in parts if p.is_floating_point() and p.shape == used.shape), None)
    if gates is None:
        raise RoutingError(f"{type(spec.module).__name__} does not hand out combine weights; record without scores.")
    logits = next((p for p in parts if p.is_floating_point() and p.shape == choice.shape), choice).float()
    log_probs = logits.log_softmax(-1)
    if k < experts:
        top = choice.topk(k + 1, dim=-1).values
        margins = top[:, -2] - top[:, -1]
    else:
        margins = choice.new_full(choice.shape[:1], float("inf"))
    at_used = log_probs.gather(-1, used)
    return {"gates": gates.float(), "log_probs": at_used, "margins": margins, "all_log_probs": log_probs}


def _stack_sites(sites: Sequence[Tensor], layout: Layout) -> Int[Tensor, "tokens site k"]:
    """One [tokens, k] tensor per site as one tensor in the layout's narrow dtype."""
    return torch.stack([_pad_k(ids, layout.top_k, layout.unknown).to(layout.dtype) for ids in sites], 1)


def _pad_k(x: Tensor, k: int, value: float = 0.0) -> Tensor:
    """Widen the last axis to k slots."""
    return x if x.shape[-1] == k else nn.functional.pad(x, (0, k - x.shape[-1]), value=value)
