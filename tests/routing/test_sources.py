"""The routes an update may replay, and that placebos carry nothing about the tokens they are forced on."""

from __future__ import annotations

import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.registry import Component, lookup
from moe_rl.routing import RoutingTrace
from moe_rl.routing.sources import (
    SOURCES,
    live,
    old_policy,
    random_sets,
    random_share,
    rollout,
    shuffled,
    under_noise,
)
from moe_rl.types import Scored
from tests.conftest import build
from tests.objectives.examples import rewarded
from tests.policies.test_hf import make_batch, policy_of
from tests.routing.test_trace import random_trace
from tests.test_trainer import TINY, carry_out


@pytest.fixture
def step():
    """Three prompts of two rows each, of unequal length."""
    lengths = [5, 4, 3, 5, 2, 5]
    routes = random_trace(batch=6, lengths=lengths)
    mask, zeros = routes.attention_mask, torch.zeros(6, 5)
    further = {"tokens": routes.tokens.long(), "attention_mask": mask, "rollout_routes": routes}
    return rewarded([0.0] * 6, [0, 0, 1, 1, 2, 2], mask, **further), Scored(zeros, zeros, routes)


def test_live_replays_nothing_and_old_policy_its_own_routes(step):
    assert live(*step) is None
    assert old_policy(*step) is step[1].routes
    assert rollout(*step) is step[0].rollout_routes


def test_shuffled_routes_come_from_another_prompt_at_the_same_position(step):
    batch, unconstrained = step
    forced = shuffled(batch, unconstrained)
    for b in range(6):
        donors = [
            d
            for d in range(6)
            if batch.prompt_index[d] != batch.prompt_index[b]
            and torch.equal(
                forced.known[b], unconstrained.routes.known[d] & unconstrained.routes.attention_mask[b, :, None]
            )
            and torch.equal(forced.experts[b][forced.known[b]], unconstrained.routes.experts[d][forced.known[b]])
        ]
        assert donors, b
    assert torch.equal(forced.tokens, unconstrained.routes.tokens), (
        "replay checks tokens: the trace speaks of these rows"
    )


def test_shuffled_needs_two_prompts(step):
    batch, unconstrained = step
    with pytest.raises(RoutingError, match="only one"):
        shuffled(batch.rows(slice(0, 2)), unconstrained.rows(slice(0, 2), 5))


def test_random_sets_are_valid_routes_wherever_routes_are_known(step):
    batch, unconstrained = step
    forced = random_sets(batch, unconstrained)
    RoutingTrace.from_ids(forced.ids(), forced.layout)  # distinct and in range, or it raises
    assert torch.equal(forced.known, unconstrained.routes.known)
    assert random_sets(batch, unconstrained) == forced
    assert random_sets(batch, unconstrained, seed=1) != forced


def test_a_dose_of_replay_keeps_a_share_of_the_routes_and_frees_the_rest(step):
    batch, unconstrained = step
    known = unconstrained.routes.known
    assert random_share(batch, unconstrained, share=1.0) is unconstrained.routes
    assert random_share(batch, unconstrained, share=1e-9) is None, "a draw that hits no pair is no replay"
    half = random_share(batch, unconstrained, share=0.5)
    assert 0.3 < half.known.sum() / known.sum() < 0.7
    assert torch.equal(half.experts[half.known], unconstrained.routes.experts[half.known])
    assert random_share(batch, unconstrained, share=0.5) == half


def test_the_ratios_source_gets_the_router_scores_it_needs(tmp_path):
    arm = Arm(name="margins", ratio_routes=Component("by_margin", below=0.5))
    tables = carry_out(TINY.replace(arm=arm, steps=2), tmp_path / "run")
    assert (tables["steps"]["first_update_log_ratio_max"].dropna() < 1e-5).all()


def test_routes_under_noise_are_those_of_moved_routers_the_same_all_step_and_its_ratios_start_at_one(tmp_path):
    policy, batch = policy_of(build("qwen3_moe")), make_batch()
    unconstrained = policy.score(batch)
    found = under_noise(batch, unconstrained, policy.score, sigma=1.0)
    assert found != unconstrained.routes and under_noise(batch, unconstrained, policy.score, sigma=1.0) == found
    assert under_noise(batch, unconstrained, policy.score, sigma=1.0, seed=1) != found
    assert under_noise(batch, unconstrained, policy.score, sigma=0.0) is unconstrained.routes
    with pytest.raises(ConfigError, match="sigma=-1"):
        lookup("route source", Component("under_noise", sigma=-1.0), SOURCES)
    arm = Arm(name="wrong", routes=Component("under_noise", sigma=1.0))
    tables = carry_out(TINY.replace(arm=arm, steps=2), tmp_path / "run")
    assert (tables["steps"]["first_update_log_ratio_max"].dropna() < 1e-5).all()
    assert (tables["updates"]["coverage"] == 1).all() and (tables["updates"]["pull"] > 0.05).all()
