"""The CPU experts against transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_rl.integrations.cpu_kernels import use_cpu_kernels
from moe_rl.integrations.cpu_kernels.experts import NAME, cpu_experts
from moe_rl.metrics.rounding import SUMMED, rounding
from tests.conftest import CPU_KERNELS, FAMILIES, build

pytestmark = pytest.mark.skipif(not CPU_KERNELS, reason="the library's operators take torch 2.10 and transformers 5.7")


def logits_and_gradients(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    (logits.log_softmax(-1)[..., 3] * torch.linspace(-1, 1, tokens.numel()).view_as(tokens)).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_transformers_own(family: str, tokens: torch.Tensor) -> None:
    model = build(family)
    assert model.config._experts_implementation == "grouped_mm"
    logits, gradients = logits_and_gradients(model, tokens)
    assert use_cpu_kernels(model)
    new_logits, new_gradients = logits_and_gradients(model, tokens)
    torch.testing.assert_close(new_logits, logits, rtol=0, atol=1e-6)
    assert new_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = (new_gradients[name] - gradient).norm() / gradient.norm()
        assert error < rounding(SUMMED, model.config.num_hidden_layers, 1), (name, error)
    again = logits_and_gradients(model, tokens)
    assert torch.equal(new_logits, again[0])
    assert all(torch.equal(new_gradients[name], again[1][name]) for name in gradients)


def test_transformers_that_knows_no_other_implementations_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 5.7: a name that it does not list is a ValueError."""
    model = build("qwen3_moe")

    def refuse(name: str) -> None:
        raise ValueError(f'Specified `experts_implementation="{name}"` is not supported.')

    monkeypatch.setattr(model, "set_experts_implementation", refuse)
    norms = [module.forward for module in model.modules() if "Norm" in type(module).__name__]
    assert not use_cpu_kernels(model) and model.config._experts_implementation == "grouped_mm"
    assert norms == [module.forward for module in model.modules() if "Norm" in type(module).__name__]


def test_an_expert_without_tokens_changes_nothing_and_gets_no_gradient() -> None:
    model, unused = build("qwen3_moe"), 5
    assert use_cpu_kernels(model)
    experts = model.model.layers[0].mlp.experts
    x, ids = torch.randn(6, 32), torch.tensor([[0, 1], [1, 2], [7, 0], [3, 4], [4, 6], [6, 0]])
    experts(x, ids, torch.rand(6, 2)).sum().backward()
    norms = experts.gate_up_proj.grad.flatten(1).norm(dim=1)
    assert norms[unused] == 0
    assert bool((norms[[e for e in range(8) if e != unused]] > 0).all())


def test_one_token_by_hand() -> None:
    """Two experts whose gate is silu(x) and that double and triple it, weights 0.25 and 0.75: 2.75 · silu(x) · x."""
    eye = torch.eye(4)
    experts = build("qwen3_moe").model.layers[0].mlp.experts
    experts.num_experts, experts.gate_up_proj = 3, torch.nn.Parameter(torch.cat([torch.stack([eye] * 3)] * 2, 1))
    experts.down_proj = torch.nn.Parameter(torch.stack([2 * eye, 100 * eye, 3 * eye]))
    x = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = cpu_experts(experts, x, torch.tensor([[2, 0]]), torch.tensor([[0.75, 0.25]]))
        torch.testing.assert_close(out.detach(), 2.75 * nn.functional.silu(x) * x)


def test_it_says_when_it_stays_out_and_saves_no_trace(tmp_path) -> None:
    eager = build("qwen3_moe")
    eager.set_experts_implementation("eager")
    assert not use_cpu_kernels(eager)
    assert eager.config._experts_implementation == "eager"
    assert not use_cpu_kernels(build("qwen3_moe").bfloat16())
    assert not use_cpu_kernels(nn.Linear(2, 2))
    model = build("qwen3_moe")
    assert use_cpu_kernels(model) and use_cpu_kernels(model)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    assert type(model).from_pretrained(tmp_path).config._experts_implementation == "grouped_mm"
