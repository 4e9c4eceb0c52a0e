"""How sure the routers were, how much replay forced, and all that two routings of the same tokens say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.metrics.volatility import Ids, Mask, PerSite, Pooled, response_change, route_change, router_shift
from moe_rl.routing.trace import Layout
from moe_rl.types import boolean

PerSlot = Float[Tensor, "batch time site k"]


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
    at `ids`, of which -1 are unused slots and, in the first, an unknown row. prime-rl, pull request 2545, logs the same
    of its own scores, as routing confidence."""
    used = ids[boolean(mask)] >= 0  # token, site, k
    known = used[..., 0]
    chosen = torch.where(used, log_probs[mask].double().exp(), 0)
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
        unused = (before < 0) | (after[..., :1] < 0)
        first, then = (x.masked_fill(unused, math.nan) for x in log_probs)
        found.append(router_shift(first, then, mask))
    return found
