"""Small MoE models of real architectures, and the configuration of any model, before a weight is made or read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from moe_rl.config import SHIPPED, ModelConfig
from moe_rl.errors import ConfigError
from moe_rl.lookup import unknown
from moe_rl.models import checkpoints

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# 2^-3 = 1/sqrt(hidden): at the usual 0.02, scores of so narrow a router differ by 0.1 and the model learns nothing.
_TINY = {
    "vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.125, "tie_word_embeddings": True,
    "eos_token_id": 256, "pad_token_id": 257}
_NO_HEAD_DIM = {k: v for k, v in _TINY.items() if k != "head_dim"}  # for families that derive it
_DEEPSEEK_LIKE = {  # one dense layer, shared expert, sigmoid scores with a selection bias, experts chosen within groups
    "intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "n_group": 4, "topk_group": 2}
_QWEN3_MOE = _TINY | {
    "intermediate_size": 128, "moe_intermediate_size": 32, "num_local_experts": 16, "num_experts_per_tok": 2,
    "norm_topk_prob": True}

PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_moe-tiny": ("qwen3_moe", _QWEN3_MOE),
    "qwen3_moe-bench": ("qwen3_moe", _QWEN3_MOE | {
        "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 64, "head_dim": 32, "eos_token_id": 62, "pad_token_id": 63}),
    "qwen3_moe-fine": ("qwen3_moe", _QWEN3_MOE | {
        "num_hidden_layers": 12, "num_local_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 24}),
    "olmoe-tiny": ("olmoe", _NO_HEAD_DIM | {"intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}),
    "mixtral-tiny": ("mixtral", _TINY | {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v3-tiny": ("deepseek_v3", _NO_HEAD_DIM | _DEEPSEEK_LIKE | {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16}),
    "gpt_oss-tiny": ("gpt_oss", _TINY | {
        "intermediate_size": 32, "num_local_experts": 16, "num_experts_per_tok": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "glm4_moe-tiny": ("glm4_moe", _TINY | _DEEPSEEK_LIKE),
}
"""Name → (Hugging Face model type, settings of its configuration). About 0.7 M parameters each; `-bench` 6.7 M,
`-fine`, of many narrow experts, 3.8 M."""


def hf_config(model_config: ModelConfig, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The Hugging Face configuration, overrides applied, without any weights being made or read."""
    from transformers import CONFIG_MAPPING

    if model_config.name not in PRESETS:
        if model_config.overrides:
            raise ConfigError(
                f"model {model_config.name!r} is a checkpoint, whose weights fix its shape, so the overrides "
                f"{dict(model_config.overrides)!r} cannot apply; presets with overrides are {', '.join(PRESETS)}."
            )
        if not checkpoints.may_exist(model_config.name):
            unknown("model preset or checkpoint folder", model_config.name, [*PRESETS, *SHIPPED])
        return checkpoints.load_config(model_config.name, trust_remote_code)
    model_type, settings = PRESETS[model_config.name]
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(config_class.attribute_map) | set(settings)
    for key in model_config.overrides:
        if key not in known:
            unknown(f"setting of the {model_type} configuration", key, known)
    overrides = {config_class.attribute_map.get(key, key): value for key, value in model_config.overrides.items()}
    try:
        return config_class(**{**settings, **overrides})
    except Exception as error:  # transformers' validation raises classes of its own
        raise ConfigError(f"{model_config.name} refuses the overrides {overrides!r}: {error}") from error


def skeleton(model_config: ModelConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model without memory or weights (on the meta device), from its configuration alone: names, shapes, layout."""
    from transformers import AutoModelForCausalLM

    config, (_, dtype) = hf_config(model_config, trust_remote_code), placement(model_config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, dtype=dtype).eval()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no model can be built of {model_config.name!r} with the overrides "
                          f"{dict(model_config.overrides)!r}: {error}") from error


def placement(model_config: ModelConfig) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of a configuration. Raises ConfigError for one that is not there."""
    dtype = getattr(torch, model_config.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"model dtype {model_config.dtype!r} is none; use float32 or bfloat16.")
    try:
        device = torch.device(model_config.device)
    except RuntimeError as error:
        raise ConfigError(f"model device {model_config.device!r} is none; use cpu, cuda or cuda:<index>.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"model device {model_config.device!r} is not there: this machine shows {torch.cuda.device_count()} CUDA "
            "devices to this PyTorch; use cpu."
        )
    return device, dtype
