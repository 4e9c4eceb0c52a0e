"""How much routes and log-probs differ at equal weights, over many tokens of a cold-started model.

    python tests/benchmarks/noise_floor.py runs/.cache/cold_starts/<hash>

Samples completions of running sums, scores them, and scores them again with rows permuted, in batches of another size,
and with every row padded. On a CPU in float32 no expert set may change. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import torch

from moe_rl.config import ModelConfig, Optimizer
from moe_rl.metrics.volatility import route_change
from moe_rl.models.load import load
from moe_rl.models.tokens import encode_prompts
from moe_rl.policies.hf import HFPolicy
from moe_rl.rollouts.batches import collate
from moe_rl.rollouts.hf import HFEngine
from moe_rl.tasks.running_sums import RunningSums
from moe_rl.types import Rollouts, Sampling, Scored


def padded(batch: Rollouts, extra: int) -> Rollouts:
    """Every row with `extra` columns of padding, which one row claims as tokens so that they are not trimmed away."""
    wide = {
        name: torch.nn.functional.pad(getattr(batch, name), (0, extra))
        for name in ("tokens", "attention_mask", "response_mask", "rollout_logprobs")
    }
    wide["attention_mask"][:, -extra:] = torch.arange(len(batch))[:, None] % 97 == 0
    return replace(batch, **wide, rollout_routes=None)


def compare(name: str, first: Scored, again: Scored, batch: Rollouts) -> dict[str, float | str]:
    time = batch.tokens.shape[1]
    rows = torch.nn.functional.pad(batch.attention_mask[:, 1:], (0, 1))
    change = route_change(first.routes.ids(), again.routes.ids()[:, :time], rows).row()
    return {
        "rescored": name,
        "tokens": int(change["volatility_tokens"]),
        "any_change_rate": change["any_change_rate"],
        "logprob_max": (first.logprobs - again.logprobs[:, :time]).abs().max().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--prompts", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(ModelConfig(name=options.checkpoint), seed=0)
    prompts = encode_prompts(RunningSums(digits=12).prompts(options.prompts, 1), loaded.tokenizer)
    rollouts = HFEngine(loaded.model, loaded.tokenizer).generate(
        prompts, 8, key=(0,), sampling=Sampling(max_new_tokens=13)
    )
    index = [i // 8 for i in range(len(rollouts))]
    batch = collate(rollouts, index, [0.0] * len(rollouts), loaded.tokenizer.pad_token_id)
    policies = {size: HFPolicy(loaded.model, Optimizer(), score_batch=size) for size in (256, 61)}
    first = policies[256].score(batch)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    permuted, time = batch.rows(order), batch.tokens.shape[1]
    found = [
        compare(
            "while sampling", first, replace(first, routes=batch.rollout_routes, logprobs=batch.rollout_logprobs), batch
        ),
        compare("rows permuted", first.rows(order, time), policies[256].score(permuted), permuted),
        compare("batches of 61", first, policies[61].score(batch), batch),
        compare("padded by 7", first, policies[256].score(padded(batch, 7)), batch),
    ]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
