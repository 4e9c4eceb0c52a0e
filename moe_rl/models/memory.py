"""How much memory a run will need, before anything is loaded."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from moe_rl import ranks
from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError
from moe_rl.models.presets import hf_config, skeleton
from moe_rl.models.vocabulary import LOGITS


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one run, by what holds them; see `estimate_memory`."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    activations: int
    sampling: int
    routes: int

    @property
    def persistent(self) -> int:
        """What is there all the time and known exactly: weights, gradients, AdamW's moments, the reference policy,
        the critic."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.critic

    @property
    def total(self) -> int:
        """Sampling and updates take turns, so the larger of the two counts."""
        return self.persistent + self.routes + max(self.activations, self.sampling)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_readable(size)}" for name, size in asdict(self).items() if size)
        return f"about {_readable(self.total)} ({parts}), besides the 0.5 GB of the libraries"


def estimate_memory(
    run: RunConfig, prompt_tokens: int, reference: bool = False, critic: bool = False
) -> MemoryEstimate:
    """The memory of a run whose longest prompt has `prompt_tokens` tokens; nothing is loaded, the weights are counted
    on the meta device.

    With P parameters of b bytes, L layers, width h, vocabulary V, k experts of width w per token, time
    T = prompt_tokens + max_new_tokens, R = prompts × group rollouts and N = T · min(micro_batch,
    ceil(R / mini_batches)) tokens per forward, or micro_batch_tokens (but at least T) where these are fewer:

        weights = gradients = P b,  optimizer = 2 P b,  reference = P b where an arm compares with one
                      (gradients 2 P b with measure.gradient_cosine)
        critic = 4 (C b + 4 (h + 1)) where it has one, C = P without an output matrix of its own: all four of it, the
                      head in float32
        activations = N L A b + min(3 · 4 N V, 16 · 2^26): log-softmax, in float32, and two gradients of its size; more
                      logits are made in pieces (`vocabulary`). A family that scales its logits has them all at once,
                      3 · 4 N V, and one that squashes them N V b more,
                      A = 8 h + 5 heads head_dim + k (4 w + 2 h), or, with the operators of `kernels_cpu` (float32 or
                      float64 on a CPU), A = 5 h + 4 heads head_dim + k (3 w + 2 h);
                      L h + A in place of L A with activation checkpointing
        sampling    = R (2 L T kv_heads head_dim b + 3 V · 4)
        routes      = R T L k bytes (two per id above 255 experts), for engine, policy, and every batch that waits

    Under policy='fsdp' on GPUs the first four are divided by the number of ranks, and the weights of the model that
    samples on rank 0 are added.

    A is a fit to what autograd keeps for the presets (within a factor of 1.5); eager attention adds heads · T² per row,
    which is not counted.
    """
    config = hf_config(run.model)
    config.allow_global_per_layer_attribute_access = True  # of families whose layers differ: those of most layers
    b = torch.empty((), dtype=getattr(torch, run.model.dtype)).element_size()
    model: Any = skeleton(run.model)
    # On GPUs every rank of FSDP has a part, and rank 0 the model that samples as well; on a CPU they share the memory.
    ranks_apart = run.policy == "fsdp" and torch.device(run.model.device).type == "cuda" and ranks.world() > 1
    parts = ranks.world() if ranks_apart else 1
    weights = sum(p.numel() for p in model.parameters()) * b
    body = sum(p.numel() for p in model.base_model.parameters()) * b
    layers, hidden, vocab = config.num_hidden_layers, config.hidden_size, config.vocab_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    k = getattr(config, "num_experts_per_tok", None) or 1
    width = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 4 * hidden
    experts = next((e for key in _EXPERTS if (e := getattr(config, key, None))), 1)

    time = prompt_tokens + run.max_new_tokens
    rollouts = run.prompts_per_step * run.group_size
    tokens = min(run.micro_batch, -(-rollouts // run.mini_batches)) * time
    tokens = min(tokens, max(time, run.micro_batch_tokens or tokens))
    layer = 8 * hidden + 5 * heads * head_dim + k * (4 * width + 2 * hidden)
    if torch.device(run.model.device).type == "cpu" and run.model.dtype in ("float32", "float64"):
        layer -= 3 * hidden + heads * head_dim + k * width  # which kernels_cpu makes again in the backward
    kept = layers * hidden + layer if run.activation_checkpointing else layers * layer
    scaled = any(getattr(config, key, None) not in (None, 0, 1) for key in _ON_LOGITS)
    logits = tokens * vocab * (3 * 4 + (b if getattr(config, _ON_LOGITS[0], None) else 0))
    return MemoryEstimate(
        weights=weights // parts + (weights if parts > 1 else 0),
        gradients=weights * (1 + run.measure.gradient_cosine) // parts,
        optimizer=2 * weights // parts,
        reference=weights // parts if reference else 0,
        critic=4 * (body + 4 * (hidden + 1)) if critic else 0,
        activations=tokens * kept * b + (logits if scaled else min(logits, 16 * LOGITS)),
        sampling=rollouts * (2 * layers * time * kv_heads * head_dim * b + 3 * vocab * 4),
        routes=(2 + run.lag) * rollouts * time * layers * k * (1 if experts <= 255 else 2),
    )


def check_memory(estimate: MemoryEstimate, device: str = "cpu") -> None:
    """Raise ConfigError when what is certainly needed exceeds the device's free memory; warn when the whole estimate
    does."""
    free = available_memory(device)
    advice = ("Use a smaller model, bfloat16 (model.dtype), a smaller micro_batch or micro_batch_tokens, or "
              "activation_checkpointing.")
    if estimate.persistent > free:
        raise ConfigError(
            f"this run needs {estimate}, but {device} has {_readable(free)} free, less than weights, gradients and "
            f"optimizer alone take ({_readable(estimate.persistent)}). {advice}"
        )
    if estimate.total > free:
        warnings.warn(
            f"this run needs {estimate}, but {device} has {_readable(free)} free: it may be killed. {advice}",
            stacklevel=2,
        )


def available_memory(device: str = "cpu") -> int:
    """Bytes of a CUDA device that are free or this process's already, weights that are loaded among them, which
    estimates count; or the bytes this machine can give to a process without swapping."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(torch.device(device))[0] + torch.cuda.memory_reserved(torch.device(device))
    return psutil.virtual_memory().available


_ON_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier")
"""What configurations call that which is done to logits after the head; the first squashes them."""
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")


def _readable(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
