"""Memory and time of scoring and of a gradient at the widths of a real model, on one device.

    python tests/benchmarks/real_shapes.py --layers 1 --tokens 2048      # a row of so many, half of them response
    python tests/benchmarks/real_shapes.py --layers 2 --tokens 8192 --rows 4 --budget 8192

Qwen3-30B-A3B's widths (hidden 2048, 128 experts of 768, top-8, vocabulary 151,936), random weights in bfloat16, no
optimizer state. Prints the peak memory of the process, and what recording and replay cost in a
score, each the median of ratios to a forward without hooks that runs right before.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.config import Arm, Optimizer
from moe_rl.objectives import objective_of
from moe_rl.policies.hf import HFPolicy
from moe_rl.rollouts.batches import collate
from moe_rl.types import Batch, Prompt, Rollout

WIDTHS = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "norm_topk_prob": True,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    before = peak()
    model = built(args.layers)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    print(
        f"{args.layers} layers, {args.rows} rows of {args.tokens} tokens, {args.budget or 'all'} in a forward; "
        f"weights {weights / 1e9:.2f} GB; peak once built {peak() - before:.2f} GB"
    )
    batch = batch_of(args.rows, args.tokens)
    policy = HFPolicy(model, Optimizer(), micro_batch_tokens=args.budget)
    started = time.perf_counter()
    old = policy.score(batch)
    print(f"score: {time.perf_counter() - started:.1f} s, peak {peak() - before:.2f} GB")
    per_token = old.routes.experts.element_size() * old.routes.experts[0, 0].numel()
    print(f"a trace: {per_token} bytes per token, {per_token // args.layers * 48} at 48 layers")
    if args.repeat:
        shares(policy, batch, old.routes, args.repeat)
    objective = objective_of(Arm(name="grpo"))
    advantages = torch.zeros_like(old.logprobs)
    part = objective.attach_weights(
        Batch(**vars(batch), old_logprobs=old.logprobs, routes=old.routes, advantages=advantages)
    )
    started = time.perf_counter()
    policy._backward(part, objective)
    print(f"gradient under replay: {time.perf_counter() - started:.1f} s, peak {peak() - before:.2f} GB")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--budget", type=int, help="micro_batch_tokens")
    parser.add_argument("--repeat", type=int, default=0, help="pairs for the shares of recording and replay")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def built(layers: int) -> Qwen3MoeForCausalLM:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=layers, **WIDTHS)).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
        rotary = model.model.rotary_emb  # its frequencies are a buffer, which to_empty left empty
        rotary.__init__(model.config)
    return model


def batch_of(rows: int, tokens: int):
    """Random tokens; the second half of each row is a response."""
    half, generator = tokens // 2, torch.Generator().manual_seed(0)
    drawn = torch.randint(3, 150_000, (rows, tokens), generator=generator).tolist()
    rollouts = [
        Rollout(Prompt("", tokens=tuple(row[:half])), tuple(row[half:]), torch.zeros(tokens - half), "", True)
        for row in drawn
    ]
    batch = collate(rollouts, [0] * rows, [0.0] * rows, 0)
    advantages = torch.randn(rows, generator=generator)[:, None].where(batch.response_mask, 0)
    return batch.__class__(**{**vars(batch), "advantages": advantages})


def shares(policy: HFPolicy, batch, routes, pairs: int) -> None:
    """What hooks add to a forward: ratios to one without any, in turns."""
    tokens, found = batch.tokens[:, :-1], {"recording": [], "recording and replay": []}

    def timed(action) -> float:
        started = time.perf_counter()
        with torch.no_grad():
            action()
        return time.perf_counter() - started

    def plain() -> None:
        policy.model(input_ids=tokens, use_cache=False, logits_to_keep=1)

    def hooked(forced) -> None:
        with policy._record_and_replay(batch, forced) as routed:
            plain()
        routed.traces  # noqa: B018  what was recorded, as a trace

    for _ in range(pairs):
        bare = timed(plain)
        found["recording"].append(timed(lambda: hooked(None)) / bare)
        found["recording and replay"].append(timed(lambda: hooked(routes)) / bare)
    for name, ratios in found.items():
        print(f"{name}: +{100 * (statistics.median(ratios) - 1):.1f} % of a forward's body ({pairs} pairs)")


def peak() -> float:
    """Of the process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main()
