"""Truncated sampling: which tokens top-k, top-p and min-p keep, and log-probs renormalised over these.

What is drawn from a kept set has the probability π(y) / Σ π(kept). A ratio compares a distribution with its like where
the trainer takes the same sum over the same set, whatever its weights have become: DeepSeek-V3.2's "keep sampling mask"
(arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def kept(
    logits: Float[Tensor, "rows vocabulary"],
    *,
    top_p: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    min_p: float | Tensor = 0.0,
) -> Bool[Tensor, "rows vocabulary"]:
    """True at the tokens that may be drawn. Logits are after the temperature; log-probs will do as well.

    min-p keeps what has at least `min_p` times the highest probability; of these top-k the `top_k` most likely (0:
    all); of these, renormalised, top-p the fewest that together have `top_p`. That is vLLM's order. Of equal tokens
    those of smaller ids come first. Settings may be tensors [rows, 1]. Logits that are NaN keep nothing.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    settings = (torch.as_tensor(x, dtype=torch.float64, device=logits.device) for x in (top_p, top_k, min_p))
    share, most, floor = settings
    rank = torch.arange(logits.shape[-1], device=logits.device)
    relative = (ordered - ordered[:, :1]).double()  # log of p over the highest p
    keep = (relative >= floor.log()) & (relative > -torch.inf) & ((rank < most) | (most <= 0))
    mass = relative.exp().where(keep, 0.0)
    before = mass.cumsum(-1) - mass
    keep &= (before < share * mass.sum(-1, keepdim=True)) | (share >= 1)  # rounding takes nothing from all of them
    return torch.zeros_like(keep).scatter(-1, order, keep)


def entropy_of(log_p: Float[Tensor, "*token vocabulary"], truncated: bool) -> Float[Tensor, "*token"]:
    """−Σ p log p in nats; where it is truncated, over what was kept, since 0 · -inf would be NaN."""
    known = log_p.masked_fill(log_p == -torch.inf, 0.0) if truncated else log_p
    return -(log_p.exp() * known).sum(-1)
