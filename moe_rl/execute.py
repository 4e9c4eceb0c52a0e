"""From a RunConfig to a finished run: build the parts it names, train. The one place that knows every backend."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moe_rl import ranks
from moe_rl.checkpoints import check_weights
from moe_rl.cold_start import cold_start
from moe_rl.config import EngineConfig, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.losses import objective_of
from moe_rl.memory import check_memory, estimate_memory
from moe_rl.models import PRESETS, encode_prompts, hf_config, load, placement, save_checkpoint, skeleton
from moe_rl.policies.hf import HFPolicy
from moe_rl.policies.megatron_layout import check_layout
from moe_rl.rollouts.choose import check_engine, engine_of
from moe_rl.rollouts.request import check_request, context_length
from moe_rl.routing.sites import layout_of
from moe_rl.routing.sources import SOURCES, RouteSource
from moe_rl.runs import RunFolder
from moe_rl.tasks.base import held_out, load_task, unknown
from moe_rl.trainer import Parts, sampling_of, train


def execute(
    run: RunConfig,
    folder: RunFolder | ranks.SharedFolder,
    *,
    cache: Path,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Carry out a run in its folder, or go on with it; cold starts are shared through `cache`."""
    parts = build(run, folder.path, cache)
    try:
        train(run, parts, folder, on_step)
    finally:
        parts.engine.close()


def build(run: RunConfig, folder: Path, cache: Path) -> Parts:
    """The parts that `run` names, its model past the cold start. Raises ConfigError before any compute is spent."""
    check_engine(run)
    check_policy(run)
    check_model(run)
    source, objective = source_of(run.arm.routes), objective_of(run.arm)
    ratio_source = source_of(run.arm.ratio_routes) if run.arm.ratio_routes else None
    task = load_task(run.task, run.task_options)
    if run.policy == "megatron":
        from moe_rl.execute_megatron import build_on_ranks

        return replace(build_on_ranks(run, task, source, folder, cache), ratio_source=ratio_source)
    loaded = load(run.model, run.cold_start.seed)
    encode = partial(encode_prompts, tokenizer=loaded.tokenizer)
    evaluation = encode(held_out(task, run.eval_prompts))
    check_request(evaluation, 1, sampling_of(run), context_length(loaded.model.config))
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
        engine=engine_of(run, loaded, policy.score, folder / "engine"),
        objective=objective,
        source=source,
        ratio_source=ratio_source,
        encode=encode,
        pad_token=loaded.tokenizer.pad_token_id,
        held_out=evaluation,
        reference=reference,
        export=export,
    )


def check_model(run: RunConfig) -> None:
    """Raise ConfigError or RoutingError, without reading weights, for a device that is not there, a checkpoint that is
    missing or damaged, and a model without a router."""
    placement(run.model)
    model = skeleton(run.model)
    if run.model.name not in PRESETS:
        check_weights(run.model.name)
    layout_of(model)


def check_policy(run: RunConfig) -> None:
    """Raise ConfigError where policy, layout, model and the processes that run do not fit each other."""
    if run.policy not in ("hf", "megatron"):
        unknown("policy", run.policy, ("hf", "megatron"))
    if run.policy == "megatron":
        if importlib.util.find_spec("megatron.core") is None:
            raise ConfigError("policy='megatron' needs Megatron-core: pip install 'moe_rl[megatron]'.")
        if run.engine.name == "hf" and run.engine != EngineConfig(routes=run.engine.routes):
            raise ConfigError(
                "policy='megatron' samples with the Hugging Face engine as it is, with vLLM or with a server; another "
                f"dtype, other experts, int8 and router noise are for policy='hf', not {run.engine}."
            )
        check_layout(run.parallel, hf_config(run.model), ranks.world())
    elif ranks.launched():
        raise ConfigError(
            f"torchrun started {ranks.world()} processes, but policy='hf' runs in one: leave torchrun out, or add "
            "--policy megatron."
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
        raise ConfigError(f"route source {name!r} cannot be imported ({error}); write pkg.module:function.") from error
