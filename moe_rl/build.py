"""From a RunConfig to a finished run: check it, build the parts it names, train. The one place that knows every
backend, and the same on one process and on several: there every rank builds, and rank 0 alone has a model of its own.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_rl import ranks
from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, Stopped
from moe_rl.integrations.megatron.layout import check_routers
from moe_rl.integrations.on_ranks import from_rank_0
from moe_rl.integrations.vllm.push import checkpoint_weights, describe
from moe_rl.integrations.vllm.shards import write_shards
from moe_rl.models.load import PRESETS, LoadedModel, check_weights, load, placement, save_checkpoint, skeleton
from moe_rl.models.supervised import Progress, cold_start
from moe_rl.models.tokens import encode_prompts
from moe_rl.objectives import advantage_of, objective_of
from moe_rl.objectives.spelling import suggest_field
from moe_rl.policies.critic import HFCritic
from moe_rl.policies.hf import HFPolicy
from moe_rl.policies.limits import check_critic, check_policy, layers_of
from moe_rl.recorder import Recorder, Row, Rows
from moe_rl.registry import Part, lookup, needs_of
from moe_rl.rollouts.choose import check_engine, engine_of
from moe_rl.rollouts.gap_files import GapFiles
from moe_rl.rollouts.hf import HFEngine
from moe_rl.rollouts.readable import readable
from moe_rl.rollouts.request import check_request, completion_text, context_length, end_tokens, sampling_of
from moe_rl.routing.balance import correction_biases, keep_routers_in
from moe_rl.routing.sites import layout_of
from moe_rl.routing.sources import SOURCES, RouteSource
from moe_rl.storage.folder import RunFolder, SharedFolder, read_json, write_json
from moe_rl.storage.inputs import inputs_of
from moe_rl.storage.lease import Lease
from moe_rl.tasks.base import AnyTask, Environment, held_out, load_task, split_of
from moe_rl.trainer import Listener, Parts, train, warn_void
from moe_rl.types import Prompt, Rollout

if TYPE_CHECKING:
    from moe_rl.policies.base import Policy


def execute(
    run: RunConfig, folder: RunFolder | SharedFolder, *, cache: Path, listen: Listener = lambda rows: None
) -> None:
    """Carry out a run in its folder, or go on with it; cold starts are shared through `cache`."""
    told = folder.told if isinstance(folder, SharedFolder) else folder.stopping
    parts = build(run, folder.path, cache, told)
    try:
        folder.finish(train(run, parts, folder, listen))
    finally:
        parts.engine.close()


def check(run: RunConfig) -> list[str]:
    """Everything that any layer would refuse later, refused before compute is spent; what would make the comparison
    void, one sentence each.

    Raises ConfigError or RoutingError. Reads no weights.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_policy(run)
        check_engine(run)
        _check_model(run)
        _check_task(run)
        objective = objective_of(run.arm)
        if "values" in advantage_of(run.arm).needs:
            check_critic(run)
        if run.policy == "megatron":
            check_routers(run, objective.needs)
        if run.dial.sigma and run.dial.acts_on != "ratio" and "reference" in objective.needs:
            raise ConfigError(f"arm {run.arm.name!r} compares with a reference, which no dial moves: at equal weights "
                              "it would be pulled against the dose. Use dial.acts_on='ratio', or leave the term out.")
        lookup("route source", run.arm.routes, SOURCES, suggest_field)
        if run.arm.ratio_routes is not None:
            lookup("route source", run.arm.ratio_routes, SOURCES, suggest_field)
    return [*warn_void(run), *(str(warning.message) for warning in caught)]


def _check_task(run: RunConfig) -> None:
    split_of(task := load_task(run.task), run.eval_prompts)
    if run.partial_tokens is not None and isinstance(task, Environment):
        raise ConfigError(f"partial_tokens={run.partial_tokens}: the task answers back, and its turns are drawn as a "
                          "whole; leave partial_tokens out. A lag of whole conversations works.")


def build(run: RunConfig, folder: Path, cache: Path, told: Callable[[], bool] = lambda: False) -> Parts:
    """The parts that `run` names, its model past the cold start; collective where there are ranks. Raises ConfigError
    before any compute is spent, Stopped where it was `told` to stop while another run makes its cold start."""
    check(run)
    if run.policy != "hf":
        ranks.join(run.model.device)
    task, objective = load_task(run.task), objective_of(run.arm)
    loaded = load(run.model, run.cold_start.seed) if ranks.rank() == 0 else None
    advantage = advantage_of(run.arm)
    compares, valued = "reference" in objective.needs | advantage.needs, "values" in advantage.needs
    evaluation, pad_token = ranks.from_rank_0(
        lambda: _prepare(run, task, _of_rank_0(loaded), cache, _progress(folder, told)))
    policy = _policy(run, loaded)
    # Both made now, before the policy has moved: from the weights of the cold start.
    critic = _critic(run, _of_rank_0(loaded)) if valued else None
    reference = _policy(run, loaded, frozen=True) if compares else None
    engine = engine_of(run, loaded, policy.score, folder / "engine", shared=run.policy == "hf")
    given_up = run.policy != "hf" and run.engine.name != "hf"  # the model it began with is neither trained nor sampled
    if given_up and loaded is not None:
        torch.nn.Module.to(loaded.model, "meta")

    def export(step: int) -> None:
        """Collective: the Hugging Face model may have older weights than the policy, which is spread over ranks."""
        weights, target = policy.weights(), folder / "checkpoints" / f"step={step:06d}"
        if loaded is None:
            for _ in weights:  # a rank still has to give its part of them
                pass
        elif given_up:
            describe(loaded.model, loaded.tokenizer, target)
            write_shards(target, checkpoint_weights(loaded.model, weights))
        else:
            HFEngine(loaded.model, loaded.tokenizer).load(weights)
            save_checkpoint(loaded.model, loaded.tokenizer, target)

    return Parts(
        task=task,
        policy=policy,
        engine=engine,
        objective=objective,
        advantage=advantage,
        source=_source(run.arm.routes, policy),
        ratio_source=None if run.arm.ratio_routes is None else _source(run.arm.ratio_routes, policy),
        encode=lambda prompts: encode_prompts(prompts, _of_rank_0(loaded).tokenizer),
        decode=lambda tokens: _text(_of_rank_0(loaded), tokens),
        pad_token=pad_token,
        held_out=evaluation,
        reference=reference,
        critic=critic,
        export=export,
        from_rank_0=from_rank_0,
        watch=_watch(run, loaded, GapFiles(folder / "rollouts", sampling_of(run))) if loaded else lambda *seen: {},
    )


def _text(loaded: LoadedModel, tokens: Sequence[int]) -> str:
    return completion_text(tokens, end_tokens(loaded.model, loaded.tokenizer), loaded.tokenizer)


def _watch(run: RunConfig, loaded: LoadedModel, gaps: GapFiles) -> Callable[[Recorder, Row], Rows]:
    """Keeps the rollouts of steps that stand out, and of every step some that people can read."""
    def watch(step: Recorder, row: Row) -> Rows:
        gaps(step.step, step.batch, row)
        return {"rollouts": readable(step.step, step.batch, step.log_ratio, step.clipped_by, step.flips,
                                     loaded.tokenizer, run.measure.rollouts)}

    return watch


def _source(use: Part, policy: Policy) -> RouteSource:
    """A route source; one that asks for the policy gets its `score` as its third argument."""
    source = lookup("route source", use, SOURCES, suggest_field)
    return partial(source, score=policy.score) if "policy" in needs_of(source) else source


def _of_rank_0(loaded: LoadedModel | None) -> LoadedModel:
    assert loaded is not None, "rank 0 alone has a model, and is asked for what takes one"
    return loaded


def _prepare(
    run: RunConfig, task: AnyTask, loaded: LoadedModel, cache: Path, progress: Progress
) -> tuple[list[Prompt], int]:
    """The cold start; evaluation prompts and the padding token."""
    evaluation = encode_prompts(held_out(task, run.eval_prompts), loaded.tokenizer)
    check_request(evaluation, 1, sampling_of(run), context_length(loaded.model.config))
    inputs = inputs_of({"task": run.to_dict()["task"]})
    cold_start(loaded, task, run, cache, sample, progress=progress, alone=alone, inputs=inputs)
    return evaluation, loaded.tokenizer.pad_token_id


def alone(folder: Path, progress: Progress) -> Lease:
    """A folder's lease, once whoever holds it is done."""
    return Lease(folder, wait=lambda: progress({"waiting": True}))


def _progress(folder: Path, told: Callable[[], bool]) -> Progress:
    """Writes how far the cold start is into the progress of the run in `folder`, where there is one."""
    file = folder / "progress.json"

    def tell(now: Mapping[str, Any]) -> None:
        if "waiting" in now and told():
            raise Stopped(f"{folder} was told to stop while it waited for the cold start that another run makes")
        if (found := read_json(file, ("step",))) and found.get("cold_start") != now:
            write_json(file, {**found, "updated": time.time(), "cold_start": now}, durable=False)

    return tell


def sample(model: Any, tokenizer: Any, prompts: list[Prompt], group_size: int, **how: Any) -> list[Rollout]:
    """Completions of a Hugging Face model, without their routes; see `Sampler.generate`."""
    return HFEngine(model, tokenizer, record_routes=False).generate(prompts, group_size, **how)


def _policy(run: RunConfig, loaded: LoadedModel | None, frozen: bool = False) -> Policy:
    """What scores and updates; `frozen` only scores, and on one process has a model of its own."""
    if run.policy == "megatron":
        # Here, since Megatron-core asks for process groups when it is imported.
        from moe_rl.integrations.megatron.policy import MegatronPolicy

        return MegatronPolicy(
            loaded.model if loaded else skeleton(run.model),
            None if frozen else run.optimizer,
            run.parallel,
            temperature=run.temperature,
            micro_batch=run.micro_batch,
            recompute=run.activation_checkpointing and not frozen,
            device=run.model.device,
        )
    settings: dict[str, Any] = {
        "temperature": run.temperature,
        "micro_batch": run.micro_batch,
        "micro_batch_tokens": run.micro_batch_tokens,
        "activation_checkpointing": run.activation_checkpointing and not frozen,
    }
    if run.policy == "fsdp":
        from moe_rl.integrations.fsdp import FSDPPolicy  # here, since torch's distributed parts are slow to import

        whole = loaded.model if loaded else None
        return FSDPPolicy(run.model, whole, run.optimizer, compute_dtype=run.parallel.compute_dtype, **settings)
    start = _of_rank_0(loaded)
    settings["gradient_cosine"] = run.measure.gradient_cosine and not frozen
    return HFPolicy(_copied(run, start) if frozen else start.model, run.optimizer, **settings)


def _critic(run: RunConfig, start: LoadedModel) -> HFCritic:
    """A critic that starts as the policy does."""
    return HFCritic(
        _copied(run, start),
        run.critic.of(run.optimizer),
        clip=run.critic.clip,
        micro_batch=run.micro_batch,
        micro_batch_tokens=run.micro_batch_tokens,
        activation_checkpointing=run.activation_checkpointing,
    )


def _copied(run: RunConfig, start: LoadedModel) -> Any:
    """Another model of the same weights."""
    model = load(run.model, run.cold_start.seed).model
    model.load_state_dict(start.model.state_dict())
    return model


def _check_model(run: RunConfig) -> None:
    """Raise ConfigError or RoutingError, without reading weights, for a device that is not there, a checkpoint that is
    missing or damaged, and a model without a router."""
    _, dtype = placement(run.model)
    if run.policy == "megatron" and run.model.device == "cpu" and run.model.dtype != "float32":
        raise ConfigError(f"policy='megatron' on a CPU needs dtype float32, not {dtype}.")
    model = skeleton(run.model)
    if run.model.name not in PRESETS:
        check_weights(run.model.name)
    layout_of(model)
    if run.model.router_dtype is not None:
        keep_routers_in(model, getattr(torch, run.model.router_dtype))
    if run.optimizer.loss_free_bias:
        correction_biases(model)
    if run.policy == "fsdp":
        layers_of(model)
