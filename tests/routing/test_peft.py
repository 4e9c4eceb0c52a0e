"""LoRA-wrapped models: the hooks see through the wrapper, and so do the policy, the engine and the trainer."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from moe_rl.errors import RoutingError, RunError
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing import layout_of, record_routing, replay_routing
from moe_rl.routing.moe_layers import router_parameters
from tests.conftest import build
from tests.policies.test_hf import GRPO, make_batch, part_of, policy_of
from tests.routing.test_families import gradients, watched
from tests.routing.test_hooks import record

ADAPTERS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "router": {"target_parameters": ["mlp.gate.weight"]},
    "whole router": {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
}


def wrap(model, kind="attention"):
    """The model with fresh adapters, which change nothing yet."""
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **ADAPTERS[kind])).eval()


def move(model, scale=0.5):
    """Move every trained weight, so that the adapters act."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


@pytest.fixture(params=ADAPTERS)
def kind(request):
    return request.param


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_an_adapted_model_has_the_moe_layers_and_routes_of_the_plain_one(family, tokens):
    plain = build(family)
    trace, logits = record(plain, tokens)
    target = "mlp.experts.down_proj"
    adapted = get_peft_model(plain, LoraConfig(r=2, target_modules=["o_proj"], target_parameters=[target])).eval()
    assert layout_of(adapted) == trace.layout
    again, same = record(adapted, tokens)
    assert again == trace
    torch.testing.assert_close(same, logits, rtol=1e-5, atol=1e-5)


def test_replay_forces_the_routes_of_before_on_adapters_that_moved(kind, tokens):
    plain = build("qwen3_moe")
    trace, _ = record(plain, tokens)
    model = wrap(plain, kind)
    move(model)
    live, logits = record(model, tokens)
    assert not live.same_sets(trace).all()
    with watched(model.get_base_model()) as seen, torch.no_grad(), replay_routing(model, trace):
        model(tokens)
    for moe_layer, here in enumerate(seen):
        assert torch.equal(here.router[2][2], trace.ids()[:, :, moe_layer].flatten(0, 1))
    with torch.no_grad(), replay_routing(model, live):
        assert torch.equal(model(tokens).logits, logits)


def switched_off(model):
    model.base_model.disable_adapter_layers()


def other_adapter(model):
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")


@pytest.mark.parametrize("change", [switched_off, other_adapter])
def test_adapters_that_change_inside_a_block_are_right_or_refused(kind, change, tokens):
    model = wrap(build("qwen3_moe"), kind)
    trace, _ = record(model, tokens)
    if change is other_adapter and kind in ("experts", "router"):
        pytest.skip("PEFT allows one adapter on parameters")
    with torch.no_grad(), replay_routing(model, trace), record_routing(model) as recording:
        model(tokens)
        change(model)
        recording.clear()
        if kind == "whole router":
            with pytest.raises(RoutingError, match=r"layers\.0\.mlp\.gate ran 0 times"):
                model(tokens)
            return
        model(tokens)
    assert recording.trace(tokens) == trace


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_checkpointing_recomputes_under_the_same_routes(kind, mode, tokens):
    plain = build("qwen3_moe")
    trace, _ = record(plain, tokens)
    model = wrap(plain, kind)
    move(model)
    without, checkpointed = (gradients(model, tokens, trace, how) for how in (None, mode))
    assert without.keys() == checkpointed.keys() != set()
    for name in without:
        assert torch.equal(without[name], checkpointed[name]), name


def test_router_parameters_are_the_adapters_on_the_router(kind):
    model = wrap(build("qwen3_moe"), kind)
    routers = {id(p) for p in router_parameters(model)}
    trained = {n for n, p in model.named_parameters() if p.requires_grad and id(p) in routers}
    expected = {n for n, p in model.named_parameters() if p.requires_grad and ".gate." in n}
    assert trained == expected
    assert bool(trained) == (kind in ("router", "whole router"))


def test_a_policy_trains_the_adapters_alone_and_an_engine_on_its_module_needs_no_copy(kind):
    model = wrap(build("qwen3_moe"), kind)
    policy, batch = policy_of(model), make_batch()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    unconstrained = policy.score(batch)
    updated = policy.update(part_of(batch, unconstrained, unconstrained.routes), GRPO)
    assert (updated.logprobs - unconstrained.logprobs).abs().max() < 1e-5
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and moved <= {n for n, p in model.named_parameters() if p.requires_grad}
    mine = {name: w.clone() for name, w in model.state_dict().items()}
    HFEngine(model, byte_tokenizer()).load(policy.weights())
    assert all(torch.equal(w, mine[name]) for name, w in model.state_dict().items())
    with pytest.raises(RunError, match="lm_head.weight"):
        HFEngine(build("qwen3_moe"), byte_tokenizer()).load(policy.weights())
