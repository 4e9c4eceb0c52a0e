"""Where the gap is: by position in the response, by length, by weight version, after a cached prefix or a fresh one;
and in the response whose log-probs are furthest apart, token by token, with a page of `moe-rl checkpoint view`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.analysis.diagnose.responses import Response, count_turns, has_routes, select_ids
from moe_rl.analysis.diagnose.scoring import STATED, Scorer, compute_distances, find_possible, score
from moe_rl.analysis.response_page import write_response_page
from moe_rl.errors import RoutingError
from moe_rl.routing.trace import Layout, RoutingTrace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 2**62)
MOST = 12
"""Weight versions shown, and twice the experts."""
SEEN, LARGER = 8, 1.5
"""Tokens that a place has at least, and times the mean gap that tokens of an expert have."""


@dataclass(frozen=True)
class Location:
    """A part of the tokens, and the natural gap in it."""

    kind: str
    """turn, expert, position, length, weight version, prefix; or layer, or sets of a layer."""
    name: str
    value: float
    """k3 per token, in nats; of a layer with its reported ids alone forced; of sets the share that the model would not
    pick itself."""
    tokens: int
    """0 for layers."""


def locate_gap(scorer: Scorer, versions_shown: int | None = MOST) -> Iterator[Location]:
    """The natural gap, taken apart; parts without tokens are left out, and further weight versions (None: none are)."""
    kl, position = _gaps(scorer)
    length = np.array([len(r.logprobs) for r in scorer.responses])[scorer.owner]
    turn = np.concatenate([count_turns(r.logprobs) for r in scorer.responses])

    def place(kind: str, name: str, where: NDArray) -> Iterator[Location]:
        here = kl[where & scorer.own]
        if len(here):
            yield Location(kind, name, float(here.mean()), len(here))

    for number in range(1, int(turn.max()) + 1):
        yield from place("turn", str(number), turn == number)
    yield from _locate_experts(scorer, kl)
    for kind, values in (("position", position), ("length", length)):
        for low, high in zip(EDGES, EDGES[1:], strict=False):
            name = f"{low}" if high == low + 1 else f"{low}–{high - 1}"
            yield from place(kind, name, (values >= low) & (values < high))
    versions = [r.version for r in scorer.responses]
    if len(set(versions)) > 1:
        for version in list(dict.fromkeys(versions))[:versions_shown]:
            yield from place("weight version", str(version), np.array([v == version for v in versions])[scorer.owner])
    if any(r.cached is not None for r in scorer.responses):
        cached = np.array([bool(r.cached) for r in scorer.responses])[scorer.owner]
        yield from place("prefix", "cached", cached)
        yield from place("prefix", "fresh", ~cached)


def _locate_experts(scorer: Scorer, kl: NDArray) -> Iterator[Location]:
    """The gap of the tokens that use an expert, by the model's own routing: the experts with the largest, if any has
    one that is clearly larger than that of all tokens."""
    rows = [ids[r.prompt - 1 :] for r, ids in zip(scorer.responses, scorer.natural.routes, strict=True)]
    used, found, mean = np.concatenate(rows)[scorer.own], [], float(kl[scorer.own].mean())
    for s, site in enumerate(scorer.layout.sites):
        for expert in range(site.num_experts):
            here = kl[scorer.own][(used[:, s] == expert).any(-1)]
            if len(here) >= SEEN and here.mean() > LARGER * mean:
                found.append(Location("expert", f"layer {site.decoder_layer}, expert {expert}", float(here.mean()),
                                      len(here)))
    yield from sorted(found, key=lambda x: -x.value)[: MOST // 2]


def describe_largest(locations: Sequence[Location]) -> str:
    """Where the gap is largest, in words."""
    found = []
    for kind in ("turn", "position", "expert", "layer", "sets"):
        places = [x for x in locations if x.kind == kind and (x.tokens >= SEEN or not x.tokens)]
        if len(places) > 1 or kind == "expert" and places:
            most = min(places, key=lambda x: x.value) if kind == "layer" else max(places, key=lambda x: x.value)
            words = {"layer": f"least with the ids of layer {most.name} alone forced (KL {most.value:.2g})",
                     "sets": f"most other sets of experts in layer {most.name} ({100 * most.value:.2g} %)",
                     "position": f"in tokens {most.name} of the response (KL {most.value:.2g})"}
            found.append(words.get(kind, f"in {kind + ' ' if kind == 'turn' else 'tokens of '}{most.name} "
                                         f"(KL {most.value:.2g})"))
    return f"The gap is largest {'; '.join(found)}." if found else "The gap is the same everywhere."


def describe_start(scorer: Scorer, noise: float) -> str:
    """With which token of a response the gap begins, in words."""
    kl, position = _gaps(scorer)
    wrong = (kl > noise) & scorer.own
    _, at = np.unique(scorer.owner[wrong], return_index=True)
    if not len(at):
        return "No token alone is beyond the noise."
    first = position[wrong][at]
    return (f"The gap begins with the first token of the response in {(first == 0).sum()} of {len(first)} responses "
            f"that have one; the median is token {int(np.median(first))}, counted from 0.")


def _gaps(scorer: Scorer) -> tuple[NDArray, NDArray]:
    """The natural k3 of every token, and its place in its response."""
    position = np.concatenate([np.arange(len(r.logprobs)) for r in scorer.responses])
    return compute_distances(scorer.natural.logprobs[STATED] - scorer.engine)[0], position


@dataclass(frozen=True, eq=False)
class Example:
    """One response, as several saw it."""

    layout: Layout
    response: Response
    sides: Mapping[str, tuple[NDArray, NDArray]]
    """By who saw it: ids of the inputs, [rows, site, k], and log-probs of the response's tokens."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Spells the tokens."""


def choose_example(scorer: Scorer, tokenizer: PreTrainedTokenizerBase | None) -> Example | None:
    """Of the responses that carry routes of the model's k, the one that the natural forward is furthest from."""
    routed = [b for b, response in enumerate(scorer.responses) if has_routes(response, scorer.layout)]
    if not routed:
        return None
    b = max(routed, key=lambda b: scorer.base.distance[b])
    response, natural = scorer.responses[b], scorer.natural
    sides = {"engine": (select_ids(response, scorer.layout), response.logprobs),
             "natural": (natural.routes[b], natural.logprobs[STATED][scorer.owner == b])}
    try:
        forced = score(scorer.model, [response], routes=select_ids, keep_routes=True)
        sides["replayed"] = forced.routes[0], forced.logprobs[STATED]
    except RoutingError:  # a note of the diagnosis says that nothing can be forced, and why
        pass
    return Example(scorer.layout, response, sides, tokenizer)


def write_example(example: Example, out: Path) -> Path:
    """Write the page beside `out`, and its traces into a folder; returns the page."""
    folder, page = out.with_name(f"{out.stem}-traces"), out.with_name(f"{out.stem}-response.html")
    folder.mkdir(parents=True, exist_ok=True)
    response, files = example.response, []
    tokens = torch.tensor(response.tokens)[None]
    at = torch.arange(len(response.tokens)) >= len(response.tokens) - len(response.logprobs)
    for name, (rows, logprobs) in example.sides.items():
        ids = torch.full((1, tokens.shape[1], len(example.layout.sites), example.layout.top_k), -1)
        ids[0, : len(rows)] = torch.from_numpy(rows.astype(np.int64))
        ids[~find_possible(ids, example.layout)] = -1
        wide = torch.full((1, tokens.shape[1]), torch.nan)
        wide[0, at] = torch.from_numpy(np.asarray(logprobs, dtype=np.float32))
        version = response.version if name == "engine" else None
        trace = RoutingTrace.from_ids(ids, example.layout, tokens=tokens, weight_version=version)
        files.append(folder / f"{name}.safetensors")
        trace.save(files[-1], {"logprobs": wide, "response": at[None]})
    write_response_page(files, page, tokenizer=example.tokenizer)
    return page
