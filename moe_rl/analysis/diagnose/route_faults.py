"""What is wrong with reported routes, from the routes alone: each known fault leaves a pattern of its own.

Sets of experts are compared as keys, one integer per (token, layer), so that every layer can be held against all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import scipy.optimize
from jaxtyping import Float, Integer
from numpy.typing import NDArray

from moe_rl.analysis.diagnose.responses import Response, has_routes, hash_sets, match_layers
from moe_rl.routing.trace import Layout

CLEAR = 0.3
"""By how much a pattern must agree better than the routes as reported."""
SURE = 0.6
"""What it must agree at least, as a share of what rounding leaves of agreement."""
RIGHT = 0.8
"""What the other layers, or the other rows, must agree, as a share of the same, where some agree with nothing."""
ROWS = 20_000
"""Tokens of which the numbers of experts are compared."""
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
            if has_routes(r, layout) and len(ids) == len(r.tokens) - 1:
                assert r.ids is not None
                own = match_layers(r.ids.shape[1], layout)
                self.pairs.append(Pair(r, r.ids, ids, hash_sets(r.ids), hash_sets(ids),
                                       None if r.gates is None else r.gates[:, own], gates[i] if gates else None))
        self.layers = match_layers(self.pairs[0].ids.shape[1], layout) if self.pairs else []
        self.pairs = [p for p in self.pairs if match_layers(p.ids.shape[1], layout) == self.layers]
        self.agreement = self.match(0)

    def match(self, layers: int = 0, rows: int = 0, prompt: bool | None = None, inside: int = 0) -> float:
        """Share of (token, site) pairs whose set is the natural one, where the reported layer is taken `layers` further
        and the row `rows` later; on request rows of the prompt or the response alone, or sites alone that have a layer
        `inside` further. All-zero and missing rows do not count, nor does what falls off the edge. NaN over few
        pairs."""
        same = n = 0
        for p in self.pairs:
            here = [s for s, layer in enumerate(self.layers) if 0 <= layer + inside < p.ids.shape[1]]
            a, b = self.select_keys(p, layers)[:, here], p.natural_keys[:, here]
            t = np.arange(max(0, -rows), len(b) - max(0, rows))
            if prompt is not None:
                t = t[(t < p.response.prompt - 1) == prompt]
            mine, theirs = a[t + rows], b[t]
            known = mine >= 0
            same, n = same + int((known & (mine == theirs)).sum()), n + int(known.sum())
        return same / n if n >= FEW else float("nan")

    def select_keys(self, pair: Pair, shift: int = 0) -> Integer[NDArray, "rows site"]:
        """Keys [rows, site] of the reported layers, taken `shift` further; -1 where there is none or it is all zero."""
        found = np.full(pair.natural_keys.shape, -1, dtype=np.int32)
        for s, layer in enumerate(self.layers):
            if 0 <= layer + shift < pair.ids.shape[1]:
                column = pair.reported_keys[:, layer + shift]
                zero = (pair.ids[:, layer + shift] == 0).all(-1) & (pair.ids.shape[2] > 1)
                found[:, s] = np.where(zero, -1, column)
        return found

    def is_clear(self, agreement: float, base: float) -> bool:
        """Whether a pattern agrees much better than the routes as they are, and about as well as routes can."""
        return agreement >= base + CLEAR and agreement >= SURE * self.expected

    def measure_own(self, pair: Pair) -> float:
        """Agreement of one response's routes, as they stand."""
        mine = self.select_keys(pair)
        known = mine >= 0
        return float((known & (mine == pair.natural_keys)).sum() / max(1, known.sum()))

    def measure_by_site(self) -> Float[NDArray, " site"]:
        """Agreement of every site with itself; NaN over few rows."""
        known = same = np.zeros(len(self.layers), dtype=np.int64)
        for p in self.pairs:
            mine = self.select_keys(p)
            known, same = known + (mine >= 0).sum(0), same + ((mine == p.natural_keys) & (mine >= 0)).sum(0)
        return np.where(known >= FEW, same / np.maximum(known, 1), np.nan)

    def find_source(self, site: int) -> int | None:
        """The layer whose natural routes a site's reported ones are, if there is one."""
        hits = [np.mean(np.concatenate([self.select_keys(p)[:, site] == p.natural_keys[:, t] for p in self.pairs]))
                for t in range(len(self.layers))]
        best = int(np.argmax(hits))
        return self.layout.sites[best].decoder_layer if best != site and hits[best] >= SURE * self.expected else None


def move_routes(
    response: Response, layers: Sequence[int], by: int, rows: int = 0
) -> Integer[NDArray, "rows site k"]:
    """The ids of the sites, read `by` layers further and `rows` rows later; -1 where nothing is there."""
    assert response.ids is not None
    found = np.full((len(response.ids), len(layers), response.ids.shape[2]), -1)
    t = np.arange(max(0, -rows), len(found) - max(0, rows))
    for s, layer in enumerate(layers):
        if 0 <= layer + by < response.ids.shape[1]:
            found[t, s] = response.ids[t + rows, layer + by]
    return found


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with the routes."""

    cause: str
    says: str
    evidence: str
    fault: bool = True
    repair: Callable[[Response, Layout], NDArray] | None = None
    """The ids as they must have been, where that can be told; to be forced as a check."""


def find_faults(routes: Reported) -> list[Fault]:
    """What is wrong, the first cause first; empty where nothing is, or nothing that is known."""
    if not routes.pairs or np.isnan(routes.agreement):
        return find_repeated_ids(routes) or find_zero_rows(routes) if routes.pairs else []
    if (shift := find_layer_shift(routes)) is not None:
        return [shift]
    found = find_repeated_ids(routes) or find_zero_rows(routes)
    whole = find_row_shift(routes) or find_swapped_responses(routes)
    if whole is not None:
        return [*found, whole]
    found += find_physical_ids(routes) or find_overwritten_layers(routes) or find_stale_prefix(routes)
    return found + find_faults_of_order(routes)


def find_layer_shift(routes: Reported) -> Fault | None:
    reach = max(3, routes.layers[0]) if routes.layers else 0
    every = {p.ids.shape[1] for p in routes.pairs}.pop()
    tried = {d: routes.match(layers=d) for d in range(-reach, reach + 1)
             if d and sum(0 <= layer + d < every for layer in routes.layers) > 1}  # one that fits is a copy
    best = max(tried, key=lambda d: -1.0 if np.isnan(tried[d]) else tried[d], default=0)
    base = routes.match(inside=best)  # of the same sites: one that holds another's routes is no shift of them all
    if not best or not routes.is_clear(tried[best], base):
        return None
    dense = f"; the model's first {routes.layers[0]} layers are dense, and it counts those that route from 0" \
        if -best == routes.layers[0] and routes.layers[0] else ""
    return Fault(
        "layer_shift", f"the engine reports the routes of layer l as layer l{best:+d}{dense}",
        f"{_share(tried[best])} of its sets are the model's own when read so, {_share(base)} as they stand",
        repair=lambda r, layout: move_routes(r, routes.layers, best))


def find_repeated_ids(routes: Reported) -> list[Fault]:
    """Rows that name an expert twice, or miss some of their slots: no routes, and a replay leaves them free."""
    rows = np.concatenate([p.ids[:, routes.layers] for p in routes.pairs])
    broken = np.zeros(rows.shape[:2], dtype=bool)
    for s, site in enumerate(routes.layout.sites):
        ids = np.sort(rows[:, s, : site.top_k], -1)
        some = (ids[:, -1] >= 0) & ~(ids == 0).all(-1)  # all zero is another fault
        broken[:, s] = some & ((ids[:, 0] < 0) | (ids[:, 1:] == ids[:, :-1]).any(-1))
    if not broken.any():
        return []
    return [Fault("repeated_ids", "rows of the reported routes name an expert twice, or miss some of their slots: no "
                  "router picks so, and a replay leaves them free",
                  f"{_share(broken.mean())} of the rows do")]


def find_zero_rows(routes: Reported) -> list[Fault]:
    """All-zero rows where k > 1: a missing route written as expert 0."""
    zero = np.concatenate([(p.ids[:, routes.layers] == 0).all(-1) for p in routes.pairs])
    if routes.layout.top_k == 1 or not zero.any():
        return []
    prompt = np.concatenate([np.arange(len(p.ids)) < p.response.prompt - 1 for p in routes.pairs])
    sites = [str(routes.layout.sites[s].decoder_layer) for s in np.flatnonzero(zero.any(0))]
    where = f"of the prompt {_share(zero[prompt].mean() if prompt.any() else 0.0)}, of the response " \
            f"{_share(zero[~prompt].mean())}; layers {_several(sites)}"
    return [Fault("zero_rows", "the engine writes missing routes as rows of zeros, which a replay takes for expert 0",
                  f"{_share(zero.mean())} of the rows are all zero, which no top-{routes.layout.top_k} gives "
                  f"({where})",
                  repair=lambda r, layout: move_routes(r, routes.layers, 0))]


def find_row_shift(routes: Reported) -> Fault | None:
    for prompt, where in ((None, ""), (False, " in the response")):
        base = routes.match(prompt=prompt)
        tried = {d: routes.match(rows=d, prompt=prompt) for d in (1, -1, 2, -2)}
        best = max(tried, key=lambda d: -1.0 if np.isnan(tried[d]) else tried[d])
        if not np.isnan(base) and routes.is_clear(tried[best], base):
            return Fault(
                "row_shift", f"the engine's rows are off by {abs(best)}{where}: what it reports for token "
                f"t{best:+d} is what token t used",
                f"{_share(tried[best])} of the sets are the model's own when read so, {_share(base)} as they stand",
                repair=None if prompt is False else partial(_move_rows, routes.layers, best))
    return None


def _move_rows(layers: Sequence[int], by: int, response: Response, layout: Layout) -> NDArray:
    return move_routes(response, layers, 0, by)


def find_swapped_responses(routes: Reported) -> Fault | None:
    """Rows that are the natural ones of another response, at the places where the two responses differ."""
    wrong = [(p, routes.select_keys(p)) for p in routes.pairs if routes.measure_own(p) < RIGHT * routes.expected]
    hits = sum(any(_is_of(mine, p, q, routes.expected) for q in routes.pairs if q is not p) for p, mine in wrong)
    if hits < 2 or hits < 0.8 * len(wrong):
        return None
    return Fault("swapped_responses", "the engine hands out the routes of other responses",
                 f"{hits} of {len(routes.pairs)} responses carry the routes of another one of the file")


def _is_of(mine: NDArray, p: Pair, q: Pair, expected: float) -> bool:
    """Whether the keys reported for `p` are those of `q`, and not its own, where both could tell: behind the prompt
    that they may share."""
    n = min(len(mine), len(q.natural_keys))
    apart = (p.natural_keys[:n] != q.natural_keys[:n]) & (mine[:n] >= 0)
    theirs, own = (int(((mine[:n] == keys[:n]) & apart).sum()) for keys in (q.natural_keys, p.natural_keys))
    places = int(apart.sum())
    return places >= FEW and theirs >= max(SURE * expected * places, own + CLEAR * places)


def find_physical_ids(routes: Reported) -> list[Fault]:
    """Experts by other numbers: in every layer one permutation makes the sets the model's own."""
    reported = np.concatenate([p.ids[:, routes.layers] for p in routes.pairs]).astype(np.int64)
    natural = np.concatenate([p.natural for p in routes.pairs]).astype(np.int64)
    tables = []
    for s, site in enumerate(routes.layout.sites):
        n = site.num_experts
        a, b = reported[:ROWS, s], natural[:ROWS, s]
        if len(a) < 4 * n:
            return []
        both = (a[:, :, None] * n + b[:, None, :])[(a >= 0).all(-1) & (b >= 0).all(-1)]
        counts = np.bincount(both.ravel(), minlength=n * n).reshape(n, n)
        tables.append(scipy.optimize.linear_sum_assignment(-counts)[1])
    at = np.arange(len(tables))[:, None]
    own = (np.sort(np.stack(tables)[at, reported.clip(min=0)], -1) == np.sort(natural, -1)).all(-1)
    if not routes.is_clear(float(own.mean()), routes.agreement):
        return []
    return [Fault("physical_ids", "the engine reports where its experts are, not which: their numbers are permuted in "
                  "every layer, as by a load balancer",
                  f"{_share(own.mean())} of the sets are the model's own under one permutation per layer, "
                  f"{_share(routes.agreement)} as they stand")]


def find_overwritten_layers(routes: Reported) -> list[Fault]:
    """One or a few layers that agree with nothing, while the others do."""
    own = routes.measure_by_site()
    if len(own) < 2 or np.isnan(own).any():
        return []
    good = np.median(own[own >= np.median(own)])
    bad = np.flatnonzero(own < min(0.5, SURE * good)).tolist()
    rest = np.delete(own, bad)
    if not bad or len(bad) > len(rest) or rest.min() < RIGHT * routes.expected:  # other weights grow apart with depth
        return []
    layers = [str(routes.layout.sites[s].decoder_layer) for s in bad]
    copied = {s: routes.find_source(s) for s in bad}
    sources = [f"layer {routes.layout.sites[s].decoder_layer} holds the routes of layer {t}"
               for s, t in copied.items() if t is not None]

    def repair(response: Response, layout: Layout) -> NDArray:
        ids = move_routes(response, routes.layers, 0)
        ids[:, bad] = -1
        return ids

    return [Fault("overwritten_layer", f"the reported routes of layer {_several(layers)} are not this layer's: "
                  + ("; ".join(sources) or "something else was written over them (multi-token prediction does)"),
                  f"{_share(own[bad].mean())} of its sets are the model's own, {_share(rest.mean())} in the other "
                  "layers", repair=repair)]


def find_stale_prefix(routes: Reported) -> list[Fault]:
    """Rows at the beginning that agree with nothing, up to some token from which all do."""
    hit, rows, good, cut = 0, [], [], {}
    for p in routes.pairs:
        mine = routes.select_keys(p)
        known = mine >= 0
        right = np.where(known.any(1), ((mine == p.natural_keys) & known).sum(1) / known.sum(1).clip(min=1), np.nan)
        wrong = right < 0.5 * routes.expected
        seen = ~np.isnan(right)
        # the change that leaves most rows on the side where they belong
        score = np.concatenate([[0], np.cumsum(np.where(seen, np.where(wrong, 1, -1), 0))])
        at = int(score.argmax())
        before, after = right[:at][seen[:at]], right[at:][seen[at:]]
        if at and len(before) >= 2 and (before < 0.5 * routes.expected).mean() >= 0.8 and len(after):
            hit, cut[p.response.line] = hit + 1, at
            rows.append(at)
            good.append(float(np.mean(after)))
    enough = max(2, 0.05 * len(routes.pairs)) if len(routes.pairs) > 1 else 1
    settled = float(np.mean(good)) if good else 0.0
    if hit < enough or settled < RIGHT * routes.expected:
        return []

    def repair(response: Response, layout: Layout) -> NDArray:
        ids = move_routes(response, routes.layers, 0)
        ids[: cut.get(response.line, 0)] = -1
        return ids

    return [Fault("stale_prefix", "the routes of the first tokens are stale: rows of an earlier request, as a prefix "
                  "cache hands them out", f"in {hit} of {len(routes.pairs)} responses the first rows (median "
                  f"{np.median(rows):.0f}) agree with nothing, while of those after {_share(settled)} of the "
                  "sets are the model's own", repair=repair)]


def find_faults_of_order(routes: Reported) -> list[Fault]:
    """Ids in ascending order, and combine weights that belong to another order or another convention."""
    ascending = natural = n = 0
    slot, expert, sums, theirs = [], [], [], []
    for p in routes.pairs:
        ids = p.ids[:, routes.layers]
        same = (routes.select_keys(p) == p.natural_keys) & (ids[..., 0] >= 0)
        n += int(same.sum())
        ascending += int((np.diff(ids.astype(int)[same], axis=-1) > 0).all(-1).sum())
        natural += int((np.diff(p.natural.astype(int)[same], axis=-1) > 0).all(-1).sum())
        if p.gates is not None and p.natural_gates is not None and same.any():
            own, at = p.gates[same], p.natural_gates[same]
            order = np.argsort(p.natural[same], -1)
            by_id = np.take_along_axis(at, order, -1)[np.arange(len(at))[:, None], np.argsort(
                np.argsort(ids[same], -1), -1)]
            sums.append(own.sum(-1))
            theirs.append(at.sum(-1))
            own, at, by_id = (x / x.sum(-1, keepdims=True).clip(min=1e-12) for x in (own, at, by_id))
            slot.append(np.abs(own - at).mean(-1))
            expert.append(np.abs(own - by_id).mean(-1))
    found = []
    is_sorted = n >= 20 and ascending == n and natural < 0.9 * n and routes.layout.top_k > 1
    if slot and routes.agreement >= RIGHT * routes.expected:
        by_slot, by_expert = np.concatenate(slot).mean(), np.concatenate(expert).mean()
        ratio = np.concatenate(sums) / np.concatenate(theirs).clip(min=1e-12)
        low, times, high = np.quantile(ratio, (0.05, 0.5, 0.95))
        if is_sorted and by_expert > 0.01 and by_slot < 0.25 * by_expert:
            found.append(Fault(
                "sorted_ids", "the engine reports ids in ascending order, but their combine weights in the order of "
                "the scores: each weight is paired with another expert",
                f"weights differ from the model's by {by_expert:.2g} on average expert by expert, by {by_slot:.2g} "
                "slot by slot"))
        elif abs(times - 1) > 0.05 and high - low < 0.02 * times:
            found.append(Fault(
                "gates_scaled", f"the reported combine weights are the trainer's times {times:.3g}, as where a scaling "
                "factor is left out, or applied twice",
                f"of 90 % of the rows their sum is {low:.3g} to {high:.3g} times the model's"))
        elif abs(times - 1) > 0.05:
            raw, whole = np.median(np.concatenate(sums)), np.median(np.concatenate(theirs))
            found.append(Fault(
                "gates_raw" if raw < whole else "gates_renormalised", "the reported combine weights have another "
                "normalisation than the trainer's: "
                + ("raw where the trainer's are renormalised" if raw < whole else "renormalised, or scaled, where the "
                   "trainer's are not"),
                f"they add up to {raw:.3g} per token and layer, the model's to {whole:.3g}"))
    elif is_sorted:
        found.append(Fault("sorted_ids", "the engine reports ids in ascending order, not in that of the scores: "
                           "harmless for a replay of ids, wrong beside weights in another order",
                           f"all {n} rows ascend; {_share(natural / n)} of the model's own do", fault=False))
    return found


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"


def _several(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"
