"""The arithmetic of memory and operations, beside counts, and beside what a card measured."""

import pytest
import torch
from transformers import AutoModelForCausalLM, OlmoeConfig, Qwen3MoeConfig

from moe_rl.config import Arm, ModelConfig, RunConfig
from moe_rl.models import memory
from moe_rl.models.memory import (
    count_operations,
    describe,
    estimate_memory,
    estimate_peak,
    fit_tokens,
    measure_sizes,
    share_of_peak,
)
from moe_rl.objectives.methods import arm
from moe_rl.registry import Component
from tests.routing import families

RUN = RunConfig(
    arm=Arm(name="grpo"),
    task="running_sums",
    steps=1,
    model=ModelConfig(device="cuda", dtype="bfloat16"),
    prompts_per_step=8,
    group_size=8,
    mini_batches=1,
    micro_batch_tokens=8192,
)


def sizes_of(config):
    with torch.device("meta"):
        return measure_sizes(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


OLMOE = OlmoeConfig(intermediate_size=1024)
"""OLMoE-1B-7B."""
QWEN = Qwen3MoeConfig(
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    vocab_size=151936,
)
"""Qwen3-30B-A3B."""


@pytest.fixture(scope="module")
def olmoe():
    return sizes_of(OLMOE)


@pytest.fixture(scope="module")
def qwen():
    return sizes_of(QWEN)


@pytest.mark.parametrize(
    "checkpointing, tokens, gigabytes", [(True, 8192, 58.5), (True, 32768, 64.6), (False, 8192, 83.8)]
)
def test_an_update_needs_what_a_card_measured(olmoe, checkpointing, tokens, gigabytes):
    """OLMoE-1B-7B on an H200, 64 rows of 512 tokens, AdamW in bfloat16; the allocator does not count the context."""
    run = RUN.replace(
        policy="hf(master_weights=False)", activation_checkpointing=checkpointing, micro_batch_tokens=tokens
    )
    terms = estimate_memory(run, olmoe, 512)["update"]
    assert (sum(terms.values()) - terms["context"]) / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_sizes_are_those_of_the_published_models(olmoe, qwen):
    assert (olmoe.parameters, qwen.parameters) == (6_919_161_856, 30_532_122_624)
    assert (olmoe.inner, qwen.inner, qwen.heads_width, qwen.cached) == (1024, 768, 4096, 2 * 4 * 128)
    assert qwen.active == pytest.approx(3.0e9, rel=0.02)
    assert olmoe.active == pytest.approx(1.28e9 - 50304 * 2048, rel=0.01)


@pytest.mark.parametrize(
    "policy, dtype, ranks, bytes_each",
    [
        ("hf", "float32", 1, 16),
        ("hf", "bfloat16", 1, 18),
        ("hf(master_weights=False)", "bfloat16", 1, 8),
        ("hf(lora=16)", "bfloat16", 1, 2),
        ("fsdp(compute_dtype=bfloat16)", "float32", 8, 2),
        ("fsdp(lora=16)", "bfloat16", 8, 2 / 8),
    ],
)
def test_bytes_a_parameter(qwen, policy, dtype, ranks, bytes_each):
    terms = estimate_memory(RUN.replace(policy=policy, **{"model.dtype": dtype}), qwen, 512, ranks)["update"]
    gathered = 2 * qwen.largest * 2 if policy.startswith("fsdp") else 0
    assert terms["weights, gradients, optimizer"] == bytes_each * qwen.parameters + gathered


def test_operations_by_hand(qwen):
    """Six a parameter and token, and attention: 3.04 B parameters are 18.3, attention over 4,096 tokens 9.7 GFLOP."""
    run = RUN.replace(prompts_per_step=1, group_size=1, mini_batches=1)
    per_token = count_operations(run, qwen, 4096)["update"] / 4096
    assert per_token == pytest.approx(18.25e9 + 9.66e9, rel=0.01)
    again = count_operations(run.replace(activation_checkpointing=True), qwen, 4096)["update"]
    assert again / 4096 == pytest.approx(per_token * 8 / 6)
    for policy in ("hf(lora=16)", "fsdp(lora=16)"):
        adapters = count_operations(run.replace(policy=policy), qwen, 4096)["update"]
        assert adapters / 4096 == pytest.approx(per_token * 4 / 6)


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.model_type)
def test_active_parameters_are_those_that_are_not_experts_and_k_of_every_expert(family):
    """Every supported family has sizes: those of a run on a GPU are computed at every step."""
    model = families.build(family)
    sizes = measure_sizes(model)
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert 0 < sizes.active < sizes.parameters and sizes.inner > 0 and sizes.routed > 0
    assert sizes.heads_width > 0 and sizes.cached > 0


def test_the_most_tokens_that_fit_are_taken(olmoe, monkeypatch):
    """OLMoE with masters: 124 GB of states; an update of 8,192 tokens needs about 130."""
    monkeypatch.setattr(memory, "measure_sizes", lambda model: olmoe)
    run = RUN.replace(micro_batch_tokens=None, activation_checkpointing=True)
    assert [fit_tokens(run, None, gigabytes * 1e9) for gigabytes in (80, 150, 200)] == [1024, 16384, 32768]
    for free in (150e9, 200e9):
        tokens = fit_tokens(run, None, free)
        phases = estimate_memory(run.replace(micro_batch_tokens=tokens), olmoe, tokens)
        assert sum(phases["update"].values()) <= 0.9 * free


@pytest.mark.parametrize(
    "policy, method, bytes_each",
    [
        ("hf", "ppo", 14 + 14 + 4),
        ("hf(lora=16)", "ppo", 2 + 14 + 4),
        ("hf", "grpo+kl(coef=0.01)", 18 + 2),
        ("fsdp", "grpo+kl(coef=0.01)", 16 + 4),
        ("fsdp(master_weights=False)", "grpo+kl(coef=0.01)", 8 + 2),
        ("hf", "ppo+kl(coef=0.01)", 14 + 14 + 4 + 2),
        ("hf(lora=16)", "grpo+kl(coef=0.01)", 2 + 2),
    ],
)
def test_a_critic_is_a_second_model_with_masters_and_a_reference_weights_alone(olmoe, policy, method, bytes_each):
    """A critic has its gradients when the policy has none."""
    run, gathered = RUN.replace(policy=policy, arm=arm(method)), 4 * olmoe.largest * policy.startswith("fsdp")
    terms = estimate_memory(run, olmoe, 512)["update"]
    assert terms["weights, gradients, optimizer"] == bytes_each * olmoe.parameters + gathered


def test_gradients_that_are_summed_once_per_update_are_whole_on_every_rank(olmoe):
    """4 bytes a parameter on every rank, in place of a share of them."""
    once, each = (
        estimate_memory(RUN.replace(policy=Component("fsdp", reduce=reduce)), olmoe, 1024, 8)["update"]
        for reduce in ("update", "micro_batch")
    )
    name = "weights, gradients, optimizer"
    assert once[name] - each[name] == pytest.approx(4 * olmoe.parameters * 7 / 8)


def test_a_policy_that_chooses_no_budget_is_bounded_by_its_rows(olmoe):
    """64 rows of 1,024 tokens: hf would take half of them at a time."""
    run = RUN.replace(micro_batch_tokens=None, micro_batch=64)
    of_rows, of_hf = (
        estimate_memory(run.replace(policy=policy), olmoe, 1024)["update"]["activations"] for policy in ("fsdp", "hf")
    )
    assert of_rows == 2 * of_hf


def test_the_estimate_beside_the_measured_peak_is_of_the_largest_phase_without_the_context(olmoe):
    phases = estimate_memory(RUN.replace(micro_batch_tokens=4096), olmoe, 512)
    largest = max(phases.values(), key=lambda terms: sum(terms.values()))
    assert largest is phases["update"]
    assert estimate_peak(RUN, olmoe, 512, 4096) == sum(largest.values()) - largest["context"]


def test_the_share_of_the_peak_is_operations_over_seconds(qwen):
    assert share_of_peak(RUN, qwen, 512, 2.0) == count_operations(RUN, qwen, 512)["update"] / 2.0 / 989e12


def test_a_dry_run_names_the_largest_term():
    lines = dict(reversed(describe(RUN, 26)))
    assert lines["memory"].startswith("update") and "largest: context" in lines["memory"] and "H100" in lines["step"]
