"""No tensor of the CPU meets one of the model's device, anywhere in a step. `make test-gpu` runs the same on a card."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from moe_rl.config import Arm, Optimizer
from moe_rl.models import vocabulary
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.objectives import objective_of
from moe_rl.policies import hf
from moe_rl.policies.critic import HFCritic
from moe_rl.policies.hf import HFPolicy
from moe_rl.registry import Component
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing import record_routing, replay_routing
from moe_rl.routing.router_noise import Noise
from moe_rl.types import Prompt, Sampling
from tests.conftest import build
from tests.policies.test_hf import GRPO, make_batch, part_of
from tests.second_device import DEVICE, There, moved, second_device

PROMPTS = [Prompt("", tokens=(3, 4, 5)), Prompt("", tokens=(6,))]


def made():
    """With an attention that every device computes alike."""
    model = build("qwen3_moe")
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def plain():
    """The same on the CPU, with the model's own operators."""
    model = made()
    return model, HFPolicy(model, Optimizer(lr=1e-3))


@pytest.fixture
def there(monkeypatch):
    """A model on the second device, where fused optimizers exist too."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim") and hasattr(module, "_get_fused_kernels_supported_devices"):
            monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["cpu", DEVICE])
    with second_device():
        yield moved(made())


def test_the_second_device_refuses_what_cuda_refuses():
    with second_device():
        x, here = torch.arange(6.0).to(DEVICE), torch.arange(6)
        assert isinstance(x, There) and isinstance(x + 1, There) and not isinstance(x.cpu(), There)
        assert x[here[:2]].tolist() == [0, 1] and float((x + torch.tensor(1.0)).sum()) == 21
        with pytest.raises(RuntimeError, match="two devices"):
            x + here
        with pytest.raises(RuntimeError, match="two devices"):
            here[x.long()]
        with pytest.raises(RuntimeError, match="two devices"):
            torch.where(here > 1, x, 0)
        with pytest.raises(RuntimeError, match="two devices"):
            x[here] = torch.zeros(6)
        with pytest.raises((RuntimeError, TypeError)):
            x.numpy()


def test_traces_of_one_device_are_compared_aligned_and_replayed_on_the_other(there):
    tokens = torch.randint(3, 48, (4, 9))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, -2:] = False
    with torch.no_grad(), record_routing(there, scores=True) as recording:
        there(tokens.to(DEVICE))
    trace = recording.trace(tokens.to(DEVICE), mask.to(DEVICE))
    here = trace.to("cpu")
    assert recording.trace(tokens, mask) == here and not isinstance(recording.trace(tokens, mask).experts, There)
    with replay_routing(there, here) as replay:
        there(tokens.to(DEVICE)).logits.logsumexp(-1).sum().backward()
    assert replay.preferred.agreement(here) == here.agreement(trace) == 1
    assert trace == here and here == trace and bool(here.same_sets(trace).all())
    assert here.align(trace.attention_mask) == here
    assert isinstance(replay.preferred.tokens, There)


def test_what_a_policy_scores_is_on_the_cpu_and_the_same(there, plain):
    batch = make_batch()
    policy, other = HFPolicy(there, Optimizer()), plain[1]
    mine, theirs = (one.score(batch, scores=True) for one in (policy, other))
    assert torch.equal(mine.logprobs, theirs.logprobs) and mine.routes == theirs.routes
    found = [*vars(mine).values(), *vars(mine.scores).values(), mine.routes.experts]
    assert not any(isinstance(x, There) for x in found)


@pytest.mark.parametrize(
    "arm",
    [
        Arm(name="replay", routes="old_policy"),
        Arm(
            name="router",
            loss=Component("rspo", base="gspo"),
            terms=(
                Component("router_kl", coef=0.1),
                Component("load_balance", coef=0.1),
                Component("entropy", coef=0.1),
            ),
        ),
        Arm(name="marks", loss="clip_cov"),
    ],
    ids=lambda arm: arm.name,
)
def test_updates(arm, there, monkeypatch):
    objective, batch = objective_of(arm), make_batch()
    policy = HFPolicy(there, Optimizer(lr=1e-3), micro_batch_tokens=40)
    monkeypatch.setattr(hf, "LOGITS", 200)
    monkeypatch.setattr(vocabulary, "LOGITS", 200)
    old = policy.score(batch, scores=True)
    routes = old.routes if arm.routes.name == "old_policy" else None
    part = objective.attach_weights(replace(batch, old_logprobs=old.logprobs, old_scores=old.scores, routes=routes))
    if "mini_batch" in objective.needs:
        part = objective.attach_statistics(part, old.logprobs, old.entropy)
    updated = policy.update(part, objective)
    assert updated.grad_norm > 0 and not isinstance(updated.logprobs, There)


def test_doses_and_the_critic(there):
    batch, policy = make_batch(), HFPolicy(there, Optimizer(lr=1e-3))
    old = policy.score(batch)
    policy.update(part_of(batch, old), GRPO)
    for form in ("weights", "choice", "other_weights"):
        for direction in ("random", "last_step"):
            assert policy.score(batch, noise=Noise(form, 1.0, 3, direction)).logprobs.isfinite().all()
    critic = HFCritic(there, Optimizer(lr=1e-3))
    values = critic.values(batch)
    assert not isinstance(values, There)
    found = critic.update(replace(part_of(batch, old), values=values, returns=values + 1))
    assert found["value_loss"] > 0


def test_engines(there, plain):
    tokenizer, asked = byte_tokenizer(48), Sampling(max_new_tokens=4, stop=("A",))
    engine = HFEngine(there, tokenizer)
    found = engine.generate(PROMPTS, 2, key=(0,), sampling=asked)
    expected = HFEngine(plain[0], tokenizer).generate(PROMPTS, 2, key=(0,), sampling=asked)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    assert not any(isinstance(x, There) for r in found for x in (r.logprobs, r.routes.experts))
    engine.load(plain[0].state_dict().items())
