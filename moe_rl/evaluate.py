"""How well a policy does on problems: in training on the held-out ones, and `moe-rl evaluate` on any."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_rl.recorder import Row, Rows, exact
from moe_rl.rollouts.base import Sampler
from moe_rl.seeds import NOISE
from moe_rl.tasks.base import Task, checked_reward, votes_of
from moe_rl.types import Prompt, Rollout, Sampling

GREEDY = 0
"""The number of the greedy completion of a problem among its samples; those that are drawn count from 1."""


def evaluate(engine: Sampler, task: Task, prompts: list[Prompt], sampling: Sampling, *, key: tuple[int, ...],
             samples: int = 1, greedy: bool = True, first: int = 0) -> list[tuple[Row, Rollout]]:
    """Every completion with its row of the table `evaluations`, but for step and benchmark: the greedy one of every
    prompt, then `samples` drawn ones of each. Problems count from `first`; `key` is that of their noise."""
    found = []
    for is_greedy in [True] * greedy + [False]:
        count = 1 if is_greedy else samples
        drawn = engine.generate(prompts, count, key=key, sampling=replace(sampling, greedy=is_greedy))
        for i, prompt in enumerate(prompts):
            group = drawn[i * count : (i + 1) * count]
            votes = [None] if is_greedy else votes_of(task, prompt, [r.text for r in group])
            for n, (rollout, vote) in enumerate(zip(group, votes, strict=True)):
                found.append(({
                    "problem": first + i, "sample": GREEDY if is_greedy else 1 + n,
                    "reward": checked_reward(task, rollout.prompt, rollout.text),
                    "response_tokens": float(len(rollout.tokens)), "truncated": float(not rollout.finished),
                    "vote": None if vote is None else 1 + vote,
                }, rollout))
    return found


def evaluation(engine: Sampler, task: Task, prompts: list[Prompt], sampling: Sampling, seed: int, step: int) -> Rows:
    """What a run measures after a step on its held-out prompts, one greedy and one drawn completion of each: a part of
    its row of `steps`, and the rows of `evaluations`. The noise is the same at every evaluation of a seed."""
    rows = [row for row, _ in evaluate(engine, task, prompts, sampling, key=(seed, NOISE, 0))]
    means: Row = {"step": step, "eval_n": len(prompts)}
    for name in ("greedy", "sampled"):
        rewards = torch.tensor([r["reward"] for r in rows if (r["sample"] == GREEDY) == (name == "greedy")])
        means |= {f"eval_reward_{name}": rewards.double().mean().item(), f"eval_exact_{name}": exact(rewards)}
    return {"steps": [means], "evaluations": [{"step": step, "benchmark": "held_out", **row} for row in rows]}
