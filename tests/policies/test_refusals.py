"""What policies of several processes can do, and refuse to: said in one process, before a rank is started."""

from __future__ import annotations

import pytest

from moe_rl.build import check
from moe_rl.config import Arm, ModelConfig, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.integrations.megatron.layout import Parallel, check_layout
from moe_rl.models.load import hf_config
from moe_rl.registry import Component
from tests.conftest import pretend_installed
from tests.integrations.fsdp_on_ranks import RUN
from tests.integrations.megatron_study import replay
from tests.routing import families

# ---------------------------------------------------------------------- Megatron-core
TINY = ModelConfig()


@pytest.mark.parametrize(
    ("parallel", "world", "reason"),
    [
        (Parallel(dp=2, ep=2), 4, "needs 2 processes, but 4 run"),
        (Parallel(dp=2, ep=4), 2, "must divide"),
        (Parallel(dp=3, ep=3), 3, "16 experts over ep=3"),
        (Parallel(tp=4), 4, "2 key-value heads over tp=4"),
        (Parallel(pp=4), 4, "6 layers over pp=4"),
    ],
)
def test_layouts_that_megatron_gets_wrong_are_refused_with_the_reason(parallel, world, reason):
    with pytest.raises(ConfigError, match=reason):
        check_layout(parallel, hf_config(TINY), world)


@pytest.mark.parametrize("preset, reason", [("olmoe-tiny", "olmoe"), ("gpt_oss-tiny", "gpt_oss")])
def test_families_without_a_mapping_are_refused_by_name(preset, reason):
    with pytest.raises(ConfigError, match=reason):
        check_layout(Parallel(), hf_config(ModelConfig(name=preset)), 1)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("model_type", "shape", "parallel", "reason"),
    [
        ("qwen3_next", {}, {}, "qwen3_next"),
        ("deepseek_v3", {"norm_topk_prob": False}, {}, "sigmoid gates with norm_topk_prob=False"),
        ("dots1", {"num_experts_per_tok": 1}, {}, "num_experts_per_tok=1"),
        ("dots1", {"attention_bias": True}, {}, "attention_bias=True"),
        ("deepseek_v3", {"rope_interleave": False}, {}, "rope_interleave=False"),
        ("deepseek_v3", {"n_shared_experts": 0}, {}, "no shared expert"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, {}, "no shared expert"),
        (
            "qwen3_moe",
            {"layer_types": ["full_attention"] * 3, "use_sliding_window": True, "sliding_window": 3},
            {},
            "sliding_window=3",
        ),
        ("qwen3_moe", {"rope_parameters": YARN}, {}, "rope_type='yarn'"),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7}}, {}, "rope_parameters=.*'mscale': 0.7"),
        ("deepseek_v3", {"num_hidden_layers": 4}, {"pp": 4}, r"pp=4: .*\[0"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 33}, {"tp": 2}, "33 shared experts' width over tp=2"),
    ],
)
def test_what_a_family_has_and_megatron_has_not_is_refused_by_name(model_type, shape, parallel, reason):
    from transformers import CONFIG_MAPPING

    config = families.tiny_config(CONFIG_MAPPING[model_type], shape)
    with pytest.raises(ConfigError, match=reason):
        check_layout(Parallel(**parallel), config, parallel.get("tp", 1) * parallel.get("pp", 1))


@pytest.mark.parametrize(
    "engine", [Component("vllm", dtype="bfloat16"), Component("server", url="http://a:1", dtype="bfloat16")]
)
def test_vllm_and_servers_are_engines_of_megatrons_policy_too(engine, monkeypatch):
    pytest.importorskip("megatron", reason="pip install 'moe_rl[megatron]'")
    pretend_installed(monkeypatch, "vllm")
    run = RunConfig(arm=replay, policy="megatron", model=TINY)
    check(run.replace(engine=engine))
    check(run.replace(engine=Component("hf", routes="unknown")))
    with pytest.raises(ConfigError, match="policy='hf'"):
        check(run.replace(engine=Component("perturbed", dtype="bfloat16")))


def test_torchrun_is_refused_for_a_policy_of_one_process(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--policy megatron"):
        check(RunConfig(arm=replay))


# ---------------------------------------------------------------------- FSDP2
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"policy": Component("fsdp", compute_dtype="int8")}, "compute_dtype='int8'"),
        ({"engine": Component("perturbed", dtype="bfloat16")}, "policy='hf'"),
        (
            {"router_noise.scale": 1.0, "router_noise.target": "choice", "router_noise.direction": "last_step"},
            "is not possible with policy='fsdp'",
        ),
        ({"arm": Arm(name="ppo", advantage=Component("gae", lam=0.95))}, "not cut over ranks"),
        ({"model": ModelConfig(name="qwen3_moe-tiny", dtype="float33")}, "is unknown"),
    ],
)
def test_what_fsdp_cannot_do_is_refused_by_name(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        check(RUN.replace(**{"policy": "fsdp", **settings}))
