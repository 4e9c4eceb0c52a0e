"""The critic: what its values are of, what a step does, and that runs with it are as sure as runs without."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from moe_rl.build import _critic, build, check
from moe_rl.config import Arm, Optimizer, RunConfig
from moe_rl.errors import ConfigError, Diverged
from moe_rl.models.load import load
from moe_rl.objectives import objective_of
from moe_rl.objectives.methods import arm
from moe_rl.policies import hf
from moe_rl.policies.critic import HFCritic
from moe_rl.registry import Component
from moe_rl.storage.columns import timing
from moe_rl.trainer import warn_void
from tests.conftest import FAMILIES
from tests.conftest import build as tiny
from tests.policies.test_hf import make_batch
from tests.test_trainer import TINY, carry_out, weights, whole_and_cut

SETTINGS_OF = hf.settings_of
PPO = TINY.replace(arm=arm("ppo+gae(critic_lr=2e-3,value_clip=0.2)"), epochs=2, mini_batches=2)


@pytest.fixture
def batch():
    return make_batch()


def critic_of(family="qwen3_moe", seed=0, head=True, **settings):
    critic = HFCritic(tiny(family, seed), Optimizer(**{"lr": 1e-3, **settings.pop("optimizer", {})}), **settings)
    if head:
        with torch.no_grad():
            critic.model["head"].weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
            critic.model["head"].bias.fill_(0.1)
    return critic


def to_learn(batch, critic):
    """The batch as a mini-batch to train on: returns that are off, and some old values that are off, too."""
    values, generator = critic.values(batch), torch.Generator().manual_seed(5)
    off = torch.randn(values.shape, generator=generator).where(batch.response_mask, 0)
    batch = replace(batch, values=values + 0.1 * off.flip(0).where(batch.response_mask, 0), returns=values + off)
    return objective_of(Arm(name="a", aggregate="token_mean")).attach_weights(batch)


def test_the_budget_that_a_policy_chose_is_also_the_critics(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "settings_of", lambda *of: {**SETTINGS_OF(*of), "micro_batch_tokens": 77})
    parts = build(PPO, tmp_path, tmp_path)
    assert parts.critic.micro_batch_tokens == parts.policy.micro_batch_tokens == 77


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_is_of_the_prefix_before_its_token(family, batch):
    """Row by row, without padding, from the last hidden state of a model of its own."""
    critic, model = critic_of(family, micro_batch=2), tiny(family)
    values = critic.values(batch)
    for b in range(len(batch)):
        for t in batch.response_mask[b].nonzero()[:, 0].tolist():
            with torch.no_grad():
                hidden = model(batch.tokens[b : b + 1, :t], output_hidden_states=True).hidden_states[-1][0, -1]
            torch.testing.assert_close(values[b, t], critic.model["head"](hidden)[0], atol=1e-5, rtol=1e-5)
    assert not values[~batch.response_mask].any() and values[batch.response_mask].std() > 0.01
    assert not critic_of(family, head=False).values(batch).any(), "V = 0 at first"


def test_the_first_step_moves_the_head_alone_and_the_next_everything(batch):
    critic = critic_of(head=False)
    part = to_learn(batch, critic)
    before = {name: p.clone() for name, p in critic.model.named_parameters()}
    critic.update(part)
    moved = {name for name, p in critic.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"head.weight", "head.bias"}
    critic.update(part)
    assert len({name for name, p in critic.model.named_parameters() if not torch.equal(p, before[name])}) > 10


def test_a_step_goes_along_the_gradient_of_the_clipped_loss(batch):
    """Against autograd on one forward per row, token by token."""
    critic = critic_of(clip=0.05, optimizer={"grad_clip": 0.0})
    part = to_learn(batch, critic)
    loss, tokens = torch.zeros(()), int(part.response_mask.sum())
    for b, t in part.response_mask.nonzero().tolist():
        hidden = critic.model["body"](part.tokens[b : b + 1, :t]).last_hidden_state[0, -1]
        v, old, goal = critic.model["head"](hidden)[0], part.values[b, t], part.returns[b, t]
        loss = loss + torch.maximum((v - goal) ** 2, (v.clamp(old - 0.05, old + 0.05) - goal) ** 2) / 2 / tokens
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in critic.model.named_parameters() if p.grad is not None}
    before = {name: p.detach().clone() for name, p in critic.model.named_parameters()}
    found = critic.update(part)
    assert found["value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = math.sqrt(sum((g.double() ** 2).sum() for g in gradients.values()))
    assert found["value_grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, p in critic.model.named_parameters():
        if name in gradients and (clear := gradients[name].abs() > 1e-4).any():
            sign = gradients[name].sign()[clear]  # AdamW's first step is -lr · sign(gradient)
            torch.testing.assert_close((p.detach() - before[name])[clear], -1e-3 * sign, atol=2e-5, rtol=1e-2)


def test_explained_variance_is_that_of_returns_and_absent_where_they_are_equal(batch):
    critic = critic_of()
    part = to_learn(batch, critic)
    values, returns = (x[part.response_mask].double() for x in (critic.values(batch), part.returns))
    expected = 1 - (returns - values).var() / returns.var()
    assert critic.update(part)["value_explained_variance"] == pytest.approx(expected.item(), rel=1e-4)
    flat = replace(part, returns=torch.ones_like(part.returns).where(part.response_mask, 0))
    assert "value_explained_variance" not in critic.update(flat)


def test_an_update_does_not_depend_on_the_micro_batch(batch):
    found, rows = [], []
    for micro_batch in (1, 5, 64):
        critic = critic_of(micro_batch=micro_batch, clip=0.05, optimizer={"eps": 1e-3})
        rows.append(critic.update(to_learn(batch, critic)))
        found.append(torch.cat([p.detach().flatten() for p in critic.model.parameters()]))
    for one, row in zip(found[:2], rows[:2], strict=True):
        torch.testing.assert_close(one, found[2], atol=1e-6, rtol=1e-5)
        assert row == pytest.approx(rows[2], rel=1e-5)


def test_activation_checkpointing_changes_no_weight(batch):
    found = []
    for checkpointing in (False, True):
        critic = critic_of(activation_checkpointing=checkpointing)
        critic.update(to_learn(batch, critic))
        found.append(torch.cat([p.detach().flatten() for p in critic.model.parameters()]))
    assert torch.equal(*found)


def test_a_gradient_that_is_not_finite_names_the_critic(batch):
    critic = critic_of()
    part = to_learn(batch, critic)
    with pytest.raises(Diverged, match="critic.* nan.*learning rate"):
        critic.update(replace(part, returns=part.returns * torch.nan))


# ---------------------------------------------------------------------- in a run
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("ppo") / "run"
    return path, carry_out(PPO.replace(steps=3, save_every=1), path)


def test_ppo_trains_and_says_how_the_critic_did(trained):
    _, tables = trained
    updates = tables["updates"]
    assert len(updates) == 3 * 4
    for column in ("loss", "grad_norm", "value_loss", "value_grad_norm", "value_explained_variance"):
        assert updates[column].map(math.isfinite).all(), column
    assert (updates["value_loss"] > 0).all() and (updates["value_explained_variance"] <= 1).all()
    first = updates.iloc[0]
    assert first["value_explained_variance"] == 0, "V = 0 explains nothing"
    assert updates.query("step == 3")["value_loss"].mean() < updates.query("step == 1")["value_loss"].mean()


def critic_bytes(path):
    return next(path.glob("commit/*/checkpoint/critic.safetensors")).read_bytes()


def test_a_killed_run_ends_identical_its_critic_too(tmp_path):
    """Killed at step 3, after a commit at step 2."""
    whole_and_cut(PPO, tmp_path)
    assert critic_bytes(tmp_path / "whole") == critic_bytes(tmp_path / "cut")
    moments = [torch.load(next((tmp_path / name).glob("commit/*/checkpoint/critic.pt"))) for name in ("whole", "cut")]
    assert moments[0]["updates"] == moments[1]["updates"] == 4 * 4
    for number, state in moments[0]["optimizer"]["state"].items():
        assert all(torch.equal(value, moments[1]["optimizer"]["state"][number][name]) for name, value in state.items())


def test_a_critic_that_learns_nothing_is_none(tmp_path):
    """V = 0 for ever: PPO is then `returns`, to the last bit of every other column and of every weight."""
    never = PPO.replace(steps=2, arm=arm("ppo+gae(critic_lr=1e-45)"))
    rewards = PPO.replace(steps=2, arm=PPO.arm.replace(advantage=(Component("returns"),)))
    tables = {name: carry_out(run, tmp_path / name) for name, run in (("gae", never), ("returns", rewards))}
    for name, frame in tables["returns"].items():
        same = tables["gae"][name][list(frame)]
        steady = [c for c in frame if not timing(c)]
        pd.testing.assert_frame_equal(same[steady], frame[steady], check_exact=True)
    assert weights(tmp_path / "gae")[1] == weights(tmp_path / "returns")[1]
    assert not list((tmp_path / "returns").glob("commit/*/checkpoint/critic*"))


def test_a_critic_starts_from_the_policys_weights_and_replay_leaves_it_alone(tmp_path):
    """Its routers route freely under an arm that replays other routes; only π's ratio knows of them."""
    parts = {
        name: build(PPO.replace(arm=PPO.arm.replace(routes=name)), tmp_path / name, tmp_path)
        for name in ("live", "random_sets")
    }
    body = parts["live"].critic.model["body"].state_dict()
    ours = dict(parts["live"].policy.model.base_model.state_dict())
    assert body.keys() == ours.keys() and all(torch.equal(body[name], ours[name]) for name in body)
    assert all(body[name].data_ptr() != ours[name].data_ptr() for name in body)
    for one in parts.values():
        one.collector.engine.close()
    found = []
    for name in parts:
        run = PPO.replace(arm=PPO.arm.replace(routes=name), steps=1, epochs=1, mini_batches=1)
        carry_out(run, tmp_path / "run" / name)
        found.append(load_file(next((tmp_path / "run" / name).glob("commit/*/checkpoint/critic.safetensors"))))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "options, lr, clip",
    [
        ({}, 1.0, math.inf),
        ({"critic_lr": 0.5, "value_clip": 0.25}, 0.5, 0.25),
        ({"value_clip": math.inf}, 1.0, math.inf),
    ],
)
def test_the_advantage_gives_its_options_to_the_critic(options, lr, clip):
    """Its optimizer is AdamW beside the policy's, by default at the policy's learning rate."""
    policy = Optimizer(name="sgd", lr=1.0, warmup=3, grad_clip=0.5, router_lr_scale=0.0, loss_free_bias=1e-3)
    steps = (Component("clipped", at=2.0), Component("gae", **options))
    run = PPO.replace(optimizer=policy, arm=Arm(name="ppo", advantage=steps))
    assert RunConfig.from_dict(run.to_dict()) == run
    critic = _critic(run, load(run.model, 0))
    assert (critic.settings, critic.clip) == (Optimizer(lr=lr, warmup=3, grad_clip=0.5), clip)


def test_a_critic_on_megatron_is_refused():
    with pytest.raises(ConfigError, match="policy='megatron'"):
        check(PPO.replace(policy="megatron", epochs=1))
    assert not [text for text in check(PPO) if "critic" in text]


@pytest.mark.parametrize(
    "text, void",
    [
        ("reinforce_pp", False),
        ("ppo+gae(critic_lr=2e-3)", False),
        ("grpo+advantage=normalized(center=batch,scale=batch)", False),
        ("dr_grpo", True),
        ("rloo", True),
        ("grpo+opo", True),
        ("grpo+advantage=normalized(center=batch)", True),
    ],
)
def test_groups_of_one_are_void_where_a_step_compares_within_groups(text, void):
    said = warn_void(TINY.replace(group_size=1, arm=arm(text)))
    assert any("group_size=1" in one for one in said) is void
