"""The cache with room against the one that grows by concatenation."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from moe_rl.rollouts.hf import RoomyLayer, make_room


def states(time: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `rows` rows with 2 heads of dimension 4."""
    return torch.randn(rows, 2, time, 4), torch.randn(rows, 2, time, 4)


def test_it_holds_the_same_bits_while_rows_are_taken_away_and_added() -> None:
    ours, theirs = DynamicCache(), DynamicCache()
    prompt = states(5)
    for cache in (ours, theirs):
        cache.update(*prompt, 0)
        cache.reorder_cache(torch.tensor([0, 0, 1, 2]))
    make_room(ours, 3)
    assert type(ours.layers[0]) is RoomyLayer and ours.get_seq_length() == 5
    for rows, kept in ((4, [3, 1, 0]), (3, [2, 1]), (2, [0])):
        new = states(1, rows)
        for mine, own in zip(ours.update(*new, 0), theirs.update(*new, 0), strict=True):
            assert torch.equal(mine, own)
        for cache in (ours, theirs):
            cache.reorder_cache(torch.tensor(kept))
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)
    with pytest.raises(ValueError, match="room for 8 tokens, not for 9"):
        ours.update(*states(1, 1), 0)


def test_nothing_moves_when_a_token_is_added() -> None:
    cache = DynamicCache()
    cache.update(*states(5), 0)
    make_room(cache, 2)
    before = cache.layers[0].keys.data_ptr()
    cache.update(*states(1), 0)
    assert cache.layers[0].keys.data_ptr() == before


def test_layers_of_other_kinds_stay_as_they_are() -> None:
    cache = DynamicCache()
    cache.layers = [DynamicSlidingWindowLayer(sliding_window=4)]
    cache.update(*states(2), 0)
    make_room(cache, 3)
    assert type(cache.layers[0]) is DynamicSlidingWindowLayer
