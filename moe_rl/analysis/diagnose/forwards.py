"""Forwards of the responses: log-probs, routes and combine weights, under a change of the model or under replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from moe_rl.analysis.checkpoints.texts import cut_batches
from moe_rl.analysis.diagnose.decide import Fit
from moe_rl.analysis.diagnose.hypotheses import Hypothesis
from moe_rl.analysis.diagnose.responses import Response, hash_sets, match_layers, select_ids
from moe_rl.analysis.diagnose.scopes import cast_to
from moe_rl.errors import ConfigError, MoeRlError, RoutingError
from moe_rl.metrics.rounding import rounding
from moe_rl.models.vocabulary import kept
from moe_rl.routing import RoutingTrace, layout_of, observe
from moe_rl.routing.moe_layers import ROUTE
from moe_rl.routing.trace import Layout

STATED = "as stated"
"""The reading at the temperature of the file, over the whole vocabulary."""
TEMPERATURES = tuple(round(0.05 * n, 2) for n in range(5, 42))
LOGITS, AT_ONCE = 2**26, 2**24
"""Most logits of one forward of several responses, and most that are read at once."""
FLOORS = 4.0
"""Times the noise floor that is still noise."""
Routes = Callable[[Response, Layout], NDArray]
"""Ids [rows, MoE layer, k] to be forced on a response, -1 where free."""
Positions = Callable[[Response], NDArray]
"""Of every token of a response."""


@dataclass
class Scorer:
    """The responses, the model, and how far the engine's log-probs are from a forward of it."""

    model: nn.Module
    responses: Sequence[Response]
    batch_tokens: int = 4096
    skipped: list[str] = field(default_factory=list)
    """Forwards that this model cannot run, and why."""

    def __post_init__(self) -> None:
        self.layout: Layout = layout_of(self.model)
        self.engine = np.concatenate([r.logprobs for r in self.responses])
        self.owner = np.repeat(np.arange(len(self.responses)), [len(r.logprobs) for r in self.responses])
        self.own: Bool[NDArray, " token"] = np.isfinite(self.engine)
        self.readings: Mapping[str, tuple[str, str]] = list_readings(self.responses)
        self.has_gates = any(r.gates is not None for r in self.responses)
        names = (STATED, *self.readings)
        self.unconstrained = score(
            self.model, self.responses, names, batch_tokens=self.batch_tokens, keep_gates=self.has_gates
        )
        if not np.isfinite(self.unconstrained.logprobs[STATED]).all():
            raise ConfigError("the checkpoint's log-probs of these tokens are not finite. Check it, or use --dtype.")
        self.base = self.compare("unconstrained", self.unconstrained.logprobs[STATED])

    @property
    def dtype(self) -> str:
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    def compare(self, name: str, logprobs: NDArray, **about: Any) -> Fit:
        """The log-probs of all response tokens beside the engine's."""
        return Fit(name, (logprobs - self.engine)[self.own].astype(np.float32), self.owner[self.own], **about)

    def compare_with_unconstrained(self, name: str, logprobs: NDArray) -> Fit:
        return Fit(name, (logprobs - self.unconstrained.logprobs[STATED])[self.own], self.owner[self.own])

    def measure_floor(self) -> tuple[Fit, float]:
        """The model against itself, each response alone and padded, and rows in another order and company; and the KL
        up to which log-probs agree. Another order of summation moves them, too, by an amount that follows from the
        dtype and the depth."""
        alone = score(self.model, self.responses, batch_tokens=1, extra=3).logprobs[STATED]
        fewer = max(1, self.batch_tokens // 3)
        backwards = score(self.model, self.responses[::-1], batch_tokens=fewer).logprobs[STATED]
        ends = np.cumsum([len(r.logprobs) for r in self.responses[::-1]])[:-1]
        forwards = np.concatenate(np.split(backwards, ends)[::-1])
        floor = max(
            (self.compare_with_unconstrained("noise floor", x) for x in (alone, forwards)), key=lambda fit: fit.mean
        )
        config: Any = self.model.config
        eps = torch.finfo(next(self.model.parameters()).dtype).eps
        magnitude = float(np.sqrt(np.mean(self.unconstrained.logprobs[STATED][self.own] ** 2)))
        least = rounding(eps, config.get_text_config().num_hidden_layers, magnitude) ** 2 / 2
        return floor, max(least, FLOORS * floor.mean)

    # ------------------------------------------------------------------ what else the log-probs may be
    def compare_readings(self) -> Iterator[Fit]:
        """The unconstrained forward under each other meaning of a log-prob."""
        unconstrained = self.unconstrained.logprobs[STATED]
        yield from self.compare_temperatures(self.unconstrained)
        for by in (1, -1):
            index = np.arange(len(unconstrained)) + by
            inside = (index >= 0) & (index < len(unconstrained))
            index = index.clip(0, len(unconstrained) - 1)
            inside &= (self.owner[index] == self.owner) & np.isfinite(self.engine[index])
            shifted = np.where(inside, unconstrained[index], unconstrained)
            yield self.compare(f"log-probs {by:+d} token", shifted, causes=("logprob_shift",), detail=f"{by:+d}")
        blank = (self.engine == 0) & (unconstrained < -np.log(2))
        if blank.any() and (self.engine[self.own] != 0).any():
            zeros = np.where(blank, 0.0, unconstrained)
            yield self.compare("zeros where nothing was sampled", zeros, causes=("response_mask",))

    def compare_temperatures(self, scores: Scores, *beside: str) -> Iterator[Fit]:
        for name, (cause, detail) in self.readings.items():
            label = " + ".join((f"log-probs {'over the ' if cause == 'kept_set' else 'at '}{name}", *beside))
            causes = (cause, *(["dtype"] if beside else []))
            yield self.compare(label, scores.logprobs[name], causes=causes, detail=detail)

    # ------------------------------------------------------------------ forwards
    def score_under(
        self, h: Hypothesis, dtype: str | None = None, readings: Sequence[str] = (), keep_gates: bool = False
    ) -> Scores | None:
        """Scores under a hypothesis, on request in another dtype; None, with the reason noted, where the model cannot
        do so."""
        responses = [h.tokens(r) for r in self.responses] if h.tokens else self.responses
        settings: dict[str, Any] = {"batch_tokens": self.batch_tokens, "positions": h.positions}
        try:
            with ExitStack() as stack:
                model = stack.enter_context(h.model(self.model))
                if dtype is not None:  # a copy of what was changed
                    model = stack.enter_context(cast_to(getattr(torch, dtype))(model))
                scores = score(model, responses, (STATED, *readings), keep_gates=keep_gates, **settings)
            if np.isfinite(scores.logprobs[STATED]).all():
                return scores
            raise ConfigError("log-probs are not finite")
        except Exception as error:  # a family's code, with settings that it never had, may raise anything
            kind = "" if isinstance(error, MoeRlError) else f"{type(error).__name__}: "
            self.skipped.append(f"not tried: {h.name} ({kind}{error})")
            return None

    def force(self, name: str, routes: Routes, gates: bool = False) -> Fit | None:
        """With ids forced, and on request the reported combine weights."""
        try:
            scores = score(self.model, self.responses, batch_tokens=self.batch_tokens, routes=routes, gates=gates)
        except RoutingError as error:
            self.skipped.append(f"not tried: {name} ({error})")
            return None
        return self.compare(name, scores.logprobs[STATED])


def measure_agreement(a: Sequence[NDArray], b: Sequence[NDArray]) -> Float[NDArray, " moe_layer"]:
    """Share of tokens at which both chose the same experts, in whatever order, by MoE layer."""
    return np.concatenate([hash_sets(x) == hash_sets(y) for x, y in zip(a, b, strict=True)]).mean(0)


def mask_ids(prompt: bool) -> Routes:
    """The reported ids of the rows that decide the prompt alone, or the response."""

    def routes(response: Response, layout: Layout) -> NDArray:
        ids = select_ids(response, layout).copy()
        ids[slice(response.prompt - 1, None) if prompt else slice(0, response.prompt - 1)] = -1
        return ids

    return routes


# ---------------------------------------------------------------------- one forward
@dataclass
class Scores:
    """Of the tokens of all responses without their prompts, response after response."""

    logprobs: dict[str, Float[NDArray, " token"]]
    """By reading."""
    routes: list[NDArray]
    """Per response the experts used [rows, MoE layer, k]; none under other positions."""
    gates: list[NDArray]
    """Their combine weights, where asked for and known."""


@torch.no_grad()
def score(
    model: nn.Module,
    responses: Sequence[Response],
    readings: Sequence[str] = (STATED,),
    *,
    batch_tokens: int = 4096,
    routes: Routes | None = None,
    gates: bool = False,
    positions: Positions | None = None,
    extra: int = 0,
    keep_gates: bool = False,
) -> Scores:
    """Scores of the responses under `model`, in their order.

    `routes` forces ids, with `gates` the reported combine weights too; `positions` gives other positions;
    `extra` pads. Raises RoutingError where the model cannot do so.
    """
    config: Any = model.config
    vocabulary, device = config.get_text_config().vocab_size, next(model.parameters()).device
    logprobs: dict[str, list[NDArray]] = {name: [] for name in readings}
    used, weights = list[NDArray](), list[NDArray]()
    for part in cut_batches(responses, min(batch_tokens, LOGITS // vocabulary)):
        tokens = pad_sequence([torch.tensor(r.tokens) for r in part], batch_first=True)
        tokens = nn.functional.pad(tokens, (0, extra)).to(device)
        at = torch.arange(tokens.shape[1], device=device)
        mask = at < torch.tensor([len(r.tokens) for r in part], device=device)[:, None]
        response = mask & (at >= torch.tensor([r.prompt for r in part], device=device)[:, None])
        inputs, first = tokens[:, :-1], max(1, int(response.any(0).long().argmax()))
        trace = None if routes is None else make_trace(model, part, mask[:, 1:], routes, gates)
        if positions is None:
            keep: dict[str, Any] = {"scores": keep_gates, "logits": len(at) - first}
            seen = observe(model, {"input_ids": inputs}, routes=trace, part=True, lost="unknown", **keep)
            logits: Any = seen.logits
            ids = seen.routes.ids().cpu().numpy()
            ids = ids.astype(np.int8 if ids.max(initial=0) < 128 else np.int16)
            used += [ids[b, : len(r.tokens) - 1] for b, r in enumerate(part)]
            if seen.scores is not None:
                of_part = seen.scores.gates.cpu().numpy().astype(np.float32)
                weights += [of_part[b, : len(r.tokens) - 1] for b, r in enumerate(part)]
        else:  # which a recording takes for packed sequences; and so does transformers without a mask
            moved = at[:-1].repeat(len(part), 1)
            for row, r in zip(moved, part, strict=True):
                row[: len(r.tokens) - 1] = torch.from_numpy(positions(r)[:-1])
            padding = {"attention_mask": mask[:, :-1].long(), "logits_to_keep": len(at) - first}
            logits = model(input_ids=inputs, position_ids=moved, use_cache=False, **padding).logits
        logits, chosen, owner = logits[response[:, first:]], tokens[response], response.nonzero()[:, 0]
        pieces = (x.split(max(1, AT_ONCE // vocabulary)) for x in (logits, chosen, owner))
        for own, token, of in zip(*pieces, strict=True):
            for name in readings:
                read = read_logprobs(own.float(), token, of, part, name)
                logprobs[name].append(read.double().cpu().numpy())
    return Scores({name: np.concatenate(x) for name, x in logprobs.items()}, used, weights)


def make_trace(
    model: nn.Module, responses: Sequence[Response], mask: Bool[Tensor, "batch time"], routes: Routes, gates: bool
) -> RoutingTrace:
    """The ids to be forced on these rows; what cannot be a route (all zero, an expert twice) is free."""
    layout = layout_of(model)
    ids = torch.full((*mask.shape, len(layout.moe_layers), layout.top_k), -1)
    weights = torch.zeros(ids.shape) if gates else None
    for b, r in enumerate(responses):
        forced = torch.from_numpy(routes(r, layout).astype(np.int64))
        ids[b, : len(forced)] = forced.masked_fill((layout.kinds_of_rows(forced, ()) != ROUTE)[..., None], -1)
        if weights is not None and r.gates is not None:
            weights[b, : len(forced)] = torch.from_numpy(r.gates[:, match_layers(r.gates.shape[1], layout)])
    trace = RoutingTrace.from_ids(ids.to(mask.device), layout, attention_mask=mask)
    return trace if weights is None else replace(trace, gates=weights.to(mask.device))


def read_logprobs(
    logits: Float[Tensor, "token vocabulary"],
    chosen: Int64[Tensor, " token"],
    owner: Int64[Tensor, " token"],
    responses: Sequence[Response],
    reading: str,
) -> Float[Tensor, " token"]:
    """log p of the chosen tokens. A reading is STATED, "0.7" (that temperature), "1 / T", "T²", or
    "kept set": renormalised over what top-k, top-p and min-p keep, at the stated temperature."""
    stated = torch.tensor([r.temperature for r in responses], device=logits.device)[owner][:, None]
    other: dict[str, Any] = {STATED: stated, "kept set": stated, "1 / T": 1 / stated, "T²": stated**2}
    scaled = logits / (other[reading] if reading in other else float(reading))
    if reading == "kept set":
        top_p, top_k, min_p = (
            torch.tensor(x, device=logits.device)[owner][:, None]
            for x in zip(*((r.top_p, float(r.top_k), r.min_p) for r in responses), strict=True)
        )
        keep = kept(scaled.log_softmax(-1), top_p=top_p, top_k=top_k, min_p=min_p)
        return scaled.gather(-1, chosen[:, None])[:, 0] - scaled.masked_fill(~keep, -torch.inf).logsumexp(-1)
    return scaled.gather(-1, chosen[:, None])[:, 0] - scaled.logsumexp(-1)


def list_readings(responses: Sequence[Response]) -> Mapping[str, tuple[str, str]]:
    """Readings that differ from what the file states: the cause and the detail of each."""
    stated = {r.temperature for r in responses}
    listed = ", ".join(f"{t:g}" for t in sorted(stated))
    others = {f"{t:g}": ("temperature", f"temperature {t:g}, the file has {listed}") for t in TEMPERATURES}
    others = {name: reading for name, reading in others.items() if stated != {float(name)}}
    if stated != {1.0}:
        for name in ("1 / T", "T²"):
            others[name] = ("temperature", f"temperature {name}, where T is that of the file, {listed}")
    if any(r.top_p < 1 or r.top_k > 0 or r.min_p > 0 for r in responses):
        others["kept set"] = ("kept_set", "")
    return others
