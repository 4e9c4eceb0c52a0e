"""The routes an update may replay, and that placebos carry nothing about the tokens they are forced on."""

from __future__ import annotations

import pytest
import torch

from moe_rl.errors import RoutingError
from moe_rl.routing import RoutingTrace
from moe_rl.routing.sources import live, old_policy, random_sets, rollout, shuffled
from moe_rl.types import Batch, Scored
from tests.routing.test_trace import random_trace


@pytest.fixture
def step():
    """Three prompts of two rows each, of unequal length."""
    lengths = [5, 4, 3, 5, 2, 5]
    routes = random_trace(batch=6, lengths=lengths)
    zeros = torch.zeros(6, 5)
    batch = Batch(routes.tokens.long(), routes.attention_mask, routes.attention_mask, torch.tensor([0, 0, 1, 1, 2, 2]),
                  zeros, zeros[:, 0], zeros[:, 0], routes.attention_mask[:, 0], rollout_routes=routes)
    return batch, Scored(zeros, zeros, routes)


def test_live_replays_nothing_and_old_policy_its_own_routes(step):
    assert live(*step) is None
    assert old_policy(*step) is step[1].routes
    assert rollout(*step) is step[0].rollout_routes


def test_shuffled_routes_come_from_another_prompt_at_the_same_position(step):
    batch, natural = step
    forced = shuffled(batch, natural)
    for b in range(6):
        donors = [
            d for d in range(6)
            if batch.prompt_index[d] != batch.prompt_index[b]
            and torch.equal(forced.known[b], natural.routes.known[d] & natural.routes.attention_mask[b, :, None])
            and torch.equal(forced.experts[b][forced.known[b]], natural.routes.experts[d][forced.known[b]])
        ]  # fmt: skip
        assert donors, b
    assert torch.equal(forced.tokens, natural.routes.tokens), "replay checks tokens: the trace speaks of these rows"


def test_shuffled_needs_two_prompts(step):
    batch, natural = step
    with pytest.raises(RoutingError, match="only one"):
        shuffled(batch.rows(slice(0, 2)), natural.rows(slice(0, 2), 5))


def test_random_sets_are_valid_routes_wherever_routes_are_known(step):
    batch, natural = step
    forced = random_sets(batch, natural)
    RoutingTrace.from_ids(forced.ids(), forced.layout)  # distinct and in range, or it raises
    assert torch.equal(forced.known, natural.routes.known)
    assert random_sets(batch, natural) == forced
    assert random_sets(batch, natural, seed=1) != forced
