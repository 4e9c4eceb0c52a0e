"""A Hugging Face MoE configuration as a Megatron-core model: the same arithmetic, cut over ranks."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_rl.errors import ConfigError
from moe_rl.integrations.megatron.layout import (
    SIGMOID,
    Parallel,
    expert_tensor,
    expert_width,
    head_dim,
    head_norm,
    latent,
    normalised,
    num_experts,
    shared_width,
    sparse_layers,
)
from moe_rl.integrations.megatron.replay import ReplayRouter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that TransformerEngine and Apex are absent
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig, multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Settings of scaled rotary embeddings that have one name on both sides, and one default."""


FUSIONS = ("bias_activation", "bias_dropout", "masked_softmax", "apply_rope", "gradient_accumulation")
PLAIN: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_enable_routing_replay": True,
    "moe_token_dispatcher_type": "alltoall",
    # Losses are weighted sums: with this, and a count of 0 tokens, nothing divides them.
    "calculate_per_token_loss": True,
    "finalize_model_grads_func": finalize_model_grads,
    # Without it parameters never get the marks that the global gradient norm needs under tensor parallelism.
    "perform_initialization": True,
    **{f"{name}_fusion": False for name in FUSIONS},
}
"""Settings of every model: unfused, without dropout, jitter or load-balancing loss."""
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def transformer_config(
    config: PreTrainedConfig, parallel: Parallel, dtype: torch.dtype, recompute: bool
) -> TransformerConfig:
    """Megatron-core's configuration of the model."""
    settings = PLAIN | _layers(config) | _experts(config) | _ranks(parallel, dtype)
    if latent(config):
        settings |= _latent_attention(config)
    if recompute:
        settings |= RECOMPUTED
    kind: type[TransformerConfig] = MLATransformerConfig if latent(config) else TransformerConfig
    try:
        return kind(**settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"Megatron-core does not accept this model or layout: {error}") from error


def _layers(config: PreTrainedConfig) -> dict[str, Any]:
    """Depth, widths and attention heads."""
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim(config),
        "qk_layernorm": head_norm(config),
        "add_qkv_bias": getattr(config, "qkv_bias", False) or getattr(config, "attention_bias", False),
        "ffn_hidden_size": config.intermediate_size,
        "layernorm_epsilon": config.rms_norm_eps,
    }


def _experts(config: PreTrainedConfig) -> dict[str, Any]:
    """The experts, and how the router scores and chooses them."""
    settings = {
        # A list names the layers of a checkpoint one by one, where they could be alike.
        "moe_layer_freq": 1 if all(sparse := sparse_layers(config)) else [int(here) for here in sparse],
        "num_moe_experts": num_experts(config),
        "moe_ffn_hidden_size": expert_width(config),
        "moe_shared_expert_intermediate_size": shared_width(config),
        "moe_shared_expert_gate": config.model_type == "qwen2_moe",
        "moe_router_topk": config.num_experts_per_tok,
        # A softmax over the chosen logits is the renormalised softmax over all of them.
        "moe_router_pre_softmax": not normalised(config),
    }
    if config.model_type in SIGMOID:
        settings |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # by default it would move the bias at every update
        }
        if config.topk_group < config.n_group:
            settings |= {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    return settings


def _latent_attention(config: PreTrainedConfig) -> dict[str, Any]:
    """Multi-head latent attention, and its rotary embeddings."""
    rope = config.rope_parameters
    settings = {
        "num_query_groups": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "rope",
        "rotary_base": rope["rope_theta"],
    }
    if rope.get("rope_type") == "yarn":
        settings |= {"rope_type": "yarn", "rotary_scaling_factor": rope["factor"]}
        settings |= {name: rope[name] for name in YARN if rope.get(name)}
    return settings


def _ranks(parallel: Parallel, dtype: torch.dtype) -> dict[str, Any]:
    """How the model is cut over ranks, and the type of its numbers."""
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": expert_tensor(parallel),
        "sequence_parallel": parallel.tp > 1,
    }


class RMSNorm(nn.RMSNorm):
    """The norm of every layer. Megatron's own wrapper refuses sequence parallelism, although all it takes is a mark on
    the weight, by which its gradient is added up over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # the mark is Megatron's


class LatentNorm(RMSNorm):
    """The norm of what queries, or keys and values, are made of: transformers never gives it the model's eps."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(config, hidden_size, 1e-6)


class LatentAttention(DotProductAttention):
    """Megatron's unfused attention, for heads whose values have another width than their keys: it gets both widths,
    and needs none of them (the values' is `kv_channels`), but knows no such arguments."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **settings: Any):
        super().__init__(*args, **settings)


def build_gpt(config: PreTrainedConfig, transformer: TransformerConfig) -> GPTModel:
    """This rank's part of the model, with random weights. The process groups must exist."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 names it only where TransformerEngine is installed, but always asks
    multi_latent_attention.HAVE_TE = HAVE_TE  # 0.16.1 believes it installed as soon as its own module for it imports
    stage, per_stage = parallel_state.get_pipeline_model_parallel_rank(), len(sparse_layers(config))
    per_stage //= parallel_state.get_pipeline_model_parallel_world_size()
    here = sparse_layers(config)[stage * per_stage :][:per_stage]
    rope = config.rope_parameters
    return GPTModel(
        transformer,
        TransformerBlockSubmodules(layer_specs=[_layer(transformer, sparse) for sparse in here], layer_norm=RMSNorm),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
    )


def _layer(transformer: TransformerConfig, sparse: bool) -> ModuleSpec:
    """One decoder layer: Megatron's local parts, our norms and our look at its router."""
    layer = get_gpt_layer_local_spec(
        num_experts=transformer.num_moe_experts if sparse else None,
        moe_grouped_gemm=transformer.moe_grouped_gemm,
        qk_layernorm=transformer.qk_layernorm,
        multi_latent_attention=transformer.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    if transformer.multi_latent_attention:
        attention.core_attention = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
        # The column-parallel ones lose the gradient of the shared rotary key on all tensor-parallel ranks but its own.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    elif transformer.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if sparse:
        layer.submodules.mlp.submodules.router = ReplayRouter
    return layer
