"""Every method trains a tiny model for two steps, every framework's default for one."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from moe_rl.build import build
from moe_rl.config import Measure
from moe_rl.objectives import advantage_of, objective_of
from moe_rl.objectives.methods import arm, entry, methods, presets
from tests import test_trainer

TINY = test_trainer.TINY.replace(
    measure=Measure(responses=2, detail_every=100),
    steps=2,
    prompts_per_step=3,
    mini_batches=2,
    micro_batch=4,
    stop=tuple("abcdefghijklmnopqrstuvwxyz0123456789"),  # so that some responses end, and lengths differ
    eval_every=100,
    eval_prompts=2,
    save_every=100,
)
NAMES = [*methods(), *(p.name for p in presets().values() if p.arm != methods()[p.of].arm)]


def carried_out(run, path):
    """The rows of updates, and the weights afterwards."""
    updates = test_trainer.carry_out(run, path / "run")["updates"].to_dict("records")
    return updates, load_file(next((path / "run").glob("commit/*/checkpoint/model.safetensors")))


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
