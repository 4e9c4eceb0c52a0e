"""What makes ids routes, and traces of one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Integer
from torch import Tensor

from moe_rl.errors import RoutingError
from moe_rl.routing.layout import Layout

if TYPE_CHECKING:
    from moe_rl.routing.trace import RoutingTrace


def require_rows(
    trace: RoutingTrace, number: int, first: RoutingTrace, tokens: Integer[Tensor, "rows time"], row: int
) -> None:
    """Raise unless trace `number` may stand beside the first one, over these rows of a batch, from `row` on."""
    first.layout.require(trace.layout, f"trace {number}")
    if trace.weight_version != first.weight_version:
        versions = f"{first.weight_version!r} and {trace.weight_version!r}"
        raise RoutingError(f"traces 0 and {number} are of two weight versions, {versions}: join them apart.")
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
