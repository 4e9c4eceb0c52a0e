"""Rollouts as one padded batch."""

from __future__ import annotations

import torch

from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Batch, Rollout


def collate(rollouts: list[Rollout], prompt_index: list[int], rewards: list[float], pad_token: int) -> Batch:
    """Right-pad rollouts into one batch; advantages are zero until the trainer fills them.

    Routes, and the steps of the weights, are kept when every rollout carries them. The batch lives on the CPU.
    """
    lengths = [len(r.prompt.tokens) + len(r.tokens) for r in rollouts]
    shape = (len(rollouts), max(lengths))
    tokens = torch.full(shape, pad_token, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    response_mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape)
    sampled_at = torch.zeros(shape, dtype=torch.long)
    for b, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
        start = len(rollout.prompt.tokens)
        tokens[b, :length] = torch.tensor(rollout.prompt.tokens + rollout.tokens)
        attention_mask[b, :length] = True
        response_mask[b, start:length] = True
        logprobs[b, start:length] = rollout.logprobs
        if rollout.sampled_at is not None:
            sampled_at[b, start:length] = rollout.sampled_at
    routes = [r.routes for r in rollouts if r.routes is not None]
    routed = len(routes) == len(rollouts)
    return Batch(
        tokens=tokens,
        attention_mask=attention_mask,
        response_mask=response_mask,
        prompt_index=torch.tensor(prompt_index),
        rollout_logprobs=logprobs,
        rewards=torch.tensor(rewards, dtype=torch.float32),
        advantages=torch.zeros(shape),
        finished=torch.tensor([r.finished for r in rollouts]),
        rollout_routes=RoutingTrace.stack(routes, tokens, attention_mask) if routed else None,
        sampled_at=sampled_at if all(r.sampled_at is not None for r in rollouts) else None,
    )
