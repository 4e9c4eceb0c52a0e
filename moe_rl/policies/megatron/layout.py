"""Which models and parallel layouts Megatron-core can train here, and what is refused, and why. Imports none of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_rl.config import Parallel, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.lookup import Use

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HEAD_NORM = {"qwen3_moe": True, "mixtral": False}
"""Families that are built here, and whether each head of the queries and keys is normalised."""
REFUSED_FAMILIES = {"olmoe": "it normalises queries and keys over all heads at once, Megatron-core each head"}
REFUSED_SETTINGS = {
    "moe_router_fusion": "the fused router never asks RouterReplay, so replay would be ignored",
    "moe_expert_capacity_factor": "tokens beyond an expert's capacity are dropped, so other experts than the recorded "
    "ones would be used",
    "virtual_pipeline_model_parallel_size": "replay under the interleaved pipeline schedule is not tested here",
    "moe_enable_routing_replay": "routes are always recorded",
    "moe_router_load_balancing_type": "no load-balancing loss belongs to the objectives here, and sinkhorn routing "
    "never asks RouterReplay",
    "context_parallel_size": "a sequence is never split here",
    "calculate_per_token_loss": "losses are weighted sums, and are neither averaged nor scaled",
}


def check_layout(parallel: Parallel, config: PreTrainedConfig, world: int) -> None:
    """Raise ConfigError for a model, layout or setting that Megatron-core gets wrong, or that is not built here."""
    _check_family(config)
    p, etp = parallel, expert_tensor(parallel)
    if min(p.dp, p.tp, p.pp, p.ep, etp) < 1:
        raise ConfigError(f"{p} needs at least 1 everywhere.")
    if p.dp * p.tp * p.pp != world:
        raise ConfigError(
            f"dp={p.dp} × tp={p.tp} × pp={p.pp} needs {p.dp * p.tp * p.pp} processes, but {world} run. "
            f"Start it with torchrun --nproc-per-node {p.dp * p.tp * p.pp}, or choose another layout."
        )
    if p.tp > 1 and p.ep == 1 and etp == 1:
        raise ConfigError(
            f"tp={p.tp}, ep=1, etp=1: Megatron-core 0.16.1 does not add up the experts' gradients over the tensor-"
            f"parallel ranks, which is silently wrong. Use etp={p.tp}, or ep={p.tp}."
        )
    if (p.dp * p.tp) % (p.ep * etp):
        raise ConfigError(f"ep={p.ep} × etp={etp} does not divide dp × tp = {p.dp * p.tp}.")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for count, parts, what in (
        (config.num_attention_heads, p.tp, "attention heads over tp"),
        (heads, p.tp, "key-value heads over tp"),
        (config.vocab_size, p.tp, "vocabulary entries over tp"),
        (num_experts(config), p.ep, "experts over ep"),
        (expert_width(config), etp, "expert width over etp"),
        (config.num_hidden_layers, p.pp, "layers over pp"),
    ):
        if count % parts:
            raise ConfigError(f"{count} {what}={parts} do not come out even; choose a divisor of {count}.")
    for key, value in p.settings.items():
        if key in REFUSED_SETTINGS:
            raise ConfigError(f"parallel.settings {key}={value!r} is refused: {REFUSED_SETTINGS[key]}.")


def check_routers(run: RunConfig, needs: frozenset[str]) -> None:
    """Raise ConfigError for what an arm, or a setting, asks of routers that Megatron-core's do not do here."""
    routes = {Use.of(part).name for part in (run.arm.routes, run.arm.ratio_routes) if part is not None}
    for asked, what, why in (
        ("router" in needs, f"arm {run.arm.name!r} looks at routers",
         "their logits do not leave the schedule's forward with a graph"),
        (routes & {"soft", "recall"}, f"routes={', '.join(sorted(routes))}",
         "RouterReplay forces all ids and no combine weights"),
        ("under_noise" in routes, "routes='under_noise'", "its routers cannot be moved"),
        (run.model.router_dtype, f"model.router_dtype={run.model.router_dtype!r}",
         "its routers compute in float32 anyway, from weights of the model's dtype"),
    ):
        if asked:
            raise ConfigError(f"{what}, which policy='megatron' cannot do: {why}. Use policy='hf'.")


def _check_family(config: PreTrainedConfig) -> None:
    name = config.model_type
    if name not in HEAD_NORM:
        why = REFUSED_FAMILIES.get(name, "its weights have no mapping yet")
        raise ConfigError(f"policy='megatron' cannot train {name}: {why}. It can train {', '.join(HEAD_NORM)}.")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    sliding = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    sparse = getattr(config, "decoder_sparse_step", 1) == 1 and not getattr(config, "mlp_only_layers", None)
    for fits, what in (
        (rope == "default", f"rope_type={rope!r}"),
        (not sliding, f"sliding_window={sliding}"),
        (sparse, "decoder layers without experts"),
        (config.hidden_act == "silu", f"hidden_act={config.hidden_act!r}"),
        (not getattr(config, "attention_bias", False), "attention_bias=True"),
    ):
        if not fits:
            raise ConfigError(f"policy='megatron' does not build {what} of {name}; use policy='hf'.")


def expert_tensor(parallel: Parallel) -> int:
    """Ranks that share one expert."""
    return parallel.etp or (parallel.tp if parallel.ep == 1 else 1)


def num_experts(config: PreTrainedConfig) -> int:
    return config.num_local_experts


def expert_width(config: PreTrainedConfig) -> int:
    return getattr(config, "moe_intermediate_size", None) or config.intermediate_size


def normalised(config: PreTrainedConfig) -> bool:
    """Whether the gates of the chosen experts sum to 1; Mixtral has no setting for it and always does."""
    return getattr(config, "norm_topk_prob", True)


def head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
