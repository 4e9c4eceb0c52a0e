"""Every method trains a tiny model for two steps, every framework's default for one; draws repeat themselves."""

from __future__ import annotations

import math

import pytest
import torch

from moe_rl.build import build
from moe_rl.config import ColdStart, Measure, ModelConfig, Optimizer, RunConfig
from moe_rl.objectives import advantage_of, objective_of
from moe_rl.objectives.methods import arm, entry, methods, presets
from moe_rl.storage.columns import TABLES
from moe_rl.trainer import train

TINY = RunConfig(
    arm=arm("grpo"),
    task="tests.even_task:EvenCharacters",
    model=ModelConfig(overrides={"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 258}),
    cold_start=ColdStart(target=0.0),
    optimizer=Optimizer(lr=2e-3),
    measure=Measure(responses=2, detail_every=100),
    steps=2,
    prompts_per_step=3,
    group_size=4,
    mini_batches=2,
    micro_batch=4,
    max_new_tokens=6,
    stop=tuple("abcdefghijklmnopqrstuvwxyz0123456789"),  # so that some responses end, and lengths differ
    eval_every=100,
    eval_prompts=2,
    save_every=100,
)
DRAWS = ("clip_cov",)
"""Methods with a draw of their own, beside the sampling."""
NAMES = [*methods(), *(p.name for p in presets().values() if p.arm != methods()[p.of].arm)]


class Nowhere:
    """Keeps the rows, and nothing on disk."""

    def __init__(self):
        self.rows = {table: [] for table in TABLES}

    def latest(self):
        return 0, None

    def add(self, table, rows):
        self.rows[table] += rows

    def diverged(self):
        return None

    def stopping(self):
        return False

    def commit(self, step, save, diverged=None):
        assert diverged is None


def carried_out(run, path):
    """The rows of updates, and the weights afterwards."""
    parts, folder = build(run, path, path), Nowhere()
    try:
        assert train(run, parts, folder) is None
        return folder.rows["updates"], {name: tensor.clone() for name, tensor in parts.policy.weights()}
    finally:
        parts.collector.engine.close()


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    path = tmp_path_factory.mktemp("untrained")
    return dict(build(TINY, path, path).policy.weights())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_it_makes_an_objective_and_trains(name, tmp_path, untrained):
    run = TINY.replace(arm=arm(name), steps=2 if name in methods() else 1, **entry(name).run)
    assert objective_of(run.arm) and advantage_of(run.arm)
    updates, weights = carried_out(run, tmp_path)
    assert len(updates) == run.steps * run.mini_batches
    assert all(math.isfinite(update["loss"]) and math.isfinite(update["grad_norm"]) for update in updates)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert any(not torch.equal(tensor, untrained[key]) for key, tensor in weights.items())
    if name not in DRAWS:
        return
    again, _ = carried_out(run.replace(steps=1), tmp_path)
    for first, second in zip(updates[: run.mini_batches], again, strict=True):
        assert {k: v for k, v in first.items() if not k.startswith("seconds")} == {
            k: v for k, v in second.items() if not k.startswith("seconds")
        }
