"""A KV cache that does not move while it grows."""

from __future__ import annotations

import inspect
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, in buffers with room for what is still to come.

    A `DynamicLayer` copies everything at every token, 2 · rows · kv_heads · time · head_dim numbers; this one writes
    the new ones alone. What is attended to has the same values, so the results have the same bits.
    """

    keys: Float[Tensor, "rows heads time key_dim"]
    values: Float[Tensor, "rows heads time value_dim"]
    """What there is so far, as views of the buffers."""

    def __init__(self, keys: Tensor, values: Tensor, new: int):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.rooms = [nn.functional.pad(x, (0, 0, 0, new)) for x in (keys, values)]
        self._show(keys.shape[2])

    def update(
        self,
        key_states: Float[Tensor, "rows heads t key_dim"],
        value_states: Float[Tensor, "rows heads t value_dim"],
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:
        """Append; returns all keys and values so far, as views."""
        start, end = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if end > self.rooms[0].shape[2]:
            raise ValueError(f"the cache has room for {self.rooms[0].shape[2]} tokens, not for {end}.")
        for room, states in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Keep these rows."""
        self.rooms = [room.index_select(0, beam_idx) for room in self.rooms]
        self._show(self.keys.shape[2])

    def _show(self, end: int) -> None:
        self.keys, self.values = (room[:, :, :end] for room in self.rooms)


def cache_argument(model: nn.Module) -> str:
    """What a model calls its cache, as an argument and in its output: `cache` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def make_room(cache: Cache, new: int) -> None:
    """Give every layer that grows by concatenation room for `new` tokens; other kinds (sliding, linear) keep theirs."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
            cache.layers[index] = RoomyLayer(layer.keys, layer.values, new)
