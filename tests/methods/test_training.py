"""Every method and every framework's default trains: three steps of a tiny model, finite, and the same again."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from moe_rl.config import ColdStart, Measure, ModelConfig, Optimizer, RunConfig
from moe_rl.execute import build
from moe_rl.methods import arm, methods, presets
from moe_rl.objectives import advantage_of, objective_of
from moe_rl.trainer import train

TINY = RunConfig(
    arm=arm("grpo"),
    task="tests.even_task:EvenCharacters",
    model=ModelConfig(overrides={"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 258}),
    cold_start=ColdStart(target=0.0),
    optimizer=Optimizer(lr=2e-3),
    measure=Measure(probe=2, detail_every=100),
    steps=3,
    prompts_per_step=3,
    group_size=4,
    mini_batches=3,
    micro_batch=3,
    max_new_tokens=6,
    eval_every=100,
    eval_prompts=2,
    save_every=100,
)
NAMES = [*methods(), *(p.name for p in presets().values() if not p.name.startswith("paper:") or p.arm != methods()[p.of].arm)]


class Nowhere:
    """Keeps the rows, and nothing on disk."""

    def __init__(self):
        self.rows = []

    def latest(self):
        return 0, None

    def add(self, table, rows):
        self.rows += [(table, {k: v for k, v in row.items() if not k.startswith(("seconds", "memory"))}) for row in rows]

    def diverged(self):
        return None

    def commit(self, step, save, diverged=None):
        assert diverged is None


def carried_out(name, path):
    """Rows and weights after a run."""
    run, folder = TINY.replace(arm=arm(name)), Nowhere()
    parts = build(run, path, path)
    try:
        assert train(run, parts, folder) is None
        return folder.rows, {key: tensor.clone() for key, tensor in parts.policy.weights()}
    finally:
        parts.engine.close()


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    return dict(build(TINY, tmp_path_factory.mktemp("none"), tmp_path_factory.mktemp("none")).policy.weights())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_it_makes_an_objective_and_trains(name, tmp_path, untrained):
    made = arm(name)
    assert objective_of(made) and advantage_of(made)
    rows, weights = carried_out(name, tmp_path)
    numbers = [value for _, row in rows for value in row.values() if isinstance(value, float)]
    updates = [row for table, row in rows if table == "updates"]
    assert len(updates) == TINY.steps * TINY.mini_batches and len(numbers) > 100
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in updates)
    assert any(row["grad_norm"] > 0 for row in updates)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert any(not torch.equal(tensor, untrained[key]) for key, tensor in weights.items())
