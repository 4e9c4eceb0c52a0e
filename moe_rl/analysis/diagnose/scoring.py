"""The forward of a rung: what a model says of the responses' tokens, read at several temperatures at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor, nn

from moe_rl.analysis.diagnose.responses import Response, layers_of
from moe_rl.errors import RoutingError
from moe_rl.models.truncation import kept
from moe_rl.routing.hooks import record_routing, replay_routing
from moe_rl.routing.sites import layout_of
from moe_rl.routing.trace import Layout, RoutingTrace

STATED = "as stated"
"""The reading that the file asks for: its own temperature, over the whole vocabulary."""
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5)
LOGITS, AT_ONCE = 2**26, 2**24
"""Most logits of one forward of several responses, and most that are read at once."""
Routes = Callable[[Response, Layout], NDArray]
"""Ids [rows, site, k] to be forced on a response, -1 where free."""


@dataclass(frozen=True)
class Rows:
    """Some responses, right-padded."""

    responses: tuple[Response, ...]
    tokens: Int64[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]
    response: Bool[Tensor, "batch time"]

    @staticmethod
    def of(responses: Sequence[Response], extra: int = 0) -> Rows:
        """With `extra` columns of padding more than they need."""
        lengths = torch.tensor([len(r.tokens) for r in responses])
        tokens = torch.zeros(len(responses), int(lengths.max()) + extra, dtype=torch.long)
        for row, r in zip(tokens, responses, strict=True):
            row[: len(r.tokens)] = torch.tensor(r.tokens)
        at = torch.arange(tokens.shape[1])
        mask = at < lengths[:, None]
        return Rows(tuple(responses), tokens, mask, mask & (at >= torch.tensor([r.prompt for r in responses])[:, None]))


@dataclass
class Scores:
    """What one forward says of the tokens of all responses, those of the prompt left out, response after response."""

    logprobs: dict[str, Float[NDArray, " token"]]
    """By reading."""
    best: NDArray
    """The most likely token at each place."""
    routes: list[NDArray]
    """Per response the experts used [rows, site, k], -1 where none; empty where they were not asked for."""
    gates: list[NDArray]
    """Their combine weights, where asked for."""


def batches(responses: Sequence[Response], batch_tokens: int, vocabulary: int) -> Iterator[list[Response]]:
    """The responses in their order, cut so that a forward holds at most `batch_tokens` tokens, padding included, and
    no more logits than memory is likely to have; one response is never cut."""
    rows: list[Response] = []
    most, longest = min(batch_tokens, LOGITS // vocabulary), 0
    for response in responses:
        longest = max(longest, len(response.tokens))
        if rows and (len(rows) + 1) * longest > most:
            yield rows
            rows, longest = [], len(response.tokens)
        rows.append(response)
    if rows:
        yield rows


@torch.no_grad()
def score(
    model: nn.Module,
    responses: Sequence[Response],
    readings: Sequence[str] = (STATED,),
    *,
    batch_tokens: int = 4096,
    routes: Routes | None = None,
    gates: bool = False,
    shift: int = 0,
    extra: int = 0,
    keep_routes: bool = False,
    keep_gates: bool = False,
) -> Scores:
    """Scores of the responses under `model`, in their order.

    `routes` forces ids, with `gates` the reported combine weights too; `shift` moves the positions of the response by
    so many; `extra` pads. Raises RoutingError where the model cannot do so.
    """
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    found: dict[str, list[NDArray]] = {name: [] for name in readings}
    best, used, weights = [], [], []
    for part in batches(responses, batch_tokens, vocabulary):
        rows = Rows.of(part, extra)
        trace = None if routes is None else trace_of(model, rows, routes, gates)
        logits, seen, scored = _forward(model, rows, trace, shift, keep_routes, keep_gates)
        first = rows.tokens.shape[1] - logits.shape[1]
        at = rows.response[:, first:]
        logits = logits[at.to(logits.device)]
        chosen, owner = (x.to(logits.device) for x in (rows.tokens[:, first:][at], at.nonzero()[:, 0]))
        for own, token, of in zip(*(x.split(max(1, AT_ONCE // vocabulary)) for x in (logits, chosen, owner)),
                                  strict=True):
            best.append(own.argmax(-1).cpu().numpy())
            for name in readings:
                found[name].append(read(own.float(), token, of, part, name).double().cpu().numpy())
        used += seen
        weights += scored
    return Scores({name: np.concatenate(x) for name, x in found.items()}, np.concatenate(best), used, weights)


def _forward(
    model: nn.Module, rows: Rows, trace: RoutingTrace | None, shift: int, keep: bool, scored: bool
) -> tuple[Tensor, list[NDArray], list[NDArray]]:
    """Logits from the first place at which a response has a token; on request the experts used and their weights."""
    device = next(model.parameters()).device
    inputs, followed = rows.tokens[:, :-1].to(device), rows.mask[:, 1:].to(device)
    settings = {}
    if shift:  # with a mask, since transformers takes a jump of positions for a packed sequence
        positions = torch.arange(inputs.shape[1]) + shift * rows.response[:, :-1]
        settings = {"position_ids": positions.to(device), "attention_mask": rows.mask[:, :-1].long().to(device)}
    first = max(1, int(rows.response.any(0).long().argmax()))
    kept = rows.tokens.shape[1] - first
    with replay_routing(model, trace, part=True):
        if not keep:
            return model(input_ids=inputs, use_cache=False, logits_to_keep=kept, **settings).logits, [], []
        with record_routing(model, scores=scored) as recording:
            logits = model(input_ids=inputs, use_cache=False, logits_to_keep=kept, **settings).logits
    ids = recording.trace(inputs, followed).ids().cpu().numpy()
    gates = recording.scores(len(inputs)).gates.cpu().numpy() if scored else None
    rows_of = [len(r.tokens) - 1 for r in rows.responses]
    narrow = np.int8 if ids.max(initial=0) < 128 else np.int16
    return (logits, [ids[b, :n].astype(narrow) for b, n in enumerate(rows_of)],
            [] if gates is None else [gates[b, :n].astype(np.float32) for b, n in enumerate(rows_of)])


def hands_out_gates(model: nn.Module) -> bool:
    """Whether the routers of this model say what their combine weights are."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    try:
        with torch.no_grad(), record_routing(model, scores=True):
            model(input_ids=tokens, use_cache=False)
    except RoutingError:
        return False
    return True


def trace_of(model: nn.Module, rows: Rows, routes: Routes, gates: bool) -> RoutingTrace:
    """The ids to be forced on these rows; what cannot be a route (all zero, an expert twice) is free."""
    layout = layout_of(model)
    device = next(model.parameters()).device
    time = rows.tokens.shape[1] - 1
    ids = torch.full((len(rows.responses), time, len(layout.sites), layout.top_k), -1)
    weights = torch.zeros(ids.shape) if gates else None
    for b, r in enumerate(rows.responses):
        forced = torch.from_numpy(routes(r, layout).astype(np.int64))
        ids[b, : len(forced)] = forced.masked_fill(~possible(forced, layout)[..., None], -1)
        if weights is not None and r.gates is not None:
            weights[b, : len(forced)] = torch.from_numpy(r.gates[:, layers_of(r.gates.shape[1], layout)])
    trace = RoutingTrace.from_ids(ids.to(device), layout, attention_mask=rows.mask[:, 1:].to(device))
    return trace if weights is None else replace(trace, gates=weights.to(device))


def possible(ids: Tensor, layout: Layout) -> Tensor:
    """Rows [..., site] of ids that a router can have picked: in range and distinct."""
    found = []
    for s, site in enumerate(layout.sites):
        row = ids[..., s, : site.top_k].sort(-1).values
        found.append((row[..., 0] >= 0) & (row[..., -1] < site.num_experts) & (row[..., 1:] != row[..., :-1]).all(-1))
    return torch.stack(found, -1)


def read(
    logits: Float[Tensor, "token vocabulary"],
    chosen: Int64[Tensor, " token"],
    owner: Int64[Tensor, " token"],
    responses: Sequence[Response],
    reading: str,
) -> Float[Tensor, " token"]:
    """log p of the chosen tokens. A reading is STATED, "T=0.7", "T inverted", "T twice", or "kept set": renormalised
    over what top-k, top-p and min-p keep, at the stated temperature (the whole vocabulary where neither is stated)."""
    stated = torch.tensor([r.temperature for r in responses], device=logits.device)[owner][:, None]
    temperature = {"T inverted": 1 / stated, "T twice": stated**2}.get(reading, stated)
    if reading.startswith("T="):
        temperature = torch.full_like(stated, float(reading[2:]))
    log_p = (logits / temperature).log_softmax(-1)
    found = log_p.gather(-1, chosen[:, None])[:, 0]
    if reading != "kept set":
        return found
    top_p, top_k, min_p = (torch.tensor(x, device=logits.device)[owner][:, None] for x in zip(
        *((r.top_p, float(r.top_k), r.min_p) for r in responses), strict=True))
    keep = kept(log_p, top_p=top_p, top_k=top_k, min_p=min_p)
    return found - log_p.masked_fill(~keep, -torch.inf).logsumexp(-1)


def readings_of(responses: Sequence[Response]) -> Mapping[str, str]:
    """Readings that differ from what the file states, and what each would mean."""
    stated = {r.temperature for r in responses}
    others = {f"T={t:g}": at_temperature(t, stated) for t in TEMPERATURES if stated != {t}}
    if stated != {1.0}:
        others["T=1"] = ("the engine's log-probs are those before the temperature: it samples at "
                         f"{_listed(stated)} but reports log-probs at 1")
        others |= {"T inverted": "the engine multiplies logits by the temperature where it should divide",
                   "T twice": "the engine divides logits by the temperature twice"}
    if any(r.top_p < 1 or r.top_k > 0 or r.min_p > 0 for r in responses):
        others["kept set"] = ("the engine's log-probs are renormalised over what top-p, top-k or min-p keep; those "
                              "of the trainer are over the whole vocabulary")
    return others


def at_temperature(value: float, stated: set[float]) -> str:
    """What it means that log-probs are at this temperature."""
    return f"the engine's log-probs are at temperature {value:g}, where the file states {_listed(stated)}"


def promising(gaps: Mapping[float, float], most: float) -> list[float]:
    """Temperatures still to be tried, from the gaps that some leave: around the lowest point of the parabola in 1/T,
    what a gap of temperatures is to second order, through the best of them and its neighbours. None where more than
    `most` would be left there."""
    order = sorted(gaps)
    best = order.index(min(gaps, key=gaps.__getitem__))
    near = order[max(0, best - 1) :][:3] if best < len(order) - 1 else order[-3:]
    a, b, c = np.polyfit([1 / t for t in near], [gaps[t] for t in near], 2)
    if a <= 0 or c - b * b / (4 * a) > most:
        return []
    middle = float(1 / np.clip(-b / (2 * a), 0.1, 10))
    around = {round(middle + more / 100, 2) for more in (-2, -1, 0, 1, 2)}
    return sorted(around - gaps.keys())


def _listed(values: set[float]) -> str:
    return ", ".join(f"{v:g}" for v in sorted(values))
