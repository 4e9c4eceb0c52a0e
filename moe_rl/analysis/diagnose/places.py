"""Where the gap is: by position in the response, by length, by weight version, after a cached prefix or a fresh one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.analysis.diagnose.ladder import Ladder, distances
from moe_rl.analysis.diagnose.scoring import STATED

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


def begins(ladder: Ladder, noise: float) -> str:
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
