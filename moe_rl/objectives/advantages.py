"""Rewards of a step's rollouts → advantages, step after step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_rl.config import Arm
from moe_rl.errors import ConfigError, RunError
from moe_rl.lookup import lookup, needs_of
from moe_rl.types import Batch

EQUAL = 1e-6
"""Rewards of a group that lie this close together are equal up to rounding (rewards are in [0, 1])."""
Values = Float[Tensor, "batch ..."]
"""One number per row, [batch], or per token, [batch, time]."""


@dataclass(frozen=True, kw_only=True)
class Earned:
    """What the rollouts of a step earned, and what the steps before this one have made of it."""

    values: Values
    """At first the rewards, float32; then what the last step gave."""
    rewards: Float[Tensor, " batch"]
    prompt: Int[Tensor, " batch"]
    """Which prompt of the step a row answers; rows of equal number form a group."""
    mask: Bool[Tensor, "batch time"]
    """Response tokens."""
    finished: Bool[Tensor, " batch"]
    """False where the response was cut off."""
    old_logprobs: Float[Tensor, "batch time"] | None = None
    """log π_old; for steps that are marked `needs("reference")`."""
    ref_logprobs: Float[Tensor, "batch time"] | None = None
    """log π_ref; likewise."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What a step keeps from one batch to the next, as JSON has it; it is saved and resumed with the run."""


@dataclass(frozen=True)
class Advantage:
    """What makes advantages of the rewards of a batch. Made by `advantage_of`."""

    steps: tuple[tuple[str, Callable[[Earned], Values]], ...]
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """`reference`, where a step compares with it: then the batch must have been scored."""
        return frozenset().union(*(needs_of(step) for _, step in self.steps))

    def __call__(self, batch: Batch) -> Float[Tensor, "batch time"]:
        """Per token, 0 outside the response. Raises RunError for a reward that is not finite, and ConfigError for a
        step that gives another shape."""
        if not bool(torch.isfinite(batch.rewards).all()):
            row = int((~torch.isfinite(batch.rewards)).nonzero()[0])
            raise RunError(
                f"the reward of row {row} is {batch.rewards[row].item()}, which would make the advantages of its whole "
                "group and then the weights NaN: make the task's reward return a number in [0, 1]"
            )
        x = Earned(values=batch.rewards, rewards=batch.rewards, prompt=batch.prompt_index, mask=batch.response_mask,
                   finished=batch.finished, old_logprobs=batch.old_logprobs, ref_logprobs=batch.ref_logprobs,
                   memory=self.memory)
        for name, step in self.steps:
            x = replace(x, values=step(x))
            if x.values.shape not in (x.rewards.shape, x.mask.shape):
                raise ConfigError(f"the advantage {name} gives shape {tuple(x.values.shape)} for {len(batch)} rewards: "
                                  "it needs (batch,), or (batch, time) where one per token is meant")
        per_token = x.values[:, None] if x.values.dim() == 1 else x.values
        return torch.where(batch.response_mask, per_token, 0).to(batch.advantages.dtype)

    def save(self, folder: Path) -> None:
        """Write the memory, if there is one."""
        if self.memory:
            (folder / "advantage.json").write_text(json.dumps(self.memory))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        self.memory.clear()
        if (file := folder / "advantage.json").exists():
            self.memory.update(json.loads(file.read_text()))


def advantage_of(arm: Arm) -> Advantage:
    """What makes advantages of an arm's rewards, tried on two of them. Raises ConfigError for a name or option that is
    not there."""
    assert isinstance(arm.advantage, tuple), "an arm makes one of a part alone"
    found = Advantage(tuple((str(part), lookup("advantage", part, ADVANTAGES)) for part in arm.advantage))
    mask, zeros = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1)
    rewards, prompt = torch.tensor([0.0, 1.0]), torch.zeros(2, dtype=torch.long)
    found(Batch(tokens=torch.zeros(2, 1, dtype=torch.long), attention_mask=mask, response_mask=mask,
                prompt_index=prompt, rollout_logprobs=zeros, rewards=rewards, advantages=zeros, finished=mask[:, 0],
                old_logprobs=zeros, ref_logprobs=zeros))
    found.memory.clear()
    return found


def group(x: Earned) -> Float[Tensor, " batch"]:
    """(r_i - mean) / std over the rows of equal `prompt`; no unit.

    GSPO, arXiv 2507.18071, eq. 7. The paper does not say which deviation its std is; this is the sample one (n - 1), as
    in verl and TRL, so that advantages compare with theirs (the population one would be larger by sqrt(n/(n-1)),
    7 % for groups of 8). No epsilon is added, as in eq. 7: none is needed, since the advantage is exactly 0 in a group
    of one and in a group whose rewards differ by at most `EQUAL`. verl adds 1e-6 and TRL 1e-4, which also shrinks the
    advantages of groups with nearly equal rewards.

    The value of a row does not depend on the order of rows, to the last bit.
    """
    advantages = torch.zeros_like(x.values)
    for one in x.prompt.unique():
        rows = x.prompt == one
        values = x.values[rows].double().sort().values  # sorted: floating-point sums depend on the order
        if len(values) > 1 and values[-1] - values[0] > EQUAL:
            advantages[rows] = ((x.values[rows].double() - values.mean()) / values.std()).to(x.values.dtype)
    return advantages


ADVANTAGES: dict[str, Callable[..., Values]] = {"group": group}
"""Steps from rewards to advantages."""
