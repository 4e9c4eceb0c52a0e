"""Several processes as one run: what rank 0 does for all, and how its failures reach the others."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from moe_rl import ranks
from moe_rl.errors import Diverged


def once_on_two_ranks(monkeypatch, function):
    """What `from_rank_0(function)` gives or raises on rank 0, and then on rank 1."""
    sent, ends = [], []

    def broadcast(answer, source, group=None):
        if ranks.rank() == source:
            sent[:] = answer
        else:
            answer[:] = sent

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        try:
            ends.append(ranks.from_rank_0(function if rank == "0" else lambda: pytest.fail("rank 1 has no part in it")))
        except (Exception, SystemExit) as error:
            ends.append(error)
    return ends


def test_every_rank_has_what_rank_0_made(monkeypatch):
    assert once_on_two_ranks(monkeypatch, lambda: 3) == [3, 3]


def test_a_divergence_on_rank_0_is_one_on_every_rank(monkeypatch):
    """So that all of them end the run together, its checkpoint included."""

    def diverges():
        raise Diverged("the logits are NaN")

    first, second = once_on_two_ranks(monkeypatch, diverges)
    assert type(first) is type(second) is Diverged and str(second) == "the logits are NaN"


def test_any_other_failure_on_rank_0_ends_the_others(monkeypatch):
    first, second = once_on_two_ranks(monkeypatch, lambda: 1 / 0)
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, SystemExit) and second.code == 2
