"""How well a policy does on problems: in training on the held-out ones, and `moe-rl evaluate` on any."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_rl.recorder import Row, Rows, exact
from moe_rl.rollouts.base import Sampler
from moe_rl.seeds import NOISE
from moe_rl.tasks.base import AnyTask, votes_of
from moe_rl.tasks.environments import drawn, earned
from moe_rl.types import Prompt, Rollout, Sampling

GREEDY = 0
"""The number of the greedy completion of a problem among its samples; those that are drawn count from 1."""


def evaluate(engine: Sampler, task: AnyTask, prompts: list[Prompt], sampling: Sampling, *, key: tuple[int, ...],
             samples: int = 1, greedy: bool = True, first: int = 0) -> list[tuple[Row, Rollout]]:
    """Every completion with its row of the table `evaluations`, but for step and benchmark: the greedy one of every
    prompt, then `samples` drawn ones of each. Problems count from `first`; `key` is that of their noise."""
    found = []
    for is_greedy in [True] * greedy + [False]:
        count = 1 if is_greedy else samples
        how = replace(sampling, greedy=is_greedy, keep_mask=False)
        rollouts = drawn(engine.generate, task, prompts, count, key=key, sampling=how)
        for i, prompt in enumerate(prompts):
            here = slice(i * count, (i + 1) * count)
            votes = [None] if is_greedy else votes_of(task, prompt, [answer_of(r) for r in rollouts[here]])
            for n, (rollout, vote) in enumerate(zip(rollouts[here], votes, strict=True)):
                found.append(({
                    "problem": first + i, "sample": GREEDY if is_greedy else 1 + n,
                    "reward": earned(task, rollout),
                    "response_tokens": float(rollout.own_tokens), "truncated": float(not rollout.finished),
                    "vote": None if vote is None else 1 + vote,
                }, rollout))
    return found


def answer_of(rollout: Rollout) -> str:
    """What a completion answers; of a conversation its last turn."""
    return rollout.turns[-1].text if rollout.turns else rollout.text


def evaluation(engine: Sampler, task: AnyTask, prompts: list[Prompt], sampling: Sampling, seed: int, step: int) -> Rows:
    """What a run measures after a step on its held-out prompts, one greedy and one drawn completion of each: a part of
    its row of `steps`, and the rows of `evaluations`. The noise is the same at every evaluation of a seed."""
    rows = [row for row, _ in evaluate(engine, task, prompts, sampling, key=(seed, NOISE, 0))]
    means: Row = {"step": step, "eval_n": len(prompts)}
    for name in ("greedy", "sampled"):
        rewards = torch.tensor([r["reward"] for r in rows if (r["sample"] == GREEDY) == (name == "greedy")])
        means |= {f"eval_reward_{name}": rewards.double().mean().item(), f"eval_exact_{name}": exact(rewards)}
    return {"steps": [means], "evaluations": [{"step": step, "benchmark": "held_out", **row} for row in rows]}
