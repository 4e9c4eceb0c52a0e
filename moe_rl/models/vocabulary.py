"""log π and entropy of tokens over a large vocabulary, in pieces; and truncated sampling: the tokens that top-k, top-p
and min-p keep.

A token that is drawn from a kept set has the probability π(y) / Σ π(kept). For an exact ratio the trainer takes the
same sum over the same set: DeepSeek-V3.2's "keep sampling mask" (arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_rl.types import KeptTokens

LOGITS = 2**26
"""Logits that are made at once: 256 MiB in float32, of which softmax and backward hold about four copies."""


def head_is_apart(model: nn.Module) -> bool:
    """Whether the model's logits are just the output of its output embeddings: some families scale or squash them
    afterwards. Tried on two tokens, since a padding token may be 0 throughout."""
    head = head_of(model)
    if head is None:
        return False
    tokens = torch.tensor([[0, 1]], device=next(model.parameters()).device)
    made: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, args, output: made.append(output.clone()))
    try:
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
            return len(made) == 1 and torch.equal(made[0], logits)
    finally:
        handle.remove()


def log_probs_in_pieces(
    model: nn.Module,
    inputs: Integer[Tensor, "batch inputs"],
    wanted: Integer[Tensor, "batch kept"],
    where: Bool[Tensor, "batch kept"],
    temperature: float,
    entropy_gradient: bool,
    kept: KeptTokens | None = None,
) -> tuple[Float[Tensor, "batch kept"], Float[Tensor, "batch kept"]]:
    """log π(wanted) and entropy at the last inputs, over the `kept` tokens where these are given, 0 outside `where`;
    equal to those of all logits at once up to float rounding.

    At most `LOGITS` logits exist at a time, for `where` alone; the backward makes them again. For models whose
    `head_is_apart`. It replaces the head's forward, within the model's, where weights that are cut over ranks are
    whole.
    """
    head = head_of(model)
    forward, own = head.forward, head.__dict__.get("forward")

    def piece(
        states: Float[Tensor, "tokens width"], chosen: Integer[Tensor, " tokens"], kept: KeptTokens | None
    ) -> tuple[Tensor, Tensor]:
        logits = forward(states).float() / temperature
        log_p = (logits if kept is None else kept.only(logits)).log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = entropy_of(log_p, kept is not None)
        return log_p.gather(-1, chosen[:, None])[:, 0], entropy

    def in_pieces(hidden: Float[Tensor, "batch kept width"]) -> Float[Tensor, "batch kept 2"]:
        chosen, size = wanted[where], max(1, LOGITS // head.weight.shape[0])
        parts = hidden[where].split(size)
        keeps = [None] * len(parts) if kept is None else kept.pieces(where, size)
        pieces = [
            checkpoint(piece, s, c, k, use_reentrant=False, preserve_rng_state=False)
            for s, c, k in zip(parts, chosen.split(size), keeps, strict=True)
        ]
        return torch.stack(
            [
                torch.zeros_like(where, dtype=torch.float).masked_scatter(where, torch.cat(x))
                for x in zip(*pieces, strict=True)
            ],
            -1,
        )

    head.forward = in_pieces
    try:
        both = model(input_ids=inputs, use_cache=False, logits_to_keep=wanted.shape[1]).logits
    finally:
        del head.forward
        if own is not None:
            head.forward = own
    return both[..., 0], both[..., 1]


def head_of(model: nn.Module) -> Any:
    """The module of the output embeddings; None for a model without."""
    return getattr(model, "get_output_embeddings", lambda: None)()


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
    """−Σ p log p in nats; where it is truncated, over the kept tokens, since 0 · -inf would be NaN."""
    known = log_p.masked_fill(log_p == -torch.inf, 0.0) if truncated else log_p
    return -(log_p.exp() * known).sum(-1)
