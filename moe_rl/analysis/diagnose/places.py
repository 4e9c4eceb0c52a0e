"""Where the gap is: by position in the response, by length, by weight version, after a cached prefix or a fresh one;
and in the response whose log-probs are furthest apart, token by token, with a page of `moe-rl view`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.analysis.diagnose.ladder import STATED, Ladder, distances, possible, score
from moe_rl.analysis.diagnose.responses import Response, as_reported, usable
from moe_rl.analysis.response_page import write_response_page
from moe_rl.errors import RoutingError
from moe_rl.routing.trace import Layout, RoutingTrace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 2**62)
MOST = 12
"""Weight versions shown."""


@dataclass(frozen=True)
class Place:
    """A part of the tokens, and the natural gap in it."""

    kind: str
    """position, length, weight version, prefix; or layer, or sets of a layer."""
    name: str
    value: float
    """k3 per token, in nats; of a layer with its reported ids alone forced; of sets the share that the model would not
    pick itself."""
    tokens: int
    """0 for layers."""


def places(ladder: Ladder, versions_shown: int | None = MOST) -> Iterator[Place]:
    """The natural gap, taken apart; parts without tokens are left out, and further weight versions (None: none are)."""
    kl, position = _gaps(ladder)
    length = np.array([len(r.logprobs) for r in ladder.responses])[ladder.owner]

    def place(kind: str, name: str, where: NDArray) -> Iterator[Place]:
        here = kl[where & ladder.own]
        if len(here):
            yield Place(kind, name, float(here.mean()), len(here))

    for kind, values in (("position", position), ("length", length)):
        for low, high in zip(EDGES, EDGES[1:], strict=False):
            name = f"{low}" if high == low + 1 else f"{low}–{high - 1}"
            yield from place(kind, name, (values >= low) & (values < high))
    versions = [r.version for r in ladder.responses]
    if len(set(versions)) > 1:
        for version in list(dict.fromkeys(versions))[:versions_shown]:
            yield from place("weight version", str(version), np.array([v == version for v in versions])[ladder.owner])
    if any(r.cached is not None for r in ladder.responses):
        cached = np.array([bool(r.cached) for r in ladder.responses])[ladder.owner]
        yield from place("prefix", "cached", cached)
        yield from place("prefix", "fresh", ~cached)


def describe_start(ladder: Ladder, noise: float) -> str:
    """With which token of a response the gap begins, in words."""
    kl, position = _gaps(ladder)
    wrong = (kl > noise) & ladder.own
    _, at = np.unique(ladder.owner[wrong], return_index=True)
    if not len(at):
        return "No token alone is beyond the noise."
    first = position[wrong][at]
    return (f"The gap begins with the first token of the response in {(first == 0).sum()} of {len(first)} responses "
            f"that have one; the median is token {int(np.median(first))}, counted from 0.")


def _gaps(ladder: Ladder) -> tuple[NDArray, NDArray]:
    """The natural k3 of every token, and its place in its response."""
    position = np.concatenate([np.arange(len(r.logprobs)) for r in ladder.responses])
    return distances(ladder.natural.logprobs[STATED] - ladder.engine)[0], position


@dataclass(frozen=True, eq=False)
class Example:
    """One response, as several saw it."""

    layout: Layout
    response: Response
    sides: Mapping[str, tuple[NDArray, NDArray]]
    """By who saw it: ids of the inputs, [rows, site, k], and log-probs of the response's tokens."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Spells the tokens."""


def example_of(ladder: Ladder, tokenizer: PreTrainedTokenizerBase | None) -> Example | None:
    """Of the responses that carry routes of the model's k, the one that the natural forward is furthest from."""
    routed = [b for b, response in enumerate(ladder.responses) if usable(response, ladder.layout)]
    if not routed:
        return None
    b = max(routed, key=lambda b: ladder.base.distance[b])
    response, natural = ladder.responses[b], ladder.natural
    sides = {"engine": (as_reported(response, ladder.layout), response.logprobs),
             "natural": (natural.routes[b], natural.logprobs[STATED][ladder.owner == b])}
    try:
        forced = score(ladder.model, [response], routes=as_reported, keep_routes=True)
        sides["replayed"] = forced.routes[0], forced.logprobs[STATED]
    except RoutingError:  # the ladder has said that nothing can be forced, and why
        pass
    return Example(ladder.layout, response, sides, tokenizer)


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
        ids[~possible(ids, example.layout)] = -1
        wide = torch.full((1, tokens.shape[1]), torch.nan)
        wide[0, at] = torch.from_numpy(np.asarray(logprobs, dtype=np.float32))
        version = response.version if name == "engine" else None
        trace = RoutingTrace.from_ids(ids, example.layout, tokens=tokens, weight_version=version)
        files.append(folder / f"{name}.safetensors")
        trace.save(files[-1], {"logprobs": wide, "response": at[None]})
    write_response_page(files, page, tokenizer=example.tokenizer)
    return page
