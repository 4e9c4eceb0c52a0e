"""Traces put together from the reports of several calls, and cut for the ranks of a parallel policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from moe_rl.errors import RoutingError
from moe_rl.routing.layout import Layout
from moe_rl.routing.trace_checks import require_rows

if TYPE_CHECKING:
    from moe_rl.routing.trace import RoutingTrace

ROUTED = ("experts", "gates", "version_index")
CUTS = ("rows", "tokens", "zigzag", "layers")


def cat(
    traces: Sequence[RoutingTrace],
    tokens: Integer[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    mixed: bool,
) -> RoutingTrace:
    """See `RoutingTrace.cat`."""
    row = 0
    for number, trace in enumerate(traces):
        require_rows(trace, number, traces[0], tokens[row : row + trace.shape[0]], row, mixed)
        row += trace.shape[0]
    if row != tokens.shape[0]:
        raise RoutingError(f"the traces have {row} rows, the batch has {tokens.shape[0]}.")
    wide = with_one_index([trace.wide(tokens.shape[1]) for trace in traces])
    joined: dict[str, Any] = {name: [getattr(trace, name) for trace in wide] for name in ROUTED}
    joined = {name: None if parts[0] is None else torch.cat(parts).to(tokens.device) for name, parts in joined.items()}
    return replace(wide[0], **joined, attention_mask=mask, tokens=tokens.to(torch.int32))


def with_one_index(traces: Sequence[RoutingTrace]) -> list[RoutingTrace]:
    """The traces, numbering the weight versions of all of them alike."""
    names = tuple(dict.fromkeys(name for trace in traces for name in trace.weights))
    if len(names) == 1:
        return [replace(trace, weight_version=names[0], versions=(), version_index=None) for trace in traces]
    found = []
    for trace in traces:
        own = trace.known.any(-1).short() - 1 if trace.version_index is None else trace.version_index
        number = own.new_tensor([*(names.index(name) for name in trace.weights), -1])  # the last one is that of -1
        found.append(replace(trace, weight_version=None, versions=names, version_index=number[own.long()]))
    return found


def splice(
    parts: Sequence[RoutingTrace], tokens: Integer[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> RoutingTrace:
    """See `RoutingTrace.splice`."""
    if not parts:
        raise RoutingError("no traces to splice; for rows without routes replay None.")
    for number, part in enumerate(parts):
        require_rows(part, number, parts[0], tokens, 0, mixed=True)
    wide = with_one_index([cat([part], tokens, mask, True) for part in parts])
    whole = wide[-1]
    for part in reversed(wide[:-1]):
        here = part.known.any(-1)
        whole = whole.each(partial(_preferred, part, here), ROUTED)
    return whole


def _preferred(part: RoutingTrace, here: Bool[Tensor, "batch time"], name: str, theirs: Tensor) -> Tensor:
    """A field of the part where it knows a token, else what there is."""
    return getattr(part, name).where(here.view(*here.shape, *(1,) * (theirs.dim() - 2)), theirs)


def shard(trace: RoutingTrace, rank: int, world: int, by: str, num_layers: int | None) -> RoutingTrace:
    """See `RoutingTrace.shard`."""
    if not 0 <= rank < world:
        raise RoutingError(f"rank {rank} of {world}: ranks run from 0 to one less than their number.")
    batch, time = trace.shape[:2]
    if by == "rows":
        return trace.rows(torch.arange(batch).tensor_split(world)[rank])
    if by in ("tokens", "zigzag"):
        count = world if by == "tokens" else 2 * world
        wide = trace.wide(-(-time // count) * count)
        blocks = torch.arange(wide.shape[1]).chunk(count)
        mine = blocks[rank] if by == "tokens" else torch.cat([blocks[rank], blocks[count - 1 - rank]])
        return wide.each(lambda _, x: x[:, mine])
    if by == "layers":
        return _stage(trace, rank, world, num_layers)
    raise RoutingError(f"by={by!r}: cut by {', '.join(CUTS)}.")


def _stage(trace: RoutingTrace, rank: int, world: int, num_layers: int | None) -> RoutingTrace:
    layers = [site.decoder_layer for site in trace.layout.sites]
    total = num_layers or max(layers) + 1
    if total % world or total <= max(layers):
        raise RoutingError(f"{total} decoder layers over {world} stages; expected a number that {world} divides, of "
                           f"more than {max(layers)}, the last that routes: give num_layers.")
    each = total // world
    here = [s for s, layer in enumerate(layers) if layer // each == rank]
    if not here:
        raise RoutingError(f"stage {rank} of {world} has layers {rank * each} to {rank * each + each - 1}, none of "
                           "which routes: it needs no trace.")
    layout, index = Layout(tuple(trace.layout.sites[s] for s in here), trace.layout.architecture), torch.tensor(here)
    k, cut = layout.top_k, replace(trace, layout=layout)
    experts = trace.experts[:, :, index, :k].contiguous().to(layout.dtype)
    if layout.dtype != trace.experts.dtype:
        experts = experts.masked_fill(~trace.known[:, :, index, None], layout.unknown)
    return replace(cut, experts=experts, gates=None if trace.gates is None else trace.gates[:, :, index, :k])
