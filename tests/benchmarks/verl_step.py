"""What the plugin costs in verl: CPU-seconds of a step of verl's own FSDP2 engine, and of the same step with recording,
replay and metrics, as paired ratios with a 95 % interval. It needs verl 0.9.1 (`make test-verl` installs it).

    .venv-versions/verl-0.9.1/bin/python -m tests.benchmarks.verl_step

A step is one pass for the old log-probs of 32 responses of 16 tokens, and four updates; rollouts are given. All kinds
take turns in every round, in an order that is drawn anew. The model has 6.7 M parameters, 8 layers and 4 of 32 experts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time

from tests.benchmarks import workload  # sets the environment first
from tests.verl import conftest  # noqa: F401  (verl's environment)

os.environ["MOE_RL_VERL"] = "0"

import numpy as np  # isort: skip
import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from scipy import stats  # isort: skip
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # isort: skip

from moe_rl.integrations.verl.engine import RoutingFSDPEngine  # isort: skip
from tests.verl import worker_inputs as inputs  # isort: skip

RESPONSES, PROMPT, ANSWER, UPDATES = 32, 6, 16, 4


class Unmeasured(RoutingFSDPEngine):
    """Records and replays, and measures nothing."""

    def _measure(self, micro_batch, found):
        self._moe_sums.add("nothing", torch.zeros(()))


KINDS = {
    "verl": (FSDPEngineWithLMHead, None),
    "recording": (Unmeasured, {"mode": "disabled"}),
    "recording, metrics": (RoutingFSDPEngine, {"mode": "disabled"}),
    "R2": (Unmeasured, {"mode": "R2"}),
    "R2, metrics": (RoutingFSDPEngine, {"mode": "R2"}),
    "R2, metrics, measured_sequences=2": (RoutingFSDPEngine, {"mode": "R2", "measured_sequences": 2}),
}
"""The engine's class, and `router_replay`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=14, help="timed steps of each kind")
    options = parser.parse_args()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with tempfile.TemporaryDirectory() as folder:
        workload.model().save_pretrained(folder)
        engines = {
            name: inputs.engine(folder, replay, learning_rate=workload.LR, kind=kind)
            for name, (kind, replay) in KINDS.items()
        }
    seconds = {name: [] for name in engines}
    order = random.Random(0)
    for number in range(options.rounds + 1):  # the first warms up
        for name in order.sample([*engines], len(engines)):
            seconds[name].append(step(engines[name], number))
    timed = {name: np.array(values[1:]) for name, values in seconds.items()}
    print(json.dumps({name: round(float(np.median(values)), 3) for name, values in timed.items()}))
    for name, values in timed.items():
        logs = np.log(values / timed["verl"])
        half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
        low, middle, high = (100 * (np.exp(x) - 1) for x in (logs.mean() - half, logs.mean(), logs.mean() + half))
        print(f"{name:36s} {middle:+6.1f} % [{low:+.1f}, {high:+.1f}]")
    dist.destroy_process_group()


def step(engine, number: int) -> float:
    """CPU-seconds of scoring a batch and of the updates on it."""
    data = inputs.batch(64, number, (PROMPT,) * RESPONSES, (ANSWER,) * RESPONSES, dynamic=True)
    inputs.tu.assign_non_tensor(data, max_token_len_per_gpu=RESPONSES // UPDATES * (PROMPT + ANSWER))
    start = time.process_time()
    whole = inputs.with_old_policy(data, inputs.score(engine, data.copy()))
    for rows in torch.arange(RESPONSES).chunk(UPDATES):
        part = inputs.tu.index_select_tensor_dict(whole, rows.tolist())
        inputs.tu.assign_non_tensor(part, global_batch_size=len(rows))
        inputs.update(engine, part)
    return time.process_time() - start


if __name__ == "__main__":
    main()
