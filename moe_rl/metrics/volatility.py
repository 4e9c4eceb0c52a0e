"""How much routes change, and how experts are used: sums per site, so that pooling over batches is exact.

S and S' are the expert sets of one (token, site) before and after. Ids are integers (batch, time, site, k) as a trace
holds them (`RoutingTrace.experts`): a slot without an expert is 255 in uint8, -1 in a signed dtype. An unknown row has
none, a site that uses fewer than k experts leaves its last slots empty. A row unknown in either trace is excluded and
counted. Tokens are read in blocks, so that temporaries are small beside large traces. GSPO (arXiv 2507.18071, section
5.3) says that "roughly 10% of the experts" change and gives no formula: `expert_change_rate` is the natural reading,
the others are what else it may mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Integer, Shaped
from torch import Tensor

from moe_rl.routing.ids import BLOCK, block_tokens, signed, slots_first, unknown_id, used
from moe_rl.routing.sites import Layout
from moe_rl.types import boolean

Ids = Integer[Tensor, "batch time site k"]
AnyK = Integer[Tensor, "batch time site _"]
Mask = Bool[Tensor, "batch time"]
PerSite = Float[Tensor, " site"]
PerSlot = Float[Tensor, "batch time site k"]
PerResponse = Shaped[Tensor, "batch site"]
SUMMED = 4096
"""Tokens whose float64 values are summed at once, or more where there are few sites. PyTorch sums columns over so many
rows, then over these sums: where columns fill its vectors, sums of blocks have the bits of one sum."""
Sums = TypeVar("Sums", bound="Pooled")


@dataclass(frozen=True)
class Pooled:
    """Sums whose `+` pools two sets of tokens. Nothing is divided before `row` or `site_rows`; 0 / 0 is NaN."""

    def __add__(self: Sums, other: Sums) -> Sums:
        names = [f.name for f in dataclasses.fields(self)]
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def row(self) -> dict[str, float]:
        """Means over everything, as columns of a table."""
        return {name: float(x.sum() / n.sum()) for name, (x, n) in self._means().items()}

    def site_rows(self) -> list[dict[str, float]]:
        """Means of every site, of the columns that are counted by site."""
        columns = {name: (x / n).tolist() for name, (x, n) in self._means().items() if x.dim()}
        return [dict(zip(columns, site, strict=True)) for site in zip(*columns.values(), strict=True)]

    def _means(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The sum of every column and the count that divides it: both of every site, or both of all."""
        raise NotImplementedError


@dataclass(frozen=True)
class RouteChange(Pooled):
    """Changes of S to S', summed over tokens. Made by `route_change`."""

    n: PerSite
    """Tokens compared at each site."""
    unknown: PerSite
    """Tokens of the mask left out because a trace does not know them."""
    expert_change_rate: PerSite
    """Σ 1 - |S ∩ S'| / k."""
    any_change_rate: PerSite
    """Σ 1[S ≠ S']; R3, arXiv 2510.11370."""
    jaccard_distance: PerSite
    """Σ 1 - |S ∩ S'| / |S ∪ S'|."""
    gate_mass_moved: PerSite
    """Σ over tokens of the share of the gates, before, that was on S \\ S'."""
    gated: PerSite
    """Tokens whose gates are known: the n of gate_mass_moved."""
    tokens: Float[Tensor, ""]
    """Tokens known at every site: the n of the next two."""
    any_layer_change: Float[Tensor, ""]
    """Σ 1[S ≠ S' at any site]; R3."""
    layers_changed: Float[Tensor, ""]
    """Σ number of sites with S ≠ S'; R3."""

    def row(self) -> dict[str, float]:
        """Means over tokens, or over tokens and sites, and how many tokens these are."""
        counts = {"volatility_tokens": float(self.tokens), "volatility_unknown": float(self.unknown.sum())}
        return super().row() | counts

    def site_rows(self) -> list[dict[str, float]]:
        """Means over tokens, and how many, one row per site."""
        counts = zip(self.n.tolist(), self.unknown.tolist(), strict=True)
        return [row | {"volatility_tokens": n, "volatility_unknown": unknown}
                for row, (n, unknown) in zip(super().site_rows(), counts, strict=True)]

    def _means(self) -> dict[str, tuple[Tensor, Tensor]]:
        by = {
            "expert_change_rate": self.n,
            "any_change_rate": self.n,
            "jaccard_distance": self.n,
            "gate_mass_moved": self.gated,
            "any_layer_change": self.tokens,
            "layers_changed": self.tokens,
        }
        return {name: (getattr(self, name), n) for name, n in by.items()}


def route_change(
    before: Ids, after: AnyK, mask: Mask, gates: Float[Tensor, "batch time site k"] | None = None
) -> RouteChange:
    """Compare two routings of the same tokens where `mask` is true. `gates` are the combine weights of `before`, of any
    sum; where that is 1, the share they lose is their sum, but for rounding."""
    before, after = _alike(before, after)
    traces = [x.flatten(0, 1) for x in (before, after, gates) if x is not None]
    sites = before.shape[2]
    changes = []
    block = block_tokens(sites, before.device)
    for tokens in _tokens(mask, before, after).split(max(block, SUMMED if sites >= 16 else 64 * SUMMED // sites)):
        compared = [_compare(*(x.index_select(0, some) for x in traces)) for some in tokens.split(block)]
        changes.append(_route_change(*(torch.cat(x) for x in zip(*compared, strict=True))))
    return sum(changes[1:], start=changes[0])


def _compare(
    before: Integer[Tensor, "token site k"], after: Integer[Tensor, "token site _"],
    gates: Float[Tensor, "token site k"] | None = None,
) -> tuple[Shaped[Tensor, "token site"], ...]:
    """1 where both are known, and |S ∩ S'|, |S| and |S'|, which are 1 elsewhere; with gates, their share on S \\ S'."""
    old, new = slots_first(before), slots_first(after)
    stays, same = torch.empty_like(old), torch.empty_like(new)  # 0 and 1
    for slot, found in zip(old, stays, strict=True):
        torch.amax(torch.eq(new, slot, out=same), 0, out=found)
    in_use, in_use_after = used(old, out=old), used(new, out=new)
    stays &= in_use
    count = torch.uint8 if max(len(old), len(new)) <= 255 else torch.int16
    known = (in_use[0] & in_use_after[0]).to(count)
    unknown = 1 - known
    sums = known, *(x.sum(0, dtype=count).mul_(known).add_(unknown) for x in (stays, in_use, in_use_after))
    if gates is None:
        return sums
    lost, whole = (x.bool().movedim(0, -1).contiguous() for x in (in_use - stays, in_use))
    return *sums, _share(gates, lost, whole)


def _route_change(
    known: Integer[Tensor, "token site"], overlap: Integer[Tensor, "token site"], size: Integer[Tensor, "token site"],
    size_after: Integer[Tensor, "token site"], moved: Float[Tensor, "token site"] | None = None,
) -> RouteChange:
    largest, union = torch.maximum(size, size_after), size.short() + size_after - overlap
    changed = torch.ne(overlap, largest, out=torch.empty_like(overlap))
    n, changes = known.sum(0, dtype=torch.int64).double(), changed.sum(-1, dtype=torch.int64)
    whole = known.sum(-1, dtype=torch.int64) == known.shape[1]
    return RouteChange(
        n=n,
        unknown=len(known) - n,
        expert_change_rate=_missing(overlap, largest).sum(0),
        any_change_rate=changed.sum(0, dtype=torch.int64).double(),
        jaccard_distance=_missing(overlap, union).sum(0),
        gate_mass_moved=torch.zeros_like(n) if moved is None else torch.where(known > 0, moved, 0).sum(0),
        gated=torch.zeros_like(n) if moved is None else n.clone(),
        tokens=whole.double().sum(),
        any_layer_change=((changes > 0) & whole).double().sum(),
        layers_changed=(changes * whole).sum().double(),
    )


def _missing(part: Integer[Tensor, "token site"], whole: Integer[Tensor, "token site"]) -> Float[Tensor, "token site"]:
    """1 - part / whole."""
    share = part.double().div_(whole)
    return torch.sub(1, share, out=share)


@dataclass(frozen=True)
class ResponseChange(Pooled):
    """Changes of the experts a whole response uses, summed over responses. Made by `response_change`."""

    responses: PerSite
    """Responses with a known token at the site."""
    response_set_change: PerSite
    """Σ 1 - |U ∩ U'| / |U|, U the union of S over the response: "experts activated for the same response"."""
    response_usage_change: PerSite
    """Σ ½ Σ_e |f_e - f'_e|, f_e the share of the response's slots that expert e fills: total variation."""

    def _means(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (getattr(self, name), self.responses)
                for name in ("response_set_change", "response_usage_change")}


def response_change(before: Ids, after: AnyK, mask: Mask, num_experts: int) -> ResponseChange:
    """Compare which experts each response uses, over its rows known in both. `num_experts`: the most at any site. The
    number of slots may differ: sets and shares are those of each side."""
    before, after = _alike(before, after)
    batch, time, sites, _ = before.shape
    rows = max(1, min(block_tokens(sites, before.device) // max(1, time), BLOCK // num_experts))
    parts = [slice(row, row + rows) for row in range(0, max(1, batch), rows)]
    found = [_response_change(before[part], after[part], mask[part], num_experts) for part in parts]
    present, set_change, usage_change = (torch.cat(x) for x in zip(*found, strict=True))
    return ResponseChange(
        responses=present.double().sum(0),
        response_set_change=set_change.sum(0),
        response_usage_change=usage_change.sum(0),
    )


def _response_change(before: Ids, after: AnyK, mask: Mask, num_experts: int) -> tuple[PerResponse, ...]:
    """Of each response and site: whether it has a known token, and its two changes."""
    old, new = (counts.double() for counts in _usage([before, after], mask, num_experts))
    union = (old > 0).sum(-1)
    kept = ((old > 0) & (new > 0)).sum(-1)
    shares = [usage / usage.sum(-1, keepdim=True).clamp(min=1) for usage in (old, new)]
    return union > 0, (union - kept).double() / union.clamp(min=1), (shares[0] - shares[1]).abs().sum(-1) / 2


@dataclass(frozen=True)
class RouterShift(Pooled):
    """How far the router moved at the experts it had chosen, summed over tokens. Made by `router_shift`."""

    n: PerSite
    unknown: PerSite
    shift: PerSite
    """Σ over tokens of the mean over their experts of |log p' - log p|, in nats."""
    tokens: Float[Tensor, ""]
    """Tokens known at every site: the n of the next two."""
    ratio: Float[Tensor, ""]
    """Σ over tokens of γ = Π_site mean_e exp(-|log p'(e) - log p(e)|), in (0, 1]."""
    ratio_low: Float[Tensor, ""]
    """Tokens with γ < 0.7, the threshold below which RSPO's code drops a token."""

    def _means(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            "router_shift": (self.shift, self.n),
            "router_shift_ratio": (self.ratio, self.tokens),
            "router_shift_ratio_low": (self.ratio_low, self.tokens),
        }


def router_shift(
    old_logprobs_at_old_ids: Float[Tensor, "batch time site k"],
    new_logprobs_at_old_ids: Float[Tensor, "batch time site k"],
    mask: Mask,
) -> RouterShift:
    """Router shift of RSPO (arXiv 2510.23027), from the router's log-probs (full softmax) at the *old* ids.

    NaN marks an unused slot; a row of NaN is unknown. RSPO uses γ, floored, as a weight; here it is only measured.
    """
    shift = (new_logprobs_at_old_ids[boolean(mask)].double() - old_logprobs_at_old_ids[mask].double()).abs()
    known = ~shift.isnan().all(-1)
    whole = known.all(-1)
    gamma = (-shift).exp().nanmean(-1)[whole].prod(-1)
    return RouterShift(
        n=known.double().sum(0),
        unknown=(~known).double().sum(0),
        shift=shift.nanmean(-1).nansum(0),
        tokens=whole.double().sum(),
        ratio=gamma.sum(),
        ratio_low=(gamma < 0.7).double().sum(),
    )


@dataclass(frozen=True)
class Load:
    """How often each expert is used. `+` pools two batches. Made by `load_statistics`."""

    counts: Float[Tensor, "site expert"]
    """Slots each expert filled; 0 beyond a site's own number of experts."""
    num_experts: tuple[int, ...]
    """Of each site."""

    def __add__(self, other: Load) -> Load:
        return Load(self.counts + other.counts, self.num_experts)

    def row(self) -> dict[str, float]:
        """Means over sites of `site_rows`."""
        rows = self.site_rows()
        return {name: sum(r[name] for r in rows) / len(rows) for name in rows[0]}

    def site_rows(self) -> list[dict[str, float]]:
        """Per site, f_e the share of slots of expert e among E: `load_entropy` = -Σ f log f / log E (1 is balanced),
        `load_max_violation` = max f / mean f - 1 (arXiv 2408.15664), `load_cv` = std f / mean f (population), and
        `load_dead_experts`, the number with f_e < 0.01 / E."""
        return [self._site_row(counts[:e]) for counts, e in zip(self.counts.cpu(), self.num_experts, strict=True)]

    @staticmethod
    def _site_row(counts: Float[Tensor, " expert"]) -> dict[str, float]:
        experts, total = len(counts), float(counts.sum())
        relative = counts / total * experts if total else torch.full_like(counts, math.nan)  # 1 is a fair share
        entropy = -torch.xlogy(relative / experts, relative / experts).sum()
        return {
            "load_entropy": float(entropy) / math.log(experts) if experts > 1 else math.nan,
            "load_max_violation": float(relative.max()) - 1,
            "load_cv": float(relative.std(correction=0)),
            "load_dead_experts": float((relative < 0.01).sum()) if total else math.nan,
        }


def load_statistics(ids: Ids, num_experts: int | Sequence[int], mask: Mask) -> Load:
    """Expert usage where `mask` is true. `num_experts`: of all sites, or of each."""
    sites = ids.shape[2]
    per_site = (num_experts,) * sites if isinstance(num_experts, int) else tuple(num_experts)
    counts = _usage([ids.flatten(0, 1)[None]], boolean(mask).reshape(1, -1), max(per_site))[0]
    return Load(counts[0].double(), per_site)


def margin_summary(
    margins: Float[Tensor, "batch time site"], mask: Mask, thresholds: Sequence[float] = (0.01, 0.1)
) -> list[dict[str, float]]:
    """Per site, of the gap between the k-th and the (k+1)-th router score, in the unit of the scores: `margin_n`,
    quantiles `margin_q01`, `_q10`, `_q50`, `_q90`, and `margin_below_<threshold>`, the share below each threshold.

    NaN marks an unknown margin. Quantiles cannot be pooled: call it once, on everything it shall describe.
    """
    rows = []
    for values in margins[boolean(mask)].double().cpu().numpy().T:
        values = values[~np.isnan(values)]
        row = {"margin_n": float(len(values))}
        for name, q in (("01", 0.01), ("10", 0.1), ("50", 0.5), ("90", 0.9)):
            row[f"margin_q{name}"] = float(np.quantile(values, q)) if len(values) else math.nan
        for limit in thresholds:
            row[f"margin_below_{limit:g}"] = float((values < limit).mean()) if len(values) else math.nan
        rows.append(row)
    return rows


def _share(gates: Float[Tensor, "token site k"], of: Bool[Tensor, "token site k"],
           in_use: Bool[Tensor, "token site k"]) -> Float[Tensor, "token site"]:
    """Share of the gates of the slots in use that is on some of them; 0 where all gates are 0."""
    part, whole = (torch.where(where, gates, 0).sum(-1, dtype=torch.float64) for where in (of, in_use))
    return torch.where(whole > 0, part / whole, 0)


def _alike(before: Ids, after: AnyK) -> tuple[Ids, AnyK]:
    """Both in one dtype, so that they mark an empty slot alike."""
    return (before, after) if before.dtype == after.dtype else (signed(before), signed(after))


def _tokens(mask: Mask, *traces: AnyK) -> Int64[Tensor, " token"]:
    """Which of batch × time tokens are True in the mask."""
    for ids in traces:
        if ids.shape[:2] != mask.shape:
            raise ValueError(f"the mask is of shape {list(mask.shape)}, the ids are of shape {list(ids.shape)}; "
                             "expected [batch, time] and [batch, time, site, k] of the same tokens.")
    return boolean(mask).flatten().nonzero()[:, 0].to(traces[0].device)


def _usage(traces: Sequence[AnyK], mask: Mask, num_experts: int) -> list[Int64[Tensor, "batch site expert"]]:
    """Slots that each expert fills in each row of the batch, where the mask is true and all of the traces know it."""
    batch, time, sites, _ = traces[0].shape
    device, width = traces[0].device, num_experts + 1
    if traces[0].dtype == torch.uint8 and num_experts > 255:
        raise ValueError(f"ids of {num_experts} experts are uint8, where 255 marks a slot without an expert; give them "
                         "as int16.")
    at_site = [(torch.arange(sites, device=device) * width).int().repeat_interleave(ids.shape[3]) for ids in traces]
    found = [torch.zeros(batch, sites, num_experts, dtype=torch.int64, device=device) for _ in traces]
    for tokens in _tokens(mask, *traces).split(block_tokens(sites, device)):
        parts = [ids.flatten(0, 1).index_select(0, tokens) for ids in traces]
        unknown = (~(used(parts[0][..., 0]) & used(parts[-1][..., 0]))).nonzero(as_tuple=True)
        at_row = (tokens // max(1, time) * (sites * width)).int()[:, None]
        for counts, at, ids in zip(found, at_site, parts, strict=True):
            ids[unknown] = unknown_id(ids.dtype)
            ids = ids.short() if ids.dtype == torch.int8 else ids  # 127 + 1 would wrap
            experts = (ids + 1).clamp_(min=0)  # 0 where there is none: 255 + 1 wraps
            if experts.numel() and int(experts.max()) > num_experts:
                raise ValueError(f"an id is {int(experts.max()) - 1}, but ids of {num_experts} experts end at "
                                 f"{num_experts - 1}.")
            bins = experts.flatten(1).int().add_(at)
            bins = (bins if batch == 1 else bins.add_(at_row)).flatten()
            counts += torch.bincount(bins, minlength=batch * sites * width).view(batch, sites, width)[..., 1:]
    return found


# ---------------------------------------------------------------------- routers, and what replay forced
@dataclass(frozen=True)
class Confidence(Pooled):
    """Probability that the routers gave to the experts they chose, summed over tokens. Made by `router_confidence`."""

    n: PerSite
    confidence: PerSite
    """Σ over tokens of Σ_{e ∈ S} p(e), p the router's softmax over all experts, whatever its combine weights."""

    def _means(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {"router_confidence": (self.confidence, self.n)}


def router_confidence(log_probs: PerSlot, ids: Ids, mask: Mask) -> Confidence:
    """Mass of the chosen experts where `mask` is true; 1 where all are chosen. `log_probs` are the router's log softmax
    at `ids`. prime-rl, pull request 2545, logs the same of its own scores, as routing confidence."""
    in_use = used(ids[boolean(mask)])  # token, site, k
    known = in_use[..., 0]
    chosen = torch.where(in_use, log_probs[mask].double().exp(), 0)
    return Confidence(n=known.double().sum(0), confidence=chosen.sum(-1).sum(0))


@dataclass(frozen=True)
class Coverage(Pooled):
    """(Token, site) pairs whose experts replay forced, of all. Made by `coverage`."""

    n: Float[Tensor, ""]
    forced: Float[Tensor, ""]

    def _means(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {"coverage": (self.forced, self.n)}


def coverage(known: Bool[Tensor, "batch time site"], mask: Mask) -> Coverage:
    """How much a trace knows, and so forces, where `mask` is true."""
    found = known[boolean(mask)].double()
    return Coverage(n=torch.ones_like(found).sum(), forced=found.sum())


def changes(before: Ids, after: Ids, mask: Mask, layout: Layout, gates: PerSlot | None = None,
            log_probs: tuple[PerSlot, PerSlot] | None = None) -> list[Pooled]:
    """Volatility of the tokens of `mask`: of routes, of whole responses, and of the routers. `gates` are the combine
    weights of `before`, `log_probs` the log softmax at its ids, before and after, each where it is known."""
    experts = max(site.num_experts for site in layout.sites)
    found: list[Pooled] = [route_change(before, after, mask, gates), response_change(before, after, mask, experts)]
    if log_probs is not None:
        unused = ~(used(before) & used(after[..., :1]))
        first, then = (x.masked_fill(unused, math.nan) for x in log_probs)
        found.append(router_shift(first, then, mask))
    return found
