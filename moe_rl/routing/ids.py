"""Expert ids as compact integers: which slots hold an expert, and passes over many tokens block by block.

Ids are [..., k], in uint8, where 255 marks a slot without an expert, or in a signed dtype, where -1 does. A pass puts
the k slots of a block first: two slots are then compared over contiguous memory. Comparisons write 0 and 1 in the dtype
of the ids, which PyTorch vectorises for every dtype; to bool it does so for uint8 alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Int64, Integer
from torch import Tensor

BLOCK = 2**15
"""(Token, MoE layer) pairs of a block, whose temporaries then fit into the cache of a core."""
LARGE = 64
"""How many times as many they are on a GPU."""


def unknown_id(dtype: torch.dtype) -> int:
    """What marks a slot without an expert in ids of this dtype."""
    return 255 if dtype == torch.uint8 else -1


def used(ids: Integer[Tensor, "*axes"], out: Tensor | None = None) -> Tensor:
    """Which slots hold an expert, as bool, or as 0 and 1 in `out`."""
    return torch.ne(ids, 255, out=out) if ids.dtype == torch.uint8 else torch.ge(ids, 0, out=out)


def signed(ids: Integer[Tensor, "*axes"]) -> Int64[Tensor, "*axes"]:
    """Ids as int64, -1 where there is no expert."""
    wide = ids.long()
    return wide.masked_fill_(wide == 255, -1) if ids.dtype == torch.uint8 else wide


def slots_first(ids: Integer[Tensor, "... k"]) -> Integer[Tensor, "k ..."]:
    """A contiguous copy with one row per slot."""
    return ids.movedim(-1, 0).clone(memory_format=torch.contiguous_format)


def sorted_slots(ids: Integer[Tensor, "... k"]) -> Integer[Tensor, "k ..."]:
    """The ids of every token and MoE layer in ascending order, slots first: k rounds that exchange neighbours."""
    slots = slots_first(ids)
    k = len(slots)
    for start in range(k):
        low, high = slots[start % 2 : k - 1 : 2], slots[start % 2 + 1 : k : 2]
        least = torch.minimum(low, high)
        torch.maximum(low, high, out=high)
        low.copy_(least)
    return slots


def block_tokens(moe_layers: int, device: torch.device | None = None) -> int:
    """Tokens of a block; of a GPU's, whose kernels take longer to start than a small block takes to compute, more."""
    return max(1, (BLOCK if device is None or device.type == "cpu" else LARGE * BLOCK) // max(1, moe_layers))


def blocks(
    batch: int, time: int, moe_layers: int, *, device: torch.device | None = None
) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of blocks that cover [batch, time], in order."""
    most = block_tokens(moe_layers, device)
    columns = max(1, min(time, most))
    rows = max(1, most // columns)
    for row in range(0, batch, rows):
        for column in range(0, time, columns):
            yield slice(row, row + rows), slice(column, column + columns)
