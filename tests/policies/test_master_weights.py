"""Float32 masters of bfloat16 weights: what is trained, what is added up where, and what a checkpoint holds."""

from __future__ import annotations

import copy

import pytest
import torch

from moe_rl.config import ModelConfig, Optimizer
from moe_rl.errors import RunError
from moe_rl.models.load import keep_routers_in, load
from moe_rl.policies.hf import HFPolicy
from moe_rl.policies.optimizer import TrainedWeights, make_optimizer, take_step
from moe_rl.routing.router_noise import Noise
from tests.conftest import build
from tests.policies.test_hf import GRPO, make_batch, part_of

NARROW = ModelConfig(dtype="bfloat16")


def policy_of(lr=1e-3, seed=0, optimizer=None, **settings):
    """A fresh policy of the embedded model in bfloat16."""
    return HFPolicy(load(NARROW, seed).model, optimizer or Optimizer(lr=lr), **settings)


def update(policy, seed=0, noise=None):
    batch = make_batch(seed=seed)
    return policy.update(part_of(batch, policy.score(batch)), GRPO, noise)


def flat(tensors):
    return torch.cat([x.detach().flatten().float() for x in tensors])


def narrow(policy):
    """What the model computes with, copied."""
    return flat(policy.model.parameters()).clone()


def masters(policy):
    return flat(policy.trained.parameters()).clone()


@pytest.mark.parametrize("lr", [1e-6, 1e-5])
def test_small_steps_move_the_masters_and_are_lost_in_narrow_weights(lr):
    with_masters, without = policy_of(lr), policy_of(lr, master_weights=False)
    start = masters(with_masters)
    for seed in range(5):
        for policy in (with_masters, without):
            update(policy, seed)
    moved = {
        "masters": masters(with_masters) != start,
        "their model": narrow(with_masters) != start,
        "without": narrow(without) != start,
    }
    print(lr, {name: changed.float().mean().item() for name, changed in moved.items()})
    trained = moved["masters"].float().mean()  # all that a gradient reaches: an expert without a token has none
    assert trained > 0.8 and moved["without"].float().mean() < 0.05
    assert torch.equal(narrow(with_masters), masters(with_masters).bfloat16().float())


def test_many_steps_that_bfloat16_loses_one_by_one_arrive():
    """Steps of 2⁻¹⁰ at a weight of 1, where bfloat16 has 2⁻⁷: 64 of them are 2⁻⁴ with masters, and 0 without."""
    for keeps, expected in ((True, 1 - 2**-4), (False, 1.0)):
        layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        layer.weight.data.fill_(1)
        weights = TrainedWeights(layer, keeps)
        sgd = torch.optim.SGD([{"params": weights.parameters(), "scale": 1.0}])
        for step in range(64):
            layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
            take_step(weights, sgd, Optimizer(lr=2**-10, grad_clip=0), step + 1)
        assert layer.weight.item() == expected


def test_gradients_of_micro_batches_add_up_in_float32():
    """256 + 1 is 256 in bfloat16."""
    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    weights = TrainedWeights(layer)
    for x in (256.0, 1.0):
        layer(torch.full((1, 1), x, dtype=torch.bfloat16)).sum().backward()
        assert layer.weight.grad is None, "freed at once"
    assert [p.grad.item() for p in weights.parameters()] == [257.0]


def test_a_loaded_policy_goes_on_to_the_bit(tmp_path):
    """`load_state_dict` casts moments to the dtype of what they are of, which must be float32."""
    one = policy_of(1e-5)
    update(one)
    one.save(tmp_path)
    other = policy_of(1e-5, seed=1)
    other.load(tmp_path)
    assert torch.equal(masters(one), masters(other)) and torch.equal(narrow(one), narrow(other))
    assert not torch.equal(masters(one), narrow(one)), "the file of weights alone would not do"
    assert all(state["exp_avg_sq"].dtype == torch.float32 for state in other.optimizer.state.values())
    for policy in (one, other):
        update(policy, 1)
    assert torch.equal(masters(one), masters(other))


@pytest.mark.parametrize("writes", [True, False])
def test_a_checkpoint_with_and_one_without_masters_are_told_apart(writes, tmp_path):
    policy_of(master_weights=writes).save(tmp_path)
    with pytest.raises(RunError, match="master_weights"):
        policy_of(master_weights=not writes).load(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_what_is_float32_already_has_no_master(family):
    model = build(family).to(torch.bfloat16)
    keep_routers_in(model, torch.float32)
    buffers = {name: x.dtype for name, x in model.named_buffers()}
    policy = HFPolicy(model, Optimizer())
    narrow_ones = [p for p in model.parameters() if p.dtype == torch.bfloat16]
    assert 0 < len(narrow_ones) < len(list(model.parameters()))
    assert [*policy.trained.masters] == narrow_ones
    assert all(p.dtype == torch.float32 for p in policy.trained.parameters())
    update(policy)
    assert {name: x.dtype for name, x in model.named_buffers()} == buffers


def test_a_tied_head_has_one_master():
    policy = policy_of()
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    assert len(policy.trained.parameters()) == len({id(p) for p in policy.model.parameters()})
    update(policy)
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight


def test_float32_weights_are_trained_as_before():
    """The same bits as torch's own AdamW on the model itself."""
    policy = HFPolicy(load(ModelConfig(), 0).model, Optimizer(lr=1e-3))
    assert not policy.trained.masters
    twin = copy.deepcopy(policy.model)
    optimizer = make_optimizer(TrainedWeights(twin), Optimizer(lr=1e-3))
    batch = make_batch()
    part = part_of(batch, policy.score(batch))
    gradient = policy.gradient(part, GRPO)
    at = 0
    for p in twin.parameters():
        p.grad = gradient[at : at + p.numel()].view_as(p).clone()
        at += p.numel()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    optimizer.step()
    found = policy.update(part, GRPO)
    assert "weights_changed" not in found.metrics
    torch.testing.assert_close(narrow(policy), flat(twin.parameters()), atol=1e-7, rtol=0)


@pytest.mark.parametrize("direction", ["random", "last_step"])
def test_noise_moves_narrow_routers_and_is_taken_back_to_the_bit(direction):
    policy, batch = policy_of(), make_batch()
    update(policy)
    before, quiet = narrow(policy), policy.score(batch)
    noisy = policy.score(batch, noise=Noise("weights", 1.0, 0, direction))
    assert (noisy.logprobs - quiet.logprobs).abs().max() > 1e-3
    assert torch.equal(narrow(policy), before)


def test_fsdp2s_mixed_precision_on_one_rank_is_the_oracle(one_rank):
    """It keeps float32 parameters, and casts them for every forward: log-probs are equal to the bit, and so are the
    parameters after three updates of one micro-batch."""
    from moe_rl.integrations.fsdp import FSDPPolicy

    start = load(NARROW, 0)
    ours = HFPolicy(start.model, Optimizer(lr=1e-4))
    wide = ModelConfig(dtype="float32")
    theirs = FSDPPolicy(wide, load(NARROW, 0).weights(), Optimizer(lr=1e-4), compute_dtype="bfloat16")
    for seed in range(3):
        a, b = update(ours, seed), update(theirs, seed)
        assert torch.equal(a.logprobs, b.logprobs)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-6)
    full = flat(x for name, x in theirs.weights() if name != "lm_head.weight")  # tied
    mine = dict(zip((name for name, _ in ours.model.named_parameters()), ours.trained.parameters(), strict=True))
    named = flat(mine[name] for name, _ in theirs.weights() if name in mine)
    torch.testing.assert_close(named, full, atol=1e-7, rtol=1e-6)
