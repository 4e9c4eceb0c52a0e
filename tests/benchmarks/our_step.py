"""CPU-seconds per step of `moe_rl` on the benchmark's workload. Prints one JSON object.

`plain` is the trainer's step without measurements: sampling with routes recorded, old log-probs, the updates.
`unrecorded` is the same with recording switched off everywhere; `measured` is the trainer's own step with all default
measurements, detail steps at their default rate. The modes take turns, so that a noisy machine is unfair to none.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import workload
from workload import GROUP, MINI_BATCHES, NEW_TOKENS, PROMPT_TOKENS, PROMPTS  # sets the environment first

import moe_rl.policies.hf  # isort: skip
from moe_rl.rollouts.batches import Collector

from moe_rl.config import Arm, Optimizer, RunConfig  # isort: skip
from moe_rl.integrations.cpu_kernels import use_cpu_kernels  # isort: skip
from moe_rl.objectives import advantage_of, objective_of  # isort: skip
from moe_rl.policies.hf import HFPolicy  # isort: skip
from moe_rl.recorder import Recorder  # isort: skip
from moe_rl.rollouts.hf import HFEngine  # isort: skip
from moe_rl.routing import RoutingTrace, layout_of  # isort: skip
from moe_rl.routing.sources import live  # isort: skip
from moe_rl.trainer import Parts, sample, split_rows, train_step  # isort: skip
from moe_rl.types import Batch, Prompt, Rollouts, ScoredRollouts  # isort: skip


class OddCharacters:
    """The workload as a task."""

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        return [Prompt(text) for text in workload.prompts(count, seed)]

    def reward(self, prompt: Prompt, completion: str) -> float:
        return workload.reward(completion)


def parts() -> Parts:
    """Policy and engine on one model. Without an EOS every completion has exactly `NEW_TOKENS` tokens."""
    model, tokenizer = workload.model(), workload.tokenizer(eos=False)
    model.generation_config.eos_token_id = None
    assert use_cpu_kernels(model)

    return Parts(
        collector=Collector(
            run=RUN, task=OddCharacters(), engine=HFEngine(model, tokenizer), tokenizer=tokenizer, held_out=[]
        ),
        policy=HFPolicy(model, Optimizer(lr=workload.LR)),
        objective=objective_of(RUN.arm),
        advantage=advantage_of(RUN.arm),
        source=live,
    )


RUN = RunConfig(
    arm=Arm(name="grpo"),
    optimizer=Optimizer(lr=workload.LR),
    prompts_per_step=PROMPTS,
    group_size=GROUP,
    mini_batches=MINI_BATCHES,
    max_new_tokens=NEW_TOKENS,
)


def scored(parts: Parts, rollouts: Rollouts) -> Batch:
    """The batch with the policy's own log-probs, without replay."""
    old = parts.policy.score(rollouts).logprobs
    return parts.advantage.attach_advantages(ScoredRollouts(**vars(rollouts), old_logprobs=old))


def step(parts: Parts, number: int, seconds: dict[str, list[float]]) -> int:
    """One step without measurements; returns the completion tokens drawn."""
    marks = [time.process_time()]
    rollouts = sample(parts, number)
    marks.append(time.process_time())
    batch = scored(parts, rollouts)
    marks.append(time.process_time())
    for index in split_rows(len(batch), RUN.mini_batches, number):
        parts.policy.update(parts.objective.attach_weights(batch.rows(index)), parts.objective)
    marks.append(time.process_time())
    assert batch.tokens.shape == (PROMPTS * GROUP, PROMPT_TOKENS + NEW_TOKENS), batch.tokens.shape
    spent = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    for name, value in zip(("step", "sample", "score", "update"), (sum(spent), *spent), strict=True):
        seconds.setdefault(name, []).append(value)
    return int(batch.response_mask.sum())


def measured_step(parts: Parts, number: int, seconds: dict[str, list[float]]) -> None:
    start = time.process_time()
    train_step(RUN, parts, number, Recorder(RUN, parts.policy))
    seconds.setdefault("step", []).append(time.process_time() - start)


@contextmanager
def no_recording(parts: Parts) -> Iterator[None]:
    """Recording off in engine and policy; the policy gets an empty trace in its place."""
    layout = layout_of(parts.policy.model)

    class Nothing:
        def trace(self, tokens: object, mask: object) -> RoutingTrace:
            shape = (*tokens.shape, len(layout.moe_layers), layout.top_k)
            ids = tokens.new_full((1,), layout.unknown, dtype=layout.dtype).expand(shape)
            return RoutingTrace.from_ids(ids, layout, tokens=tokens, attention_mask=mask, check=False)

    @contextmanager
    def nothing(*_: object, **__: object) -> Iterator[Nothing]:
        yield Nothing()

    parts.collector.engine.reports_routes = False
    with mock.patch.object(moe_rl.policies.hf, "record_routing", nothing):
        yield
    parts.collector.engine.reports_routes = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each mode")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each mode before the clock counts")
    parser.add_argument("--modes", nargs="+", default=["plain"], choices=["plain", "unrecorded", "measured"])
    options = parser.parse_args()
    made = parts()
    seconds: dict[str, dict[str, list[float]]] = {mode: {} for mode in options.modes}
    tokens = set()
    for number in range(1, options.warmup + options.steps + 1):
        into = seconds if number > options.warmup else {mode: {} for mode in options.modes}
        if "plain" in into:
            tokens.add(step(made, number, into["plain"]))
        if "unrecorded" in into:
            with no_recording(made):
                tokens.add(step(made, number, into["unrecorded"]))
        if "measured" in into:
            measured_step(made, number, into["measured"])
    assert tokens <= {PROMPTS * GROUP * NEW_TOKENS}, tokens
    print(
        json.dumps(
            {
                "seconds": seconds,
                "new_tokens": PROMPTS * GROUP * NEW_TOKENS,
                "parameters": made.policy.model.num_parameters(),
            }
        )
    )


if __name__ == "__main__":
    main()
