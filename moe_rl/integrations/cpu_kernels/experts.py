"""Experts on the CPU: what transformers' `grouped_mm` computes, in pieces that stay in the processor's cache.

Registered through transformers' experts interface, so it serves every family that dispatches there and has experts of
the common kind, SiLU-gated and without biases. Others stay transformers' own. tests/benchmarks/README.md has what this
saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

NAME = "moe_rl_cpu"
BLOCK_BYTES = 2**21
"""What one block of rows and their intermediate values may take: about half of a core's own cache."""


def register(model: Any) -> bool:
    """Make a transformers model compute its experts with `cpu_experts`; returns whether it now does.

    False, and nothing is changed, when it uses another implementation than transformers' default, belongs to a family
    that does not dispatch its experts, or when torch is older than 2.10 or transformers knows no implementations but
    its own (before 5.7). A saved checkpoint does not mention it.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    dispatches = getattr(model, "_can_set_experts_implementation", lambda: False)()
    if not (dispatches and hasattr(F, "grouped_mm")):
        return False
    if model.config._experts_implementation not in ("grouped_mm", NAME):
        return False
    ALL_EXPERTS_FUNCTIONS.register(NAME, cpu_experts)
    try:
        model.set_experts_implementation(NAME)
    except ValueError:
        return False
    return model.config._experts_implementation == NAME


def suited(*tensors: Tensor) -> bool:
    """Whether these are what the replaced operators compute: all on the CPU, in one of float32 and float64.

    Asked at every forward, since a model that has them may be copied to another dtype or device.
    """
    first = tensors[0]
    alike = all(x.dtype == first.dtype and x.device.type == "cpu" for x in tensors)
    return alike and first.dtype in (torch.float32, torch.float64)


def cpu_experts(
    self: Any,
    hidden_states: Float[Tensor, "tokens hidden"],
    top_k_index: Int[Tensor, "tokens k"],
    top_k_weights: Float[Tensor, "tokens k"],
) -> Float[Tensor, "tokens hidden"]:
    """sum over k of weight · expert(hidden state), as `transformers.integrations.moe.grouped_mm_experts_forward`.

    The same steps: sort (token, k) pairs by expert, multiply each expert's rows at once, put back and add up.
    """
    if not (suited(hidden_states, self.down_proj) and _gated_by_silu(self)):
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    pairs = Pairs.of(top_k_index, self.num_experts)
    up, down = self.gate_up_proj, self.down_proj
    if self.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    weights = top_k_weights.to(hidden_states.dtype)
    if torch.is_grad_enabled():
        return _GatedExperts.apply(hidden_states, up, down, weights, pairs)
    return _gated_without_gradient(hidden_states, up, down, weights, pairs)


@dataclass(frozen=True)
class Pairs:
    """The (token, slot) pairs of a forward, sorted by expert."""

    order: Int[Tensor, " pairs"]
    """Where each pair comes from, in top_k_index.reshape(-1)."""
    token: Int[Tensor, " pairs"]
    place: Int[Tensor, "tokens k"]
    """Where the k-th row of a token went."""
    ends: Int[Tensor, " experts"]
    """Where the pairs of each expert end."""

    @staticmethod
    def of(ids: Int[Tensor, "tokens k"], num_experts: int) -> Pairs:
        """Stable, so pairs of one expert stay in the order of their tokens. NumPy sorts short integers digit by digit,
        a tenth of the time of `torch.sort`."""
        flat = ids.reshape(-1).numpy()
        order = torch.from_numpy(np.argsort(flat.astype(np.uint16), kind="stable"))
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        ends = torch.from_numpy(np.bincount(flat, minlength=num_experts)).cumsum(0, dtype=torch.int32)
        return Pairs(order, order // ids.shape[1], place.view(ids.shape), ends)

    def blocks(self, most: int) -> Iterator[tuple[slice, slice]]:
        """Consecutive experts and their pairs, at most `most` pairs at a time, or one expert."""
        first = start = end = 0
        for expert, next_end in enumerate(self.ends.tolist()):
            if next_end - start > most and end > start:
                yield slice(first, expert), slice(start, end)
                first, start = expert, end
            end = next_end
        yield slice(first, len(self.ends)), slice(start, end)


# ---------------------------------------------------------------------- SiLU-gated experts without biases
def _gated_by_silu(self: Any) -> bool:
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    plain = self.has_gate and not self.has_bias and not getattr(self, "has_post_expert_norm", False)
    usual = getattr(type(self), "_apply_gate", None) is _default_apply_gate and isinstance(self.act_fn, SiLUActivation)
    return plain and usual and getattr(self, "is_concatenated", True)  # before transformers 5.7 all are


def _gated_without_gradient(
    x: Float[Tensor, "tokens hidden"],
    up: Float[Tensor, "experts twice_width hidden"],
    down: Float[Tensor, "experts hidden width"],
    weight: Float[Tensor, "tokens k"],
    pairs: Pairs,
) -> Float[Tensor, "tokens hidden"]:
    """out[t] = sum over k of weight[t, k] · down_e (silu(g) ∘ u), with [g; u] = up_e x[t] and e the k-th expert of t.

    Some experts at a time, whose rows are gathered, multiplied, gated and multiplied again while they are in the cache.
    """
    rows, width = x.new_empty(len(pairs.token), x.shape[1]), down.shape[2]
    row_bytes = x.element_size() * (2 * x.shape[1] + 3 * width)  # input, output, gate, up, and their product
    for experts, here in pairs.blocks(BLOCK_BYTES // row_bytes):
        ends = pairs.ends[experts] - here.start
        both = _grouped_mm(x.index_select(0, pairs.token[here]), up[experts].transpose(1, 2), ends)
        opened = F.silu(both[:, :width]).mul_(both[:, width:])
        rows[here] = _grouped_mm(opened, down[experts].transpose(1, 2), ends)
    return F.embedding_bag(pairs.place, rows, mode="sum", per_sample_weights=weight)


def _grouped_mm(
    a: Float[Tensor, "left inner"], b: Float[Tensor, "*experts inner right"], ends: Int[Tensor, " experts"]
) -> Float[Tensor, "*grouped left right"]:
    """`torch.nn.functional.grouped_mm`, and in float64, which that lacks, expert by expert."""
    if a.dtype != torch.float64:
        return F.grouped_mm(a, b, offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    if b.dim() == 3:
        return torch.cat([x @ weight for x, weight in zip(a.split(sizes), b, strict=True)])
    return torch.stack([x @ y for x, y in zip(a.split(sizes, 1), b.split(sizes), strict=True)])


class _GatedExperts(torch.autograd.Function):
    """The same with gradients. Kept are the gathered rows x and [g; u]; the rest is cheaper to make again.

    With h = silu(g) ∘ u and a gradient γ of a token's output, per pair:

        ∂weight = γ · (down h) = (downᵀ γ) · h       so the rows `down h` need not be kept
        ∂h = weight · downᵀ γ,  ∂down = γ (weight h)ᵀ
        ∂u = ∂h ∘ silu(g),  ∂g = ∂h ∘ u ∘ silu'(g),  ∂up = [∂g; ∂u] xᵀ,  ∂x = upᵀ [∂g; ∂u]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        width, here = down.shape[2], x.index_select(0, pairs.token)
        both = _grouped_mm(here, up.transpose(1, 2), pairs.ends)
        opened = F.silu(both[:, :width]).mul_(both[:, width:])
        rows = _grouped_mm(opened, down.transpose(1, 2), pairs.ends)
        ctx.save_for_backward(here, both, up, down, weight, pairs.order, pairs.token, pairs.place, pairs.ends)
        return F.embedding_bag(pairs.place, rows, mode="sum", per_sample_weights=weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, None]:
        here, both, up, down, weight, order, token, place, ends = ctx.saved_tensors
        gate, raised = both.chunk(2, 1)
        scale = weight.reshape(-1).index_select(0, order)[:, None]
        grad = grad.index_select(0, token)
        h_grad = _grouped_mm(grad, down, ends)
        opened = F.silu(gate)
        h = opened * raised
        weight_grad = torch.linalg.vecdot(h, h_grad).index_select(0, place.view(-1)).view_as(weight)
        up_grad = down_grad = None  # of frozen weights, as under an adapter
        if ctx.needs_input_grad[2]:
            down_grad = _grouped_mm(grad.t(), h.mul_(scale), ends)
        h_grad.mul_(scale)
        both_grad = torch.empty_like(both)
        torch.mul(h_grad, opened, out=both_grad[:, down.shape[2] :])
        torch.ops.aten.silu_backward.grad_input(h_grad.mul_(raised), gate, grad_input=both_grad[:, : down.shape[2]])
        if ctx.needs_input_grad[1]:
            up_grad = _grouped_mm(both_grad.t(), here, ends)
        rows = _grouped_mm(both_grad, up, ends)
        return F.embedding_bag(place, rows, mode="sum"), up_grad, down_grad, weight_grad, None
