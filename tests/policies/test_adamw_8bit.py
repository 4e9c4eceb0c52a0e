"""torchao's AdamW with moments of 8 bits: small steps arrive in bfloat16 weights on average."""

from __future__ import annotations

import pytest
import torch

from moe_rl.config import ModelConfig, Optimizer, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.models.load import skeleton
from moe_rl.models.master_weights import TrainedWeights
from moe_rl.models.memory import estimate_memory, measure_sizes
from moe_rl.objectives.methods import arm
from moe_rl.policies.optimizer import adamw_8bit, take_step
from moe_rl.registry import Component
from moe_rl.routing.moe_layers import router_parameters
from tests.policies.test_master_weights import masters, narrow, policy_of, update

pytest.importorskip("torchao")
EIGHT = Optimizer(name="adamw_8bit", lr=1e-3, grad_clip=0)


def trained(dtype: torch.dtype, keeps: bool, size: int = 8192) -> tuple:
    """A layer of ones, its weights and its optimizer."""
    layer = torch.nn.Linear(size, 1, bias=False, dtype=dtype)
    layer.weight.data.fill_(1)
    weights = TrainedWeights(layer, keeps)
    groups = [{"params": weights.parameters(), "scale": 1.0}]
    return layer, weights, adamw_8bit()(groups, lr=EIGHT.lr, eps=EIGHT.eps)


def step(layer, weights, optimizer, update: int, settings: Optimizer = EIGHT) -> None:
    layer(torch.ones(1, layer.in_features, dtype=layer.weight.dtype)).sum().backward()
    take_step(weights, optimizer, settings, update)


def test_steps_below_the_spacing_of_bfloat16_arrive_on_average():
    """64 steps of −1e-4 at a weight of 1, where bfloat16 has 2⁻⁸ below it: rounding to the nearest loses them all."""
    parts = trained(torch.bfloat16, keeps=False)
    for t in range(64):
        step(*parts, t + 1, EIGHT.replace(lr=1e-4))
    moved = 1 - parts[0].weight.float()
    assert moved.mean().item() == pytest.approx(64e-4, rel=0.05), "8,192 weights: standard error 1 %"
    assert len(moved.unique()) > 2, "each weight is rounded by itself"


@pytest.mark.parametrize("dtype, keeps", [(torch.float32, False), (torch.bfloat16, True)])
def test_float32_weights_and_masters_follow_adamw(dtype, keeps):
    """With equal gradients a step is −lr, as in AdamW of 32 bits,."""
    parts = trained(dtype, keeps)
    settings = EIGHT.replace(warmup=2)
    for t in (1, 2):
        step(*parts, t, settings)
    (weight,) = parts[1].parameters()
    torch.testing.assert_close(weight, torch.full_like(weight, 1 - 1.5e-3), rtol=0, atol=2e-5)
    assert type(parts[2].state[weight]["exp_avg"]).__name__ == "OptimState8bit"


def test_every_group_has_its_rate_and_the_settings_of_the_optimizer():
    """Routers at a scale of 0 stay as they are, at the start of a warm-up and after it."""
    policy = policy_of(optimizer=EIGHT.replace(router_lr_scale=0.0, betas=(0.8, 0.9), eps=1e-6), master_weights=False)
    routers = [p.detach().clone() for p in router_parameters(policy.model)]
    before = narrow(policy)
    update(policy)
    assert all(torch.equal(a, b) for a, b in zip(routers, router_parameters(policy.model), strict=True))
    assert not torch.equal(before, narrow(policy))
    assert {(group["betas"], group["eps"]) for group in policy.optimizer.param_groups} == {((0.8, 0.9), 1e-6)}


def test_rounding_leaves_the_global_generator_alone_and_follows_the_gradients():
    """Two seeds of a study have other gradients, so their weights are rounded by other draws."""
    drawn = []
    for factor in (1.0, 2.0):
        layer, weights, optimizer = trained(torch.bfloat16, keeps=False)
        layer(torch.full((1, 8192), factor, dtype=torch.bfloat16)).sum().backward()
        torch.manual_seed(7)
        take_step(weights, optimizer, EIGHT, 1)
        drawn.append((torch.rand(2), layer.weight.detach().clone()))
    torch.manual_seed(7)
    assert torch.equal(drawn[0][0], torch.rand(2)) and torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][1], drawn[1][1])


@pytest.mark.parametrize("keeps", [True, False])
def test_a_loaded_policy_goes_on_to_the_bit(keeps, tmp_path, recwarn):
    one, other = (policy_of(seed=seed, master_weights=keeps, optimizer=EIGHT) for seed in (0, 1))
    update(one)
    assert not [w for w in recwarn if "master_weights" in str(w.message)], "no step is lost"
    one.save(tmp_path)
    other.load(tmp_path)
    for policy in (one, other):
        update(policy, 1)
    assert torch.equal(masters(one), masters(other)) and torch.equal(narrow(one), narrow(other))


def test_the_estimate_counts_bytes_of_a_parameter():
    """2 of the weight, 2 of the moments, 2 of the gradient; with masters 4 more, and gradients of 4."""
    model = ModelConfig(dtype="bfloat16")
    sizes = measure_sizes(skeleton(model))
    for keeps, expected in ((False, 6), (True, 12)):
        run = RunConfig(arm=arm("grpo"), model=model, policy=Component("hf", master_weights=keeps), optimizer=EIGHT)
        states = estimate_memory(run, sizes, 32)["update"]["weights, gradients, optimizer"]
        assert states == expected * sizes.parameters


@pytest.mark.parametrize("policy", ["fsdp", "megatron"])
def test_policies_of_several_processes_refuse_it(policy):
    from moe_rl.integrations.on_ranks import check_spread

    with pytest.raises(ConfigError, match="adamw_8bit"):
        check_spread(RunConfig(arm=arm("grpo"), policy=Component(policy), optimizer=EIGHT), "")
