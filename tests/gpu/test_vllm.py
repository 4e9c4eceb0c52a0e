"""vLLM as the engine on the policy's own card; where vLLM is not importable, it is skipped by name."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from moe_rl.config import ModelConfig
from moe_rl.registry import Component
from tests.gpu.conftest import DEVICE, DRY, NEEDS_GPU
from tests.test_trainer import ARMS, TINY, carry_out

pytestmark = [
    NEEDS_GPU,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not importable: the engine on the policy's own card was not tested",
    ),
    pytest.mark.skipif(DRY, reason="vLLM on a CPU is tested by `make test-vllm`"),
]


@pytest.mark.parametrize("arm", ["grpo", "r3"])
def test_engine_and_policy_on_one_card(arm, tmp_path, report):
    """Every push is checked: weights, log-probs and routes of a few completions."""
    assert torch.cuda.is_available()
    model = ModelConfig(overrides={"head_dim": 64, "num_hidden_layers": 2}, device=DEVICE, dtype="bfloat16")
    run = TINY.replace(arm=ARMS[arm], model=model, engine=Component("vllm", gpu_memory=0.3), steps=1)
    steps = carry_out(run, tmp_path / "run")["steps"].query("step > 0")
    for column in ("engine_logprob_max", "engine_any_change_rate", "push_gap_max"):
        assert steps[column].map(math.isfinite).all()
        report(f"vLLM, {arm}, bfloat16: {column}", float(steps[column].max()))
