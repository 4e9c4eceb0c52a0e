"""The values a configuration may have, checked before anything is computed. No torch here."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_rl.config.parts import OPTIMIZERS
from moe_rl.config.run import RunConfig
from moe_rl.config.tree import leaves
from moe_rl.errors import ConfigError
from moe_rl.registry import Use

_EXISTS = "a run needs at least 1, or there is nothing to do"
_EVERY = "an interval is at least 1 step; one longer than the run means only at its end, or never"
_SIGN = "it must not be negative, or updates would not go along the gradient"
_LR = "a learning rate must not be negative"
_RANK = "a size is at least 1 process"
_SEED = "random streams are derived from seeds, which are below 2^32 and not negative"
RANGES: Mapping[str, tuple[float, float, str]] = {
    **dict.fromkeys(("steps", "prompts_per_step", "group_size", "mini_batches", "epochs", "micro_batch",
                     "micro_batch_tokens",
                     "max_new_tokens", "eval_prompts", "cold_start.batch_size", "measure.probe", "engine.max_tokens"),
                    (1, math.inf, _EXISTS)),
    **dict.fromkeys(("eval_every", "save_every", "measure.detail_every"), (1, math.inf, _EVERY)),
    **dict.fromkeys(("parallel.dp", "parallel.tp", "parallel.pp", "parallel.ep", "parallel.etp"), (1, math.inf, _RANK)),
    **dict.fromkeys(("seed", "cold_start.seed"), (0, 2**32 - 1, _SEED)),
    **dict.fromkeys(("optimizer.lr", "critic.lr", "cold_start.lr"), (0, math.inf, _LR)),
    **dict.fromkeys(("optimizer.eps", "optimizer.weight_decay", "optimizer.router_lr_scale"), (0, math.inf, _SIGN)),
    "optimizer.loss_free_bias": (0, math.inf, "a step; a negative one would load the experts that are full"),
    "optimizer.warmup": (0, math.inf, "a number of updates; a negative one makes learning rates negative"),
    "optimizer.grad_clip": (0, math.inf, "a norm, or 0 for no clipping; a negative one would train uphill"),
    "critic.clip": (0, math.inf, "how far a value may go from what it was, at least 0; inf for no clipping"),
    **dict.fromkeys(("cold_start.max_steps", "lag"), (0, math.inf, "a number of steps")),
    "partial_tokens": (1, math.inf, "tokens per step; None draws each response at once"),
    "refills": (0, math.inf, "how often groups are exchanged, at most"),
    "top_k": (0, math.inf, "a number of tokens, or 0 for all"),
    "min_p": (0, 1, "a share of the highest probability"),
    "cold_start.target": (0, 1, "a success rate, from 0 (no cold start) to 1"),
    "measure.rollouts": (0, math.inf, "a number of rollouts, or 0 to keep none"),
    "dial.sigma": (0, math.inf, "a standard deviation"),
    "engine.router_noise": (0, math.inf, "a standard deviation"),
    "engine.gpu_memory": (0, 1, "a share of the GPU's memory"),
}
"""Smallest and largest value of a setting, and what it is or why; None, where a setting may be it, is not compared."""
CHOICES: Mapping[str, tuple[str, ...]] = {
    "optimizer.name": OPTIMIZERS,
    "lag_mode": ("fixed", "random"),
    "dial.form": ("weights", "choice", "beside"),
    "dial.acts_on": ("both", "ratio", "gradient"),
    "dial.direction": ("random", "last_step"),
}
"""The words that a setting may be."""
UNBOUNDED = ("arm.", "critic.clip")
"""Settings that may be infinite, by how their keys begin."""


def check_values(config: RunConfig) -> None:
    """Raise ConfigError for a value that no run can have: of another type than its setting, not finite, out of range.

    What depends on a model, an engine or the processes that run is checked where these are known; so are the parts of
    an arm.
    """
    settings = list(_settings(config))
    for key, value, hint in settings:
        if not _fits(value, hint):
            wanted = getattr(hint, "__name__", "") if typing.get_origin(hint) is None else str(hint)
            raise ConfigError(f"{key}={value!r}: the setting needs a value of type {wanted.replace('typing.', '')}")
    for key, number in leaves(config):
        fine = not isinstance(number, float) or math.isfinite(number)
        if not (fine or math.isinf(number) and key.startswith(UNBOUNDED)):
            raise ConfigError(f"{key}={number:g}: numbers must be finite, or nothing computed with them is")
    for key, value, _ in settings:
        least, most, why = RANGES.get(key, (-math.inf, math.inf, ""))
        if value is not None and key in RANGES and not least <= value <= most:
            raise ConfigError(f"{key}={value:g}: {why}")
        if key in CHOICES and value not in CHOICES[key]:
            raise ConfigError(f"{key}={value!r}: choose {' or '.join(CHOICES[key])}")
    if config.temperature <= 0:
        raise ConfigError(f"temperature={config.temperature:g}: logits are divided by it, so it must be positive")
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"top_p={config.top_p:g}: a share of the probability, above 0 or nothing is drawn; 1: all")
    if not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise ConfigError(f"optimizer.betas={config.optimizer.betas}: shares of a mean that are kept, in [0, 1)")
    if config.partial_tokens is not None and not (config.lag and config.partial_tokens < config.max_new_tokens):
        raise ConfigError(f"partial_tokens={config.partial_tokens} has no effect with lag={config.lag} and "
                          f"max_new_tokens={config.max_new_tokens}: a response that waits for no step, or needs no "
                          "second one, is drawn at once; set a lag, and fewer tokens per step, or leave it None")
    if config.dial.direction == "last_step" and config.dial.form != "beside" and not config.optimizer.router_lr_scale:
        raise ConfigError("dial.direction='last_step' moves routers on along their own last step, but "
                          "optimizer.router_lr_scale=0 freezes them: use the direction 'random'")
    if config.dial.direction == "last_step" and config.optimizer.name == "sgd" and not config.optimizer.betas[0]:
        raise ConfigError("dial.direction='last_step' reads the last step off the optimizer's momentum, but "
                          f"optimizer.betas={config.optimizer.betas} gives sgd none: use the direction 'random'")
    if config.model.router_dtype not in (None, "float32"):
        raise ConfigError(f"model.router_dtype={config.model.router_dtype!r}: choose float32, or None for the model's")
    if "" in config.stop:
        raise ConfigError(f"stop={config.stop}: every completion contains the empty string, so all would end at once")
    if config.hf_checkpoints and min(config.hf_checkpoints) < 0:
        raise ConfigError(f"hf_checkpoints={config.hf_checkpoints}: steps are counted from 1, and 0 is before them")
    rows = config.prompts_per_step * config.group_size
    if config.mini_batches > rows:
        raise ConfigError(f"mini_batches={config.mini_batches} is more than the {rows} rollouts of a step "
                          f"({config.prompts_per_step} prompts × {config.group_size}); some would be empty")


SHIPPED = {"qwen3_moe-fine-pretrained": Path(__file__).parents[1] / "models/pretrained"}
"""Checkpoints that come with the package: docs/pretraining.md."""
PRESET_NAMES = ("qwen3_moe-tiny", "qwen3_moe-bench", "qwen3_moe-fine", "olmoe-tiny", "mixtral-tiny", "deepseek_v3-tiny",
                "gpt_oss-tiny", "glm4_moe-tiny")
"""The keys of `models.load.PRESETS`, which is not imported here."""


def folder_of(checkpoint: str) -> Path:
    """Where a checkpoint lies that is on this machine."""
    return SHIPPED.get(checkpoint) or Path(checkpoint).expanduser()


def located(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths for the folder of a checkpoint and the file of a task, so that its row says
    where they are wherever it is read. Presets, what comes with the package and names on the hub stay as they are."""
    name, known = config.model.name, (*SHIPPED, *PRESET_NAMES)
    if (folder := Path(name).expanduser()).is_dir() and name not in known:
        config = config.replace(**{"model.name": str(folder.absolute())})
    return config.replace(task=_located_task(Use.of(config.task)))


def _located_task(task: Use) -> Use:
    kind, _, file = task.name.partition(":")
    if kind == "jsonl" and file:
        return Use(f"jsonl:{Path(file).expanduser().absolute()}", **task.options)
    if kind == "mixture" and isinstance(mixed := task.options.get("tasks"), list | tuple):
        return Use(task.name, **{**task.options, "tasks": tuple(_located_task(Use.of(one)) for one in mixed)})
    return task


def _settings(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every setting below a dataclass: its dotted key, its value, its annotation."""
    for name, hint in typing.get_type_hints(type(node)).items():
        value = getattr(node, name)
        yield prefix + name, value, hint
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{prefix}{name}.")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type. An int is welcome where a float is asked for; a bool is no number."""
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Any:
        return True
    if kind in (types.UnionType, typing.Union):
        return any(_fits(value, part) for part in parts)
    if kind is tuple and isinstance(value, tuple):
        each = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(each) == len(value) and all(map(_fits, value, each))
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)
