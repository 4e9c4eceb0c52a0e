"""What is wrong with reported routes, from the routes alone: each known fault leaves a pattern of its own.

Sets of experts are compared as keys, one integer per (token, layer), so that every layer can be compared with all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import torch
from jaxtyping import Float, Integer
from numpy.typing import NDArray

from moe_rl.analysis.diagnose.causes import describe
from moe_rl.analysis.diagnose.responses import Response, has_routes, hash_sets, match_layers
from moe_rl.routing.moe_layers import ALL_ZERO, MISSING, ROUTE
from moe_rl.routing.trace import Layout

CLEAR = 0.3
"""By how much a pattern must agree better than the routes as reported."""
SURE = 0.6
"""What a pattern must agree at least, as a share of the agreement that rounding leaves."""
RIGHT = 0.8
"""What the other layers, or the other rows, must agree, as a share of the same, where some agree with nothing."""
COVERED = 0.6
"""Share of the rows that agree with nothing that a pattern of some rows must contain."""
ROWS = 20_000
"""Tokens of which the numbers of experts are compared."""
FEW = 8
"""Fewer (token, layer) pairs than this show no pattern."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with the routes."""

    cause: str
    evidence: str
    detail: str = ""
    fault: bool = True

    @property
    def text(self) -> str:
        return describe(self.cause, self.detail)


@dataclass(frozen=True)
class Pair:
    """One response: what the engine reported, and what the model picks for the same tokens."""

    response: Response
    ids: Integer[NDArray, "rows moe_layer k"]
    unconstrained: Integer[NDArray, "rows moe_layer k"]
    layer_keys: Integer[NDArray, "rows layer"]
    """Of all reported layers; -1 where there is no route, or a row of zeros."""
    unconstrained_keys: Integer[NDArray, "rows moe_layer"]
    gates: Float[NDArray, "rows moe_layer k"] | None
    unconstrained_gates: Float[NDArray, "rows moe_layer k"] | None


class Reported:
    """The reported routes of all responses, beside those of a reference: unconstrained, or under what explains the
    gap."""

    def __init__(
        self,
        responses: Sequence[Response],
        unconstrained: Sequence[NDArray],
        gates: Sequence[NDArray],
        layout: Layout,
        expected: float,
    ):
        self.layout, self.expected = layout, expected
        self.pairs: list[Pair] = []
        self.layers: list[int] = []
        for i, (r, ids) in enumerate(zip(responses, unconstrained, strict=True)):
            if r.ids is None or not has_routes(r, layout) or len(ids) != len(r.tokens) - 1:
                continue
            own = match_layers(r.ids.shape[1], layout)
            self.layers = self.layers or own
            if own == self.layers:
                zero = (r.ids == 0).all(-1) & (layout.top_k > 1)
                keys = np.where(zero, -1, hash_sets(r.ids))
                own_gates = None if r.gates is None else r.gates[:, own]
                theirs = gates[i] if gates else None
                self.pairs.append(Pair(r, r.ids[:, own], ids, keys, hash_sets(ids), own_gates, theirs))
        self.agreement = self.match()

    def match(self, layers: int = 0, rows: int = 0, prompt: bool | None = None, inside: int = 0) -> float:
        """Share of (token, MoE layer) pairs whose set is the unconstrained one, where the reported layer is taken
        `layers` further and the row `rows` later; on request rows of the prompt or the response alone, or MoE layers
        alone that have a layer `inside` further. Rows of zeros and missing ones do not count, nor do those beyond the
        edge. NaN over few pairs."""
        same = n = 0
        for p in self.pairs:
            count = p.layer_keys.shape[1]
            here = [s for s, x in enumerate(self.layers) if 0 <= x + inside < count and 0 <= x + layers < count]
            mine = p.layer_keys[:, [self.layers[s] + layers for s in here]]
            t = np.arange(max(0, -rows), len(mine) - max(0, rows))
            if prompt is not None:
                t = t[(t < p.response.prompt - 1) == prompt]
            known = mine[t + rows] >= 0
            same += int((known & (mine[t + rows] == p.unconstrained_keys[:, here][t])).sum())
            n += int(known.sum())
        return same / n if n >= FEW else float("nan")

    def compare(self, pair: Pair) -> tuple[NDArray, NDArray]:
        """Of every row and MoE layer whether a route is known, and whether it is the unconstrained one."""
        mine = pair.layer_keys[:, self.layers]
        return mine >= 0, (mine >= 0) & (mine == pair.unconstrained_keys)

    def is_clear(self, agreement: float, base: float) -> bool:
        """Whether a pattern agrees much better than the routes as they are, and about as well as routes can."""
        return agreement >= base + CLEAR and agreement >= SURE * self.expected

    def measure_by_moe_layer(self) -> Float[NDArray, " moe_layer"]:
        """Agreement of every MoE layer with itself; NaN over few rows."""
        known, same = (np.concatenate(x).sum(0) for x in zip(*map(self.compare, self.pairs), strict=True))
        return np.where(known >= FEW, same / np.maximum(known, 1), np.nan)


def find_faults(routes: Reported) -> list[Fault]:
    """What is wrong, the first cause first; empty where nothing is, or nothing that is known."""
    broken = find_impossible_rows(routes) if routes.pairs else []
    if not routes.pairs or np.isnan(routes.agreement):
        return broken
    if shift := find_layer_shift(routes):
        return shift
    if moved := find_row_shift(routes) or find_swapped_responses(routes):
        return broken + moved
    broken += find_physical_ids(routes) or find_overwritten_layers(routes) or find_stale_prefix(routes)
    return broken + find_faults_of_weights(routes)


def find_impossible_rows(routes: Reported) -> list[Fault]:
    """Rows with an expert twice, or with some of their slots empty; else rows of zeros where k > 1."""
    ids = torch.from_numpy(np.concatenate([p.ids for p in routes.pairs]))
    kinds = routes.layout.kinds_of_rows(ids, (-1,))
    for cause, of in (
        ("repeated_ids", (kinds != ROUTE) & (kinds < ALL_ZERO)),
        ("zero_rows", (kinds > ROUTE) & (kinds < MISSING)),
    ):
        if bool(of.any()):
            return [Fault(cause, f"{_share(float(of.double().mean()))} of the rows")]
    return []


def find_layer_shift(routes: Reported) -> list[Fault]:
    reach = max(3, routes.layers[0])
    filled = np.flatnonzero(np.any([(p.layer_keys >= 0).any(0) for p in routes.pairs], axis=0))
    shared = {d: np.isin(np.add(routes.layers, d), filled).sum() for d in range(-reach, reach + 1) if d}
    enough = max(2, len(routes.layers) / 2)  # a single layer that fits is a copy
    tried = {d: routes.match(layers=d) for d in shared if shared[d] >= enough}
    best = max(tried, key=lambda d: np.nan_to_num(tried[d], nan=-1.0), default=0)
    base = routes.match(inside=best)  # of the same MoE layers
    if not best or not routes.is_clear(tried[best], base):
        return []
    evidence = f"{_share(tried[best])} of its sets are the model's own when read so, {_share(base)} unchanged"
    return [Fault("layer_shift", evidence, f"l{best:+d}")]


def find_row_shift(routes: Reported) -> list[Fault]:
    for prompt, where in ((None, ""), (False, " in the response")):
        base = routes.match(prompt=prompt)
        tried = {d: routes.match(rows=d, prompt=prompt) for d in (1, -1, 2, -2)}
        best = max(tried, key=lambda d: np.nan_to_num(tried[d], nan=-1.0))
        if not np.isnan(base) and routes.is_clear(tried[best], base):
            evidence = f"{_share(tried[best])} of the sets are the model's own when read so, {_share(base)} unchanged"
            return [Fault("row_shift", evidence, f"{best:+d}{where}")]
    return []


def find_swapped_responses(routes: Reported) -> list[Fault]:
    """Rows that are the unconstrained ones of another response, at the places where the two responses differ."""
    own = {id(p): same.sum() / max(1, known.sum()) for p in routes.pairs for known, same in [routes.compare(p)]}
    wrong = [p for p in routes.pairs if own[id(p)] < RIGHT * routes.expected]
    hits = sum(any(_has_routes_of(routes, p, q) for q in routes.pairs if q is not p) for p in wrong)
    if hits < 2 or hits < 0.8 * len(wrong):
        return []
    evidence = f"{hits} of {len(routes.pairs)} responses have the routes of another one of the file"
    return [Fault("swapped_responses", evidence)]


def _has_routes_of(routes: Reported, p: Pair, q: Pair) -> bool:
    """Whether the keys reported for `p` are those of `q`, and not its own, where both could tell: behind the prompt
    that they may share."""
    n = min(len(p.unconstrained_keys), len(q.unconstrained_keys))
    mine, own, theirs = p.layer_keys[:n, routes.layers], p.unconstrained_keys[:n], q.unconstrained_keys[:n]
    apart = (own != theirs) & (mine >= 0)
    same, unconstrained, places = (int((x & apart).sum()) for x in (mine == theirs, mine == own, apart))
    return places >= FEW and same >= max(SURE * routes.expected * places, unconstrained + CLEAR * places)


def find_physical_ids(routes: Reported) -> list[Fault]:
    """Experts by other numbers: in every layer one permutation makes the sets the model's own."""
    reported = np.concatenate([p.ids for p in routes.pairs]).astype(np.int64)
    unconstrained = np.concatenate([p.unconstrained for p in routes.pairs]).astype(np.int64)
    tables = []
    for s, moe_layer in enumerate(routes.layout.moe_layers):
        n, a, b = moe_layer.num_experts, reported[:ROWS, s], unconstrained[:ROWS, s]
        if len(a) < 4 * n:
            return []
        both = (a[:, :, None] * n + b[:, None, :])[(a >= 0).all(-1) & (b >= 0).all(-1)]
        counts = np.bincount(both.ravel(), minlength=n * n).reshape(n, n)
        tables.append(scipy.optimize.linear_sum_assignment(-counts)[1])
    at = np.arange(len(tables))[:, None]
    own = (np.sort(np.stack(tables)[at, reported.clip(min=0)], -1) == np.sort(unconstrained, -1)).all(-1).mean()
    if not routes.is_clear(float(own), routes.agreement):
        return []
    evidence = f"{_share(own)} of the sets are the model's own under one permutation per layer"
    return [Fault("physical_ids", f"{evidence}, {_share(routes.agreement)} unchanged")]


def find_overwritten_layers(routes: Reported) -> list[Fault]:
    """Some layers, fewer than the others, that agree with nothing, while the others do."""
    own = routes.measure_by_moe_layer()
    if len(own) < 2 or np.isnan(own).any():
        return []
    bad = np.flatnonzero(own < min(0.5, SURE * float(np.max(own))))
    rest = np.delete(own, bad)
    if not len(bad) or len(bad) > len(rest) or rest.min() < RIGHT * routes.expected:  # other weights differ everywhere
        return []
    names = ", ".join(str(routes.layout.moe_layers[s].decoder_layer) for s in bad)
    evidence = f"{_share(own[bad].mean())} of its sets are the model's own, {_share(rest.mean())} in the other layers"
    return [Fault("overwritten_layer", evidence, names)]


def find_stale_prefix(routes: Reported) -> list[Fault]:
    """Rows at the beginning that agree with nothing, up to some token from which all do."""
    cuts, good, inside, outside = [], [], 0, 0
    for p in routes.pairs:
        known, same = routes.compare(p)
        seen = known.any(1)
        right = same.sum(1)[seen] / known.sum(1)[seen]
        wrong = right < 0.5 * routes.expected
        # the cut that leaves most rows on the side where they belong
        at = int(np.argmax(np.concatenate([[0], np.cumsum(np.where(wrong, 1, -1))])))
        if at < 2 or at >= len(right) or wrong[:at].mean() < 0.8:
            outside += wrong.sum()
            continue
        cuts.append(at)
        good.append(right[at:].mean())
        inside, outside = inside + wrong[:at].sum(), outside + wrong[at:].sum()
    enough = max(2, 0.05 * len(routes.pairs)) if len(routes.pairs) > 1 else 1
    if len(cuts) < enough or np.mean(good) < RIGHT * routes.expected or inside < COVERED * (inside + outside):
        return []
    evidence = (
        f"in {len(cuts)} of {len(routes.pairs)} responses the first rows (median {np.median(cuts):.0f}) do not agree"
    )
    return [Fault("stale_prefix", f"{evidence}, and {_share(float(np.mean(good)))} of the later sets do")]


def find_faults_of_weights(routes: Reported) -> list[Fault]:
    """Combine weights in another order than the ids, which ascend then, or with another sum."""
    if routes.layout.top_k == 1 or routes.agreement < RIGHT * routes.expected:
        return []
    weighed = [p for p in routes.pairs if p.gates is not None and p.unconstrained_gates is not None]
    same = [(p, routes.compare(p)[1]) for p in weighed or routes.pairs]
    ids, unconstrained = (
        np.concatenate([getattr(p, name)[rows] for p, rows in same]) for name in ("ids", "unconstrained")
    )
    ascends, by_itself = ((np.diff(x.astype(int), axis=-1) > 0).all(-1).mean() for x in (ids, unconstrained))
    is_sorted = len(ids) >= 20 and ascends == 1 and by_itself < 0.9
    if not weighed:
        return [Fault("sorted_ids", "all rows ascend, which replay allows", fault=False)] if is_sorted else []
    gates, own = (np.concatenate([getattr(p, x)[rows] for p, rows in same]) for x in ("gates", "unconstrained_gates"))
    order = np.argsort(unconstrained, -1)
    by_expert = np.take_along_axis(np.take_along_axis(own, order, -1), np.argsort(np.argsort(ids, -1), -1), -1)
    times = gates.sum(-1) / own.sum(-1).clip(min=1e-12)
    low, factor, high = np.quantile(times, (0.05, 0.5, 0.95))
    slots, experts = (np.abs(gates / times[:, None].clip(min=1e-12) - x).mean() for x in (own, by_expert))
    if is_sorted and experts > 0.01 and slots < 0.25 * experts:
        return [Fault("sorted_ids", f"weights differ by {experts:.2g} expert by expert, by {slots:.2g} slot by slot")]
    if np.abs(times - 1).mean() <= 0.02:
        return []
    evidence = f"of 90 % of the rows the sum of weights is {low:.3g} to {high:.3g} times the model's"
    if high - low < 0.1 * factor:
        return [Fault("gates_scaled", evidence, f"{factor:.3g}")]
    return [Fault("gates_raw" if times.mean() < 1 else "gates_renormalised", evidence)]


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"
