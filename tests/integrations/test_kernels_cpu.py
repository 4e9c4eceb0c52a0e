"""The replaced operators against transformers' own in values and gradients, and where each of them stays out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from moe_rl.integrations.cpu_kernels import experts as experts_cpu
from moe_rl.integrations.cpu_kernels import use_cpu_kernels
from moe_rl.integrations.cpu_kernels.attention import CACHE, replace_attention
from moe_rl.integrations.cpu_kernels.experts import NAME, Pairs
from moe_rl.integrations.cpu_kernels.norms import replace_norms
from moe_rl.metrics.rounding import SUMMED, rounding
from moe_rl.routing import record_routing, replay_routing
from tests.conftest import CPU_KERNELS, FAMILIES, build, perturb

pytestmark = pytest.mark.skipif(not CPU_KERNELS, reason="the library's operators take torch 2.10 and transformers 5.7")


def double(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.double, generator=generator, requires_grad=True)


def gradients(model: nn.Module, tokens: torch.Tensor, **kwargs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False, **kwargs).logits
    weight = torch.linspace(-1, 1, tokens.numel(), dtype=logits.dtype).view_as(tokens)
    (logits.log_softmax(-1)[..., 3] * weight).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_padding_and_a_growing_cache_agree_with_the_models_own(tokens: torch.Tensor) -> None:
    model = build("qwen3_moe")
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[2, :1] = 0

    def decoded() -> list[torch.Tensor]:
        found = []
        with torch.no_grad():
            for given in ({}, {"attention_mask": mask[:, :6]}):
                output = model(input_ids=tokens[:, :6], use_cache=True, **given)
                for t in range(6, 9):
                    more = {"attention_mask": mask[:, : t + 1]} if given else {}
                    found.append(output.logits[:, -1])
                    cache = output.past_key_values
                    output = model(input_ids=tokens[:, t : t + 1], past_key_values=cache, use_cache=True, **more)
                found.append(output.logits[:, -1])
        return found

    own = decoded()
    assert use_cpu_kernels(model)
    for mine, theirs in zip(decoded(), own, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CACHE)
def test_attention_reads_the_cache_under_the_name_of_either_release(name: str) -> None:
    """A layer that missed it would attend to the newest token alone, and say nothing."""
    model = build("qwen3_moe")
    assert replace_attention(model) == len(model.model.layers)
    layer, cache = model.model.layers[0].self_attn, DynamicCache()
    hidden = torch.randn(2, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cos, sin = model.model.rotary_emb(hidden, torch.arange(5)[None])
        whole = layer(hidden, (cos, sin), torch.ones(5, 5, dtype=torch.bool).tril()[None, None])[0]
        for t in range(5):
            last = layer(hidden[:, t : t + 1], (cos[:, t : t + 1], sin[:, t : t + 1]), None, **{name: cache})[0]
    torch.testing.assert_close(last, whole[:, -1:], rtol=0, atol=1e-6)


def test_attention_with_an_argument_that_nobody_here_knows_stays_the_familys_own(monkeypatch, tokens) -> None:
    own = Qwen3MoeAttention.forward

    def newer(self, hidden_states, position_embeddings, attention_mask, memory=None, **kwargs):
        return own(self, hidden_states, position_embeddings, attention_mask, **kwargs)

    monkeypatch.setattr(Qwen3MoeAttention, "forward", newer)
    model = build("qwen3_moe")
    assert use_cpu_kernels(model) and replace_attention(model) == 0
    assert "forward" not in model.model.layers[0].self_attn.__dict__


@pytest.mark.parametrize("reentrant", [False, True])
def test_replay_under_activation_checkpointing_gives_the_gradients_without(reentrant: bool, tokens) -> None:
    model = build("qwen3_moe")
    assert use_cpu_kernels(model)
    with torch.no_grad(), record_routing(model) as recording:
        model(tokens)
    trace = recording.trace(tokens)
    perturb(model)
    with replay_routing(model, trace):
        plain = gradients(model, tokens)[1]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    if reentrant:
        model.enable_input_require_grads()
    with replay_routing(model, trace):
        again = gradients(model, tokens)[1]
    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())


def test_frozen_weights_get_no_gradient_and_take_none_from_others(tokens: torch.Tensor) -> None:
    model = build("qwen3_moe")
    assert use_cpu_kernels(model)
    everything = gradients(model, tokens)[1]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    some = gradients(model, tokens)[1]
    assert some and all("q_proj" in name for name in some)
    assert all(torch.equal(gradient, everything[name]) for name, gradient in some.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_in_another_dtype_computes_with_its_own_operators(family: str, tokens: torch.Tensor) -> None:
    """An engine that samples in bfloat16 is such a copy: norms in bfloat16 would be a mismatch that nobody has."""
    model = build(family)
    own = copy.deepcopy(model)
    assert use_cpu_kernels(model)
    found = []
    for twin in (copy.deepcopy(model), own):
        for parameter in twin.parameters():
            parameter.data = parameter.data.bfloat16()
        found.append(gradients(twin, tokens))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(gradient, found[1][1][name]) for name, gradient in found[0][1].items())


# ---------------------------------------------------------------------- experts
def test_gradients_of_gated_experts_are_central_differences() -> None:
    """4 experts of width 2, the last without tokens."""
    x, up, down = double(3, 4), double(4, 4, 4, seed=1), double(4, 4, 2, seed=2)
    weight = torch.rand(3, 2, dtype=torch.double, generator=torch.Generator().manual_seed(3), requires_grad=True)
    pairs = Pairs.of(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
    assert torch.autograd.gradcheck(
        lambda *inputs: experts_cpu._GatedExperts.apply(*inputs, pairs), (x, up, down, weight)
    )


def test_blocks_of_any_size_give_what_a_forward_with_gradient_gives(monkeypatch, tokens: torch.Tensor) -> None:
    model = build("qwen3_moe")
    assert use_cpu_kernels(model)
    whole = model(tokens).logits
    for size in (1, 2**12, 2**30):
        monkeypatch.setattr(experts_cpu, "BLOCK_BYTES", size)
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, whole), size


# ---------------------------------------------------------------------- norms


def test_a_norm_that_computes_something_else_keeps_its_own() -> None:
    class OnePlus(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(4)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    norm = OnePlus()
    assert replace_norms(norm) == 0 and "forward" not in norm.__dict__
    assert torch.equal(norm.weight, torch.zeros(4))


def test_a_forward_that_somebody_has_wrapped_stays_wrapped() -> None:
    model = build("qwen3_moe")
    wrapped = (model.model.norm, model.model.layers[0].self_attn)
    for module in wrapped:
        module.forward = lambda x: 2 * x
    for _ in range(2):
        assert use_cpu_kernels(model)
        assert all(module(3) == 6 for module in wrapped)
    assert sum("forward" in module.__dict__ for module in model.modules()) == 3 * 4 + 1 + 3


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_transformers_own(family: str, tokens: torch.Tensor) -> None:
    model = build(family)
    assert model.config._experts_implementation == "grouped_mm"
    logits, expected = gradients(model, tokens)
    assert use_cpu_kernels(model)
    new_logits, new_gradients = gradients(model, tokens)
    torch.testing.assert_close(new_logits, logits, rtol=0, atol=1e-6)
    assert new_gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (new_gradients[name] - gradient).norm() / gradient.norm()
        assert error < rounding(SUMMED, model.config.num_hidden_layers, 1), (name, error)
    again = gradients(model, tokens)
    assert torch.equal(new_logits, again[0])
    assert all(torch.equal(new_gradients[name], again[1][name]) for name in expected)


def test_it_says_when_it_stays_out_and_saves_no_trace(tmp_path) -> None:
    eager = build("qwen3_moe")
    eager.set_experts_implementation("eager")
    for model in (eager, build("qwen3_moe").bfloat16(), build("qwen3_moe").to("meta")):
        experts = model.config._experts_implementation
        assert not use_cpu_kernels(model) and model.config._experts_implementation == experts != NAME
        assert not any("forward" in module.__dict__ for module in model.modules())
    assert not use_cpu_kernels(nn.Linear(2, 2))
    model = build("qwen3_moe")
    assert use_cpu_kernels(model) and use_cpu_kernels(model)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    assert type(model).from_pretrained(tmp_path).config._experts_implementation == "grouped_mm"
