"""Where the gap is: by turn, position, expert, weight version and cached prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.analysis.diagnose.forwards import Scorer
from moe_rl.analysis.diagnose.responses import count_turns

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
