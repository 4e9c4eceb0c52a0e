"""How well a policy does on held-out prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_rl.recorder import exact
from moe_rl.rollouts.base import RolloutEngine
from moe_rl.seeds import NOISE
from moe_rl.tasks.base import AnyTask
from moe_rl.tasks.environments import converse
from moe_rl.types import Prompt, Sampling


def evaluate(
    engine: RolloutEngine, task: AnyTask, prompts: list[Prompt], sampling: Sampling, seed: int
) -> dict[str, Any]:
    """Mean reward and share of exact matches, greedy and sampled as in training: a part of a row of `steps`.

    The noise is the same at every evaluation of a seed.
    """
    row: dict[str, Any] = {"eval_n": len(prompts)}
    for name, greedy in (("greedy", True), ("sampled", False)):
        how = replace(sampling, greedy=greedy, keep_mask=False)
        _, earned = converse(engine.generate, task, prompts, 1, key=(seed, NOISE, 0), sampling=how)
        rewards = torch.tensor(earned)
        row |= {f"eval_reward_{name}": rewards.double().mean().item(), f"eval_exact_{name}": exact(rewards)}
    return row
