"""Reported routes beside those that the model itself picks for the same tokens.

Sets of experts are compared as keys, one integer per (token, layer), so that every layer can be held against all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Integer
from numpy.typing import NDArray

from moe_rl.analysis.diagnose.ladder import keys, usable
from moe_rl.analysis.diagnose.responses import Response, layers_of
from moe_rl.routing.trace import Layout

CLEAR = 0.3
"""By how much a pattern must agree better than the routes as reported."""
SURE = 0.6
"""What it must agree at least, as a share of what rounding leaves of agreement."""
RIGHT = 0.8
"""What the other layers, or the other rows, must agree, as a share of the same, where some agree with nothing."""
FEW = 8
"""Fewer (token, layer) pairs than this show no pattern."""


@dataclass(frozen=True)
class Pair:
    """One response: what the engine reported, and what the model picks for the same tokens."""

    response: Response
    ids: Integer[NDArray, "rows layer k"]
    natural: Integer[NDArray, "rows site k"]
    reported_keys: Integer[NDArray, "rows layer"]
    natural_keys: Integer[NDArray, "rows site"]
    gates: Float[NDArray, "rows site k"] | None
    natural_gates: Float[NDArray, "rows site k"] | None


class Reported:
    """The reported routes of all responses, beside those of a reference: natural, or under what explains the gap."""

    def __init__(self, responses: Sequence[Response], natural: Sequence[NDArray], gates: Sequence[NDArray],
                 layout: Layout, expected: float):
        self.layout, self.expected = layout, expected
        self.pairs: list[Pair] = []
        for i, (r, ids) in enumerate(zip(responses, natural, strict=True)):
            if usable(r, layout) and len(ids) == len(r.tokens) - 1:
                assert r.ids is not None
                own = layers_of(r.ids.shape[1], layout)
                self.pairs.append(Pair(r, r.ids, ids, keys(r.ids), keys(ids),
                                       None if r.gates is None else r.gates[:, own], gates[i] if gates else None))
        self.layers = layers_of(self.pairs[0].ids.shape[1], layout) if self.pairs else []
        self.pairs = [p for p in self.pairs if layers_of(p.ids.shape[1], layout) == self.layers]
        self.agreement = self.match(0)

    def match(self, layers: int = 0, rows: int = 0, prompt: bool | None = None, inside: int = 0) -> float:
        """Share of (token, site) pairs whose set is the natural one, where the reported layer is taken `layers` further
        and the row `rows` later; on request rows of the prompt or the response alone, or sites alone that have a layer
        `inside` further. All-zero and missing rows do not count, nor does what falls off the edge. NaN over few
        pairs."""
        same = n = 0
        for p in self.pairs:
            here = [s for s, layer in enumerate(self.layers) if 0 <= layer + inside < p.ids.shape[1]]
            a, b = self.side(p, layers)[:, here], p.natural_keys[:, here]
            t = np.arange(max(0, -rows), len(b) - max(0, rows))
            if prompt is not None:
                t = t[(t < p.response.prompt - 1) == prompt]
            mine, theirs = a[t + rows], b[t]
            known = mine >= 0
            same, n = same + int((known & (mine == theirs)).sum()), n + int(known.sum())
        return same / n if n >= FEW else float("nan")

    def side(self, pair: Pair, shift: int = 0) -> Integer[NDArray, "rows site"]:
        """Keys [rows, site] of the reported layers, taken `shift` further; -1 where there is none or it is all zero."""
        found = np.full(pair.natural_keys.shape, -1, dtype=np.int32)
        for s, layer in enumerate(self.layers):
            if 0 <= layer + shift < pair.ids.shape[1]:
                column = pair.reported_keys[:, layer + shift]
                zero = (pair.ids[:, layer + shift] == 0).all(-1) & (pair.ids.shape[2] > 1)
                found[:, s] = np.where(zero, -1, column)
        return found

    def clear(self, agreement: float, base: float) -> bool:
        """Whether a pattern agrees much better than the routes as they are, and about as well as routes can."""
        return agreement >= base + CLEAR and agreement >= SURE * self.expected

    def own(self, pair: Pair) -> float:
        """Agreement of one response's routes, as they stand."""
        mine = self.side(pair)
        known = mine >= 0
        return float((known & (mine == pair.natural_keys)).sum() / max(1, known.sum()))

    def by_site(self) -> Float[NDArray, " site"]:
        """Agreement of every site with itself; NaN over few rows."""
        known = same = np.zeros(len(self.layers), dtype=np.int64)
        for p in self.pairs:
            mine = self.side(p)
            known, same = known + (mine >= 0).sum(0), same + ((mine == p.natural_keys) & (mine >= 0)).sum(0)
        return np.where(known >= FEW, same / np.maximum(known, 1), np.nan)

    def source(self, site: int) -> int | None:
        """The layer whose natural routes a site's reported ones are, if there is one."""
        hits = [np.mean(np.concatenate([self.side(p)[:, site] == p.natural_keys[:, t] for p in self.pairs]))
                for t in range(len(self.layers))]
        best = int(np.argmax(hits))
        return self.layout.sites[best].decoder_layer if best != site and hits[best] >= SURE * self.expected else None


def moved(response: Response, layers: Sequence[int], by: int, rows: int = 0) -> Integer[NDArray, "rows site k"]:
    """The ids of the sites, read `by` layers further and `rows` rows later; -1 where nothing is there."""
    assert response.ids is not None
    found = np.full((len(response.ids), len(layers), response.ids.shape[2]), -1)
    t = np.arange(max(0, -rows), len(found) - max(0, rows))
    for s, layer in enumerate(layers):
        if 0 <= layer + by < response.ids.shape[1]:
            found[t, s] = response.ids[t + rows, layer + by]
    return found
