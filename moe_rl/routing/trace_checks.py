"""What makes ids routes, and traces of one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from moe_rl.errors import RoutingError
from moe_rl.routing.layout import Layout

if TYPE_CHECKING:
    from moe_rl.routing.trace import RoutingTrace

LIGHTEST = 1e-6
"""Of the heaviest combine weight of a row."""


def require_rows(
    trace: RoutingTrace, number: int, first: RoutingTrace, tokens: Integer[Tensor, "rows time"], row: int, mixed: bool
) -> None:
    """Raise unless trace `number` may stand beside the first one, over these rows of a batch, from `row` on."""
    first.layout.require(trace.layout, f"trace {number}")
    if trace.weights != first.weights and not mixed:
        versions = " and ".join(", ".join(map(repr, one.weights)) for one in (first, trace))
        raise RoutingError(f"traces 0 and {number} are of two weight versions, {versions}: join them apart, or say "
                           "mixed=True, and the result knows the one of every token.")
    if trace.keep != first.keep or (trace.gates is None) != (first.gates is None):
        raise RoutingError(f"traces 0 and {number} are replayed by different rules, one keeps or weighs experts "
                           "otherwise than the other: join them apart.")
    rows, time = trace.shape[:2]
    if time > tokens.shape[1]:
        raise RoutingError(f"trace {number} has {time} columns, the batch {tokens.shape[1]}: rows of other tokens?")
    if trace.tokens is None or rows != len(tokens):  # too many rows are refused by their sum
        return
    other = (trace.tokens.to(tokens.device) != tokens[:, :time]) & trace.attention_mask.to(tokens.device)
    if bool(other.any()):
        b, t = other.nonzero()[0].tolist()
        raise RoutingError(
            f"trace {number} holds the routes of other tokens than row {row + b} of the batch: at position {t} token "
            f"{int(trace.tokens[b, t])}, in the batch {int(tokens[b, t])}. Give the traces in the order of the rows."
        )


def check_ids(ids: Integer[Tensor, "batch time site k"], layout: Layout) -> None:
    """Raise unless every row is unknown, or holds distinct ids in range (so an all-zero row with k > 1 is refused)."""
    if ids.dim() != 4 or ids.shape[2:] != (len(layout.sites), layout.top_k):
        expected = f"[batch, time, {len(layout.sites)} sites, {layout.top_k}]"
        raise RoutingError(f"routes have shape {tuple(ids.shape)}; expected {expected}.")
    unknown = 255 if ids.dtype == torch.uint8 else -1
    for s, site in enumerate(layout.sites):
        row = ids[:, :, s, : site.top_k].long()
        free = (row == unknown).all(-1)
        bad = ((row < 0) | (row >= site.num_experts)).any(-1) & ~free
        if bool(bad.any()):
            b, t = bad.nonzero()[0].tolist()
            raise RoutingError(
                f"{site.name}: row {b}, token {t} has experts {row[b, t].tolist()}, but ids run from 0 to "
                f"{site.num_experts - 1}; mark a missing route with -1 in every slot."
            )
        ordered = row.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & ~free
        if bool(twice.any()):
            b, t = twice.nonzero()[0].tolist()
            raise RoutingError(
                f"{site.name}: row {b}, token {t} names an expert twice: {row[b, t].tolist()}. An all-zero row is how "
                "some engines write a missing route; mark it with -1."
            )


def check_gates(gates: Tensor, known: Bool[Tensor, "batch time site"], layout: Layout) -> None:
    """Raise unless combine weights are float32 or float16, one per slot, and where a route is known finite, not
    negative and not all 0."""
    if gates.dtype not in (torch.float32, torch.float16) or gates.shape != (*known.shape, layout.top_k):
        raise RoutingError(f"combine weights are {gates.dtype} of shape {tuple(gates.shape)}; expected float32 or "
                           f"float16, one per id: {(*known.shape, layout.top_k)}.")
    slots = torch.arange(layout.top_k) < torch.tensor([site.top_k for site in layout.sites])[:, None]
    weights = gates.masked_fill(~slots.to(gates.device), 0)
    bad = ((~weights.isfinite() | (weights < 0)).any(-1) | (weights.amax(-1) < LIGHTEST)) & known
    if bool(bad.any()):
        b, t, s = bad.nonzero()[0].tolist()
        raise RoutingError(f"{layout.sites[s].name}: row {b}, token {t} has combine weights {gates[b, t, s].tolist()}; "
                           f"expected finite ones, not negative, of which one weighs {LIGHTEST} or more.")


def check_layout(layout: Layout) -> None:
    """Raise unless a layout that was read from somewhere could be a model's."""
    for site in layout.sites:
        sizes = (site.decoder_layer, site.num_experts, site.top_k)
        if not all(type(x) is int for x in sizes) or not isinstance(site.name, str) \
                or not (site.decoder_layer >= 0 and 1 <= site.top_k <= site.num_experts < 2**15):
            raise RoutingError(f"no router of a model is {site}, which the trace names.")
    if not layout.sites or not isinstance(layout.architecture, str):
        raise RoutingError(f"the trace names {len(layout.sites)} sites of architecture {layout.architecture!r}.")
