"""A Hugging Face MoE configuration as a Megatron-core model: the same arithmetic, cut over ranks."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_rl.config import Parallel
from moe_rl.errors import ConfigError
from moe_rl.policies.megatron.layout import HEAD_NORM, expert_tensor, expert_width, head_dim, normalised, num_experts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that TransformerEngine and Apex are absent
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def transformer_config(
    config: PreTrainedConfig, parallel: Parallel, dtype: torch.dtype, recompute: bool
) -> TransformerConfig:
    """Megatron-core's configuration of the model: unfused, without dropout, jitter or load-balancing loss."""
    settings: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim(config),
        "qk_layernorm": HEAD_NORM[config.model_type],
        "ffn_hidden_size": config.intermediate_size,
        "num_moe_experts": num_experts(config),
        "moe_ffn_hidden_size": expert_width(config),
        "moe_router_topk": config.num_experts_per_tok,
        # A softmax over the chosen logits is the renormalised softmax over all of them.
        "moe_router_pre_softmax": not normalised(config),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_enable_routing_replay": True,
        "moe_token_dispatcher_type": "alltoall",
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        # Losses are weighted sums: with this, and a count of 0 tokens, nothing divides them.
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": finalize_model_grads,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Without it parameters never get the marks that the global gradient norm needs under tensor parallelism.
        "perform_initialization": True,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": expert_tensor(parallel),
        "sequence_parallel": parallel.tp > 1,
    }
    fusions = ("bias_activation", "bias_dropout", "masked_softmax", "apply_rope", "gradient_accumulation")
    settings |= {f"{name}_fusion": False for name in fusions}
    if recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    try:
        return TransformerConfig(**settings | dict(parallel.settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"Megatron-core refuses this model or layout: {error}") from error


class RMSNorm(nn.RMSNorm):
    """The norm of every layer. Megatron's own wrapper refuses sequence parallelism, although all it takes is a mark on
    the weight, by which its gradient is added up over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # the mark is Megatron's


def build_gpt(config: PreTrainedConfig, transformer: TransformerConfig) -> GPTModel:
    """This rank's part of the model, with random weights. The process groups must exist."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 names it only where TransformerEngine is installed, but always asks
    layer = get_gpt_layer_local_spec(
        num_experts=transformer.num_moe_experts,
        moe_grouped_gemm=transformer.moe_grouped_gemm,
        qk_layernorm=transformer.qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if transformer.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = [layer] * get_num_layers_to_build(transformer)
    return GPTModel(
        transformer,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
    )
