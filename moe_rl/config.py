"""What a run is, as data: frozen pydantic models. Nothing here imports torch, so that studies are declared fast."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic.functional_validators import BeforeValidator, InstanceOf, PlainValidator, model_validator

from moe_rl.errors import ConfigError
from moe_rl.registry import Component, NotNegative, Part, Share, unknown

S = TypeVar("S", bound="Settings")
NAMED = re.compile(r"[^\s:(),=]+:[^\s:(),=]+")
"""`pkg.module:name`, anywhere in a setting."""
WHOLE = {"arm": float, **dict.fromkeys(("task", "model", "policy", "engine", "batches"), int)}
"""Types that whole numbers have in the hash where settings have none: options of an arm are mostly bounds and
coefficients, those of other components and overrides of a model mostly counts."""
LATER = (
    "steps",
    "measure.rollouts",
    "measure.detail_every",
    "save_every",
    "eval_every",
    "micro_batch",
    "micro_batch_tokens",
    "activation_checkpointing",
)
"""Settings with which a run may go on that began with others: they say how long, what is kept, when it is measured,
and how much of a batch is computed at a time, which changes the last bits at most."""

SCORED, MAX_ROWS = 4, 512
"""Rows of a forward without gradient, which keeps no activations, for each of one with; and completions that the engine
`hf` samples at once, where its option does not say."""
ADDED = ("schedule", "decay_until")
"""Settings that release 0.1 lacked. They are written, and hashed, only where they differ from the default: so the
settings and hashes of earlier runs stay."""


# ---------------------------------------------------------------------- the types of values
def _make_uses(parts: Any) -> tuple[Component, ...]:
    return tuple(map(Component.of, parts if isinstance(parts, tuple | list) else (parts,)))


FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""For tuples, which are lists in JSON."""
Named = Annotated[Part, PlainValidator(Component.of)]
Called = Annotated[Part, PlainValidator(Component.read)]
"""A component, which a text may give options: `megatron(ep=2)`."""
AllNamed = Annotated[tuple[Named, ...], FromList]

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Number = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


# ---------------------------------------------------------------------- what all settings have in common
class Settings(BaseModel):
    """Frozen settings. A value that no run can have raises a ConfigError; an int may stand for a float."""

    model_config = {
        "frozen": True,
        "strict": True,
        "extra": "forbid",
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain_errors(type(self), error))) from None

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
                known = [name for name, _ in fields_of(type(self), _prefix(type(self)))]
                unknown("setting", key, [name for name in known if name.endswith(f".{key}")] or known)
        return type(self)(**values)


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
    if isinstance(value, Settings):
        fields = type(value).model_fields
        value = {k: v for k, v in vars(value).items() if k not in ADDED or v != fields[k].default}
    if isinstance(value, Component):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: plain(below) for key, below in value.items()}
    return [plain(below) for below in value] if isinstance(value, tuple | list) else value


def _prefix(kind: type[Settings]) -> str:
    """How the dotted keys of a group's settings begin."""
    return next((f"{name}." for name, field in RunConfig.model_fields.items() if field.annotation is kind), "")


def _explain_errors(kind: type[Settings], error: ValidationError) -> Iterator[str]:
    """Pydantic's errors, each with its setting and value."""
    for detail in error.errors(include_url=False):
        reason = detail.get("ctx", {}).get("error", detail["msg"])
        if detail["type"] == "extra_forbidden":
            reason = f"not among {', '.join(kind.model_fields)}. Release 0.1.0 alone reads what it wrote."
        key = _prefix(kind) + ".".join(map(str, detail["loc"]))
        value = "" if detail["type"] == "missing" else f"={detail['input']!r}"
        yield f"{key}{value}: {reason}" if detail["loc"] else str(reason)


# ---------------------------------------------------------------------- what a run is made of
class ModelConfig(Settings):
    """Which model. A preset of `moe_rl.models`, or any Hugging Face checkpoint directory or name."""

    name: str = "qwen3_moe-tiny"
    """A preset, the folder of a checkpoint, or its name on the hub."""
    overrides: Mapping[str, Any] = {}
    """Changes to a preset's Hugging Face configuration, e.g. `{"num_experts": 32}`."""
    device: str = "cpu"
    dtype: str = "float32"
    router_dtype: Annotated[str, Field(pattern="^(float32|bfloat16)$")] | None = None
    """`float32`: routers keep their weights, and compute logits and combine weights, in float32, whatever `dtype` is.
    None: as the family's own code does, mostly in `dtype`. policy='megatron' always computes them in float32."""


class ColdStart(Settings):
    """Supervised warm-up until a target success rate. `target=0` turns it off, as for a trained checkpoint."""

    target: Share = 0.35
    """Share of sampled completions with reward 1 at which it stops; 0: no warm-up."""
    seed: Seed = 0
    """Of initial weights and the order of examples. Runs that share a warm-up give no evidence about other warm-ups."""
    max_steps: Count = 3000
    batch_size: Count = 64
    lr: NotNegative = 2e-3


class Optimizer(Settings):
    """AdamW or SGD, learning rate, and gradient clipping."""

    name: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """`adamw`, `sgd` with momentum `betas[0]`, or torchao's `adamw_8bit` (policy hf): moments of 8 bits (arXiv
    2110.02861), and bfloat16 weights without masters are rounded stochastically."""
    lr: NotNegative = 2e-4
    warmup: Number = 0
    """Updates over which the learning rate rises from 0, linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up: it stays, or falls to 0."""
    decay_until: Number = 0
    """Last update with a learning rate above 0, counted over the whole run, for `linear` and `cosine`."""
    betas: Annotated[tuple[Decay, Decay], FromList] = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    """Of matrices; norms and biases have none."""
    grad_clip: NotNegative = 1.0
    """Global L2 norm to which gradients are clipped; 0 turns clipping off."""
    router_lr_scale: NotNegative = 1.0
    """Learning-rate factor of the router weights; 0 freezes them."""
    loss_free_bias: NotNegative = 0.0
    """Step u of every expert's correction bias after an update, u · sign(mean count − count), counted over the
    mini-batch's unconstrained choices (arXiv 2408.15664: u = 1e-3). For families that choose with such a bias."""

    def lr_at(self, update: int) -> float:
        """Learning rate of an update, counted from 1 over the whole run."""
        if update <= self.warmup:
            return self.lr * (update / self.warmup)
        fallen = min(1.0, (update - self.warmup) / max(1, self.decay_until + 1 - self.warmup))
        share = {"constant": 1.0, "linear": 1 - fallen, "cosine": (1 + math.cos(math.pi * fallen)) / 2}
        return self.lr * share[self.schedule]


class Measure(Settings):
    """How much is measured (docs/concepts.md, "Measure")."""

    responses: Count = 32
    """Responses per step on which quantities that need an extra forward are measured."""
    detail_every: Count = 10
    """Steps between detailed measurements: per-update volatility, attribution by mini-batch index, noise floor. A run
    may go on with another value."""
    rollouts: Number = 8
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

    scale: NotNegative = 0.0
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
    advantage: Annotated[tuple[Part, ...], PlainValidator(_make_uses)] = (Component("group"),)
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
    """Most rows in one forward with gradient; without gradient there are four times as many. Fewer need less memory and
    round differently in the last bits. A run may go on with another value; the manifest has both."""
    micro_batch_tokens: Annotated[int | None, Field(ge=1)] = None
    """Most tokens, padding included, in any forward. Rows are sorted by length and grouped up to this number; a longer
    row is alone. None: with policy=hf on a GPU up to 32,768, as many as fit; else no limit besides the rows. A run may
    go on with another value, as with `micro_batch`."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward, for less memory. A run may go on with another value."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of sampling, and of every log-probability; above 0."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the fewest tokens that together have this probability, after `min_p` and `top_k`; every
    log-probability is over these tokens. 1: all tokens. The supervised warm-up samples from all tokens."""
    top_k: Number = 0
    """Sample from at most so many tokens. 0: all tokens."""
    min_p: Share = 0.0
    """Sample from tokens with at least this share of the highest probability."""
    sampling_mask: bool = True
    """With `top_p`, `top_k` or `min_p`, trainer and reference renormalise over the tokens that the engine kept. False:
    trainer and reference use the whole vocabulary, and differ from the engine."""
    max_new_tokens: Count = 16
    stop: Annotated[tuple[Text, ...], FromList] = ()
    """Texts that end a completion, besides the end token."""
    eval_every: Count = 10
    """Steps between evaluations on held-out prompts, greedy and sampled; also before and after training. A run may go
    on with another value."""
    eval_prompts: Count = 128
    save_every: Count = 25
    """Steps between resume checkpoints. A run may go on with another value."""
    hf_checkpoints: Annotated[tuple[Number, ...], FromList] = ()
    """Steps after which the weights are also saved, as Hugging Face's files in the run's folder checkpoints/step=…; 0:
    before all. The last step's always are where the model came from a checkpoint. A run may go on with more, at steps
    that are still to come."""

    @model_validator(mode="after")
    def _check_together(self) -> RunConfig:
        if self.model.router_dtype == "bfloat16":
            raise ConfigError("model.router_dtype='bfloat16': train with float32, or None for the model's dtype")
        rows = self.prompts_per_step * self.group_size
        if self.mini_batches > rows:
            raise ConfigError(
                f"mini_batches={self.mini_batches} is more than the {rows} rollouts of a step "
                f"({self.prompts_per_step} prompts × {self.group_size}). Use at most {rows}."
            )
        noise, optimizer = self.router_noise, self.optimizer
        frozen = noise.target != "other_weights" and not optimizer.router_lr_scale
        unknown_step = optimizer.name == "adamw_8bit" or optimizer.name == "sgd" and not optimizer.betas[0]
        if noise.direction == "last_step" and (frozen or unknown_step):
            raise ConfigError(
                "router_noise.direction='last_step' needs a last step, but routers are frozen, sgd has no momentum, "
                f"or moments have 8 bits: optimizer.router_lr_scale={optimizer.router_lr_scale}, betas="
                f"{optimizer.betas}, name={optimizer.name!r}. Use the direction 'random'."
            )
        self._check_schedule()
        return self

    def _check_schedule(self) -> None:
        schedule, until = self.optimizer.schedule, self.optimizer.decay_until
        if schedule == "constant" and until:
            raise ConfigError(f"optimizer.decay_until={until} has no effect: set optimizer.schedule=linear or cosine")
        if schedule != "constant" and until <= self.optimizer.warmup:
            raise ConfigError(
                f"optimizer.schedule={schedule!r} needs the last update with a learning rate above 0, after the "
                f"warm-up of {self.optimizer.warmup} updates: optimizer.decay_until"
            )
        if until and (updates := self.steps * self.mini_batches * self.epochs) > until:
            raise ConfigError(
                f"optimizer.decay_until={until}, but the run has {updates} updates ({self.steps} steps × "
                f"{self.mini_batches} mini-batches × {self.epochs} epochs), and the last ones would change nothing."
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; `from_dict` reads it back."""
        return json.loads(json.dumps(plain(self)))

    def own_code(self) -> set[str]:
        """Every `pkg.module:name` that the parts of the run name, in their options too, and a mixture its tasks."""
        texts = [text for key, text in leaves(self.arm) if key != "name" and isinstance(text, str)]
        names = {name for text in texts for name in NAMED.findall(text)}
        parts = (self.policy, self.engine, self.batches)
        names |= {use.name for part in parts if (use := Component.of(part)).own}
        for key, text in leaves(self.task):
            data = "reward" not in key and str(text).startswith(("reasoning_gym:", "jsonl:"))
            if isinstance(text, str) and Component(text).own and not data:
                names.add(text)
        return names

    def exports_after(self, step: int) -> bool:
        """Whether the weights are saved as Hugging Face's files after a step: see `hf_checkpoints`."""
        from_checkpoint = "/" in self.model.name or self.model.name in SHIPPED
        return step in self.hf_checkpoints or (step == self.steps and from_checkpoint)

    @property
    def truncates(self) -> bool:
        """Whether completions are drawn from some tokens only."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def samples_itself(self) -> bool:
        """Whether the engine's routes and probabilities are those of the policy that begins the step: up to rounding
        in float32 it is the same network, with the same weights."""
        engine, batches, policy = map(Component.of, (self.engine, self.batches, self.policy))
        same = engine.name in ("hf", "perturbed") and policy.name == "hf" and self.model.dtype == "float32"
        other = batches.own or batches.options.get("lag") or self.truncates and not self.sampling_mask
        return (
            same and not other and not any(engine.options[name] for name in {*engine.options} - {"routes", "max_rows"})
        )

    @property
    def hash(self) -> str:
        """Of everything but `steps`, so that more steps extend a run, and what is kept to be read. 1 is 1.0."""
        return hash_of(self.to_dict())


def hash_of(settings: Mapping[str, Any]) -> str:
    """`RunConfig.hash`, of a run's settings as JSON has them."""
    d = {k: v for k, v in settings.items() if k != "steps"}
    d["measure"] = {k: v for k, v in d.get("measure", {}).items() if k != "rollouts"}
    d = {k: _by_value(v, WHOLE.get(k)) for k, v in d.items()}
    return hashlib.sha256(json.dumps(d, sort_keys=True).encode()).hexdigest()[:16]


def same_value(a: Any, b: Any) -> bool:
    """Whether two settings, as JSON has them, mean the same: 1 and 1.0 do, 1 and true do not."""
    a, b = (json.dumps(_by_value(value, float), sort_keys=True, default=str) for value in (a, b))
    return a == b


def _by_value(value: Any, whole: type | None) -> Any:
    """Settings with one form of equal numbers: whole ones of this type, by default of their own."""
    if isinstance(value, Mapping):
        return {key: _by_value(below, whole) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_by_value(below, whole) for below in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    number = value + 0  # of -0.0 it makes 0.0
    return whole(number) if whole and number % 1 == 0 and abs(number) <= 2**53 else number


SHIPPED = {"qwen3_moe-fine-pretrained": Path(__file__).parent / "models/pretrained"}
"""Checkpoints that come with the package: docs/checkpoints.md."""


def folder_of(checkpoint: str) -> Path:
    """Where a checkpoint lies that is on this machine."""
    return SHIPPED.get(checkpoint) or Path(checkpoint).expanduser()


# ---------------------------------------------------------------------- settings as text
def parse_settings(config: RunConfig, settings: Sequence[str], file: Path | None = None) -> dict[str, Any]:
    """`["optimizer.lr=1e-4"]`, as a command line has it, as typed values for `config.replace`, after those of a TOML
    file. Raises ConfigError for an unknown setting, or for a value that it cannot have."""
    try:
        pairs = [*_dotted(tomllib.loads(file.read_text(encoding="utf-8")))] if file else []
    except ValueError as error:
        raise ConfigError(f"{file}: {error}. Write TOML, e.g. optimizer.lr = 1e-4.") from error
    of_file = {key for key, _ in pairs}
    for key, equals, text in (setting.partition("=") for setting in settings):
        if not equals:
            raise ConfigError(f"--set takes key=value, e.g. optimizer.lr=1e-4, but got {key!r}")
        pairs, of_file = [*pairs, (key, text)], of_file - {key}
    typed = {key: _parse_value(config, key, value) if isinstance(value, str) else value for key, value in pairs}
    try:
        for key in typed:
            if key.split(".")[0] in ("arm", "seed", "steps"):
                raise ConfigError(
                    f"{key} is not changed by --set. Change arms in the study file; use --seeds and --steps."
                )
        config.replace(**typed)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}" if any(key in str(error) for key in of_file) else str(error)) from error
    return typed


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by their dotted keys."""
    for key, value in table.items():
        yield from _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]


def _parse_value(config: Settings, key: str, text: str) -> Any:
    """The text as a literal of Python, unless the setting is a text. Whether it fits is for `replace` to say."""
    field = dict(fields_of(type(config))).get(key)
    kind = field.annotation if field else Any
    kinds = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    if NoneType in kinds and text.lower() == "none":
        return None
    if str in kinds or get_origin(kind) is Literal:
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text
    if get_origin(kind) is tuple and type(value) in (int, float):
        return (value,)
    return value
