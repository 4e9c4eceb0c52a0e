"""Training on the device: the loop with three arms, again bit for bit, interrupted and resumed; the policy's verbs."""

from __future__ import annotations

import math

import pytest
import torch

from moe_rl.config import Optimizer
from moe_rl.models import vocabulary
from moe_rl.policies import hf
from moe_rl.policies.hf import HFPolicy
from moe_rl.routing.router_noise import Noise
from moe_rl.storage import frames
from tests.conftest import build
from tests.gpu.conftest import DEVICE, DRY, DTYPES, NEEDS_GPU, on_device, short
from tests.policies.test_hf import GRPO, make_batch, part_of
from tests.policies.test_micro_batches import CLOSE
from tests.test_trainer import ARMS, TINY, carry_out, weights, whole_and_cut

pytestmark = [NEEDS_GPU, pytest.mark.usefixtures("repeatable"), pytest.mark.filterwarnings("ignore:.*deterministic")]
RUN = TINY.replace(steps=3, **{"model.device": DEVICE, "measure.detail_every": 1})
FAMILIES = ("qwen3_moe", "deepseek_v3")
BATCH = {"prompts": 4, "group": 3} if DRY else {"prompts": 16, "group": 8}


def policy_of(family="qwen3_moe", dtype=torch.float32, seed=0, **settings):
    return HFPolicy(on_device(build(family, seed), dtype), Optimizer(lr=1e-3), **settings)


def copied(policy):
    return {name: tensor.clone() for name, tensor in policy.weights()}


def assert_same(one, other):
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# ---------------------------------------------------------------------- the loop
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("arm", ["grpo", "replay", "gspo"])
def test_three_steps_of_an_arm(arm, dtype, tmp_path, report):
    found = carry_out(RUN.replace(arm=ARMS[arm], **{"model.dtype": short(dtype)}), tmp_path / "run")
    steps, updates = found["steps"].query("step > 0"), found["updates"]
    assert len(steps) == 3 and len(updates) == 3 * RUN.mini_batches
    for column in (
        "reward",
        "grad_norm",
        "expert_change_rate",
        "replay_gap_max",
        "noise_floor_any_change_rate",
        "engine_kl_k3",
    ):
        assert steps[column].map(math.isfinite).all(), column
    idle = updates["grad_norm"] == 0  # where GSPO clips all that has an advantage
    assert not idle.all() and not (updates["clip_tokens"][idle] < 1).any()
    assert arm == "gspo" or not idle.any()
    if arm == "replay":
        assert (updates["coverage"] == 1).all()
    name = f"{arm}, {short(dtype)}"
    for column in (
        "first_update_log_ratio_max",
        "engine_logprob_max",
        "noise_floor_logprob",
        "noise_floor_any_change_rate",
    ):
        report(f"{name}: {column}", float(steps[column].max()))
    if dtype == torch.float32:
        assert (steps["first_update_log_ratio_max"] < 1e-5).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_two_runs_are_bit_equal(dtype, tmp_path):
    run = RUN.replace(steps=2, arm=ARMS["replay"], **{"model.dtype": short(dtype)})
    for name in ("one", "two"):
        carry_out(run, tmp_path / name)
    assert frames.diff(tmp_path / "one", tmp_path / "two") is None
    assert weights(tmp_path / "one")[1] == weights(tmp_path / "two")[1]


def test_an_interrupted_run_ends_bit_identical(tmp_path):
    whole_and_cut(TINY.replace(**{"model.device": DEVICE, "model.dtype": "bfloat16"}), tmp_path)


# ---------------------------------------------------------------------- the verbs of the policy
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("form", ["weights", "choice", "other_weights"])
def test_a_dose_gives_the_weights_back_bit_for_bit(form, dtype):
    policy, batch = policy_of(dtype=dtype), make_batch(**BATCH)
    unconstrained = policy.score(batch)
    policy.update(part_of(batch, unconstrained), GRPO)
    before, unconstrained = copied(policy), policy.score(batch)
    for direction in ("random", "last_step"):
        noise = Noise(form, 2.0, 5, direction)
        moved = policy.score(batch, noise=noise)
        assert moved.routes != unconstrained.routes, "a dose that changes nothing would show nothing"
        assert_same(before, copied(policy))
        again = policy.score(batch)
        assert torch.equal(again.logprobs, unconstrained.logprobs) and again.routes == unconstrained.routes
        replayed, dosed = (policy.score(batch, unconstrained.routes, noise=d) for d in (None, noise))
        assert dosed.routes == unconstrained.routes
        assert form != "choice" or torch.equal(dosed.logprobs, replayed.logprobs), "replay is immune to a choice"
    frozen = policy_of(dtype=dtype)
    frozen.settings = frozen.settings.replace(lr=0.0)
    before = copied(frozen)
    frozen.update(part_of(batch, unconstrained), GRPO, noise=Noise(form, 2.0, 5))
    assert_same(before, copied(frozen))


def test_on_every_device_a_dose_has_the_same_direction():
    here, there = build("qwen3_moe"), on_device(build("qwen3_moe"), torch.float32)
    batch = make_batch(**BATCH)
    noise = Noise("weights", 1.0, 5)
    one, two = (HFPolicy(model, Optimizer()).score(batch, noise=noise) for model in (here, there))
    torch.testing.assert_close(one.logprobs, two.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_of_tokens_and_logits_in_pieces(family, monkeypatch):
    batch = make_batch(**BATCH)
    plain, budgeted = (policy_of(family, micro_batch_tokens=budget) for budget in (None, 20))
    old = plain.score(batch, scores=True)
    part = part_of(batch, old, old.routes)
    gradient = plain.gradient(part, GRPO)
    for size in (vocabulary.LOGITS, 200):
        monkeypatch.setattr(hf, "LOGITS", size)
        monkeypatch.setattr(vocabulary, "LOGITS", size)
        new = budgeted.score(batch, scores=True)
        torch.testing.assert_close(new.logprobs, old.logprobs, **CLOSE)
        torch.testing.assert_close(new.entropy, old.entropy, **CLOSE)
        assert new.routes == old.routes and new.logprobs.device == batch.tokens.device
        torch.testing.assert_close(budgeted.gradient(part, GRPO), gradient, atol=1e-6, rtol=1e-4)
