"""What the hooks cost, in CPU time: recording in a decode step and in a whole training step, replay in forward and
backward; and in memory: what a replay scope holds on to. Every pair runs without and with, one right after the other;
the number is the median of the pairs' ratios.

    python tests/benchmarks/hook_overhead.py

Five families, each of about the size of the workload: hidden 128, 8 layers, 32 experts, top-4, expert width 64.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import our_step  # sets the environment first
import torch
import workload

from moe_rl.config import ModelConfig, Optimizer
from moe_rl.integrations.cpu_kernels import use_cpu_kernels
from moe_rl.models.load import load
from moe_rl.policies.hf import HFPolicy
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing import RoutingTrace, record_routing, replay_routing

SIZE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_experts_per_tok": 4,
    "eos_token_id": 62,
    "pad_token_id": 63,
}
FAMILIES = {
    "qwen3_moe": {"num_local_experts": 32, "moe_intermediate_size": 64, "head_dim": 32},
    "olmoe": {"num_experts": 32, "intermediate_size": 64},
    "mixtral": {"num_local_experts": 32, "intermediate_size": 64, "head_dim": 32},
    "deepseek_v3": {"n_routed_experts": 32, "moe_intermediate_size": 64, "first_k_dense_replace": 0},
    "gpt_oss": {"num_local_experts": 32, "intermediate_size": 64, "head_dim": 32},
}
SEQUENCES, PROMPT, DECODE_STEPS = 64, 6, 16
ROWS, TOKENS = 8, 64


class Bench:
    """One family's model, and what is timed on it."""

    def __init__(self, family: str):
        self.model = load(ModelConfig(name=f"{family}-tiny", overrides={**SIZE, **FAMILIES[family]}), seed=0).model
        use_cpu_kernels(self.model)
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(0, 62, (SEQUENCES, PROMPT), generator=generator)
        self.tokens = torch.randint(0, 62, (ROWS, TOKENS), generator=generator)
        with torch.no_grad(), record_routing(self.model) as recording:
            self.model(self.tokens, use_cache=False)
        self.trace = recording.trace(self.tokens)
        self.steps = 0
        self.parts = None

    @torch.no_grad()
    def decode(self, recorded: bool) -> float:
        """Greedy decode steps of 64 sequences with a KV cache, routes taken after every one."""
        output = self.model(self.prompts, use_cache=True, logits_to_keep=1)
        start = time.process_time()
        with record_routing(self.model) if recorded else nullcontext() as recording:
            for _ in range(DECODE_STEPS):
                token = output.logits[:, -1:].argmax(-1)
                output = self.model(token, past_key_values=output.past_key_values, use_cache=True)
                if recorded:
                    recording.take()
        return time.process_time() - start

    def forward_backward(self, trace: RoutingTrace | None) -> float:
        """One forward and backward over 8 rows of 64 tokens, and what the routers would have picked."""
        start = time.process_time()
        with replay_routing(self.model, trace) as replay:
            self.model(self.tokens, use_cache=False).logits.logsumexp(-1).sum().backward()
            if replay:
                replay.preferred  # noqa: B018
        spent = time.process_time() - start
        self.model.zero_grad()
        return spent

    def kept(self) -> int:
        """Bytes that a replay scope holds on to after its backward, until it ends."""
        self.forward_backward(None)
        self.model.zero_grad(set_to_none=False)
        self.model(self.tokens, use_cache=False).logits.sum().backward()
        before = tensor_bytes()
        with replay_routing(self.model, self.trace):
            self.model(self.tokens, use_cache=False).logits.sum().backward()
            return tensor_bytes() - before

    def step(self, recorded: bool) -> float:
        """A whole training step: sampling, old log-probs, four updates."""
        if self.parts is None:
            self.model.generation_config.eos_token_id = None
            tokenizer = workload.tokenizer(eos=False)
            policy = HFPolicy(self.model, Optimizer(lr=0.0))
            parts = our_step.parts()
            collector = replace(parts.collector, engine=HFEngine(self.model, tokenizer))
            self.parts = replace(parts, policy=policy, collector=collector)
        self.steps += recorded
        with nullcontext() if recorded else our_step.no_recording(self.parts):
            seconds: dict[str, list[float]] = {}
            our_step.step(self.parts, self.steps, seconds)
        return seconds["step"][0]


def tensor_bytes() -> int:
    """Of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages = (x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def overhead(without: Callable[[], float], added: Callable[[], float], pairs: int) -> tuple[float, float, float]:
    """Median of (with / without - 1) in percent and its quartiles; the first pair warms up."""
    ratios = []
    for pair in range(pairs + 1):
        if pair % 2:
            base, more = without(), added()
        else:
            more, base = added(), without()
        ratios.append(100 * (more / base - 1))
    low, median, high = statistics.quantiles(ratios[1:], n=4)
    return median, low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=61)
    parser.add_argument("--step-pairs", type=int, default=15)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    options = parser.parse_args()
    print("| family | recording: decode step | recording: training step | replay: forward + backward | replay keeps |")
    print("|---|---|---|---|---|")
    for family in options.families:
        bench = Bench(family)
        plain = lambda: bench.forward_backward(None)  # noqa: E731, B023
        cells = [
            overhead(lambda: bench.decode(False), lambda: bench.decode(True), options.pairs),  # noqa: B023
            overhead(lambda: bench.step(False), lambda: bench.step(True), options.step_pairs),  # noqa: B023
            overhead(plain, lambda: bench.forward_backward(bench.trace), options.pairs),  # noqa: B023
        ]
        row = " | ".join(f"{m:+.1f} % ({a:+.1f} … {b:+.1f})" for m, a, b in cells)
        print(f"| {family} | {row} | {bench.kept() / 1024:.0f} KiB |", flush=True)


if __name__ == "__main__":
    main()
