"""Experts on the CPU: transformers' `grouped_mm` with its gathers and its weighted sum done by faster operators.

Registered through transformers' experts interface, so it serves every family that dispatches there; biases, gates and
activations stay the family's own. A forward with gradient of a small model's experts takes about 0.85 times as long.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

NAME = "moe_rl_cpu"


def use_cpu_experts(model: Any) -> bool:
    """Make a transformers model on the CPU compute its experts with `cpu_experts`; returns whether it now does.

    False, and nothing is changed, when the model is not on the CPU, is not in float32 or float64, uses another
    implementation than transformers' default, belongs to a family that does not dispatch its experts, or when torch
    is older than 2.10. Outputs agree with the default's to float rounding. A saved checkpoint does not mention it.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    weight = next(model.parameters())
    possible = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)
    dispatches = getattr(model, "_can_set_experts_implementation", lambda: False)()
    if not (possible and dispatches and hasattr(F, "grouped_mm")):
        return False
    if model.config._experts_implementation not in ("grouped_mm", NAME):
        return False
    ALL_EXPERTS_FUNCTIONS.register(NAME, cpu_experts)
    model.set_experts_implementation(NAME)
    return model.config._experts_implementation == NAME


def cpu_experts(
    self: Any,
    hidden_states: Float[Tensor, "tokens hidden"],
    top_k_index: Int[Tensor, "tokens k"],
    top_k_weights: Float[Tensor, "tokens k"],
) -> Float[Tensor, "tokens hidden"]:
    """sum over k of weight · expert(hidden state), as `transformers.integrations.moe.grouped_mm_experts_forward`.

    The same steps: sort (token, k) pairs by expert, multiply each expert's rows at once, put back and add up.
    """
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    token = order // top_k_index.shape[-1]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    place = place.view_as(top_k_index)  # where the k-th row of a token went
    ends = torch.bincount(expert, minlength=self.num_experts).cumsum(0, dtype=torch.int32)

    rows = _Gather.apply(hidden_states, token, place)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    rows = _experts_linear(self, name, rows, expert, ends)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _experts_linear(self, "down_proj", rows, expert, ends)
    if getattr(self, "has_post_expert_norm", False):
        rows = self.post_expert_norm(rows)
    return _WeightedSum.apply(rows, top_k_weights, token, order, place)


def _experts_linear(
    self: Any,
    name: str,
    rows: Float[Tensor, "pairs in"],
    expert: Int[Tensor, " pairs"],
    ends: Int[Tensor, " experts"],
) -> Float[Tensor, "pairs out"]:
    """Each row times the weight (and bias) of its expert. Rows are sorted by expert; expert e's end at ends[e]."""
    weight = getattr(self, name)
    rows = F.grouped_mm(rows, weight if self.is_transposed else weight.transpose(1, 2), offs=ends)
    return rows + getattr(self, f"{name}_bias").index_select(0, expert) if self.has_bias else rows


class _Gather(torch.autograd.Function):
    """x[token]. Its backward adds up the k rows of a token in fixed order, in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return F.embedding_bag(place, grad.contiguous(), mode="sum"), None, None


class _WeightedSum(torch.autograd.Function):
    """out[t] = sum over k of weight[t, k] · rows[place[t, k]], in one pass and in fixed order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, token: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, token, order, place)
        return F.embedding_bag(place, rows, mode="sum", per_sample_weights=weight.to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weight, token, order, place = ctx.saved_tensors
        grad = grad.index_select(0, token)
        weight_grad = torch.linalg.vecdot(rows, grad).index_select(0, place.view(-1)).view_as(weight)
        grad.mul_(weight.reshape(-1).index_select(0, order)[:, None])
        return grad, weight_grad.to(weight.dtype), None, None, None
