"""What a run's configuration is made of, beside its arm: a dataclass per part, each a room of settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model. A preset of `moe_rl.models`, or any Hugging Face checkpoint directory or name."""

    name: str = "qwen3_moe-tiny"
    """A preset, the folder of a checkpoint, or its name on the hub."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Changes to a preset's Hugging Face configuration, e.g. `{"num_experts": 32}`."""
    device: str = "cpu"
    dtype: str = "float32"
    router_dtype: str | None = None
    """`float32`: weights of routers are kept, and their logits and combine weights computed, in it, whatever `dtype`
    is. None: as the family's own code does it, most in `dtype`. policy='megatron' computes them in float32 anyway."""


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """Supervised training until a target success rate. Ignored for a checkpoint with `target=0`."""

    target: float = 0.35
    """Share of sampled completions with reward 1 at which it stops; 0 turns the cold start off."""
    seed: int = 0
    """Initial weights and order of examples: a factor of its own, since runs that share one cold start say nothing
    about other starts."""
    max_steps: int = 3000
    batch_size: int = 64
    lr: float = 2e-3


OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW, or SGD, and its surroundings."""

    name: str = "adamw"
    """`adamw`, or `sgd` with momentum `betas[0]`."""
    lr: float = 2e-4
    warmup: int = 0
    """Updates over which the learning rate rises from 0, linearly."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Global L2 norm to which gradients are clipped; 0 turns clipping off."""
    router_lr_scale: float = 1.0
    """Learning-rate factor of the router weights; 0 freezes them."""
    loss_free_bias: float = 0.0
    """Step u of every expert's correction bias after an update, u · sign(mean count − count), counted over the
    mini-batch's live choices (arXiv 2408.15664, where u is 1e-3). For families that choose with such a bias."""

    def lr_at(self, update: int) -> float:
        """Learning rate of an update, counted from 1 over the whole run."""
        return self.lr * min(1.0, update / self.warmup) if self.warmup else self.lr


@dataclass(frozen=True, kw_only=True)
class Critic:
    """PPO's value model, for arms whose advantage asks for values (`gae`); other arms have none. It is the policy's
    model after the cold start with a scalar in place of the vocabulary, 0 at first, and takes a step of AdamW after
    each of the policy's, on the same mini-batch: moments, clipping and warm-up are those of `Optimizer`, its learning
    rate is its own, its routers are neither slowed nor balanced."""

    lr: float = 0.0
    """Learning rate; 0: there is no critic."""
    clip: float = math.inf
    """Range ε around V_old beyond which the value loss is clipped (arXiv 1707.06347's code; verl 0.5, slime 0.2)."""

    def of(self, optimizer: Optimizer) -> Optimizer:
        """Its optimizer, beside the policy's."""
        return replace(optimizer, name="adamw", lr=self.lr, router_lr_scale=1.0, loss_free_bias=0.0)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The measuring budget (see "What is measured" in the README)."""

    probe: int = 32
    """Responses per step on which quantities that need an extra forward are measured."""
    detail_every: int = 10
    """Steps between detailed measurements: per-update volatility, attribution by mini-batch index, noise floor."""
    rollouts: int = 8
    """Most rollouts per step that are kept to be read (`moe-rl read`); 0: none. It changes no number, so runs that
    differ in it alone are one and the same."""
    full: bool = False
    """Measure every response at every step and print what that costs."""
    gradient_cosine: bool = False
    """The cosine of every update's gradient with that of the update before, which is kept for it: memory and resume
    checkpoints grow by the size of the trainable weights. For policy='hf'."""


@dataclass(frozen=True, kw_only=True)
class Dial:
    """Volatility as an assigned dose (see `routing.dial`): in the j-th of N updates of a step the routers are moved by
    sigma · (j − 1)/(N − 1) of their standard deviation along one direction, by default a random one, the same within a
    step and for all arms of a seed. N counts the updates of all epochs. Ratios start at 1 and drift as real drift does,
    coherently within a step."""

    sigma: float = 0.0
    """In standard deviations of each router's weights; 0 turns it off."""
    form: str = "weights"
    """`weights`: gates and sets move. `choice`: sets alone. `beside`: not the routers, but all other matrices of the
    decoder's layers do, in standard deviations of each."""
    direction: str = "random"
    """Which way they are moved: `random`, or `last_step`, on along the optimizer's own last step."""
    acts_on: str = "both"
    """What the moved network gives: the `ratio`, the `gradient`, or `both`."""

    def size(self, update: int, updates: int) -> float:
        """The dose of an update, counted from 0, in units of sigma's."""
        return self.sigma * update / (updates - 1) if updates > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How `policy="megatron"` is spread over dp × tp × pp processes, one per GPU. `policy="fsdp"` has no layout: every
    process takes rows, and holds a part of every layer."""

    dp: int = 1
    """Data parallel: each rank takes part of a mini-batch's rows."""
    tp: int = 1
    """Tensor parallel, with sequence parallelism: attention, embedding and output are cut."""
    pp: int = 1
    """Pipeline parallel: each stage holds consecutive layers."""
    ep: int = 1
    """Expert parallel: the experts of a layer are spread over `ep` of the dp × tp ranks."""
    etp: int | None = None
    """Ranks that share one expert. None: `tp` when ep = 1, else 1."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of Megatron-core's TransformerConfig, e.g. `{"moe_token_dispatcher_type": "allgather"}`."""
    compute_dtype: str | None = None
    """fsdp: in which forwards and backwards compute, e.g. `bfloat16`; weights, sums of gradients and moments keep
    `model.dtype`, and routers compute in `model.router_dtype`. None: all of it in `model.dtype`."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What draws the rollouts, and in which numerics. By default the policy's own module samples, so that engine and
    policy agree to float rounding; anything else is an engine of its own, whose weights follow the policy's."""

    name: str = "hf"
    """`hf`, `vllm` (in this process), or the address of a server, e.g. `http://127.0.0.1:8000`."""
    dtype: str | None = None
    """In which the engine computes, e.g. `bfloat16`; None: the policy's."""
    routes: str = "raise"
    """What becomes of routes that are missing or impossible: `raise`, `unknown` (they route freely under replay and are
    counted), or `off`: none are asked for."""
    experts: str | None = None
    """hf: another of transformers' implementations of the experts, `eager`, `batched_mm` or `grouped_mm`."""
    int8: bool = False
    """hf: matrices rounded to 8 bits, one scale per row; embeddings and routers are kept."""
    router_noise: float = 0.0
    """hf: noise on router weights in units of their standard deviation, new after every update."""
    gpu_memory: float = 0.4
    """vllm: share of the GPU's memory it may take."""
    max_tokens: int | None = None
    """vllm: prompt and completion it makes room for; None: as many as the model can take."""
    dialect: str = "openai"
    """Server: `openai` (vLLM's completions), `vllm` (its `--enable-scale-out` endpoint) or `sglang`."""
