"""Engine mismatch: what each setting does to weights, and that the measured gap follows it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.build import build
from moe_rl.config import Arm
from moe_rl.policies.hf import HFPolicy
from moe_rl.recorder import engine_row
from moe_rl.registry import Component
from moe_rl.rollouts.hf import HFEngine
from moe_rl.rollouts.mismatch import MismatchedEngine, to_int8_and_back, with_noise
from moe_rl.routing import RoutingTrace
from moe_rl.trainer import sample
from tests.test_trainer import TINY, carry_out

WIDE = TINY.replace(prompts_per_step=16, max_new_tokens=12)


def gap(tmp_path, **settings):
    """One batch from the engine that `settings` describe, against the policy."""
    run = WIDE.replace(engine=Component("perturbed" if settings else "hf", **settings))
    parts = build(run, tmp_path, tmp_path)
    parts.collector.engine.load(parts.policy.weights())
    batch = sample(parts, 1)
    row, moe_layers = engine_row(batch, parts.policy.score(batch))
    return parts, row, moe_layers


def test_without_settings_the_policys_own_module_samples(tmp_path):
    parts, row, moe_layers = gap(tmp_path)
    assert type(parts.collector.engine) is HFEngine and parts.collector.engine.model is parts.policy.model
    assert row["engine_logprob_max"] < 1e-5 and row["engine_kl_k3"] < 1e-9 and row["engine_beyond_2"] == 0
    assert row["engine_any_change_rate"] == row["engine_unknown"] == 0
    assert [moe_layer["engine_any_change_rate"] for moe_layer in moe_layers] == [0, 0]


def test_eight_bits_by_hand():
    weight = torch.tensor([[127.0, 50.4, -0.6, 0.4], [0.0, 0.0, 0.0, 0.0], [1.0, -0.5, 0.25, 0.0]])
    expected = [[127, 50, -1, 0], [0, 0, 0, 0], [1, -64 / 127, 32 / 127, 0]]
    np.testing.assert_allclose(to_int8_and_back(weight).numpy(), expected, rtol=1e-6)
    codes = to_int8_and_back(torch.randn(3, 5, 64)) * 0 + 1
    assert codes.shape == (3, 5, 64)


def test_router_noise_has_the_scale_asked_for_and_follows_the_weights():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 3
    noise = with_noise(weight, 0.1) - weight
    assert abs(noise.std() / weight.std() - 0.1) < 0.002
    assert torch.equal(with_noise(weight, 0.1), with_noise(weight.clone(), 0.1)), "a resumed run meets the same noise"
    other = with_noise(weight + 1e-3, 0.1) - (weight + 1e-3)
    assert abs(torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]) < 0.03
    assert with_noise(weight, 0.0) is weight


DIAL = [{"dtype": "bfloat16"}, {"int8": True}, {"router_noise": 0.05}, {"dtype": "bfloat16", "experts": "eager"}]


@pytest.mark.parametrize("settings", DIAL)
def test_every_setting_of_the_dial_is_seen_in_the_gap(tmp_path, settings):
    parts, row, moe_layers = gap(tmp_path, **settings)
    assert parts.collector.engine.model is not parts.policy.model
    assert row["engine_logprob_mean"] > 1e-4 and row["engine_kl_k3"] > 0
    assert 0 < row["engine_any_change_rate"] < 0.5 and row["engine_unknown"] == 0
    assert sum(moe_layer["engine_any_change_rate"] for moe_layer in moe_layers) > 0


def test_another_implementation_of_the_experts_agrees_in_float32(tmp_path):
    parts, row, _ = gap(tmp_path, experts="eager")
    assert parts.collector.engine.model.config._experts_implementation == "eager"
    assert parts.policy.model.config._experts_implementation != "eager"
    assert row["engine_logprob_max"] < 1e-5


def test_the_copy_follows_the_policy_and_the_policy_never_follows_the_copy(tmp_path):
    parts, _, _ = gap(tmp_path, router_noise=0.5, int8=True)
    engine: MismatchedEngine = parts.collector.engine
    before = {name: w.clone() for name, w in parts.policy.weights()}
    with torch.no_grad():
        for parameter in parts.policy.model.parameters():
            parameter.add_(0.1)
    engine.load(parts.policy.weights())
    mine, theirs = dict(parts.policy.weights()), engine.model.state_dict()
    for name in mine:
        assert torch.equal(mine[name], before[name] + 0.1)
        kept = "embed" in name or "norm" in name or "lm_head" in name
        assert torch.equal(mine[name], theirs[name]) == kept, name


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_replaying_the_rollouts_routes_removes_what_the_router_noise_adds(tmp_path, noise):
    """R3: the noise is on routers, whose gates still differ; forcing the ids removes most of the gap."""
    arm = Arm(name="r3", routes="rollout")
    run = WIDE.replace(arm=arm, engine=Component("perturbed", router_noise=noise), steps=2)
    steps = carry_out(run, tmp_path / "run")["steps"]
    last = steps.iloc[-1]
    if noise:
        assert last["engine_kl_k3_replayed"] < 0.5 * last["engine_kl_k3_unconstrained"]
    else:
        assert last["engine_logprob_max_unconstrained"] < 1e-5 and last["engine_logprob_max_replayed"] < 1e-5
    assert (steps["first_update_log_ratio_max"].dropna() < 1e-5).all(), "both sides replay the engine's routes"


@pytest.mark.parametrize("by", [0.01, -1.0])
def test_the_noise_floor_of_a_policy_that_scores_padded_rows_otherwise_by_hand(tmp_path, monkeypatch, by):
    """Every log-prob higher by `by` where rows are padded, and every expert of the first MoE layer the next one: sets
    of two of eight are then others."""
    score = HFPolicy.score

    def noisy(self, batch, *args, **settings):
        found = score(self, batch, *args, **settings)
        if batch.response_mask[:, -1].any():
            return found
        ids, layout = found.routes.ids().long(), found.routes.layout
        ids[:, :, 0] = torch.where(ids[:, :, 0] >= 0, (ids[:, :, 0] + 1) % layout.moe_layers[0].num_experts, -1)
        return replace(
            found, logprobs=found.logprobs + by * batch.response_mask, routes=RoutingTrace.from_ids(ids, layout)
        )

    monkeypatch.setattr(HFPolicy, "score", noisy)
    tables = carry_out(WIDE.replace(steps=2), tmp_path / "run")
    step = tables["steps"].iloc[-1]
    assert step["noise_floor_logprob"] == pytest.approx(abs(by), rel=1e-3)
    assert step["noise_floor_kl_k3"] == pytest.approx(np.expm1(by) - by, rel=1e-3)
    assert step["noise_floor_beyond_2"] == (abs(by) > np.log(2))
    assert step["noise_floor_any_layer_change"] == 1 and step["noise_floor_any_change_rate"] == 0.5
    assert tables["layers"].query("step == 2")["noise_floor_any_change_rate"].tolist() == [1, 0]
