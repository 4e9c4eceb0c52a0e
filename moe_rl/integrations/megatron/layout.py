"""Models and parallel layouts that Megatron-core trains here, and refusals of the others. Imports none of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError
from moe_rl.registry import Component

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SOFTMAX = ("qwen3_moe", "qwen2_moe", "mixtral")
SIGMOID = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1")
"""Families that are built here, by what their routers make of logits. Those of sigmoids choose with a bias, inside the
best groups, and have shared experts and dense layers first. Moonlight is a `deepseek_v3`."""
NO_SOURCES = {"soft", "recall", "under_noise", "by_margin"}
"""Sources of routes that force more than ids, or that need what routers choose by."""


@dataclass(frozen=True)
class Parallel:
    """How the model is spread over dp × tp × pp processes."""

    dp: int = 1
    """Data parallel: each rank takes part of a mini-batch's rows."""
    tp: int = 1
    """Tensor parallel, with sequence parallelism: attention, embedding and output are cut."""
    pp: int = 1
    """Pipeline parallel: each stage holds consecutive layers."""
    ep: int = 1
    """Expert parallel: the experts of a layer are spread over `ep` of the dp × tp ranks."""


def check_layout(parallel: Parallel, config: PreTrainedConfig, world: int) -> None:
    """Raise ConfigError for a model or layout that Megatron-core gets wrong, or that is not built here."""
    _check_family(config)
    p, etp = parallel, expert_tensor(parallel)
    if min(p.dp, p.tp, p.pp, p.ep) < 1 or p.dp * p.tp * p.pp != world:
        raise ConfigError(
            f"dp={p.dp} × tp={p.tp} × pp={p.pp} needs {p.dp * p.tp * p.pp} processes, but {world} run. Start as many "
            "with torchrun --nproc-per-node, or choose another layout."
        )
    if (p.dp * p.tp) % p.ep:
        raise ConfigError(f"ep={p.ep} must divide dp × tp = {p.dp * p.tp}")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    sparse = sparse_layers(config)
    shared = shared_width(config)
    for count, parts, what in (
        (config.num_attention_heads, p.tp, "attention heads over tp"),
        (heads, p.tp, "key-value heads over tp"),
        (config.vocab_size, p.tp, "vocabulary entries over tp"),
        (num_experts(config), p.ep, "experts over ep"),
        (expert_width(config), etp, "expert width over tp"),
        (shared or 0, p.tp, "shared experts' width over tp"),
        (0 if all(sparse) else config.intermediate_size, p.tp, "width of dense layers over tp"),
        (config.num_hidden_layers, p.pp, "layers over pp"),
    ):
        if count % parts:
            raise ConfigError(f"{count} {what}={parts} is not a whole number. Choose a divisor of {count}.")
    if not all(sizes := routers_of_stages(sparse, p.pp)):
        raise ConfigError(f"pp={p.pp}: stages have {sizes} MoE layers, and each needs one. Use fewer stages.")


def check_routers(run: RunConfig, needs: frozenset[str]) -> None:
    """Raise ConfigError for an arm, or a setting, that needs more of the routers than Megatron-core's do here."""
    routes = {Component.of(part).name for part in (run.arm.routes, run.arm.ratio_routes) if part is not None}
    for refused, what in (
        ("router" in needs, f"arm {run.arm.name!r}, which needs the routers' logits with a graph"),
        (routes & NO_SOURCES, f"routes={', '.join(sorted(routes))}, which need scores or force more than ids"),
        (run.model.router_dtype, f"model.router_dtype={run.model.router_dtype!r}: routers compute in float32 anyway"),
        (run.router_noise.scale, f"router_noise.scale={run.router_noise.scale:g}"),
        (run.micro_batch_tokens, f"micro_batch_tokens={run.micro_batch_tokens}"),
    ):
        if refused:
            raise ConfigError(f"policy='megatron' does not support {what}. Use policy='hf'.")


def _check_family(config: PreTrainedConfig) -> None:
    name = config.model_type
    if name not in SOFTMAX + SIGMOID:
        raise ConfigError(f"policy='megatron' cannot train {name}, but {', '.join(SOFTMAX + SIGMOID)}.")
    scaling = {k: v for k, v in (getattr(config, "rope_parameters", None) or {}).items() if v is not None}
    rope = scaling.get("rope_type", "default")
    # transformers' other families slide by `sliding_window`, whatever their layers are called.
    kinds = getattr(config, "layer_types", None) if name in ("qwen2_moe", "dots1") else None
    sliding = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    k, part = config.num_experts_per_tok, scaling.get("partial_rotary_factor", 1.0)
    for fits, what in (
        (rope == "default" or rope == "yarn" and latent(config), f"rope_type={rope!r}"),
        (rope == "default" or _is_plain_yarn(scaling), f"rope_parameters={scaling}"),
        (name == "glm4_moe" or part == 1, f"partial_rotary_factor={part}"),
        (not ("sliding_attention" in kinds if kinds else sliding), f"sliding_window={sliding}"),
        (config.hidden_act == "silu", f"hidden_act={config.hidden_act!r}"),
        (not getattr(config, "attention_bias", False) or name == "glm4_moe", "attention_bias=True"),
        (getattr(config, "rope_interleave", True), "rope_interleave=False"),
        (shared_width(config) or not hasattr(config, "n_shared_experts") and name != "qwen2_moe", "no shared expert"),
        (
            name in SOFTMAX
            or normalised(config)
            and k > 1,  # Megatron divides by the sum wherever k > 1, and there alone
            f"sigmoid gates with norm_topk_prob={normalised(config)} and num_experts_per_tok={k}",
        ),
    ):
        if not fits:
            raise ConfigError(f"policy='megatron' does not support {what} of {name}. Use policy='hf'.")


def _is_plain_yarn(rope: dict) -> bool:
    """Whether Megatron-core reads these settings of YaRN as transformers does: one mscale alone it takes otherwise, and
    it knows no attention_factor and no truncate, and another default length."""
    known = {"attention_factor", "truncate"}.isdisjoint(rope) and "original_max_position_embeddings" in rope
    return known and bool(rope.get("mscale")) == bool(rope.get("mscale_all_dim"))


def sparse_layers(config: PreTrainedConfig) -> list[bool]:
    """Which decoder layers have experts; the others are dense."""
    if kinds := getattr(config, "mlp_layer_types", None):
        return [kind == "sparse" for kind in kinds]
    first, step = getattr(config, "first_k_dense_replace", 0), getattr(config, "decoder_sparse_step", 1)
    dense = getattr(config, "mlp_only_layers", None) or ()
    return [n >= first and (n + 1) % step == 0 and n not in dense for n in range(config.num_hidden_layers)]


def routers_of_stages(sparse: list[bool], pp: int) -> list[int]:
    """How many MoE layers each pipeline stage has."""
    size = len(sparse) // pp
    return [sum(sparse[stage * size :][:size]) for stage in range(pp)]


def expert_tensor(parallel: Parallel) -> int:
    """Ranks that share one expert. Where ep = 1 and tp > 1, Megatron-core 0.16.1 computes wrong gradients of experts
    that are not cut."""
    return parallel.tp if parallel.ep == 1 else 1


def num_experts(config: PreTrainedConfig) -> int:
    return getattr(config, "num_local_experts", None) or config.num_experts


def expert_width(config: PreTrainedConfig) -> int:
    return getattr(config, "moe_intermediate_size", None) or config.intermediate_size


def shared_width(config: PreTrainedConfig) -> int | None:
    """Width of all shared experts together; None without any."""
    own = getattr(config, "shared_expert_intermediate_size", None)
    return own or (getattr(config, "n_shared_experts", None) or 0) * expert_width(config) or None


def normalised(config: PreTrainedConfig) -> bool:
    """Whether the gates of the chosen experts sum to 1; Mixtral has no setting for it and always does."""
    return config.model_type == "mixtral" or getattr(config, "norm_topk_prob", True)


def head_norm(config: PreTrainedConfig) -> bool:
    """Whether each head of the queries and keys is normalised, or, in latent attention, what they are made of."""
    return config.model_type in ("qwen3_moe", "dots1") or getattr(config, "use_qk_norm", False) or latent(config)


def latent(config: PreTrainedConfig) -> bool:
    """Whether keys and values come from one narrow vector per token (MLA)."""
    return getattr(config, "kv_lora_rank", None) is not None


def head_dim(config: PreTrainedConfig) -> int:
    """Width of a head: of its values, where those of queries and keys differ."""
    if latent(config):
        return config.v_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
