"""What a monitor costs in somebody else's training step: CPU-seconds of the step as it is, of the same step in a block
that is not measured, and of one that is, and of its row; ratios of their medians.

    python tests/benchmarks/monitor_overhead.py

The step is the benchmark's workload (sampling, old log-probs, four updates); the block is around its updates, the probe
32 of its responses. The three take turns, one right after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import our_step  # sets the environment first

import moe_rl  # isort: skip
from moe_rl.trainer import sample, split_rows  # isort: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each kind")
    parser.add_argument("--every", type=int, default=10, help="the probe rate that the ratio is for")
    options = parser.parse_args()
    parts = our_step.parts()
    parts.collector.engine.reports_routes = False
    batch = sample(parts, 1)
    probe = {"input_ids": batch.tokens[:32], "attention_mask": batch.attention_mask[:32]}
    idle = moe_rl.monitor(parts.policy.model, probe=probe, every=10**9, router_aux_loss_coef=0.0)
    seconds: dict[str, list[float]] = {"plain": [], "unmeasured": [], "measured": [], "row": []}
    for number in range(1, options.steps + 2):  # the first of each warms up
        seconds["plain"].append(step(parts, number, None))
        seconds["unmeasured"].append(step(parts, number, idle))
        # As with --every: the reference is read before the step, the probe again after it.
        measuring = moe_rl.monitor(parts.policy.model, probe=probe, router_aux_loss_coef=0.0)
        seconds["measured"].append(step(parts, number, measuring))
        start = time.process_time()
        json.dumps(measuring.row())
        seconds["row"].append(time.process_time() - start)
    timed = {name: values[1:] for name, values in seconds.items()}
    middle = {name: statistics.median(values) for name, values in timed.items()}
    reading = 100 * ((middle["measured"] + middle["row"]) / middle["plain"] - 1)
    print(
        json.dumps(
            {
                "seconds": timed,
                "median_seconds": middle,
                "one_reading_percent_of_a_step": reading,
                f"percent_at_every_{options.every}": reading / options.every,
            }
        )
    )


def step(parts: our_step.Parts, number: int, monitor: moe_rl.monitor | None) -> float:
    """CPU-seconds of one step, the monitor's block around its updates."""
    start = time.process_time()
    batch = our_step.scored(parts, sample(parts, number))
    if monitor is not None:
        monitor.__enter__()
    for index in split_rows(len(batch), our_step.RUN.mini_batches, number):
        parts.policy.update(parts.objective.attach_weights(batch.rows(index)), parts.objective)
    if monitor is not None:
        monitor.__exit__(None, None, None)
    return time.process_time() - start


if __name__ == "__main__":
    main()
