"""Prompts to rewarded rollouts, under the weights that the engine has: what every batch source draws with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from moe_rl.config import RunConfig
from moe_rl.rollouts.base import RolloutEngine
from moe_rl.rollouts.collate import collate
from moe_rl.rollouts.request import sampling_of
from moe_rl.seeds import NOISE, PROMPTS, derive
from moe_rl.tasks.base import AnyTask, draw
from moe_rl.tasks.environments import drawn, earned
from moe_rl.types import Batch, Prompt, Rollout


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A run's task and engine. Prompts and noise follow from the run's seed and a position: the number of the step that
    trains on a batch and, for more of it, further numbers."""

    run: RunConfig
    task: AnyTask
    engine: RolloutEngine
    encode: Callable[[list[Prompt]], list[Prompt]]
    """Fills in the token ids of prompts."""
    pad_token: int
    held_out: list[Prompt]
    """Encoded prompts of the evaluation; never trained on."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids of a completion as text, without the token that ends it; for responses that are drawn in parts."""

    def draw_prompts(self, count: int, *position: int) -> list[Prompt]:
        """Encoded prompts that the evaluation does not have."""
        excluding = {prompt.text for prompt in self.held_out}
        return self.encode(draw(self.task, count, derive(self.run.seed, PROMPTS, *position), excluding))

    def sample(self, prompts: list[Prompt], group_size: int, position: tuple[int, ...], *, step: int | None = None,
               most: int | None = None) -> list[Rollout]:  # fmt: skip
        """Completions of at most `most` tokens. With `step`, they say that the weights before it drew them."""
        sampling = sampling_of(self.run)
        sampling = sampling if most is None else replace(sampling, max_new_tokens=most)
        rollouts = drawn(self.engine.generate, self.task, prompts, group_size, key=(self.run.seed, NOISE, *position),
                         sampling=sampling)
        if step is None:
            return rollouts
        return [replace(r, sampled_at=torch.full((len(r.tokens),), step - 1),
                        routes=r.routes and replace(r.routes, weight_version=f"step {step - 1}")) for r in rollouts]

    def rewards(self, rollouts: list[Rollout]) -> list[float]:
        """What every completion earns."""
        return [earned(self.task, rollout) for rollout in rollouts]

    def batch(self, rollouts: list[Rollout], rewards: list[float]) -> Batch:
        """Padded, groups of `group_size` after each other."""
        groups = [i // self.run.group_size for i in range(len(rollouts))]
        return collate(rollouts, groups, rewards, self.pad_token)
