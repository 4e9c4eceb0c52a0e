"""Every cause that a diagnosis can name: what it means, and what to do. `{}` stands for the detail of one case."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BIAS = "Load the correction bias into the engine, and push it with the weights."
CACHE = "Empty the prefix cache at each push of weights."
CONFIGURED = "Compare the engine's copy of the model's configuration with the trainer's."
LAYERS = "Number layers as the model does, and leave those of multi-token prediction out."
PUSHED = "Compare the names and numbers of the pushed weights on both sides, and push again."
QUANTISED = "Leave the routers out of the engine's quantisation."
REPLAY = "Do not replay these routes."
ROUTERS = "Compare router weights, dtypes and kernels of both sides."
TOKENS = "Send token ids to the engine, not text, and store the ids that it read."
WEIGHTS = "Load the engine without quantisation, or correct by importance weights."
ONE_DTYPE = "Nothing; one dtype on both sides makes the gap smaller."
PARTS = ("head", "embedding", "routers", "experts")
NOT_PUSHED = "the engine has the {part} of {{}}, and the rest of the checkpoint"


@dataclass(frozen=True)
class Cause:
    text: str
    remedy: str
    fault: bool = True
    """Whether something is to be mended; a dtype or another kernel is no fault."""


CAUSES = {
    # numbers
    "dtype": Cause("the engine computes in {}", ONE_DTYPE, False),
    "rounding": Cause("the gap is rounding", "Nothing; --engine-dtype makes the test sharper.", False),
    "int8": Cause("the engine's matrices are quantised to int8", WEIGHTS),
    "fp8": Cause("the engine's matrices are quantised to fp8", WEIGHTS),
    # routers
    "router_fp32": Cause("the engine keeps and computes its routers in float32", ONE_DTYPE, False),
    "router_bf16": Cause("the engine's routers are {} bfloat16", "Keep and push the engine's routers in float32."),
    "router_int8": Cause("the engine's routers are quantised to int8, {}", QUANTISED),
    "router_fp8": Cause("the engine's routers are quantised to fp8 (e4m3), {}", QUANTISED),
    "lost_bias": Cause("the engine chooses experts without the correction bias", BIAS),
    "lost_scaling": Cause("the engine leaves out routed_scaling_factor", CONFIGURED),
    "scaled_twice": Cause("the engine applies routed_scaling_factor twice", CONFIGURED),
    "gates_raw": Cause("the engine does not renormalise its combine weights; the trainer does", CONFIGURED),
    "gates_renormalised": Cause("the engine renormalises its combine weights; the trainer does not", CONFIGURED),
    "gates_scaled": Cause("the reported combine weights are the trainer's times {}", CONFIGURED),
    "top_k": Cause("the engine uses {}", CONFIGURED),
    # weights
    "shared_expert": Cause("the engine leaves out the shared expert", PUSHED),
    "weight_version": Cause("the engine samples with {}", "Wait for the push before sampling."),
    **{f"{part}_not_pushed": Cause(NOT_PUSHED.format(part=part), PUSHED) for part in PARTS},
    "layer_not_pushed": Cause("the engine has layer {}, and the rest of the checkpoint", PUSHED),
    "stale_cache": Cause("responses after a cached prefix have the gap ({})", CACHE),
    # tokens
    "bos": Cause("the engine reads the prompt {}", TOKENS),
    "special_tokens": Cause("the engine reads the prompt without its special tokens", TOKENS),
    "prompt_cut": Cause("the engine reads the prompt without its first {}", TOKENS),
    "visible_padding": Cause("the engine's attention reads the padding on the left", "Pass the attention mask to it."),
    "positions": Cause(
        "the engine counts positions of the response 1 too {}", "Count them from the first token, cached or not."
    ),
    "positions_per_turn": Cause(
        "the engine counts the positions of each further turn from 0", "Count them from the first token of all turns."
    ),
    "positions_of_padding": Cause(
        "the engine counts the positions of a response from the end of the padded prompt", "Leave the padding out."
    ),
    # log-probs
    "temperature": Cause(
        "the engine's log-probs are at {}",
        "Report log-probs at the temperature of the sampling (vLLM: logprobs_mode=processed_logprobs), write it into "
        "the file, and let the trainer divide its logits by it.",
    ),
    "kept_set": Cause(
        "the engine's log-probs are renormalised over what top-p, top-k or min-p keep",
        "Read log-probs over the whole vocabulary, or mask the trainer's logits, too.",
    ),
    "logprob_shift": Cause("the log-prob of token t is that of token t{}", "Align log-probs with their tokens."),
    "response_mask": Cause("the engine's log-probs are 0 where it sampled nothing", "Mask tokens of an environment."),
    # routes
    "layer_shift": Cause("the engine reports the routes of layer l as layer {}", LAYERS),
    "overwritten_layer": Cause("the reported routes of layer {} are those of another layer, or of nothing", LAYERS),
    "row_shift": Cause("the row of token t{} is what token t used", "Write the routing of input t at row t."),
    "swapped_responses": Cause("the engine hands out the routes of other responses", "Keep routes with their request."),
    "physical_ids": Cause(
        "the engine reports the places of its experts, which a load balancer permutes", "Map places to experts."
    ),
    "stale_routes": Cause("the engine reports the routes of {}", REPLAY),
    "stale_prefix": Cause("the routes of the first tokens are those of an earlier request", CACHE),
    "zero_rows": Cause("the engine writes missing routes as rows of zeros", "Write -1 for a missing route."),
    "repeated_ids": Cause("rows of the reported routes contain an expert twice, or lack slots", REPLAY),
    "sorted_ids": Cause("the engine sorts ids, but not their combine weights", "Sort both, or neither."),
    # without a name
    "routing": Cause("the engine chooses other experts, for a reason that is none of those tried", ROUTERS),
    "combine_weights": Cause("the engine weighs its experts otherwise, for no reason of those tried", ROUTERS),
    "few_tokens": Cause("too few tokens to tell one reason from another", "Look at more responses (--responses)."),
    "unexplained": Cause(
        "nothing tried explains the gap",
        "Read where the gap is: layers, positions, turns. Name other checkpoints with --also.",
    ),
}


def list_remedies(causes: Iterable[str]) -> tuple[str, ...]:
    """What to do about these causes, each text once."""
    return tuple(dict.fromkeys(CAUSES[cause].remedy for cause in causes)) or ("Nothing.",)


def describe(cause: str, detail: str = "") -> str:
    """What the cause means, as a sentence without its full stop."""
    text = CAUSES[cause].text.format(detail)
    return text[0].upper() + text[1:]
