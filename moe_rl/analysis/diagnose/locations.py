"""Where the gap is: by position in the response, by length, by weight version, after a cached prefix or a fresh one;
and in the response whose log-probs are furthest apart, token by token, with a page of `moe-rl checkpoint view`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.analysis.diagnose.responses import Response, has_routes, select_ids
from moe_rl.analysis.diagnose.scoring import STATED, Scorer, compute_distances, find_possible, score
from moe_rl.analysis.response_page import write_response_page
from moe_rl.errors import RoutingError
from moe_rl.routing.trace import Layout, RoutingTrace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 2**62)
MOST = 12
"""Weight versions shown."""


@dataclass(frozen=True)
class Location:
    """A part of the tokens, and the natural gap in it."""

    kind: str
    """position, length, weight version, prefix; or layer, or sets of a layer."""
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

    def place(kind: str, name: str, where: NDArray) -> Iterator[Location]:
        here = kl[where & scorer.own]
        if len(here):
            yield Location(kind, name, float(here.mean()), len(here))

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
