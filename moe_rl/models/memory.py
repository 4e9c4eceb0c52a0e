"""What a run needs on a GPU, by arithmetic: bytes of each phase, and operations of a step. No weights are made.

Activations are about ±20 % right: see tests/benchmarks/README.md for the measured numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_rl import ranks
from moe_rl.config import MAX_ROWS, SCORED, RunConfig
from moe_rl.models.load import skeleton
from moe_rl.models.vocabulary import LOGITS
from moe_rl.objectives import advantage_of, objective_of
from moe_rl.registry import Component
from moe_rl.routing.moe_layers import layout_of

WORKSPACE = 2 * 10**9
"""Bytes of the CUDA context, of workspaces and of what is lost between tensors, about."""
ATTENTION, PAIR_HIDDEN, PAIR_INNER = 14, 3, 4
"""Numbers that the backward needs: of a token and layer, in units of the hidden size; of each routed pair, in units of
the hidden size and of the expert's inner size. Counted on Qwen3-30B-A3B: 217 kB a token and layer in bfloat16."""
MOST = 32_768
"""Tokens of a forward where nobody set them."""
PEAK, SHARE = 989e12, 0.35
"""Dense bfloat16 operations a second of an H100 or H200, and the share of it that an update reaches, assumed."""


@dataclass(frozen=True)
class Sizes:
    """What of a model decides memory and operations."""

    parameters: int
    largest: int
    """Parameters of the largest decoder layer, or of the embedding."""
    active: int
    """Parameters in products with one token."""
    layers: int
    routed: int
    """Σ k over MoE layers."""
    hidden: int
    inner: int
    """Inner size of an expert."""
    vocabulary: int
    heads_width: int
    """Query heads × head size."""
    cached: int
    """Numbers per token and layer in the KV cache."""


def measure_sizes(model: Any) -> Sizes:
    """The sizes of a model, which may be on the meta device."""
    text: Any = model.config.get_text_config()
    layout = layout_of(model)
    experts = [layer for layer in layout.moe_layers if layer.num_experts]
    by_layer: dict[int, int] = {}
    routed_parameters, embedding = 0, model.get_input_embeddings().weight
    inactive = 0.0 if _setting(text, "tie_word_embeddings") else float(embedding.numel())
    routers = {layer.decoder_layer: layer for layer in experts}
    for name, p in model.named_parameters():
        words = name.split(".")
        number = next((int(word) for word in words if word.isdigit()), -1)
        by_layer[number] = by_layer.get(number, 0) + p.numel()
        router = routers.get(number)
        if router and ("experts" in words or p.ndim == 3 and p.shape[0] == router.num_experts):
            inactive += p.numel() * (1 - router.top_k / router.num_experts)
            routed_parameters += p.numel()
    total = sum(p.numel() for p in model.parameters())
    heads = text.num_attention_heads
    width = _setting(text, "head_dim") or text.hidden_size // heads
    cached = 2 * (_setting(text, "num_key_value_heads") or heads) * width
    if _setting(text, "kv_lora_rank"):  # latent attention: keys and values of all heads are cached
        cached = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
        width = cached // heads // 2
    of_all = sum(layer.num_experts for layer in experts)
    return Sizes(
        parameters=total,
        largest=max(embedding.numel(), *(n for layer, n in by_layer.items() if layer >= 0)),
        active=int(total - inactive),
        layers=text.num_hidden_layers,
        routed=sum(layer.top_k for layer in experts),
        hidden=text.hidden_size,
        inner=round(routed_parameters / max(1, of_all) / (3 * text.hidden_size)),
        vocabulary=text.vocab_size,
        heads_width=heads * width,
        cached=cached,
    )


def _setting(config: Any, name: str) -> Any:
    """A setting of a configuration; None where it has none, or another one for each layer."""
    try:
        return getattr(config, name)
    except Exception:  # transformers has no public name for the second
        return None


def estimate_memory(run: RunConfig, sizes: Sizes, time: int, ranks: int = 1) -> dict[str, Mapping[str, float]]:
    """Phase → term → bytes per GPU, of rows of `time` tokens. With FSDP2 over `ranks` GPUs."""
    policy = Component.read(run.policy)
    width = getattr(torch, policy.options.get("compute_dtype", run.model.dtype)).itemsize
    rows = run.prompts_per_step * run.group_size
    most = MOST if policy.name == "hf" else rows * time  # the others choose no budget
    tokens = min(run.micro_batch_tokens or min(most, run.micro_batch * time), -(-rows // run.mini_batches) * time)
    scored = min(run.micro_batch_tokens or min(most, SCORED * run.micro_batch * time), rows * time)
    by_layer = ATTENTION * sizes.hidden * width
    pairs = (PAIR_HIDDEN * sizes.hidden + PAIR_INNER * sizes.inner) * width
    all_layers = sizes.layers * by_layer + sizes.routed * pairs
    one_layer = all_layers / sizes.layers
    states, gradients = _states(policy, run.model.dtype, run.optimizer.name)
    needs = objective_of(run.arm).needs | advantage_of(run.arm).needs
    if "values" in needs:  # of a critic; one of the two has gradients at a time
        its_states, its_gradients = _states(Component("hf"), run.model.dtype, "adamw")
        states, gradients = states + its_states, max(gradients, its_gradients)
    if "reference" in needs:  # the policy's weights again
        options = policy.options
        wide = policy.name == "fsdp" and not options.get("lora") and options.get("master_weights", True)
        states += 4 if wide else getattr(torch, run.model.dtype).itemsize
    gathered = 2 * sizes.largest * width if policy.name == "fsdp" else 0
    held = states * sizes.parameters / ranks + gathered
    holders = 1 if policy.options.get("reduce") == "update" else ranks  # of gradients
    of_a_token = sizes.layers * sizes.hidden * width + one_layer if run.activation_checkpointing else all_layers
    engine = Component.read(run.engine)
    drawn = min(int(engine.options.get("max_rows", MAX_ROWS)), rows)

    def head(count: int) -> float:
        return 16.0 * min(count * sizes.vocabulary, LOGITS)

    phases = {
        "update": {
            "weights, gradients, optimizer": held + gradients * sizes.parameters / holders,
            "activations": float(tokens * of_a_token),
            "head": head(tokens),
            "routing": float(tokens * sizes.routed * 10),
        },
        "score": {
            "weights, optimizer": held,
            "activations": float(scored * one_layer),
            "head": head(scored),
            "routing": float(scored * sizes.routed * 10),
        },
    }
    if engine.name == "hf":
        phases["rollout"] = {
            "weights, optimizer": held,
            "KV cache": float(drawn * time * sizes.layers * sizes.cached * width),
            "logits": float(drawn * sizes.vocabulary * 20),
            "routing": float(drawn * time * sizes.routed * 10),
        }
    return {phase: {**terms, "context": float(WORKSPACE)} for phase, terms in phases.items()}


def fit_tokens(run: RunConfig, model: Any, free: float) -> int:
    """`micro_batch_tokens` for a GPU with `free` bytes, the weights' own among them: the most tokens a forward, of
    32,768, 16,384, …, 1,024, with which update and score need nine tenths of them at most."""
    sizes, tokens = measure_sizes(model), MOST
    while tokens > 1024:
        phases = estimate_memory(run.replace(micro_batch_tokens=tokens), sizes, tokens)
        if all(sum(phases[phase].values()) <= 0.9 * free for phase in ("update", "score")):
            break
        tokens //= 2
    return tokens


def estimate_peak(run: RunConfig, sizes: Sizes, time: int, tokens: int | None) -> float:
    """Bytes per GPU in the phase that needs the most, of rows of `time` tokens in forwards of `tokens`, without the
    context, which torch does not count."""
    phases = estimate_memory(run.replace(micro_batch_tokens=tokens), sizes, time, ranks.world())
    return max(sum(terms.values()) for terms in phases.values()) - WORKSPACE


def share_of_peak(run: RunConfig, sizes: Sizes, time: int, seconds: float) -> float:
    """Operations of a step's update over `seconds`, as a share of an H100's dense bfloat16 peak per process."""
    return count_operations(run, sizes, time)["update"] / seconds / PEAK / ranks.world()


def _states(policy: Component, dtype: str, optimizer: str) -> tuple[int, int]:
    """Bytes a parameter of weights, masters and moments, and of gradients. Adapters are too small to count."""
    if policy.options.get("lora"):
        return getattr(torch, dtype).itemsize, 0
    moments = 2 if optimizer == "adamw_8bit" else 8
    masters = policy.options.get("master_weights", True)
    if dtype == "float32" or policy.name == "fsdp" and masters:  # whose shards are the masters
        return 4 + moments, 4
    if masters:
        return 6 + moments, 4
    return 2 + min(moments, 4), 2


def count_operations(run: RunConfig, sizes: Sizes, time: int) -> dict[str, float]:
    """Floating-point operations of a step's update and score. Forward and backward are six a parameter and token, with
    activation checkpointing eight, and two fewer where weights are frozen beside adapters. Attention is counted without
    its causal half (as torchtitan does)."""
    tokens = run.prompts_per_step * run.group_size * time
    frozen = bool(Component.read(run.policy).options.get("lora"))
    forward = 2 * sizes.active + 4 * sizes.layers * sizes.heads_width * time
    return {
        "update": float(tokens * forward * (3 + run.activation_checkpointing - frozen) * run.epochs),
        "score": float(tokens * forward),
    }


def describe(run: RunConfig, time: int, ranks: int = 1) -> list[tuple[str, str]]:
    """Lines of a name and a text for a dry run on GPUs: the memory of each phase, and seconds of a step; of the
    policies hf and fsdp."""
    if Component.read(run.policy).name not in ("hf", "fsdp"):
        return []
    sizes = measure_sizes(skeleton(run.model.replace(device="cpu")))
    lines = []
    for phase, terms in estimate_memory(run, sizes, time, ranks).items():
        parts = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in terms.items())
        largest = max(terms, key=lambda name: terms[name])
        where = f"each of {ranks} GPUs" if ranks > 1 else "one GPU"
        text = f"{phase}: {sum(terms.values()) / 1e9:.3g} GB on {where} ({parts}); largest: {largest}"
        lines.append(("memory", text))
    seconds = {phase: count / PEAK / SHARE / ranks for phase, count in count_operations(run, sizes, time).items()}
    text = ", ".join(f"{phase} {value:.2g} s" for phase, value in seconds.items())
    assumed = f"{SHARE:.0%} of {PEAK / 1e12:.0f} TFLOP/s (H100), {time} tokens a row; rollouts and traffic not counted"
    return [*lines, ("step", f"{text}, assuming {assumed}")]
