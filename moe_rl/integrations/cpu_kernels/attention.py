"""Rotary embedding on the CPU, in attention layers of Qwen3-MoE's form.

The family's own takes five passes over queries and keys in short strides (a row of one head at a time), and zero-fills
halves in the backward. Here both run over [batch, time, heads · dim] as projected, before heads and time change places.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_rl.integrations.cpu_kernels.experts import suited

CACHE = ("cache", "past_key_values")
"""The argument that holds keys and values of earlier tokens, since transformers 5.24 and before."""
_KNOWN = {"self", "hidden_states", "position_embeddings", "attention_mask", "cache_position", "kwargs", *CACHE}


def replace_attention(model: nn.Module) -> int:
    """Give every `Qwen3MoeAttention` of a model, but for those that somebody has wrapped, the forward of this file;
    returns how many were found.

    0 with a release of transformers whose layer has an argument that this forward does not know and would ignore.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

    if not inspect.signature(Qwen3MoeAttention.forward).parameters.keys() <= _KNOWN:
        return 0
    layers = [module for module in model.modules() if type(module) is Qwen3MoeAttention]
    layers = [m for m in layers if "forward" not in m.__dict__ or getattr(m.forward, "__func__", None) is _forward]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _forward(
    self: Any,
    hidden_states: Float[Tensor, "batch time hidden"],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch time hidden"], Tensor | None]:
    """As `Qwen3MoeAttention.forward`, but for the rotation."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.qwen3_moe.modeling_qwen3_moe import eager_attention_forward

    earlier = kwargs.pop("past_key_values", None)
    cache = earlier if cache is None else cache
    if not suited(hidden_states, getattr(self.q_norm, "weight", hidden_states), *position_embeddings):
        return type(self).forward(self, hidden_states, position_embeddings, attention_mask, cache, **kwargs)
    shape = hidden_states.shape[:-1]
    heads = (*shape, -1, self.head_dim)
    query = rotated(self.q_norm(self.q_proj(hidden_states).view(heads)), *position_embeddings).transpose(1, 2)
    key = rotated(self.k_norm(self.k_proj(hidden_states).view(heads)), *position_embeddings).transpose(1, 2)
    value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    if query.shape[2] == 1 and attention_mask is None and _plain(self):
        return self.o_proj(attend_last(query, key, value, self.scaling).reshape(*shape, -1)), None
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    out, weights = attend(
        self,
        query,
        key,
        value,
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        sliding_window=self.sliding_window,
        **kwargs,
    )
    return self.o_proj(out.reshape(*shape, -1).contiguous()), weights


def rotated(
    x: Float[Tensor, "batch time heads dim"], cos: Float[Tensor, "rows time dim"], sin: Float[Tensor, "rows time dim"]
) -> Float[Tensor, "batch time heads dim"]:
    """x cos + (x R) sin, where R turns [a, b] into [-b, a]: a signed permutation, so x R is exact as a product."""
    cos, sin = _repeated(cos, x.shape[2]), _repeated(sin, x.shape[2])
    turn = _turn(x.shape[3], x.dtype)
    if torch.is_grad_enabled():
        return _Rotate.apply(x, cos, sin, turn)
    return _rotate(x, cos, sin, turn)


@lru_cache
def _turn(dim: int, dtype: torch.dtype) -> Float[Tensor, "dim dim"]:
    """R, with [a, b] R = [-b, a]."""
    turn = torch.eye(dim, dtype=dtype).roll(dim // 2, 1)
    turn[dim // 2 :] *= -1
    return turn


def _repeated(table: Float[Tensor, "rows time dim"], heads: int) -> Float[Tensor, "rows time heads_dim"]:
    """The table once per head, so that its rows are long. All layers share a forward's tables: it is kept with them."""
    repeated = table.__dict__.setdefault("_repeated", {})
    if heads not in repeated:
        repeated[heads] = table.repeat(1, 1, heads)
    return repeated[heads]


def _plain(self: Any) -> bool:
    """Whether this is an attention that `attend_last` computes: transformers' default, without gradient or dropout."""
    return self.config._attn_implementation == "sdpa" and not self.training and not torch.is_grad_enabled()


def attend_last(
    query: Float[Tensor, "batch heads 1 dim"],
    key: Float[Tensor, "batch kv_heads time dim"],
    value: Float[Tensor, "batch kv_heads time dim"],
    scaling: float,
) -> Float[Tensor, "batch heads dim"]:
    """softmax(q · k · scaling) v of the newest token, which may see everything: two batched products.

    `scaled_dot_product_attention` on the CPU works through one head of one row at a time, which takes longer for a
    single query (377 against 249 µs at 22 keys); and `softmax` computes rows shorter than a vector register number by
    number.
    """
    grouped = query.reshape(*key.shape[:2], -1, key.shape[3])  # the heads that share keys and values
    scores = torch.matmul(grouped, key.transpose(2, 3)).mul_(scaling)
    scores = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    return torch.matmul(scores.div_(scores.sum(-1, keepdim=True)), value).flatten(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, turn: Tensor) -> Tensor:
    turned = (x.reshape(-1, x.shape[3]) @ turn).view(*x.shape[:2], -1)
    return turned.mul_(sin).addcmul_(x.flatten(2), cos).view(x.shape)


class _Rotate(torch.autograd.Function):
    """`_rotate` with the gradient ∂x = γ cos + (γ sin) Rᵀ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, turn: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin, turn)
        return _rotate(x, cos, sin, turn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin, turn = ctx.saved_tensors
        flat = grad.contiguous().flatten(2)
        turned = (flat * sin).view(-1, grad.shape[3]) @ turn.t()
        return turned.view(flat.shape).addcmul_(flat, cos).view(grad.shape), None, None, None
