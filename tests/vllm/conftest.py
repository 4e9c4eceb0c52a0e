"""A real vLLM, one for all tests: `make test-vllm` installs it and runs them. Skipped where it is absent."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from moe_rl.config import Arm, ColdStart, ModelConfig, Optimizer, RunConfig
from moe_rl.models import load
from moe_rl.policies.hf import HFPolicy

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
torch.set_num_threads(1)

RUN = RunConfig(
    arm=Arm(name="grpo"),
    model=ModelConfig(overrides={"head_dim": 32}),  # the least that vLLM's attention takes on a CPU
    task="running_sums",
    task_options={"digits": 4},
    max_new_tokens=5,
    eval_prompts=8,
    cold_start=ColdStart(target=0.3, max_steps=1500),
)
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="tests against a real vLLM are run by `make test-vllm`"
)
CACHE = Path(__file__).parents[2] / ".cache" / "test-vllm"
"""Where the trained checkpoint is kept between runs of the tests."""


class Serving:
    """One engine and the policy whose weights it serves; the tests change the weights."""

    def __init__(self, folder, temperature=1.0, dtype="float32", model=RUN.model):
        from moe_rl.rollouts.push import describe
        from moe_rl.rollouts.vllm import VLLMEngine

        self.loaded = load(model, 0)
        self.folder = folder
        describe(self.loaded.model, self.loaded.tokenizer, folder)
        self.policy = HFPolicy(self.loaded.model, Optimizer(), temperature=temperature)
        self.engine = VLLMEngine(
            folder, self.loaded.tokenizer, self.score, dtype=dtype, temperature=temperature, max_tokens=256
        )

    def score(self, batch):
        return self.policy.score(batch)

    def at(self, temperature):
        """Both sides at another temperature."""
        self.policy.temperature = self.engine.temperature = temperature
        return self


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    serving = Serving(tmp_path_factory.mktemp("served"))
    yield serving
    serving.engine.close()


@pytest.fixture
def serving(running):
    """The engine with the random weights of seed 0, pushed."""
    running.loaded.model.load_state_dict(load(RUN.model, 0).model.state_dict())
    running.at(1.0).engine.load(running.policy.weights())
    return running


@pytest.fixture(scope="session")
def trained():
    """Weights that solve four running sums in about a third of the attempts."""
    from moe_rl.cold_start import cold_start
    from moe_rl.tasks.base import load_task

    loaded = load(RUN.model, 0)
    cold_start(loaded, load_task(RUN.task, RUN.task_options), RUN, CACHE)
    return loaded
