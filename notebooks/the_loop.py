"""The whole algorithm in one file: GRPO, GRPO with Routing Replay, or GSPO on a tiny Mixture-of-Experts model.

    python notebooks/the_loop.py grpo|replay|gspo_short [steps]  seconds on a laptop CPU

No study, no folders, nothing kept: what is left are the verbs of the package in the order in which they are called.
`moe_rl.trainer.train`, the loop of every study, calls them in the same order. With the settings and the seed below it
earns the same rewards, to the last bit; a test holds that.
"""

from __future__ import annotations

import random
import sys

import torch

from moe_rl.config import Arm, ModelConfig, Optimizer
from moe_rl.metrics.ratios import ratio_statistics
from moe_rl.metrics.volatility import route_change
from moe_rl.models.load import load
from moe_rl.models.tokens import encode_prompts
from moe_rl.objectives import advantage_of, objective_of
from moe_rl.policies.hf import HFPolicy
from moe_rl.recorder import evaluation_rows
from moe_rl.registry import Component
from moe_rl.rollouts.batches import collate
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing.sources import SOURCES
from moe_rl.seeds import NOISE, PROMPTS, SPLIT, derive
from moe_rl.tasks.base import draw, held_out
from moe_rl.types import Prompt, Sampling, ScoredRollouts, response_rows

# ---------------------------------------------------------------------- the three methods, as data
METHODS = {
    # w[i,t] = π_θ / π_old of every token, clipped token by token
    "grpo": Arm(name="grpo", loss="grpo"),
    # the same loss, but every forward of the updates uses the experts that π_old used for the same token
    "replay": Arm(name="replay", loss="grpo", routes="old_policy"),
    # one ratio per response, the geometric mean of its tokens', clipped as a whole; its range is for short responses
    "gspo_short": Arm(name="gspo_short", loss=Component("gspo", clip_low=0.01, clip_high=0.013)),
}

# ---------------------------------------------------------------------- settings
MODEL = ModelConfig(overrides={"num_hidden_layers": 2, "hidden_size": 32})  # Qwen3-MoE, 16 experts, top-2, bytes
OPTIMIZER = Optimizer(lr=2e-3)
SAMPLING = Sampling(temperature=1.0, max_new_tokens=8)
PROMPTS_PER_STEP, GROUP_SIZE, MINI_BATCHES, TEST_PROMPTS = 16, 8, 4, 16


class Letters:
    """A task is a class with prompts and rewards. This one can be learned from random weights: answer with letters."""

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        rng = random.Random(seed)
        return [Prompt("".join(rng.choices("0123456789", k=rng.randint(2, 5)))) for _ in range(count)]

    def reward(self, prompt: Prompt, completion: str) -> float:
        return sum(c.isascii() and c.isalpha() for c in completion) / max(1, len(completion))


def main(method: str = "grpo", steps: int = 30, seed: int = 0) -> list[dict[str, float]]:
    """Train and print; a row per step."""
    arm, task = METHODS[method], Letters()
    loaded = load(MODEL, seed=0)
    policy = HFPolicy(loaded.model, OPTIMIZER)  # what scores and updates: π_θ
    engine = HFEngine(loaded.model, loaded.tokenizer)  # what samples: here the same module; elsewhere vLLM or a server
    objective, advantage = objective_of(arm), advantage_of(arm)
    test = encode_prompts(held_out(task, TEST_PROMPTS), loaded.tokenizer)
    engine.load(policy.weights())
    rows = []
    for step in range(1, steps + 1):
        # Prompts. Random streams are derived from the seed, their purpose and the step, so that all methods share them.
        excluding = {prompt.text for prompt in test}
        prompts = draw(task, PROMPTS_PER_STEP, derive(seed, PROMPTS, step), excluding)
        prompts = encode_prompts(prompts, loaded.tokenizer)

        # Rollouts: a group of completions per prompt, with the log-probs and the routes of the engine; their rewards.
        rollouts = engine.generate(prompts, GROUP_SIZE, key=(seed, NOISE, step), sampling=SAMPLING)
        rewards = [task.reward(rollout.prompt, rollout.text) for rollout in rollouts]

        # One right-padded batch.
        groups = [i for i in range(len(prompts)) for _ in range(GROUP_SIZE)]
        sampled = collate(rollouts, groups, rewards, loaded.tokenizer.pad_token_id)

        # π_old: the policy's own scoring of what was sampled, before any update, and the experts every token used.
        unconstrained = policy.score(sampled)

        # Routing Replay is this line: the routes that all updates of the step will use, or None for live routing. Both
        # sides of a ratio use the same ones. Those of π_old are what `unconstrained` was scored under; for any others,
        # such as a placebo's, the denominator would be policy.score(batch, routes).logprobs.
        routes = SOURCES[arm.routes.name](sampled, unconstrained)
        scored = ScoredRollouts(**vars(sampled), old_logprobs=unconstrained.logprobs, routes=routes)

        # The advantage of a response is how much better than its group it is.
        batch = advantage.attach_advantages(scored)

        # Updates. The first mini-batch is on-policy (every ratio is 1); the others have moved away by then, and so have
        # their routes: this is what the three methods treat differently.
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(derive(seed, SPLIT, step)))
        for index in order.tensor_split(MINI_BATCHES):
            part = objective.attach_weights(batch.rows(index))  # aggregation weights span the whole mini-batch
            updated = policy.update(part, objective)  # forward, loss, backward, clip, one AdamW step

        # The new weights go to the engine; nothing happens where it shares the module.
        engine.load(policy.weights())

        # Measuring. Routes are compared as the model chooses them by itself, in every method: a forward without replay
        # under the new weights, of the same tokens as before. Ratios and clipping are those of the last mini-batch.
        after = policy.score(batch)
        change = route_change(unconstrained.routes.experts, after.routes.experts, response_rows(batch)).row()
        ratios = ratio_statistics(updated.logprobs - part.old_logprobs, part.response_mask)
        clipped = (updated.clipped_by != 0)[part.response_mask].double().mean().item()
        row = {
            "reward": batch.rewards.double().mean().item(),
            "held_out": evaluation_rows(engine, task, test, SAMPLING, seed, step)["steps"][0]["eval_reward_greedy"],
            "experts_changed": change["expert_change_rate"],
            "log_ratio_var": ratios["token_log_ratio_var"],
            "clipped": clipped,
            "entropy": unconstrained.entropy[batch.response_mask].double().mean().item(),
        }
        rows.append(row)
        print(f"step {step:3d}  " + "  ".join(f"{name} {value:.4f}" for name, value in row.items()))
    return rows


if __name__ == "__main__":
    if not set(sys.argv[1:2]) <= set(METHODS) or not all(number.isdigit() for number in sys.argv[2:3]):
        sys.exit(__doc__)
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
