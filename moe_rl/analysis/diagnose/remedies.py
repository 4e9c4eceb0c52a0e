"""What to do about each cause that a diagnosis names."""

from __future__ import annotations

from collections.abc import Iterable

QUANTISED = "Leave the routers out of the engine's quantisation."
CONFIGURED = "Compare the engine's copy of the model's configuration with the trainer's"
PUSHED = "Compare the names and numbers of the pushed weights on both sides; push again, and diagnose new rollouts."
TOKENS = "Send token ids to the engine, not text, and store the ids that it read."
LAYERS = "Number layers as the model does, and map the engine's numbers before a replay."
REPLAY = "Do not replay these routes."
REMEDIES = {
    "": "Nothing.",
    "rounding": "Nothing; --engine-dtype makes the test sharper.",
    "dtype": "Nothing; one dtype on both sides makes the gap smaller.",
    "experts": "Nothing.",
    "router_fp32": "Nothing; routers in float32 on both sides make the gap smaller.",
    "router_bf16": "Keep the engine's routers in float32, and push them in float32.",
    "router_int8": QUANTISED,
    "router_fp8": QUANTISED,
    "int8": "Load the engine without quantisation, or correct by importance weights.",
    "fp8": "Load the engine without quantisation, or correct by importance weights.",
    "lost_bias": "Load the correction bias into the engine, and push it with the weights.",
    "lost_scaling": f"{CONFIGURED}: routed_scaling_factor.",
    "gates_raw": f"{CONFIGURED}: norm_topk_prob.",
    "gates_renormalised": f"{CONFIGURED}: norm_topk_prob.",
    "gates_scaled": f"{CONFIGURED}: routed_scaling_factor.",
    "sigmoid": f"{CONFIGURED}: scoring_func.",
    "top_k": f"{CONFIGURED}: num_experts_per_tok.",
    "rope_base": f"{CONFIGURED}: rope_theta, rope_scaling.",
    "rope_scaling": f"{CONFIGURED}: rope_theta, rope_scaling.",
    "attention_scale": f"{CONFIGURED}: head_dim, query_pre_attn_scalar.",
    "window_lost": f"{CONFIGURED}: sliding_window, layer_types.",
    "window_size": f"{CONFIGURED}: sliding_window, layer_types.",
    "softcap": f"{CONFIGURED}: final_logit_softcapping.",
    "qk_norm": f"Load q_norm and k_norm into the engine. {PUSHED}",
    "sinks": f"Use an attention backend with sinks. {PUSHED}",
    "shared_expert": f"Load the shared expert into the engine. {PUSHED}",
    "weight_version": "Wait for the push before sampling, and store the version with each response.",
    "head_not_pushed": PUSHED,
    "embedding_not_pushed": PUSHED,
    "routers_not_pushed": PUSHED,
    "experts_not_pushed": PUSHED,
    "layer_not_pushed": PUSHED,
    "swapped_layers": PUSHED,
    "stale_cache": "Empty the prefix cache at each push of weights.",
    "bos": TOKENS,
    "special_tokens": TOKENS,
    "prompt_cut": TOKENS,
    "visible_padding": "Pass the attention mask to the engine, or send prompts without padding.",
    "positions": "Count positions from the first token of the prompt, cached prefix included.",
    "positions_per_turn": "Count positions from the first token of the first turn.",
    "positions_of_padding": "Leave padding out of the positions of a response.",
    "temperature": "Let the engine report log-probs at the temperature of its sampling (vLLM: "
                   "logprobs_mode=processed_logprobs), and write that temperature.",
    "kept_set": "Read log-probs over the whole vocabulary, or mask the trainer's logits, too.",
    "logprob_shift": "Align log-probs with the tokens that they belong to.",
    "response_mask": "Build the mask of a response from the tokens that were sampled, in the turns of its log-probs.",
    "log_base": "Convert log-probs to nats.",
    "greedy": "Read the log-prob of the sampled token, not of the first of the top list.",
    "others_logprobs": "Keep the request's id with its log-probs until both are stored.",
    "layer_shift": LAYERS,
    "overwritten_layer": f"{LAYERS} Leave the layers of multi-token prediction out.",
    "row_shift": "A row is the routing of an input token: write that of token t at row t.",
    "swapped_responses": "Keep the request's id with its routes until both are stored.",
    "physical_ids": "Map physical to logical experts, counted from 0, before routes are stored.",
    "stale_routes": REPLAY,
    "stale_prefix": "Store routes of a cached prefix with the cache, or write -1 for them.",
    "zero_rows": "Write -1 for a missing route.",
    "repeated_ids": REPLAY,
    "sorted_ids": "Sort combine weights with the ids, or sort neither.",
    "routing": "Compare router weights, dtypes and kernels of both sides.",
    "combine_weights": "Compare router weights, dtypes and kernels of both sides.",
    "few_tokens": "Look at more responses (--responses), or give a file with more.",
    "unexplained": "Read where the gap is: layers, positions, turns, experts. If log-probs have it, name other "
                   "checkpoints with --also; if routes alone have it, check how they are recorded and stored.",
}
"""By cause, one sentence or two."""


def list_remedies(causes: Iterable[str]) -> tuple[str, ...]:
    """What to do about these causes, each sentence once."""
    return tuple(dict.fromkeys(REMEDIES[cause] for cause in causes)) or (REMEDIES[""],)
