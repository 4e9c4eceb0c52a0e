"""Mini-batches as NumPy has them, for the oracle, and as `LossInputs`, for ours."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import torch

from moe_rl.config import Arm
from moe_rl.objectives import LossInputs, advantage_of
from moe_rl.objectives.weights import seq_mean_token_mean
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Batch

TIGHT = dict(rtol=0, atol=1e-12)


def case(seed=0, spread=0.3):
    """Six float64 sequences of unequal length, prompts of unequal length, one empty response, both signs and a zero."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((6, 9), dtype=bool)
    for i, (start, stop) in enumerate([(1, 9), (3, 5), (4, 4), (2, 3), (1, 7), (2, 8)]):
        mask[i, start:stop] = True
    old = -rng.exponential(size=mask.shape)
    new = old + spread * rng.normal(size=mask.shape) + spread * rng.normal(size=(6, 1))
    return new, old, np.array([1.3, -0.7, 0.9, -1.1, 0.0, 0.4]), mask


def inputs(new, old, advantages, mask, *, weights=None, **further) -> LossInputs:
    """Of arrays or tensors; advantages per row or per token, the aggregation of exactly these rows unless given. Tokens
    are of the step before and of one entropy, unless that is given."""
    logprobs, old, advantages, mask = (torch.as_tensor(x) for x in (new, old, advantages, mask))
    further = {name: torch.ones(mask.shape, dtype=logprobs.dtype) for name in ("lag", "entropy")} | further
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        mask=mask,
        advantages=advantages[:, None].expand(mask.shape) if advantages.dim() == 1 else advantages,
        weights=seq_mean_token_mean(mask) if weights is None else weights,
        **{name: torch.as_tensor(x) for name, x in further.items()},
    )


def ranged(loss, low=0.1, high=0.15) -> dict[str, float]:
    """The range as options of a loss, where it has one."""
    return {k: v for k, v in {"clip_low": low, "clip_high": high}.items() if k in inspect.signature(loss).parameters}


def advantages_of(batch, *steps):
    """Of an arm with these steps, or with those of GRPO."""
    made = advantage_of(Arm(name="a", advantage=steps) if steps else Arm(name="a"))
    return made.attach_advantages(batch).advantages


def rewarded(rewards, prompt, mask=None, dtype=torch.float32, **further) -> Batch:
    """A batch of which only rewards, groups and the response matter: one token each, unless there is a mask."""
    mask = torch.ones(len(rewards), 1, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    zeros = torch.zeros(mask.shape, dtype=dtype)
    batch = Batch(
        tokens=torch.zeros(mask.shape, dtype=torch.long),
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        prompt_index=torch.as_tensor(prompt),
        rollout_logprobs=zeros,
        rewards=torch.as_tensor(rewards, dtype=dtype),
        advantages=zeros,
        old_logprobs=zeros,
        finished=torch.ones(len(mask), dtype=torch.bool),
    )
    tensors = {name: torch.as_tensor(x) for name, x in further.items() if not isinstance(x, RoutingTrace)}
    return replace(batch, **further | tensors)
