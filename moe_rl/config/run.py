"""What a run is, as data: plain frozen dataclasses, hashed into the run's manifest.

Nothing here imports torch, so that declaring, listing and hashing studies stays instant.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_rl.config.older import modern
from moe_rl.config.parts import ColdStart, Critic, Dial, EngineConfig, Measure, ModelConfig, Optimizer, Parallel
from moe_rl.config.tree import leaves, plain, read, replaced
from moe_rl.errors import ConfigError
from moe_rl.registry import Part, Use

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
    """`hf`; or on several processes `fsdp`, the same cut by FSDP2, or `megatron` (Megatron-core), laid out as
    `parallel` says."""
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
    lag: int = 0
    """Steps between the weights that sample a batch and those that begin to train on it. Step s trains on a batch that
    was drawn in step s − lag, by the weights after step s − lag − 1; in the first steps by those that the run begins
    with. Lags share prompts and noise."""
    lag_mode: str = "fixed"
    """`fixed`, or `random`: a batch's lag is drawn from 0 … `lag`, alike in all arms of a seed."""
    partial_tokens: int | None = None
    """Tokens that a response draws per step, from the step in which its batch is begun to the one that trains on it,
    which draws what is left: its parts are of several weights. None: each is drawn at once. Needs a lag."""
    refills: int = 0
    """Dynamic sampling: how often groups whose rewards are all equal are exchanged for those of new prompts before a
    batch is trained on; 0: they stay. What it cost is in the columns `drawn_*`."""
    temperature: float = 1.0
    """Of sampling, and of every log-probability; above 0."""
    top_p: float = 1.0
    """Completions are drawn from the fewest tokens that together have this probability, after `min_p` and `top_k`, and
    every log-probability is over these alone. 1: from all. The cold start draws from all."""
    top_k: int = 0
    """Completions are drawn from at most so many tokens. 0: from all."""
    min_p: float = 0.0
    """Completions are drawn from tokens of at least so many times the highest probability."""
    sampling_mask: bool = True
    """Where `top_p`, `top_k` or `min_p` truncate: which tokens they kept travels with the rollouts, and trainer and
    reference renormalise over the same ones. False: they are over the whole vocabulary, the engine's are not."""
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
        """Every `pkg.module:name` that the parts of the run name, in their options too, and a mixture its tasks."""
        texts = [text for key, text in leaves(self.arm) if key != "name" and isinstance(text, str)]
        names = {name for text in texts for name in NAMED.findall(text)}
        tasks = (text for _, text in leaves(self.task) if isinstance(text, str))
        return names | {text for text in tasks if Use(text).own and text.partition(":")[0] not in WITH_ARGUMENT}

    @property
    def truncates(self) -> bool:
        """Whether completions are drawn from some tokens only."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def hash(self) -> str:
        """Of everything but `steps`, so that more steps extend a run, and what is kept to be read."""
        d = {k: v for k, v in self.to_dict().items() if k != "steps"}
        del d["measure"]["rollouts"]
        return hashlib.sha256(json.dumps(d, sort_keys=True).encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with changes. Dotted keys reach inside: `run.replace(**{"optimizer.lr": 1e-4})`."""
        return replaced(self, changes)
