"""A batch in forwards that fit, and their results put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from moe_rl.routing.hooks import RouterScores
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Batch

Rows = slice | Tensor


def filled(batch: Batch, order: Tensor) -> Batch:
    """The rows `order` of the batch; those beyond its end are copies of the last one without a response, so that they
    weigh nothing, for ranks that must do as much as others."""
    real = (order < len(batch))[:, None]
    rows = batch.rows(order.clamp(max=len(batch) - 1))
    return replace(
        rows,
        response_mask=rows.response_mask & real,
        loss_mask=None if rows.loss_mask is None else rows.loss_mask & real,
        weights=None if rows.weights is None else rows.weights * real,
    )


def cut(batch: Batch, rows: int, tokens: int | None = None) -> list[Rows]:
    """The rows of every forward, at most `rows`, in their order. Under a budget of `tokens`, padding included, they are
    sorted by length, the longest first, and as many as fit go together, so that little is padding. A row is never
    split: one that is longer than the budget goes alone."""
    if tokens is None:
        return [slice(start, start + rows) for start in range(0, len(batch), rows)]
    lengths = batch.attention_mask.sum(1)
    order = lengths.argsort(descending=True, stable=True)
    cuts: list[Rows] = []
    while len(order):
        size = max(1, min(rows, tokens // max(1, int(lengths[order[0]]))))
        cuts.append(order[:size])
        order = order[size:]
    return cuts


def waiting(batch: Batch, *outputs: Tensor | RoutingTrace | RouterScores | None) -> tuple:
    """What a forward gave, where the batch is, so that it takes no memory of a device until all forwards have run."""
    return tuple(None if x is None else x.to(batch.tokens.device) for x in outputs)


def join(parts: Sequence[tuple], batch: Batch, cuts: Sequence[Rows]) -> list:
    """Each kind of part as one over the batch's rows, in their order, widened to its time axis, on its device."""
    order = None if isinstance(cuts[0], slice) else torch.cat([c for c in cuts if isinstance(c, Tensor)])
    tokens, mask = (x if order is None else x[order] for x in (batch.tokens, batch.attention_mask))
    back, width = None if order is None else order.argsort(), batch.tokens.shape[1]

    def widen(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, width - x.shape[1]))

    def put_back(kind: tuple) -> Tensor | RoutingTrace | RouterScores | None:
        if kind[0] is None:
            return None
        if isinstance(kind[0], Tensor):
            found = torch.cat([widen(x) for x in kind])
            return found if back is None else found[back]
        scores = isinstance(kind[0], RouterScores)
        whole = RouterScores.cat(kind, width) if scores else RoutingTrace.cat(kind, tokens, mask)
        return whole if back is None else whole.rows(back, width)

    return [put_back(kind) for kind in zip(*parts, strict=True)]
