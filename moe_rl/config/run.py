"""What a run is, as data: plain frozen dataclasses, hashed into the run's manifest.

Nothing here imports torch, so that declaring, listing and hashing studies stays instant.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_rl.config.older import modern
from moe_rl.config.tree import changed, leaves, plain, read
from moe_rl.errors import ConfigError
from moe_rl.lookup import Part, Use

ANCHORS = ("policy", "engine")
WITH_ARGUMENT = ("reasoning_gym", "jsonl")
"""Tasks whose name goes on after a colon: a dataset, a file."""
NAMED = re.compile(r"[^\s:(),=]+:[^\s:(),=]+")
"""`pkg.module:name`, wherever it stands in a setting."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of the comparison, made of parts: a name, or a `Use` with options, each.

    GRPO with Routing Replay is `Arm(name="replay", loss="grpo", routes="old_policy")`; a KL to the reference is
    `terms=(Use("kl", coef=0.04),)`. What is there is in `moe_rl.objectives` and `moe_rl.routing.sources`; a user's own
    function is `pkg.module:function`.
    """

    name: str
    loss: Part = "grpo"
    """Ratio level and trust region: `objectives.losses`."""
    aggregate: Part = "seq_mean_token_mean"
    """How the tokens of a mini-batch weigh: `objectives.aggregate`."""
    corrections: tuple[Part, ...] = ()
    """Factors on those weights, without gradient, e.g. `Use("truncated", cap=2.0)`: `objectives.corrections`."""
    filters: tuple[Part, ...] = ()
    """Corrections whose zeros leave the loss altogether: such tokens count neither in |y| nor in the number of
    sequences, nor in the mean of a sequence's ratio; under `corrections` they keep all three."""
    terms: tuple[Part, ...] = ()
    """What is added to the loss, e.g. `Use("entropy", coef=0.01)`: `objectives.terms`."""
    advantage: Part | tuple[Part, ...] = ("group",)
    """Rewards to advantages, step after step, e.g. `("overlong", "group", Use("clipped", at=2.0))`; one may be given
    alone: `objectives.advantages`."""
    routes: Part = "live"
    """Routes of ratio and gradient: `routing.sources`."""
    ratio_routes: Part | None = None
    """Routes of the ratio alone, when not those of the gradient: splits replay into its two mechanisms. Costs a forward
    more per update. None: one and the same."""
    anchor: str = "policy"
    """Denominator of the ratio: `policy` (recomputed by the trainer) or `engine` (the rollout's own log-probs)."""

    def __post_init__(self) -> None:
        for part in ("loss", "aggregate", "routes"):
            object.__setattr__(self, part, Use.of(getattr(self, part)))
        for parts in ("corrections", "filters", "terms", "advantage"):
            given = getattr(self, parts)
            given = given if isinstance(given, tuple | list) else (given,)
            object.__setattr__(self, parts, tuple(Use.of(part) for part in given))
        if self.ratio_routes is not None:
            object.__setattr__(self, "ratio_routes", Use.of(self.ratio_routes))
        if self.anchor not in ANCHORS:
            raise ConfigError(f"arm {self.name!r}: anchor={self.anchor!r}; choose {' or '.join(ANCHORS)}")


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
    full: bool = False
    """Measure every response at every step and print what that costs."""


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
    """How `policy="megatron"` is spread over dp × tp × pp processes, one per GPU."""

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


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run, and nothing else."""

    arm: Arm
    seed: int = 0
    """Prompts, sampling noise, mini-batch split and probe; shared by all arms of a study."""
    task: Part = "running_sums"
    """What is asked and rewarded: `running_sums`, `reasoning_gym:<dataset>`, `jsonl:<file>`, `pkg.module:Class`, or a
    `Use` of one with its options, e.g. `Use("running_sums", digits=12)`."""
    model: ModelConfig = ModelConfig()
    cold_start: ColdStart = ColdStart()
    optimizer: Optimizer = Optimizer()
    critic: Critic = Critic()
    measure: Measure = Measure()
    engine: EngineConfig = EngineConfig()
    dial: Dial = Dial()
    policy: str = "hf"
    """`hf`, or `megatron` (Megatron-core), laid out as `parallel` says."""
    parallel: Parallel = Parallel()
    steps: int = 100
    """A step is `prompts_per_step` × `group_size` rollouts, and `mini_batches` × `epochs` updates on them."""
    prompts_per_step: int = 32
    group_size: int = 8
    mini_batches: int = 8
    epochs: int = 1
    """Passes over the rollouts of a step, each with a split of its own: `mini_batches` × `epochs` updates."""
    micro_batch: int = 64
    """Most rows in one forward with gradient."""
    micro_batch_tokens: int | None = None
    """Most tokens, padding included, in any forward: rows are sorted by length, and those that fit go together. A row
    that is longer goes alone. None: forwards are cut by rows alone."""
    activation_checkpointing: bool = False
    temperature: float = 1.0
    """Of sampling, and of every log-probability; above 0."""
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ()
    """Texts that end a completion, beside the end token."""
    eval_every: int = 10
    """Steps between evaluations on held-out prompts, greedy and sampled; before training and at its end, too."""
    eval_prompts: int = 128
    save_every: int = 25
    """Steps between resume checkpoints."""
    hf_checkpoints: tuple[int, ...] = ()
    """Steps after which the weights are also saved as a Hugging Face checkpoint, in the run's folder; 0: those that
    the run begins with."""

    def __post_init__(self) -> None:
        task = Use.of(self.task)
        if task.name.startswith("jsonl:"):  # written out, since rows without it are of an older scorer
            task = Use(task.name, **{"match": "exact", **task.options})
        object.__setattr__(self, "task", task)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; `from_dict` reads it back."""
        return json.loads(json.dumps(plain(self)))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunConfig:
        """The configuration that `to_dict` described, now or in an older version: settings that came later take their
        defaults, and what was written otherwise is read as it would be written now.

        Raises ConfigError for a setting that no longer exists.
        """
        return read(cls, modern(content))

    def own_code(self) -> set[str]:
        """Every `pkg.module:name` that the parts of the run name, in their options too."""
        texts = [text for key, text in leaves(self.arm) if key != "name" and isinstance(text, str)]
        names = {name for text in texts for name in NAMED.findall(text)}
        task = Use.of(self.task).name
        return names | ({task} if ":" in task and task.partition(":")[0] not in WITH_ARGUMENT else set())

    @property
    def hash(self) -> str:
        """Of everything but `steps`, so that more steps extend a run."""
        d = {k: v for k, v in self.to_dict().items() if k != "steps"}
        return hashlib.sha256(json.dumps(d, sort_keys=True).encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with changes. Dotted keys reach inside: `run.replace(**{"optimizer.lr": 1e-4})`."""
        new = self
        for key, value in changes.items():
            new = changed(new, key, value)
        return new
