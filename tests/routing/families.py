"""Tiny models of every decoder MoE family of transformers that can be replayed, and the reasons for the others.

`python -m tests.routing.families` prints the tables of `docs/concepts.md`; `test_families.py` tests what they contain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from moe_rl.routing.moe_layers import UNSUPPORTED, router_parameters

TINY = {
    # every decoder
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 16,
    # experts and routers
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_topk": 3,
    "top_k_experts": 3,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "route_scale": 2.5,
    "router_scaling_factor": 2.5,
    "router_hidden_size": 16,
    "moe_intermediate_size": 16,
    "moe_hidden_size": 16,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "share_expert_dim": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "num_mtp_layers": 0,
    # latent, sparse, linear and state-space attention
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 64,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "hc_mult": 2,
    # eyes and ears, which the tests do not use
    "depth": 1,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "image_size": 16,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "text_hidden_size": 32,
    "output_dim": 32,
    "projection_intermediate_size": 16,
    "projector_hidden_size": 16,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
    "output_channels": 8,
    "downsample_channels": [16, 32],
    "global_attn_indexes": [0],
    "window_size": 2,
    "mlp_dim": 16,
    "adapter_in_dim": 32,
    "adapter_out_dim": 32,
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 16,
    "num_mel_bins": 8,
    "image_token_id": 40,
    "video_token_id": 41,
    "audio_token_id": 42,
    "image_token_index": 40,
    "video_token_index": 41,
}
"""Small values for whatever of these names a configuration has."""


# ---------------------------------------------------------------------- combine weights, written out independently
@dataclass(frozen=True)
class At:
    """Where weights are made: the router, what it read, and the configuration of the text model."""

    router: Any
    hidden: Tensor
    config: Any

    @property
    def scale(self) -> float:
        names = ("routed_scaling_factor", "route_scale", "router_scaling_factor")
        return next((getattr(self.config, name) for name in names if hasattr(self.config, name)), 1.0)


Formula = Callable[[Tensor, Tensor, At], Tensor]
"""(router logits [tokens, experts], ids [tokens, k], At) → weights [tokens, k], in float64."""


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def softmax(logits: Tensor, ids: Tensor, at: At) -> Tensor:
    return logits.softmax(-1).gather(1, ids) * at.scale


def softmax_normalised(logits: Tensor, ids: Tensor, at: At) -> Tensor:
    return normalised(logits.softmax(-1).gather(1, ids)) * at.scale


def softmax_of_chosen(logits: Tensor, ids: Tensor, at: At) -> Tensor:
    return logits.gather(1, ids).softmax(-1)


def softmax_of_chosen_by_k(logits: Tensor, ids: Tensor, at: At) -> Tensor:
    return logits.gather(1, ids).softmax(-1) / ids.shape[1]


def sigmoid(logits: Tensor, ids: Tensor, at: At) -> Tensor:
    return logits.gather(1, ids).sigmoid()


def sigmoid_normalised(logits: Tensor, ids: Tensor, at: At) -> Tensor:
    return normalised(logits.gather(1, ids).sigmoid())


def sigmoid_normalised_scaled(logits: Tensor, ids: Tensor, at: At) -> Tensor:
    return normalised(logits.gather(1, ids).sigmoid()) * at.scale


def sqrt_softplus(logits: Tensor, ids: Tensor, at: At) -> Tensor:
    return normalised((1 + logits.gather(1, ids).exp()).log().sqrt()) * at.scale


def softmax_expert_scale(logits: Tensor, ids: Tensor, at: At) -> Tensor:
    return normalised(logits.softmax(-1).gather(1, ids)) * at.router.per_expert_scale.double()[ids]


def softmax_or_skip(logits: Tensor, ids: Tensor, at: At) -> Tensor:
    """Zaya's last class skips the experts: weight 0."""
    return logits.softmax(-1).gather(1, ids) * (ids < at.config.num_experts)


def sigmoid_with_shared(logits: Tensor, ids: Tensor, at: At) -> Tensor:
    """Inkling normalises over the chosen and the shared experts, whose logits its router does not return."""
    shared = at.hidden.double() @ at.router.weight[logits.shape[1] :].double().T
    every = torch.cat([logits.gather(1, ids), shared], -1).sigmoid()
    return normalised(every)[:, : ids.shape[1]] * at.scale * at.router.global_scale.double()


CONVENTIONS: dict[Formula, str] = {
    softmax: "softmax over all experts",
    softmax_normalised: "softmax over all experts, renormalised",
    softmax_of_chosen: "softmax over the chosen",
    softmax_of_chosen_by_k: "softmax over the chosen, divided by k",
    sigmoid: "sigmoid",
    sigmoid_normalised: "sigmoid, renormalised",
    sigmoid_normalised_scaled: "sigmoid, renormalised, scaled",
    sqrt_softplus: "square root of softplus, renormalised, scaled",
    softmax_expert_scale: "softmax, renormalised, scaled per expert",
    softmax_or_skip: "softmax over the experts and one more class: the token skips the layer's experts",
    sigmoid_with_shared: "sigmoid, renormalised together with the shared experts",
}


# ---------------------------------------------------------------------- dispatch of families without ids at the experts
def llama4_dispatch(output: tuple) -> Tensor:
    """The router hands out weights for all experts, 0 where not chosen."""
    return output[0]


def jetmoe_dispatch(output: tuple) -> Tensor:
    """The router hands out (token, expert) pairs sorted by expert, with their gates."""
    _, token, gates, sizes, logits = output
    expert = torch.arange(logits.shape[1]).repeat_interleave(torch.tensor(sizes))
    return torch.zeros_like(logits).index_put((token, expert), gates)


# ---------------------------------------------------------------------- the families
@dataclass(frozen=True)
class Family:
    """A model type of transformers, a tiny configuration of it, and what differs from the rule."""

    model_type: str
    formula: Formula
    settings: dict[str, Any] = field(default_factory=dict)
    """What `TINY` does not settle."""
    architecture: str | None = None
    """The class with the language head, where `AutoModelForCausalLM` does not know it."""
    dispatch: Callable[[tuple], Tensor] | None = None
    """Weights of all experts from the router's output, where the experts are not called with ids and weights."""
    experts: bool = True
    """Whether the experts can be computed in other ways than eagerly."""
    checkpointing: str = "exact"
    """Gradients with and without: exact; rounded (the model itself rounds otherwise); none (it cannot); not re-entrant
    (exact, but for a part with weights outside of the checkpointed layers, which the re-entrant kind cannot take)."""
    scores_since: str | None = "0"
    """The release of transformers from which on router scores can be read."""
    padding: bool = True
    """Whether the model itself computes the same under left as under right padding."""
    generates: bool = True
    sound_since: str = "0"
    """The release from which on the model itself computes the same in every padding, and with a cache."""
    torch_since: str = "0"
    """The torch in which its own code runs, as far as tried."""
    before: tuple[str, dict[str, Any]] = ("0", {})
    """A release of transformers, and the settings in place of `settings` before it."""

    @property
    def package(self) -> str:
        """The folder of its source in transformers."""
        return self.model_type.removesuffix("_text").removesuffix("_thinker")


SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
FULL = {"layer_types": ["full_attention"] * 3}
TWO = {"num_hidden_layers": 2}
MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "mrope_section": [1, 1, 2],
    }
}

FAMILIES = [
    Family("afmoe", sigmoid_normalised_scaled),
    Family("aria_text", softmax_of_chosen, TWO),
    Family("axk1", sigmoid_normalised_scaled),
    Family("axk2", sigmoid_normalised_scaled),
    Family("bailing_hybrid", sigmoid_normalised_scaled, HYBRID),
    Family("beam", sigmoid_normalised, SPARSE),
    Family("cohere2_moe", softmax_of_chosen, TWO),
    Family(
        "dbrx",
        softmax_normalised,
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 3},
        },
        experts=False,
    ),
    Family(
        "deepseek_ocr2",
        softmax,
        {"text_config": SPARSE | {"topk_method": "group_limited_greedy"}},
        "DeepseekOcr2ForConditionalGeneration",
    ),
    Family(
        "deepseek_v2", softmax, {"topk_method": "group_limited_greedy"}, before=("5.13", {"topk_method": "greedy"})
    ),  # whose group-limited routing is broken
    Family("deepseek_v3", sigmoid_normalised_scaled),
    Family("deepseek_v32", sigmoid_normalised_scaled),
    Family(
        "deepseek_v4",
        sqrt_softplus,
        {
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "num_key_value_heads": 1,
            "o_groups": 2,
            "o_lora_rank": 8,
            "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        },
        padding=False,
    ),
    Family("dots1", sigmoid_normalised_scaled),
    Family(
        "dots3_note",
        sigmoid_normalised_scaled,
        {
            "text_config": {"layer_types": ["indexed_attention"] * 3},
            "vision_config": SPARSE | {"num_experts_per_tok": 2},
            "audio_config": {"adapter_input_size": 32, "hidden_size": 32, "conv_output_size": 32},
        },
        "Dots3NoteForConditionalGeneration",
    ),
    Family("ernie4_5_moe", softmax_normalised),
    Family("exaone_moe", sigmoid_normalised_scaled),
    Family("flex_olmo", softmax_normalised, TWO),
    Family("flint", sigmoid_normalised, {"mlp_only_layers": [0]}, checkpointing="rounded"),
    Family(
        "gemma4_text",
        softmax_expert_scale,
        {
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 48,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Family("glm4_moe", sigmoid_normalised_scaled),
    Family("glm4_moe_lite", sigmoid_normalised_scaled),
    Family("glm4v_moe", sigmoid_normalised_scaled, {"text_config": MROPE}, "Glm4vMoeForConditionalGeneration"),
    Family(
        "glm5_next",
        sigmoid_normalised_scaled,
        {
            "text_config": SPARSE
            | {
                "qk_rope_head_dim": 0,
                "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
                "index_kpool": 2,
            }
        },
        "Glm5NextForConditionalGeneration",
        torch_since="2.7",
    ),
    Family("glm_moe_dsa", sigmoid_normalised_scaled, SPARSE, sound_since="5.11"),
    Family("gpt_oss", softmax_of_chosen, TWO),
    Family("granitemoe", softmax_of_chosen, TWO, scores_since="5.13"),
    Family("granitemoe_swa", softmax_of_chosen, TWO, checkpointing="rounded"),
    Family(
        "granitemoehybrid",
        softmax_of_chosen,
        HYBRID | {"mamba_chunk_size": 8},
        scores_since="5.13",
        before=("5.13", {"mamba_chunk_size": 8, "layer_types": ["mamba", "attention", "mamba"]}),
    ),
    Family("granitemoeshared", softmax_of_chosen, TWO, scores_since="5.13"),
    Family("hunyuan_v1_moe", softmax_normalised, TWO),
    Family("hy_v3", sigmoid_normalised_scaled),
    Family("hy_v4", sigmoid_normalised_scaled),
    Family(
        "hy_v4_vl",
        sigmoid_normalised_scaled,
        {
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        },
        "HYV4VLForConditionalGeneration",
    ),
    Family(
        "inkling2_text",
        sigmoid_normalised_scaled,
        {
            "num_hidden_layers": 2,
            "d_rel": 4,
            "rel_extent": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "unpadded_vocab_size": 48,
        },
        checkpointing="rounded",
    ),
    Family(
        "inkling_text",
        sigmoid_with_shared,
        SPARSE
        | {
            "d_rel": 4,
            "rel_extent": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
        },
    ),
    Family(
        "jamba",
        softmax,
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 0,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
        },
    ),
    Family(
        "jetmoe",
        softmax_of_chosen,
        TWO,
        dispatch=jetmoe_dispatch,
        experts=False,
        checkpointing="none",
        scores_since=None,
    ),
    Family("kimi_linear", sigmoid_normalised_scaled, HYBRID),
    Family("kolibri1", sigmoid_normalised_scaled, TWO),
    Family("laguna", sigmoid_normalised),
    Family(
        "lara_mini",
        softmax_normalised,
        {
            "layer_types": ["linear_attention", "full_attention", "sliding_attention"],
        },
    ),
    Family("lfm2_moe", sigmoid_normalised_scaled, {"layer_types": ["conv", "full_attention", "conv"]}),
    Family("llama4_text", sigmoid, TWO, dispatch=llama4_dispatch, experts=False, scores_since=None),
    Family("longcat_flash", softmax, {"num_layers": 2, "zero_expert_num": 4}, experts=False, scores_since="5.19"),
    Family("mellum", softmax_normalised, TWO),
    Family(
        "mimo_v2_flash",
        sigmoid_normalised_scaled,
        FULL
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            }
        },
    ),
    Family("minimax", softmax_normalised, TWO | {"block_size": 8}),
    Family("minimax_m2", sigmoid_normalised, TWO),
    Family(
        "minimax_m3_vl_text",
        sigmoid_normalised,
        SPARSE
        | {
            "dense_intermediate_size": 32,
            "rotary_dim": 4,
            "index_block_size": 8,
            "index_topk_blocks": 2,
        },
    ),
    Family("mistral4", softmax_normalised, {}, "Mistral4ForCausalLM"),
    Family(
        "mistral_large4",
        softmax_normalised,
        {
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "intermediate_size": 32,
                "num_attention_heads": 4,
                "head_dim": 8,
            },
        },
        "MistralLarge4ForConditionalGeneration",
        checkpointing="not re-entrant",
    ),
    Family("mixtral", softmax_normalised, TWO),
    Family(
        "muse_spark",
        sigmoid_normalised_scaled,
        {
            "text_config": SPARSE,
            "audio_config": {
                "patch_sizes": [4],
                "hidden_sizes": [16],
                "depths": [1],
                "num_hidden_layers": 1,
            },
        },
        "MuseSparkForConditionalGeneration",
    ),
    Family(
        "nemotron_h",
        sigmoid_normalised_scaled,
        {
            "layers_block_type": ["moe", "linear_attention", "moe", "full_attention"],
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
        before=(
            "5.13",
            {
                "layers_block_type": ["moe", "mamba", "moe", "attention"],
                "ssm_state_size": 8,
                "n_groups": 2,
                "chunk_size": 8,
            },
        ),
    ),
    Family("olmoe", softmax_normalised, TWO),
    Family(
        "openai_privacy_filter",
        softmax_of_chosen_by_k,
        TWO,
        "OpenAIPrivacyFilterForTokenClassification",
        generates=False,
    ),
    Family("qwen2_moe", softmax_normalised, TWO),
    Family("qwen3_5_moe_text", softmax_normalised, HYBRID),
    Family("qwen3_moe", softmax_normalised, TWO),
    Family("qwen3_next", softmax_normalised, HYBRID),
    Family(
        "qwen3_omni_moe_thinker",
        softmax_normalised,
        {"text_config": TWO | MROPE, "vision_start_token_id": 43},
        "Qwen3OmniMoeThinkerForConditionalGeneration",
    ),
    Family("qwen3_vl_moe", softmax_normalised, {"text_config": TWO | MROPE}, "Qwen3VLMoeForConditionalGeneration"),
    Family(
        "qwen4_exp_text",
        softmax_normalised,
        {
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "hc_count": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
        torch_since="2.7",
    ),
    Family("solar_open", sigmoid_normalised_scaled, TWO),
    Family("step3p7", sigmoid_normalised, {"text_config": SPARSE}, "Step3p7ForConditionalGeneration", experts=False),
    Family(
        "unlimited_ocr",
        softmax,
        {"text_config": SPARSE | {"topk_method": "group_limited_greedy"}},
        "UnlimitedOcrForConditionalGeneration",
    ),
    Family("zaya", softmax_or_skip, TWO | {"num_experts_per_tok": 1, "num_key_value_heads": 2}),
]


@dataclass(frozen=True)
class Refused:
    """A family that cannot be replayed, the class that gives it away, and words of the reason given."""

    package: str
    class_name: str
    reason: str


REFUSED = [
    Refused("diffusion_gemma", "DiffusionGemmaTextRouter", "denoises blocks of tokens"),
    Refused("doge", "DogeCDMoE", "product keys"),
    Refused("ernie4_5_vl_moe", "Ernie4_5_VLMoeMoeBlock", "reads a part of the tokens"),
    Refused("inkling2_loop", "Inkling2LoopSparseMoeBlock", "several times"),
    Refused("nllb_moe", "NllbMoeTop2Router", "drops tokens"),
    Refused("phimoe", "PhimoeTopKRouter", "one masked maximum per slot"),
    Refused("qwen3_omni_moe", "Qwen3OmniMoeTalkerForConditionalGeneration", "hook model.thinker"),
    Refused("switch_transformers", "SwitchTransformersTop1Router", "drops tokens"),
]


def tiny_config(config_class: type, settings: dict[str, Any]):
    """A configuration with the values of `TINY` for the names it has, and `settings`; its parts likewise."""
    from transformers import AutoConfig

    names = {f.name for f in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    values = {config_class.attribute_map.get(name, name): value for name, value in TINY.items() if name in names}
    values |= settings
    for part, part_class in config_class.sub_configs.items():
        if part_class is not AutoConfig:
            values[part] = tiny_config(part_class, settings.get(part, {}))
    return config_class(**values)


def older_than(release: str) -> bool:
    """Whether the installed transformers is older than a release."""
    import transformers
    from packaging.version import Version

    return Version(transformers.__version__) < Version(release)


def build(family: Family, seed: int = 0):
    """A tiny random model whose routers are neither uniform nor degenerate. Skips a family that is not there."""
    import transformers

    if family.model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family.model_type}")
    if Version(torch.__version__) < Version(family.torch_since):
        pytest.skip(f"{family.model_type} of transformers needs torch {family.torch_since}, here {torch.__version__}")
    release, earlier = family.before
    settings = earlier if older_than(release) else family.settings
    config = tiny_config(transformers.CONFIG_MAPPING[family.model_type], settings)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        if family.architecture:
            model = getattr(transformers, family.architecture)(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in router_parameters(model):
            if parameter.dim() == 2:
                parameter.normal_(0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    return model.eval()


# ---------------------------------------------------------------------- the tables
def table() -> str:
    """Three tables of `docs/concepts.md`: families by formula of the gate weights, exceptions, refused ones."""
    by_formula: dict[str, list[str]] = {}
    for family in FAMILIES:
        by_formula.setdefault(CONVENTIONS[family.formula], []).append(f"`{family.model_type}`")
    rows = ["| gate weights of the chosen experts | families |", "|---|---|"]
    rows += [f"| {formula} | {', '.join(names)} |" for formula, names in by_formula.items()]
    rows += ["", "| family | exception |", "|---|---|"]
    by_remark: dict[str, list[str]] = {}
    for family in FAMILIES:
        if found := "; ".join(remarks(family)):
            by_remark.setdefault(found, []).append(f"`{family.model_type}`")
    rows += [f"| {', '.join(names)} | {remark} |" for remark, names in by_remark.items()]
    rows += ["", "| refused | reason |", "|---|---|"]
    rows += [f"| `{r.package}` | {UNSUPPORTED[r.class_name]} |" for r in REFUSED]
    return "\n".join(rows) + "\n"


CHECKPOINTING = {
    "exact": None,
    "rounded": "gradients under activation checkpointing are equal to 1e-6",
    "not re-entrant": "re-entrant activation checkpointing fails in transformers 5.24",
    "none": "no activation checkpointing",
}


def remarks(family: Family) -> list[str]:
    """What differs from the rules above the table, each a few words."""
    found = [CHECKPOINTING[family.checkpointing]]
    found.append(None if family.experts else "eager experts only")
    found.append("`scores=True` is refused" if not family.scores_since else None)
    found.append(None if family.padding else "the model itself differs under left padding")
    if family.scores_since not in (None, "0"):
        found.append(f"scores need transformers ≥ {family.scores_since}")
    found.append(None if family.generates else "an encoder: no generation")
    return [remark for remark in found if remark]


if __name__ == "__main__":
    print(table(), end="")
