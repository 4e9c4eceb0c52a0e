"""What a run is, as data: frozen pydantic models. Nothing here imports torch, so that studies are declared fast."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic.functional_validators import BeforeValidator, InstanceOf, PlainValidator, WrapValidator, model_validator

from moe_rl.errors import ConfigError
from moe_rl.registry import Component, Part

S = TypeVar("S", bound="Settings")
NAMED = re.compile(r"[^\s:(),=]+:[^\s:(),=]+")
"""`pkg.module:name`, wherever it stands in a setting."""
UNBOUNDED = ("arm.", "most_violation")
"""Settings that may be infinite, by how their keys begin."""
FINITE = "numbers must be finite, or nothing computed with them is"
OUT_OF_RANGE = {"greater_than_equal", "greater_than", "less_than_equal", "less_than", "string_too_short"}
"""Pydantic's errors for a value of the right type that is out of range."""


# ---------------------------------------------------------------------- the types of values
def _keep_int(value: Any, check: Any) -> Any:
    """The number as it was given: pydantic makes 1.0 of 1, and JSON and the hash tell the two apart."""
    check(value)
    return value


def _make_uses(parts: Any) -> tuple[Component, ...]:
    return tuple(map(Component.of, parts if isinstance(parts, tuple | list) else (parts,)))


FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""For tuples, which are lists in JSON."""
Float = Annotated[float, WrapValidator(_keep_int)]
Named = Annotated[Part, PlainValidator(Component.of)]
Called = Annotated[Part, PlainValidator(Component.read)]
"""A component, which a text may give options: `megatron(ep=2)`."""
AllNamed = Annotated[tuple[Named, ...], FromList]

# A text beside a range is the end of the error message: what the value is, or why it has this range.
AT_LEAST_ONE = "a run needs at least 1, or there is nothing to do"
Count = Annotated[int, Field(ge=1), AT_LEAST_ONE]
Interval = Annotated[int, Field(ge=1), "at least 1 step; an interval longer than the run means at its end, or never"]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1), "random streams are derived from seeds, from 0 to 2^32 - 1"]
Steps = Annotated[int, Field(ge=0), "a number of steps"]
LearningRate = Annotated[Float, Field(ge=0), "a learning rate must not be negative"]
NotNegative = Annotated[Float, Field(ge=0), "it must not be negative, or updates would not go along the gradient"]
Deviation = Annotated[Float, Field(ge=0), "a standard deviation"]
Decay = Annotated[Float, Field(ge=0, lt=1)]
Step = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


# ---------------------------------------------------------------------- what all settings have in common
class Settings(BaseModel):
    """Frozen settings. A value that no run can have raises a ConfigError; an int may stand for a float."""

    model_config = {"frozen": True, "strict": True, "extra": "forbid", "use_attribute_docstrings": True}

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            about = f"arm {values.get('name')!r}: " if isinstance(self, Arm) else ""
            raise ConfigError(about + "\n".join(_explain_errors(type(self), values, error))) from None

    @model_validator(mode="after")
    def _check_finite(self) -> Settings:
        for name, number in leaves({name: value for name, value in self if not isinstance(value, Settings)}):
            if isinstance(number, float) and not math.isfinite(number):
                key = _prefix(type(self)) + name
                if math.isnan(number) or not key.startswith(UNBOUNDED):
                    raise ConfigError(f"{key}={number:g}: {FINITE}")
        return self

    @classmethod
    def from_dict(cls: type[S], content: Mapping[str, Any]) -> S:
        """The settings that JSON describes. Those that are not there take their defaults."""
        values = dict(content)
        for name, field in cls.model_fields.items():
            if name in values and (group := group_of(field)):
                values[name] = group.from_dict(values[name])
        return cls(**values)

    def replace(self: S, **changes: Any) -> S:
        """A copy with changes, which are checked together. Dotted keys reach inside: `run.replace(**{"optimizer.lr":
        1e-4})`. What lies below a mapping is one key of it. Raises ConfigError for a key that is not there."""
        values = dict(self)
        for key, value in changes.items():
            name, _, below = key.partition(".")
            part = values.get(name)
            if name in values and not below:
                values[name] = value
            elif isinstance(part, Mapping):
                values[name] = {**part, below: value}
            elif isinstance(part, str | Component):
                use = Component.of(part)
                values[name] = Component(use.name, **{**use.options, below: value})
            elif isinstance(part, Settings) and below.partition(".")[0] in type(part).model_fields:
                values[name] = part.replace(**{below: value})
            else:
                self._refuse_key(key)
        return type(self)(**values)

    def _refuse_key(self, key: str) -> NoReturn:
        """Raise a ConfigError for a dotted key that is not there: the settings that may be meant, those beside it."""
        prefix = _prefix(type(self))
        key, known = prefix + key, [known for known, _ in fields_of(type(self), prefix)]
        group, _, word = key.rpartition(".")
        if group in known:
            raise ConfigError(f"there is no setting {key!r}: {group} has no settings of its own")
        beside = {k.removeprefix(f"{group}."): k for k in known if k.rpartition(".")[0] == group}
        same = [k for k in known if k.rpartition(".")[2] == word]
        near = [beside[name] for name in difflib.get_close_matches(word, beside)] or difflib.get_close_matches(
            key, same, cutoff=0.8) or same or difflib.get_close_matches(key, () if beside else known, cutoff=0.8)
        hint = f": did you mean {' or '.join(near)}?" if near else "."
        groups = [name if name in known else f"{name}.…" for name in type(self).model_fields]
        raise ConfigError(f"there is no setting {key!r}{hint} There are: "
                          f"{', '.join(beside.values() if group and beside else groups)}.")


def group_of(field: FieldInfo) -> type[Settings] | None:
    """The class of the settings below a field; None, where it is one setting."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def fields_of(kind: type[Settings], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The dotted key and the field of every setting."""
    for name, field in kind.model_fields.items():
        group = group_of(field)
        yield from fields_of(group, f"{prefix}{name}.") if group else [(prefix + name, field)]


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in settings or their JSON, however deep, and its dotted key, which entries of a list share."""
    if isinstance(value, Component | Settings):
        value = vars(value)
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from leaves(below, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for below in value:
            yield from leaves(below, key)
    else:
        yield key, value


def plain(value: Any) -> Any:
    """Settings as nested dictionaries; a Component without options is its name."""
    if isinstance(value, Component) and not value.options:
        return value.name
    if isinstance(value, Component | Settings):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: plain(below) for key, below in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple | list) else value


def _prefix(kind: type[Settings]) -> str:
    """How the dotted keys of a group's settings begin."""
    return next((f"{name}." for name, field in RunConfig.model_fields.items() if field.annotation is kind), "")


def _explain_errors(kind: type[Settings], values: Mapping[str, Any], error: ValidationError) -> Iterator[str]:
    """Pydantic's errors in our words: what is wrong with the value, and what to do."""
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0]) if detail["loc"] else ""
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            yield f"{_prefix(kind)}{name}: {cause}" if name else str(cause)
        elif name not in kind.model_fields:
            yield (f"{kind.__name__} has no setting {name}; it has {', '.join(kind.model_fields)}. "
                   "Release 0.1.0 alone reads the configurations that it wrote.")
        elif name not in values:
            yield f"{_prefix(kind)}{name} must be given"
        elif get_origin(kind.model_fields[name].annotation) is Mapping:
            yield f"{_prefix(kind)}{name}={values[name]!r}: set one entry at a time, {_prefix(kind)}{name}.NAME=…"
        else:
            yield f"{_prefix(kind)}{name}={_explain_value(kind.model_fields[name], values[name], detail['type'])}"


def _explain_value(field: FieldInfo, value: Any, error: str) -> str:
    if get_origin(field.annotation) is Literal:
        return f"{value!r}: choose {' or '.join(map(str, get_args(field.annotation)))}"
    if error in OUT_OF_RANGE:
        written = f"{value:g}" if isinstance(value, int | float) else repr(value)
        return f"{written}: {FINITE if written == 'nan' else next(m for m in field.metadata if isinstance(m, str))}"
    return f"{value!r}: the setting needs a value of type {write_type(field.annotation)}"


def write_type(kind: Any) -> str:
    """A type as text."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return write_type(inner[0])
    if origin is Literal:
        return "str"
    if origin in (UnionType, Union):
        return " | ".join(map(write_type, inner))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(write_type, inner))}]"
    return {NoneType: "None", Ellipsis: "..."}.get(kind) or kind.__name__


# ---------------------------------------------------------------------- what a run is made of
class ModelConfig(Settings):
    """Which model. A preset of `moe_rl.models`, or any Hugging Face checkpoint directory or name."""

    name: str = "qwen3_moe-tiny"
    """A preset, the folder of a checkpoint, or its name on the hub."""
    overrides: Mapping[str, Any] = {}
    """Changes to a preset's Hugging Face configuration, e.g. `{"num_experts": 32}`."""
    device: str = "cpu"
    dtype: str = "float32"
    router_dtype: str | None = None
    """`float32`: routers keep their weights, and compute logits and combine weights, in float32, whatever `dtype` is.
    None: as the family's own code does, mostly in `dtype`. policy='megatron' always computes them in float32."""


class ColdStart(Settings):
    """Supervised warm-up until a target success rate. `target=0` turns it off, as for a trained checkpoint."""

    target: Annotated[Float, Field(ge=0, le=1), "a success rate, from 0 (no cold start) to 1"] = 0.35
    """Share of sampled completions with reward 1 at which it stops; 0: no warm-up."""
    seed: Seed = 0
    """Of initial weights and the order of examples. Runs that share a warm-up give no evidence about other warm-ups."""
    max_steps: Steps = 3000
    batch_size: Count = 64
    lr: LearningRate = 2e-3


class Optimizer(Settings):
    """AdamW or SGD, learning rate, and gradient clipping."""

    name: Literal["adamw", "sgd"] = "adamw"
    """`adamw`, or `sgd` with momentum `betas[0]`."""
    lr: LearningRate = 2e-4
    warmup: Annotated[int, Field(ge=0), "a number of updates; a negative one makes learning rates negative"] = 0
    """Updates over which the learning rate rises from 0, linearly."""
    betas: Annotated[tuple[Decay, Decay], FromList, "shares of a mean that are kept, in [0, 1)"] = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    grad_clip: Annotated[Float, Field(ge=0), "a norm, or 0 for no clipping; a negative one would train uphill"] = 1.0
    """Global L2 norm to which gradients are clipped; 0 turns clipping off."""
    router_lr_scale: NotNegative = 1.0
    """Learning-rate factor of the router weights; 0 freezes them."""
    loss_free_bias: Annotated[Float, Field(ge=0), "a negative step would load the experts that are full"] = 0.0
    """Step u of every expert's correction bias after an update, u · sign(mean count − count), counted over the
    mini-batch's unconstrained choices (arXiv 2408.15664: u = 1e-3). For families that choose with such a bias."""

    def lr_at(self, update: int) -> float:
        """Learning rate of an update, counted from 1 over the whole run."""
        return self.lr * min(1.0, update / self.warmup) if self.warmup else self.lr


class Measure(Settings):
    """How much is measured (docs/concepts.md, "Measure")."""

    responses: Count = 32
    """Responses per step on which quantities that need an extra forward are measured."""
    detail_every: Interval = 10
    """Steps between detailed measurements: per-update volatility, attribution by mini-batch index, noise floor."""
    rollouts: Annotated[int, Field(ge=0), "a number of rollouts, or 0 to keep none"] = 8
    """Most rollouts that are kept per step for `moe-rl runs read`; 0: none. It changes neither numbers nor hash."""
    full: bool = False
    """Measure every response at every step, and print the cost."""
    gradient_cosine: bool = False
    """The cosine of every update's gradient with that of the update before. Memory and resume checkpoints grow by the
    size of the trainable weights. For policy='hf'."""


class RouterNoise(Settings):
    """Router noise with an assigned scale (see `routing.router_noise`). In the j-th of N updates of a step the routers
    are moved by scale · (j − 1)/(N − 1) of their standard deviation. They move along one direction, by default a random
    one, the same within a step and for all arms of a seed. N counts the updates of all epochs. Ratios start at 1 and
    drift coherently within a step, as in training."""

    scale: Deviation = 0.0
    """In standard deviations of each router's weights; 0 turns it off."""
    target: Literal["weights", "choice", "other_weights"] = "weights"
    """`weights`: gates and expert sets change. `choice`: expert sets only. `other_weights`: a control, noise on
    all matrices of the decoder's layers except the routers, in standard deviations of each."""
    direction: Literal["random", "last_step"] = "random"
    """Direction of the noise: `random`, or `last_step`, along the last optimizer step."""
    applied_to: Literal["both", "ratio", "gradient"] = "both"
    """Computed with noise: the `ratio`, the `gradient`, or `both`."""

    def size(self, update: int, updates: int) -> float:
        """The noise scale of an update, counted from 0."""
        return self.scale * update / (updates - 1) if updates > 1 else 0.0


class Arm(Settings):
    """One algorithm with its settings. Each field is a component: a name, or a `Component` with options.

    GRPO with Routing Replay is `Arm(name="replay", loss="grpo", routes="old_policy")`; a KL to the reference is
    `terms=(Component("kl", coef=0.04),)`. docs/methods.md lists all components. Your own function is
    `pkg.module:function`.
    """

    name: str
    loss: Named = Component("grpo")
    """Level of the ratio, and clipping rule: `objectives.losses`."""
    aggregate: Named = Component("seq_mean_token_mean")
    """Weights of the tokens of a mini-batch: `objectives.weights`."""
    corrections: AllNamed = ()
    """Factors on these weights, without gradient, e.g. `Component("truncated", cap=2.0)`: `objectives.weights`."""
    filters: AllNamed = ()
    """Corrections that also change the denominators: a token with factor 0 counts neither in |y|, nor in the number of
    sequences, nor in the mean of a sequence's ratio. With `corrections` it counts in all three."""
    terms: AllNamed = ()
    """Terms added to the loss, e.g. `Component("entropy", coef=0.01)`: `objectives.terms`."""
    advantage: Annotated[Part | tuple[Part, ...], PlainValidator(_make_uses)] = (Component("group"),)
    """Steps from rewards to advantages, e.g. `("overlong", "group", Component("clipped", at=2.0))`:
    `objectives.advantages`."""
    routes: Named = Component("live")
    """Replayed routing, in ratio and gradient: `routing.sources`. `live`: no replay."""
    ratio_routes: Named | None = None
    """Replayed routing of the ratio alone, which costs one more forward per update. None: as `routes`."""
    anchor: Literal["policy", "engine"] = "policy"
    """Denominator of the ratio: `policy` (recomputed by the trainer) or `engine` (the rollout's own log-probs)."""


class RunConfig(Settings):
    """Everything that determines a run, and nothing else."""

    arm: InstanceOf[Arm]
    seed: Seed = 0
    """Prompts, sampling noise, mini-batch split and measurement subset; shared by all arms of a study."""
    task: Named = Component("running_sums")
    """Prompts and rewards: `running_sums`, `reasoning_gym:<dataset>`, `jsonl:<file>`, `pkg.module:Class`, or a
    `Component` with options, e.g. `Component("running_sums", digits=12)`."""
    model: InstanceOf[ModelConfig] = Field(default_factory=ModelConfig)
    cold_start: InstanceOf[ColdStart] = Field(default_factory=ColdStart)
    optimizer: InstanceOf[Optimizer] = Field(default_factory=Optimizer)
    measure: InstanceOf[Measure] = Field(default_factory=Measure)
    router_noise: InstanceOf[RouterNoise] = Field(default_factory=RouterNoise)
    policy: Called = Component("hf")
    """Scores and updates the model: `hf`; on several processes `fsdp` (hf with FSDP2) or `megatron(tp=2)`
    (Megatron-core); `pkg.module:name`. docs/extending.md has the signature of your own."""
    engine: Called = Component("hf")
    """Samples the rollouts: `hf` (the policy's own module, so that both agree up to float rounding),
    `perturbed(dtype=bfloat16)`, `vllm`, `server(url='http://…')`, `pkg.module:name`."""
    batches: Called = Component("fresh")
    """The batch of a step: `fresh` (sampled in the step), `lagged(lag=4)`, `dynamic(refills=4)`,
    `pkg.module:name`."""
    steps: Count = 100
    """A step is `prompts_per_step` × `group_size` rollouts, and `mini_batches` × `epochs` updates on them."""
    prompts_per_step: Count = 32
    group_size: Count = 8
    mini_batches: Count = 8
    epochs: Count = 1
    """Passes over the rollouts of a step, each with its own split: `mini_batches` × `epochs` updates."""
    micro_batch: Count = 64
    """Most rows in one forward with gradient."""
    micro_batch_tokens: Annotated[int | None, Field(ge=1), AT_LEAST_ONE] = None
    """Most tokens, padding included, in any forward. Rows are sorted by length and grouped up to this number; a longer
    row is alone. None: no limit besides the rows."""
    activation_checkpointing: bool = False
    temperature: Annotated[Float, Field(gt=0), "logits are divided by it, so it must be positive"] = 1.0
    """Of sampling, and of every log-probability; above 0."""
    top_p: Annotated[Float, Field(gt=0, le=1), "a share of the probability, above 0, or nothing is drawn"] = 1.0
    """Sample from the fewest tokens that together have this probability, after `min_p` and `top_k`; every
    log-probability is over these tokens. 1: all tokens. The supervised warm-up samples from all tokens."""
    top_k: Annotated[int, Field(ge=0), "a number of tokens, or 0 for all"] = 0
    """Sample from at most so many tokens. 0: all tokens."""
    min_p: Annotated[Float, Field(ge=0, le=1), "a share of the highest probability"] = 0.0
    """Sample from tokens with at least this share of the highest probability."""
    sampling_mask: bool = True
    """With `top_p`, `top_k` or `min_p`, trainer and reference renormalise over the tokens that the engine kept. False:
    trainer and reference use the whole vocabulary, and differ from the engine."""
    max_new_tokens: Count = 16
    stop: Annotated[tuple[Text, ...], FromList, "every completion contains the empty string, so all would end"] = ()
    """Texts that end a completion, besides the end token."""
    eval_every: Interval = 10
    """Steps between evaluations on held-out prompts, greedy and sampled; also before and after training."""
    eval_prompts: Count = 128
    save_every: Interval = 25
    """Steps between resume checkpoints."""
    hf_checkpoints: Annotated[tuple[Step, ...], FromList, "steps are counted from 1, and 0 is before them"] = ()
    """Steps after which the weights are also saved, as Hugging Face's files in the run's folder checkpoints/step=…; 0:
    before all."""

    @model_validator(mode="after")
    def _check_together(self) -> RunConfig:
        if self.model.router_dtype not in (None, "float32"):
            raise ConfigError(f"model.router_dtype={self.model.router_dtype!r}: choose float32, or None for the "
                              "model's dtype")
        rows = self.prompts_per_step * self.group_size
        if self.mini_batches > rows:
            raise ConfigError(f"mini_batches={self.mini_batches} is more than the {rows} rollouts of a step "
                              f"({self.prompts_per_step} prompts × {self.group_size}). Use at most {rows}.")
        if (
            self.router_noise.direction == "last_step"
            and self.router_noise.target != "other_weights"
            and not self.optimizer.router_lr_scale
        ):
            raise ConfigError("router_noise.direction='last_step' needs routers that train, but "
                              "optimizer.router_lr_scale=0 freezes them. Use the direction 'random'.")
        if self.router_noise.direction == "last_step" and self.optimizer.name == "sgd" and not self.optimizer.betas[0]:
            raise ConfigError(
                "router_noise.direction='last_step' needs the optimizer's momentum, but sgd with "
                f"optimizer.betas={self.optimizer.betas} has none. Use the direction 'random'."
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; `from_dict` reads it back."""
        return json.loads(json.dumps(plain(self)))

    def own_code(self) -> set[str]:
        """Every `pkg.module:name` that the parts of the run name, in their options too, and a mixture its tasks."""
        texts = [text for key, text in leaves(self.arm) if key != "name" and isinstance(text, str)]
        names = {name for text in texts for name in NAMED.findall(text)}
        parts = (self.policy, self.engine, self.batches)
        names |= {use.name for part in parts if (use := Component.of(part)).own}
        tasks = (text for _, text in leaves(self.task) if isinstance(text, str))
        return names | {
            text for text in tasks if Component(text).own and not text.startswith(("reasoning_gym:", "jsonl:"))
        }

    @property
    def truncates(self) -> bool:
        """Whether completions are drawn from some tokens only."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def hash(self) -> str:
        """Of everything but `steps`, so that more steps extend a run, and what is kept to be read."""
        return hash_of(self.to_dict())


def hash_of(settings: Mapping[str, Any]) -> str:
    """`RunConfig.hash`, of a run's settings as JSON has them, whichever version wrote them."""
    d = {k: v for k, v in settings.items() if k != "steps"}
    d["measure"] = {k: v for k, v in d["measure"].items() if k != "rollouts"}
    return hashlib.sha256(json.dumps(d, sort_keys=True).encode()).hexdigest()[:16]


class Pretraining(Settings):
    """Supervised training of random weights until loss and load are stable: `moe-rl checkpoint pretrain`."""

    task: Named = Component("running_sums")
    """The task whose answers are learned, usually a `mixture`."""
    model: InstanceOf[ModelConfig] = Field(default_factory=ModelConfig)
    seed: Seed = 0
    """Initial weights and order of examples."""
    batch_size: Count = 64
    micro_batch: Count = 64
    """Most rows in one forward, over which the load is balanced."""
    lr: LearningRate = 2e-3
    warmup: int = 100
    """Steps over which the learning rate rises; then it is constant, until all goals are met or steps run out."""
    load_balance: Float = 0.01
    """Switch's loss per MoE layer (arXiv 2101.03961, eq. 4), over real tokens, prompts included."""
    max_steps: int = 5000
    """Most steps at the constant rate. A fifth as many steps follow, in which the rate falls to 0."""
    every: Interval = 100
    """Steps between measurements on held-out prompts. A killed pretraining continues from the last measurement."""
    held_out: int = 256
    """Held-out prompts: the same as in a run with as many `eval_prompts`; a run with more begins with them."""
    patience: int = 5
    least_gain: Float = 0.02
    """The loss is flat if its best of the last `patience` values is less than this share below the best before."""
    least_entropy: Float = 0.95
    """Goal for the least balanced MoE layer: −Σ f log f / log E of the share of slots that each expert fills."""
    most_violation: Float = 1.0
    """Goal for the least balanced MoE layer: max f / mean f − 1. No expert may be dead (f < 0.01 / E)."""

    def goals(self, rows: list[dict[str, float]]) -> dict[str, bool]:
        """Which are met after these measurements on held-out prompts: `flat`, `balanced`."""
        losses, last = [row["loss"] for row in rows], rows[-1]
        before, lately = losses[: -self.patience], losses[-self.patience :]
        return {
            "flat": bool(before) and min(lately) > (1 - self.least_gain) * min(before),
            "balanced": (last["load_entropy"] >= self.least_entropy and not last["load_dead_experts"]
                         and last["load_max_violation"] < self.most_violation),
        }


SHIPPED = {"qwen3_moe-fine-pretrained": Path(__file__).parent / "models/pretrained"}
"""Checkpoints that come with the package: docs/checkpoints.md."""


def folder_of(checkpoint: str) -> Path:
    """Where a checkpoint lies that is on this machine."""
    return SHIPPED.get(checkpoint) or Path(checkpoint).expanduser()


# ---------------------------------------------------------------------- settings as text
def parse_settings(config: RunConfig | Pretraining, settings: Sequence[str]) -> dict[str, Any]:
    """`["optimizer.lr=1e-4"]`, as a command line has it, as typed values for `config.replace`. Raises ConfigError for
    an unknown setting, or for a value that it cannot have."""
    typed = {}
    for key, equals, text in (setting.partition("=") for setting in settings):
        if not equals:
            raise ConfigError(f"--set takes key=value, e.g. optimizer.lr=1e-4, but got {key!r}")
        if key.split(".")[0] in ("arm", "seed", "steps"):
            raise ConfigError(f"{key} cannot be changed with --set. Change arms in the study file; use --seeds and "
                              "--steps for the others.")
        typed[key] = _parse_value(config, key, text)
    config.replace(**typed)
    return typed


def _parse_value(config: Settings, key: str, text: str) -> Any:
    """The text as a literal of Python, unless the setting is a text. Whether it fits is for `replace` to say."""
    field = dict(fields_of(type(config))).get(key)
    kind = field.annotation if field else Any
    kinds = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    if str in kinds or get_origin(kind) is Literal:
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text
    if float in kinds and type(value) is int:
        return float(value)
    if get_origin(kind) is tuple and type(value) in (int, float):
        return (value,)
    return value
