"""What is compiled, and what is refused. What compiled parts compute is in tests/gpu/test_compile.py."""

from __future__ import annotations

import pytest

from moe_rl.build import check
from moe_rl.config import Arm, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.models.compilation import compile_parts, find_parts
from tests.conftest import build

EVERYWHERE = {"self_attn", "input_layernorm", "post_attention_layernorm", "mlp.experts"}


def test_the_parts_of_a_layer_hold_no_router():
    """DeepSeek's first layer has a dense block, the others experts and a shared expert."""
    parts = find_parts(build("deepseek_v3"))
    assert {name: len(modules) for name, modules in parts.items()} == dict.fromkeys(EVERYWHERE, 3) | {
        "mlp": 1,
        "mlp.experts": 2,
        "mlp.shared_experts": 2,
    }


def test_float32_experts_stay_eager():
    """Traced in float32, transformers' experts loop with a wait for the device."""
    assert "mlp.experts" in find_parts(build("qwen3_moe"))
    assert set(compile_parts(build("qwen3_moe"), "aot_eager")) == EVERYWHERE - {"mlp.experts"}


def test_a_backend_that_torch_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="inductr"):
        check(RunConfig(arm=Arm(name="grpo"), policy="hf(compile=inductr)"))
