"""RMS norms on the CPU: two passes over the hidden states in place of five, and half as many in the backward."""

from __future__ import annotations

import copy
from inspect import signature
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_rl.integrations.cpu_kernels.experts import suited


def replace_norms(model: nn.Module) -> int:
    """Give every RMS norm of a model the forward of this file; returns how many were found.

    A norm is recognised by what it has (`weight` [n] and `variance_epsilon`) and by what it does: a family whose norm
    computes anything else on a sample, such as (1 + weight) · x̂, keeps its own.
    """
    count = 0
    for module in model.modules():
        if hasattr(module, "variance_epsilon") and [name for name, _ in module.named_parameters()] == ["weight"]:
            alone = len(signature(type(module).forward).parameters) == 2  # of itself and x: others take a gate, too
            placed = module.__dict__.get("forward")  # this one, or what somebody wraps it in
            ours = placed is not None and getattr(placed, "__func__", None) is _forward
            if not (ours or (placed is None and alone and _is_rms_norm(module))):
                continue
            module.forward = MethodType(_forward, module)
            count += 1
    return count


def rms_norm(x: Float[Tensor, "*batch n"], weight: Float[Tensor, " n"], epsilon: float) -> Float[Tensor, "*batch n"]:
    """y = weight · x̂ with x̂ = x / sqrt(mean(x²) + ε)."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, epsilon)
    return (x * _scale(x, epsilon)).mul_(weight)


def _forward(self: Any, hidden_states: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    if not suited(hidden_states, self.weight):
        return type(self).forward(self, hidden_states)
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


@torch.no_grad()
def _is_rms_norm(module: Any) -> bool:
    n = module.weight.numel()
    x = torch.linspace(-2, 3, 2 * n, dtype=module.weight.dtype).view(2, n)
    other = copy.copy(module)  # the weight may be cut over ranks; and all ones tell nothing
    other._parameters = {"weight": nn.Parameter(torch.linspace(0.5, 2, n, dtype=x.dtype))}
    return torch.allclose(other(x), rms_norm(x, other.weight, module.variance_epsilon), rtol=1e-5, atol=1e-6)


def _scale(x: Float[Tensor, "*batch n"], epsilon: float) -> Float[Tensor, "*batch 1"]:
    """1 / sqrt(mean(x²) + ε): `vector_norm` squares and adds up in one pass."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.mul_(norm).div_(x.shape[-1]).add_(epsilon).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    """With a gradient γ: ∂weight = Σ γ x̂ and, s being the scale of a row, ∂x = s (γ weight - x̂ mean(γ weight x̂))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = _scale(x, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        n = len(weight)
        unit = x * scale
        both = (grad * unit).reshape(-1, n)  # heads and time may have changed places before the norm
        weight_grad = both.sum(0) if ctx.needs_input_grad[1] else None
        shared = (both @ weight).div_(-n).view(scale.shape)
        return torch.addcmul(grad * weight, unit, shared).mul_(scale), weight_grad, None
