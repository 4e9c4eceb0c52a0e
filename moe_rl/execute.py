"""From a RunConfig to a finished run: build the parts it names, train. The one place that knows every backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from moe_rl.cold_start import cold_start
from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError
from moe_rl.losses import objective_of
from moe_rl.memory import check_memory, estimate_memory
from moe_rl.models import encode_prompts, load, save_checkpoint
from moe_rl.policies.hf import HFPolicy
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing.sources import SOURCES, RouteSource
from moe_rl.runs import RunFolder
from moe_rl.tasks.base import held_out, load_task, unknown
from moe_rl.trainer import Parts, train


def execute(
    run: RunConfig, folder: RunFolder, *, cache: Path, on_step: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Carry out a run in its folder, or go on with it; cold starts are shared through `cache`."""
    train(run, build(run, folder.path, cache), folder, on_step)


def build(run: RunConfig, folder: Path, cache: Path) -> Parts:
    """The parts that `run` names, its model past the cold start. Raises ConfigError before any compute is spent."""
    if (run.engine, run.policy) != ("hf", "hf"):
        raise ConfigError(f"engine={run.engine!r} and policy={run.policy!r}: only 'hf' is available for both.")
    source, objective = source_of(run.arm.routes), objective_of(run.arm)
    task = load_task(run.task, run.task_options)
    loaded = load(run.model, run.cold_start.seed)
    encode = partial(encode_prompts, tokenizer=loaded.tokenizer)
    evaluation = encode(held_out(task, run.eval_prompts))
    check_memory(estimate_memory(run, max(len(p.tokens) for p in evaluation)), run.model.device)
    cold_start(loaded, task, run, cache)
    policy = HFPolicy(
        loaded.model,
        run.optimizer,
        temperature=run.temperature,
        micro_batch=run.micro_batch,
        activation_checkpointing=run.activation_checkpointing,
    )
    reference = None
    if run.arm.kl:
        twin = load(run.model, run.cold_start.seed).model
        twin.load_state_dict(loaded.model.state_dict())
        reference = HFPolicy(twin, run.optimizer, temperature=run.temperature)

    def export(step: int) -> None:
        save_checkpoint(loaded.model, loaded.tokenizer, folder / "checkpoints" / f"step={step:06d}")

    return Parts(
        task=task,
        policy=policy,
        engine=HFEngine(loaded.model, loaded.tokenizer),
        objective=objective,
        source=source,
        encode=encode,
        pad_token=loaded.tokenizer.pad_token_id,
        held_out=evaluation,
        reference=reference,
        export=export,
    )


def source_of(name: str) -> RouteSource:
    """The route source an arm names, or a user's own `pkg.module:function`. Raises ConfigError for an unknown name."""
    if name in SOURCES:
        return SOURCES[name]
    module, colon, function = name.partition(":")
    if not colon:
        unknown("route source", name, SOURCES)
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the route source {name!r} cannot be imported ({error}); write pkg.module:function.") from error
