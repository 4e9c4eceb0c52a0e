"""Rollouts as one padded batch."""

from __future__ import annotations

import torch

from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Batch, KeptTokens, Rollout


def collate(rollouts: list[Rollout], prompt_index: list[int], rewards: list[float], pad_token: int) -> Batch:
    """Right-pad rollouts into one batch; advantages are zero until the trainer fills them.

    Routes, what sampling kept, and the steps of the weights are there when every rollout carries them. What an
    environment said in a conversation is no part of the response. The batch lives on the CPU.
    """
    lengths = [len(r.prompt.tokens) + len(r.tokens) for r in rollouts]
    shape = (len(rollouts), max(lengths))
    tokens = torch.full(shape, pad_token, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    response_mask = torch.zeros(shape, dtype=torch.bool)
    logprobs, turn_rewards = torch.zeros(shape), torch.zeros(shape)
    turn = torch.zeros(shape, dtype=torch.long)
    sampled_at = torch.zeros(shape, dtype=torch.long)
    for b, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
        start = len(rollout.prompt.tokens)
        tokens[b, :length] = torch.tensor(rollout.prompt.tokens + rollout.tokens)
        attention_mask[b, :length] = True
        response_mask[b, start:length] = not rollout.turns
        for number, one in enumerate(rollout.turns, start=1):
            response_mask[b, start + one.start : start + one.end] = True
            turn[b, start + one.start : start + one.end] = number
            turn_rewards[b, start + one.end - 1] = one.reward
        logprobs[b, start:length] = rollout.logprobs
        if rollout.sampled_at is not None:
            sampled_at[b, start:length] = rollout.sampled_at
    routes = [r.routes for r in rollouts if r.routes is not None]
    kept = [r.kept for r in rollouts if r.kept is not None]
    prompts = torch.tensor([len(r.prompt.tokens) for r in rollouts])
    written = attention_mask & (torch.arange(shape[1]) >= prompts[:, None])
    routed, conversed = len(routes) == len(rollouts), any(r.turns for r in rollouts)
    return Batch(
        tokens=tokens,
        attention_mask=attention_mask,
        response_mask=response_mask,
        prompt_index=torch.tensor(prompt_index),
        rollout_logprobs=logprobs,
        rewards=torch.tensor(rewards, dtype=torch.float32),
        advantages=torch.zeros(shape),
        finished=torch.tensor([r.finished for r in rollouts]),
        turn=turn if conversed else None,
        turn_rewards=turn_rewards if conversed else None,
        rollout_routes=RoutingTrace.cat(routes, tokens, attention_mask, mixed=True) if routed else None,
        kept=KeptTokens.stack(kept, written) if len(kept) == len(rollouts) else None,
        sampled_at=sampled_at if all(r.sampled_at is not None for r in rollouts) else None,
    )
