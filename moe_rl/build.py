"""From a RunConfig to a finished run: check it, build the parts it names, train. The one place that knows every
backend, and the same on one process and on several: there every rank builds, and rank 0 alone has a model of its own.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_rl import ranks
from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, Stopped, name_full_memory
from moe_rl.models.load import (
    LoadedModel,
    keep_routers_in,
    load,
    placement,
    save_checkpoint,
    skeleton,
)
from moe_rl.models.supervised import Progress, cold_start
from moe_rl.models.tokens import encode_prompts
from moe_rl.objectives import advantage_of, objective_of
from moe_rl.objectives.spelling import suggest_field
from moe_rl.policies.critic import HFCritic
from moe_rl.policies.hf import copy_of, correction_biases
from moe_rl.recorder import Recorder, Row, Rows
from moe_rl.registry import Known, Part, check_component, import_component, lookup, needs_of
from moe_rl.rollouts.batches import Collector
from moe_rl.rollouts.engine import check_request, context_length, end_tokens, sampling_of
from moe_rl.rollouts.hf import HFEngine
from moe_rl.rollouts.log import GapFiles, rollout_rows
from moe_rl.routing.moe_layers import layout_of
from moe_rl.routing.sources import SOURCES
from moe_rl.storage.folder import RunFolder, SharedFolder, read_json, write_json
from moe_rl.storage.lock import Lock
from moe_rl.storage.provenance import inputs_of
from moe_rl.tasks.base import AnyTask, held_out, load_task, split_of
from moe_rl.trainer import Listener, Parts, train, warn_void
from moe_rl.types import Prompt, Rollout, RouteSource

if TYPE_CHECKING:
    from moe_rl.policies.base import Policy
    from moe_rl.rollouts.engine import RolloutEngine

POLICIES: Known = {
    "hf": "moe_rl.policies.hf:hf",
    "fsdp": "moe_rl.integrations.fsdp:fsdp",
    "megatron": "moe_rl.integrations.megatron:megatron",
}
ENGINES: Known = {
    "hf": "moe_rl.rollouts.hf:hf",
    "perturbed": "moe_rl.rollouts.mismatch:perturbed",
    "vllm": "moe_rl.integrations.vllm.engine:vllm",
    "server": "moe_rl.integrations.vllm.server:server",
}
CHECKED = "moe_rl.integrations.vllm.push:check_pushes"
OUTLINE, WRITE = (f"moe_rl.integrations.shards:{name}" for name in ("outline", "write_checkpoint"))
BATCHES: Known = {name: f"moe_rl.rollouts.batches:{name}" for name in ("fresh", "lagged", "dynamic")}


def execute(
    run: RunConfig, folder: RunFolder | SharedFolder, *, cache: Path, listen: Listener = lambda rows: None
) -> None:
    """Carry out a run in its folder, or go on with it; cold starts are shared through `cache`."""
    stopping = folder.stopping_here if isinstance(folder, SharedFolder) else folder.stopping
    with name_full_memory(run):
        parts = build(run, folder.path, cache, stopping)
        try:
            folder.finish(train(run, parts, folder, listen))
        finally:
            parts.collector.engine.close()


def check(run: RunConfig) -> list[str]:
    """Everything that any layer would refuse later, refused before compute is spent; what would make the comparison
    void, one sentence each.

    Raises ConfigError or RoutingError. Reads no weights.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind, use, known in (
            ("policy", run.policy, POLICIES),
            ("engine", run.engine, ENGINES),
            ("batch source", run.batches, BATCHES),
        ):
            check_component(lookup(kind, use, known), run)
        lookup("batch source", run.batches, BATCHES)()
        _check_model(run)
        split_of(load_task(run.task), run.eval_prompts)
        objective = objective_of(run.arm)
        advantage_of(run.arm)
        if run.router_noise.scale and run.router_noise.applied_to != "ratio" and "reference" in objective.needs:
            raise ConfigError(
                f"arm {run.arm.name!r} compares with a reference, and router noise does not change the reference. Use "
                "router_noise.applied_to='ratio', or remove the term."
            )
        void = warn_void(run)
    return [*void, *(str(warning.message) for warning in caught)]


def build(run: RunConfig, folder: Path, cache: Path, stopping: Callable[[], bool] = lambda: False) -> Parts:
    """The parts that `run` names, its model past the cold start; collective where there are ranks. Raises ConfigError
    before any compute is spent, Stopped if `stopping` says so while another run makes its cold start."""
    check(run)
    make_policy = lookup("policy", run.policy, POLICIES)
    if spread := "ranks" in needs_of(make_policy):
        ranks.join(run.model.device)
    task, objective = load_task(run.task), objective_of(run.arm)
    loaded = _load(run, spread) if ranks.rank() == 0 else None
    advantage = advantage_of(run.arm)
    compares, valued = "reference" in objective.needs | advantage.needs, "values" in advantage.needs
    evaluation = ranks.from_rank_0(lambda: _prepare(run, task, _of_rank_0(loaded), cache, _progress(folder, stopping)))
    policy = make_policy(run, loaded, False)
    # Both made now, before the policy has moved: from the weights of the cold start.
    tokens = getattr(policy, "micro_batch_tokens", run.micro_batch_tokens)
    critic = _critic(run.replace(micro_batch_tokens=tokens), _of_rank_0(loaded)) if valued else None
    reference = make_policy(run, loaded, True) if compares else None
    engine = build_engine(run, loaded, policy, folder / "engine", spread)
    # The model it began with is neither trained nor sampled.
    given_up = spread and _receives(run)
    if given_up and loaded is not None:
        torch.nn.Module.to(loaded.model, "meta")

    def export(step: int) -> None:
        """Collective: the Hugging Face model may have older weights than the policy, which is spread over ranks."""
        weights, target = policy.weights(), folder / "checkpoints" / f"step={step:06d}"
        if loaded is None:
            for _ in weights:  # a rank still has to give its part of them
                pass
        elif given_up:
            import_component("export", "sharded", WRITE)(loaded, weights, target)
        else:
            HFEngine(loaded.model, loaded.tokenizer).load(weights)
            save_checkpoint(loaded.model, loaded.tokenizer, target)

    return Parts(
        collector=Collector(
            run=run,
            task=task,
            engine=engine,
            tokenizer=loaded.tokenizer if loaded else None,
            ends=end_tokens(loaded.model, loaded.tokenizer) if loaded else (),
            held_out=evaluation,
        ),
        policy=policy,
        objective=objective,
        advantage=advantage,
        source=_source(run.arm.routes, policy),
        ratio_source=None if run.arm.ratio_routes is None else _source(run.arm.ratio_routes, policy),
        reference=reference,
        critic=critic,
        export=export,
        batches=lookup("batch source", run.batches, BATCHES)(),
        watch=_watch(run, loaded, GapFiles(folder / "rollouts", sampling_of(run))) if loaded else lambda *seen: {},
    )


def build_engine(
    run: RunConfig, loaded: LoadedModel | None, policy: Policy, folder: Path, spread: bool
) -> RolloutEngine:
    """The engine, which rank 0 alone has; `spread`: the policy runs on several processes. One that does not sample from
    the policy's module, or from a copy that is to differ, is checked after every push."""
    engine = lookup("engine", run.engine, ENGINES)(run, loaded, folder) if loaded else None
    if isinstance(engine, HFEngine) and not spread:
        return engine
    return import_component("engine", "checked", CHECKED)(run, loaded, engine, policy.score)


def _watch(run: RunConfig, loaded: LoadedModel, gaps: GapFiles) -> Callable[[Recorder, Row], Rows]:
    """Keeps the rollouts of steps that stand out, and of every step some that people can read."""

    def watch(step: Recorder, row: Row) -> Rows:
        gaps(step.step, step.batch, row)
        return {
            "rollouts": rollout_rows(
                step.step,
                step.batch,
                step.log_ratio,
                step.clipped_by,
                step.flips,
                loaded.tokenizer,
                run.measure.rollouts,
            )
        }

    return watch


def _source(use: Part, policy: Policy) -> RouteSource:
    """A route source; one that asks for the policy gets its `score` as its third argument."""
    source = lookup("route source", use, SOURCES, suggest_field)
    return partial(source, score=policy.score) if "policy" in needs_of(source) else source


def _load(run: RunConfig, spread: bool) -> LoadedModel:
    """The model that a run begins with. Where a policy on several processes is all that takes its weights, they stay in
    their files, or else in the memory of the host."""
    if not spread or run.cold_start.target or not _receives(run):
        return load(run.model, run.cold_start.seed)
    outline = import_component("checkpoint", "sharded", OUTLINE)
    return outline(run.model) or load(run.model.replace(device="cpu"), run.cold_start.seed)


def _receives(run: RunConfig) -> bool:
    """Whether the engine has weights of its own, to which the policy's are pushed."""
    return "pushes" in needs_of(lookup("engine", run.engine, ENGINES))


def _of_rank_0(loaded: LoadedModel | None) -> LoadedModel:
    assert loaded is not None, "rank 0 alone has a model"
    return loaded


def _prepare(run: RunConfig, task: AnyTask, loaded: LoadedModel, cache: Path, progress: Progress) -> list[Prompt]:
    """Supervised warm-up of the model; returns the encoded prompts of the evaluation."""
    evaluation = encode_prompts(held_out(task, run.eval_prompts), loaded.tokenizer)
    check_request(evaluation, 1, sampling_of(run), context_length(loaded.model.config))
    inputs = inputs_of({"task": run.to_dict()["task"]})
    cold_start(loaded, task, run, cache, sample, progress=progress, alone=alone, inputs=inputs)
    return evaluation


def alone(file: Path, progress: Progress) -> Lock:
    """A lock, once the process that holds it is done."""
    return Lock(file, wait=lambda: progress({"waiting": True}))


def _progress(folder: Path, stopping: Callable[[], bool]) -> Progress:
    """Writes how far the cold start is into the progress of the run in `folder`, where there is one."""
    file = folder / "progress.json"

    def tell(now: Mapping[str, Any]) -> None:
        if "waiting" in now and stopping():
            raise Stopped(f"{folder} was stopped while it waited for the supervised warm-up of another run")
        if (content := read_json(file, ("step",))) and content.get("cold_start") != now:
            write_json(file, {**content, "updated": time.time(), "cold_start": now}, durable=False)

    return tell


def sample(model: Any, tokenizer: Any, prompts: list[Prompt], group_size: int, **how: Any) -> list[Rollout]:
    """Completions of a Hugging Face model, without their routes; see `Sampler.generate`."""
    return HFEngine(model, tokenizer, record_routes=False).generate(prompts, group_size, **how)


def _critic(run: RunConfig, start: LoadedModel) -> HFCritic:
    """A critic that starts as the policy does. Its options are those of the advantage that asks for its values."""
    options = next(
        getattr(step, "keywords", {}) for _, step in advantage_of(run.arm).steps if "values" in needs_of(step)
    )
    lr, clip = options.get("critic_lr"), options.get("value_clip", math.inf)
    return HFCritic(
        copy_of(run, start),
        run.optimizer.replace(
            name="adamw", lr=run.optimizer.lr if lr is None else lr, router_lr_scale=1.0, loss_free_bias=0.0
        ),
        clip=clip,
        micro_batch=run.micro_batch,
        micro_batch_tokens=run.micro_batch_tokens,
        activation_checkpointing=run.activation_checkpointing,
    )


def _check_model(run: RunConfig) -> None:
    """Raise ConfigError or RoutingError, without weights, for a device that is not there, a configuration that is
    missing, and a model without a router."""
    placement(run.model)
    model = skeleton(run.model)
    layout_of(model).check()
    if run.model.router_dtype is not None:
        keep_routers_in(model, getattr(torch, run.model.router_dtype))
    if run.optimizer.loss_free_bias:
        correction_biases(model)
