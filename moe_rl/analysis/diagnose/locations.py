"""Where the gap is: by turn, position, expert, weight version and cached prefix; and the response whose log-probs are
furthest apart, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.analysis.diagnose.forwards import STATED, Scorer, score
from moe_rl.analysis.diagnose.responses import Response, count_turns, has_routes, select_ids
from moe_rl.analysis.response_page import write_response_page
from moe_rl.errors import RoutingError
from moe_rl.routing.moe_layers import ROUTE
from moe_rl.routing.trace import Layout, RoutingTrace
from moe_rl.storage.links import replaced

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 2**62)
MOST = 12
"""Weight versions shown, and twice the experts."""
SEEN, LARGER = 8, 1.5
"""Tokens that a place has at least, and times the mean gap that tokens of an expert have."""


@dataclass(frozen=True)
class Location:
    """A part of the tokens, and the unconstrained gap in it."""

    kind: str
    """turn, position, expert, weight version or prefix; or sets of a layer."""
    name: str
    value: float
    """k3 per token, in nats; of sets the share that the model would not pick itself."""
    tokens: int = 0
    """0 for layers."""


def locate_gap(scorer: Scorer, versions_shown: int | None = MOST) -> Iterator[Location]:
    """The unconstrained gap, taken apart; parts without tokens are left out, and further weight versions (None: none
    are)."""
    kl, own, responses = scorer.base.kls, scorer.own, scorer.responses
    position, turn = _position(scorer), np.concatenate([count_turns(r.logprobs) for r in responses])[own]

    def place(kind: str, name: str, where: NDArray) -> Iterator[Location]:
        if where.any():
            yield Location(kind, name, float(kl[where].mean()), int(where.sum()))

    for number in range(1, int(turn.max()) + 1):
        yield from place("turn", str(number), turn == number)
    for low, high in zip(EDGES, EDGES[1:], strict=False):
        name = f"{low}" if high == low + 1 else f"{low}–{high - 1}"
        yield from place("position", name, (position >= low) & (position < high))
    rows = [ids[r.prompt - 1 :] for r, ids in zip(responses, scorer.unconstrained.routes, strict=True)]
    used = np.concatenate(rows)[own]
    experts: list[Location] = []
    for s, moe_layer in enumerate(scorer.layout.moe_layers):
        for expert in range(moe_layer.num_experts):
            name = f"layer {moe_layer.decoder_layer}, expert {expert}"
            experts += place("expert", name, (used[:, s] == expert).any(-1))
    experts = [x for x in experts if x.tokens >= SEEN and x.value > LARGER * kl.mean()]
    yield from sorted(experts, key=lambda x: -x.value)[: MOST // 2]
    versions = np.array([str(r.version) for r in responses])[scorer.base.owner]
    if len(names := list(dict.fromkeys(versions))) > 1:
        for name in names[:versions_shown]:
            yield from place("weight version", name, versions == name)
    if any(r.cached is not None for r in responses):
        cached = np.array([bool(r.cached) for r in responses])[scorer.base.owner]
        yield from place("prefix", "cached", cached)
        yield from place("prefix", "fresh", ~cached)


def _position(scorer: Scorer) -> NDArray:
    """Of each token in its response."""
    return np.concatenate([np.arange(len(r.logprobs)) for r in scorer.responses])[scorer.own]


def describe_gap(scorer: Scorer, noise: float, locations: Sequence[Location]) -> Iterator[str]:
    """Where the gap begins, and where it is largest, in words."""
    wrong = scorer.base.kls > noise
    _, at = np.unique(scorer.base.owner[wrong], return_index=True)
    if len(at):
        first = _position(scorer)[wrong][at]
        yield (
            f"The gap begins with the first token of the response in {(first == 0).sum()} of {len(first)} responses "
            f"that have one; the median is token {int(np.median(first))}, counted from 0."
        )
    largest = []
    for kind, name in (("turn", "turn {}"), ("position", "tokens {}"), ("expert", "{}"), ("sets", "sets of layer {}")):
        places = [x for x in locations if x.kind == kind and (x.tokens >= SEEN or not x.tokens)]
        if len(places) > 1 or (kind == "expert" and places):
            most = max(places, key=lambda x: x.value)
            largest.append(f"{name.format(most.name)} ({most.value:.2g})")
    if largest:
        yield f"The gap is largest in {', '.join(largest)}."


@dataclass(frozen=True, eq=False)
class Example:
    """One response, as several saw it."""

    layout: Layout
    response: Response
    sides: Mapping[str, tuple[NDArray, NDArray]]
    """Of the engine, the unconstrained and the replayed forward: ids of the inputs, [rows, MoE layer, k], and log-probs
    of the response's tokens."""
    tokenizer: PreTrainedTokenizerBase | None = None


def choose_example(scorer: Scorer, tokenizer: PreTrainedTokenizerBase | None) -> Example | None:
    """Of the responses that carry routes of the model's k, the one with the largest gap."""
    routed = [b for b, response in enumerate(scorer.responses) if has_routes(response, scorer.layout)]
    if not routed:
        return None
    b = max(routed, key=lambda b: scorer.base.kl[b])
    response, unconstrained = scorer.responses[b], scorer.unconstrained
    sides = {
        "engine": (select_ids(response, scorer.layout), response.logprobs),
        "unconstrained": (unconstrained.routes[b], unconstrained.logprobs[STATED][scorer.owner == b]),
    }
    try:
        forced = score(scorer.model, [response], routes=select_ids)
        sides["replayed"] = forced.routes[0], forced.logprobs[STATED]
    except RoutingError:  # a note of the diagnosis names the reason
        pass
    return Example(scorer.layout, response, sides, tokenizer)


def write_example(example: Example, out: Path) -> Path:
    """Write the page beside `out`, and its traces into a folder; returns the page."""
    folder, page = replaced(out.with_name(f"{out.stem}-traces")), replaced(out.with_name(f"{out.stem}-response.html"))
    folder.mkdir(parents=True, exist_ok=True)
    response, layout, files = example.response, example.layout, []
    tokens = torch.tensor(response.tokens)[None]
    at = torch.arange(tokens.shape[1]) >= response.prompt
    for name, (rows, logprobs) in example.sides.items():
        ids = torch.nn.functional.pad(torch.from_numpy(rows.astype(np.int64)), (0, 0, 0, 0, 0, 1), value=-1)[None]
        ids[layout.kinds_of_rows(ids, ()) != ROUTE] = -1
        wide = torch.full(tokens.shape, torch.nan)
        wide[0, at] = torch.from_numpy(np.asarray(logprobs, dtype=np.float32))
        version = response.version if name == "engine" else None
        trace = RoutingTrace.from_ids(ids, layout, tokens=tokens, weight_version=version)
        files.append(folder / f"{name}.safetensors")
        trace.save(files[-1], {"logprobs": wide, "response": at[None]})
    write_response_page(files, page, tokenizer=example.tokenizer)
    return page
