"""Compiled parts of every family beside its eager model: parts, graphs, log-probs, routes, gradients."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn

from moe_rl.config import Optimizer
from moe_rl.models.compilation import compile_parts, run_eagerly, try_parts
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.policies.hf import HFPolicy
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing import record_routing, replay_routing
from moe_rl.types import Prompt, Sampling
from tests.gpu.conftest import DEVICE, DRY, NEEDS_GPU, family_on_device
from tests.policies.test_compile import EVERYWHERE
from tests.policies.test_hf import GRPO, make_batch, part_of

pytestmark = NEEDS_GPU
BACKEND = "aot_eager" if DRY else "inductor"
PARTS = {
    "qwen3_moe": EVERYWHERE,
    "olmoe": EVERYWHERE,
    "mixtral": EVERYWHERE,
    "deepseek_v3": EVERYWHERE | {"mlp", "mlp.shared_experts"},
    "gpt_oss": EVERYWHERE,
}
SHAPES = ((2, 7), (1, 1), (3, 11), (1, 20), (2, 2)) if DRY else ((2, 7), (1, 1), (3, 11), (1, 20), (2, 2), (8, 300))


@pytest.fixture(autouse=True)
def fresh_counts():
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def graphs():
    """How many were made; no part may break in two."""
    assert not dynamo.utils.counters["graph_break"]
    return dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.filterwarnings("ignore:Dynamo detected")
@pytest.mark.parametrize("family", PARTS)
def test_compiled_parts_record_replay_and_learn_as_the_eager_model(family, report):
    eager, compiled = (family_on_device(family, torch.bfloat16) for _ in range(2))
    keys = [*compiled.state_dict()]
    parts = try_parts(compiled, compile_parts(compiled, BACKEND), BACKEND)
    assert set(parts) == PARTS[family] and [*compiled.state_dict()] == keys
    assert all(p.grad is None for p in compiled.parameters())
    differing = []
    for seed, shape in enumerate(SHAPES):
        tokens = torch.randint(3, 48, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        outputs = []
        for model in (eager, compiled):
            model.zero_grad()
            with record_routing(model) as recording:
                model(input_ids=tokens, use_cache=False)
            trace = recording.trace(tokens)
            with replay_routing(model, outputs[0][0] if outputs else trace):
                logits = model(input_ids=tokens, use_cache=False).logits
                logits.float().logsumexp(-1).sum().backward()
            outputs.append((trace, logits, *(p.grad for p in model.parameters())))
        (trace, *expected), (own, *ours) = outputs
        differing.append((trace.experts != own.experts).float().mean().item())
        if DRY:
            assert torch.equal(trace.experts, own.experts)
            torch.testing.assert_close(ours, expected)
        else:
            torch.testing.assert_close(ours[0], expected[0], atol=0.1, rtol=0.1)
    assert 0 < graphs() < 64
    report(f"compiled {family}: graphs", graphs())
    report(f"compiled {family}: share of expert ids that differ", max(differing))


@pytest.mark.filterwarnings("ignore:Dynamo detected", "ignore:None of the inputs")
@pytest.mark.parametrize("checkpointing", [False, "non-reentrant"])
def test_a_compiled_policy_scores_and_updates_as_an_eager_one(checkpointing):
    policies = [
        HFPolicy(
            family_on_device("qwen3_moe", torch.bfloat16),
            Optimizer(lr=1e-3),
            compile=backend,
            activation_checkpointing=checkpointing,
        )
        for backend in (None, BACKEND)
    ]
    made = 0
    for seed in range(3):
        batch = make_batch(seed=seed)
        scored = [policy.score(batch) for policy in policies]
        updated = [p.update(part_of(batch, s, s.routes), GRPO) for p, s in zip(policies, scored, strict=True)]
        torch.testing.assert_close(scored[1].logprobs, scored[0].logprobs)
        torch.testing.assert_close(updated[1].logprobs, updated[0].logprobs)
        assert torch.equal(scored[1].routes.experts, scored[0].routes.experts)
        assert (updated[1].logprobs - scored[1].logprobs).abs().max() < 0.02, "ratios begin at 1, up to rounding"
        assert seed < 2 or graphs() == made, "the third update makes no graph"
        made = graphs()
    assert made > 0
    weights = [dict(policy.weights()) for policy in policies]
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, msg=name)


def test_a_part_that_cannot_be_compiled_runs_eagerly_and_is_named():
    class Odd(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            dynamo.graph_break()
            return self.norm(x)

    model = family_on_device("qwen3_moe", torch.float32)
    for layer in model.model.layers:
        layer.input_layernorm = Odd(layer.input_layernorm)
    with pytest.warns(UserWarning, match=r"input_layernorm \(Odd"):
        parts = try_parts(model, compile_parts(model, BACKEND), BACKEND)
    assert set(parts) == {"self_attn", "post_attention_layernorm"}
    assert model.model.layers[0].input_layernorm._compiled_call_impl is None
    tokens = torch.randint(3, 48, (2, 9)).to(DEVICE)
    torch.testing.assert_close(model(tokens).logits, family_on_device("qwen3_moe", torch.float32)(tokens).logits)


def test_decoding_is_eager_and_makes_no_graph():
    model = family_on_device("qwen3_moe", torch.float32)
    try_parts(model, compile_parts(model, BACKEND), BACKEND)
    before = graphs()
    engine = HFEngine(model, byte_tokenizer(258))
    prompts = [Prompt("", tokens=(5, 6, 7)), Prompt("", tokens=(8, 9))]
    engine.generate(prompts, 2, key=(0,), sampling=Sampling(1.0, 6))
    assert graphs() == before
    with run_eagerly(model):
        model(torch.randint(3, 48, (2, 5)).to(DEVICE), use_cache=True)
    assert graphs() == before
