"""The loop. It knows protocols only: a task, a policy, a rollout engine; an arm is data, its parts are functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from moe_rl.config import RunConfig
from moe_rl.errors import Diverged, RunError
from moe_rl.objectives import Advantage, Objective
from moe_rl.policies.base import Policy, ValueModel
from moe_rl.recorder import Recorder, Row, Rows, evaluation_rows
from moe_rl.registry import Component, needs_of
from moe_rl.rollouts.batches import BatchSource, Collector, Queue
from moe_rl.rollouts.engine import sampling_of
from moe_rl.routing.router_noise import Noise
from moe_rl.routing.trace import RoutingTrace
from moe_rl.seeds import DIAL, SPLIT, derive
from moe_rl.types import Batch, RouteSource, Scored

T = TypeVar("T")
Listener = Callable[[Rows], None]
"""Gets the rows of every table as they are made; it may change no number."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of. `build.py` builds them from a RunConfig; a user may build their own."""

    collector: Collector
    """Task and engine: samples and rewards rollouts."""
    policy: Policy
    objective: Objective
    advantage: Advantage
    source: RouteSource
    ratio_source: RouteSource | None = None
    """Routes of the ratio, where they are not those of the gradient."""
    batches: BatchSource = field(default_factory=Queue)
    """What every step trains on."""
    reference: Policy | None = None
    """Scores the batch for the parts of the objective that compare with it."""
    critic: ValueModel | None = None
    """For advantages that ask for values: takes a step after each of the policy's."""
    export: Callable[[int], None] | None = None
    """Called after every step that the run wants as a Hugging Face checkpoint."""
    recorder: Callable[[RunConfig, Policy], Recorder] = Recorder
    watch: Callable[[Recorder, Row], Rows] = lambda recorder, row: {}  # noqa: E731
    """Sees what a step was, and its row of `steps`, on each rank that has one, and gives rows of further tables; it may
    change no number."""

    def from_rank_0(self, function: Callable[[], T]) -> T:
        """What the function returns, called on rank 0 alone where the policy runs on several: for what samples, rewards
        and evaluates."""
        of_ranks = getattr(self.policy, "from_rank_0", None)
        return function() if of_ranks is None else of_ranks(function)

    @property
    def needs_scores(self) -> bool:
        """Whether a part asks for the scores of π_old's routers."""
        return "router" in self.objective.needs or "scores" in needs_of(self.source) | needs_of(self.ratio_source)


@runtime_checkable
class Folder(Protocol):
    """Where a run is kept; see `storage.folder`."""

    def latest(self) -> tuple[int, Path | None]:
        """Step and checkpoint of the last commit; (0, None) before the first."""

    def add(self, table: str, rows: list[Row]) -> None:
        """Rows for the next commit."""

    def diverged(self) -> str | None:
        """How the run diverged, where its last commit says so."""

    def commit(self, step: int, save: Callable[[Path], None], diverged: str | None = None) -> None:
        """Rows and checkpoint, which `save` writes, in one atomic change; and how the run diverged, if it did."""

    def stopping(self) -> bool:
        """Whether the run was told to stop: it commits at once, and `commit` ends it; collective."""


def train(run: RunConfig, parts: Parts, folder: Folder, listen: Listener = lambda rows: None) -> str | None:
    """Run, or go on with, `run` in `folder` until `run.steps`; resumes at the last commit and ends identical.

    Each step draws prompts, samples completions, scores them under π_old, and takes one update per mini-batch and
    epoch. A run whose gradients or weights stop being finite ends there, with what was measured committed; returns how
    it diverged, for `folder.finish`.
    """
    for text in warn_void(run):
        warnings.warn(text, stacklevel=2)
    if (diverged := folder.diverged()) is not None:
        return diverged
    start, checkpoint = folder.latest()
    if checkpoint is not None:
        try:
            parts.policy.load(checkpoint)
            parts.advantage.load(checkpoint)
            parts.from_rank_0(lambda: parts.batches.load(parts.collector, checkpoint))
            if parts.critic:
                parts.critic.load(checkpoint)
        except Exception as error:  # of safetensors, torch or Megatron: each has its own
            raise RunError(f"the checkpoint {checkpoint} cannot be read ({error}). Restore it from a copy, or delete "
                           "the run and start it again.") from error
    parts.collector.engine.load(parts.policy.weights())
    if checkpoint is None:
        if 0 in run.hf_checkpoints and parts.export:
            parts.export(0)
        before = evaluate_held_out(run, parts, 0)
        for table, new in before.items():
            folder.add(table, new)
        listen(before)
    recorder = parts.recorder(run, parts.policy)
    for step in range(start + 1, run.steps + 1):
        rows: Rows = {}
        try:
            rows = train_step(run, parts, step, recorder)
            if step % run.eval_every == 0 or step == run.steps:
                with recorder.timed("evaluate"):
                    found = evaluate_held_out(run, parts, step)
                rows |= found | {"steps": [rows["steps"][0] | found["steps"][0]]}
            if step in run.hf_checkpoints and parts.export:
                parts.export(step)
        except Diverged as error:
            diverged = f"step {step}: {error}"
            warnings.warn(diverged, stacklevel=2)
        if rows:  # else the step itself broke off
            rows["steps"][0] |= parts.batches.row
            with recorder.timed("measure"):
                rows |= parts.watch(recorder, rows["steps"][0])
            rows["steps"][0] |= recorder.cost()
            for table, new in rows.items():
                folder.add(table, new)
            listen(rows)
        if folder.stopping() or diverged or step % run.save_every == 0 or step == run.steps:
            folder.commit(step if rows else step - 1, lambda path: save(parts, path), diverged)
        if diverged:
            break
    return diverged


def save(parts: Parts, folder: Path) -> None:
    """Write what resuming needs; collective."""
    parts.policy.save(folder)
    parts.from_rank_0(lambda: parts.advantage.save(folder))
    parts.from_rank_0(lambda: parts.batches.save(folder))
    if parts.critic:
        parts.critic.save(folder)


def train_step(run: RunConfig, parts: Parts, step: int, recorder: Recorder) -> Rows:
    """One batch of rollouts and its updates; the rows that describe them."""
    policy, timed = parts.policy, recorder.timed
    with timed("sample"):
        batch = parts.from_rank_0(lambda: attach_advantages(parts, step, parts.batches.next(parts.collector, step)))
    with timed("score"):
        natural = policy.score(batch, scores=parts.needs_scores)
        lag = batch.response_mask.long() * 0 if batch.sampled_at is None else step - 1 - batch.sampled_at
        batch = replace(attach_old_policy(run, parts, batch, natural), lag=lag)
    split = split_into_mini_batches(run, step, len(batch))
    recorder.begin(step, batch, natural, split)
    probe = recorder.start_probe()  # its calls are the forwards that measuring needs
    for number, index in enumerate(split):
        mini_batch = parts.objective.attach_weights(drop_unknown_routes(batch.rows(index)))
        recorder.before(number, mini_batch, probe.score_before(number))
        with timed("update"):
            of_ratio, of_gradient = build_noise(run, step, number, len(split))
            mini_batch = attach_current_policy(parts, mini_batch, of_ratio, of_gradient)
            updated = policy.update(mini_batch, parts.objective, noise=of_gradient)
            if parts.critic:
                updated = replace(updated, metrics={**updated.metrics, **parts.critic.update(mini_batch)})
        recorder.after(number, mini_batch, updated)
        recorder.updates[-1] |= probe.score_after(number)
    with timed("sample"):
        push_gap = parts.collector.engine.load(policy.weights())
    return recorder.end(push_gap, probe.score_at_end())


def roll_out(run: RunConfig, parts: Parts, step: int) -> Batch:
    """A batch of the current weights, with the prompts and the noise of a step, and its advantages."""
    collector = parts.collector
    rollouts = collector.sample(collector.draw_prompts(run.prompts_per_step, step), run.group_size, (step,))
    return attach_advantages(parts, step, collector.batch(rollouts, collector.rewards(rollouts)))


def attach_advantages(parts: Parts, step: int, batch: Batch) -> Batch:
    """The batch with its advantages; unchanged where these need log-probs or values, and `attach_old_policy` adds
    them."""
    if parts.advantage.needs:
        return batch
    batch = parts.advantage.attach_advantages(batch)
    if not bool(batch.advantages.any()):
        warnings.warn(
            f"step {step}: all rewards of every group are equal, so there is no gradient. If this continues, change "
            "the difficulty of the task, or use a longer supervised warm-up.",
            stacklevel=2,
        )
    return batch


def attach_old_policy(run: RunConfig, parts: Parts, batch: Batch, natural: Scored) -> Batch:
    """The batch with the routing to replay, the log-probs of π_old and of the reference under that routing, the
    critic's values, and the advantages that need one of them.

    `natural` is the unconstrained scoring of the batch. Both sides of a ratio use the same routing, so `natural` serves
    as π_old only where the arm replays nothing, or the routing of `natural` itself (R2).
    """
    routes = parts.source(batch, natural)
    ratio_routes = parts.ratio_source(batch, natural) if parts.ratio_source else routes
    for trace in (routes, ratio_routes):
        if trace is not None:
            trace.require_known()

    def score_under(trace: RoutingTrace | None, scores: bool = False) -> Scored:
        same = trace is None or trace is natural.routes
        return natural if same else parts.policy.score(batch, trace, scores)

    with_scores = score_under(routes, scores=True) if "router" in parts.objective.needs else None
    if run.arm.anchor == "engine":
        old = batch.rollout_logprobs
    else:
        old = (with_scores if with_scores and ratio_routes is routes else score_under(ratio_routes)).logprobs
    batch = replace(
        batch,
        old_logprobs=old,
        routes=routes,
        ratio_routes=ratio_routes if parts.ratio_source else None,
        ref_logprobs=None if parts.reference is None else parts.reference.score(batch, routes).logprobs,
        old_scores=with_scores.scores if with_scores else None,
        values=None if parts.critic is None else parts.critic.values(batch),
    )
    return parts.advantage.attach_advantages(batch) if parts.advantage.needs else batch


def attach_current_policy(parts: Parts, mini_batch: Batch, of_ratio: Noise | None, of_gradient: Noise | None) -> Batch:
    """The mini-batch with what its loss needs of π_θ before the update: the log-probs of the ratio, where routing or
    noise of the ratio are not those of the gradient, and statistics over all of the mini-batch."""
    if parts.ratio_source or of_ratio != of_gradient:
        routes = mini_batch.ratio_routes if parts.ratio_source else mini_batch.routes
        scored = parts.policy.score(mini_batch, routes, noise=of_ratio)
        mini_batch = replace(mini_batch, ratio_logprobs=scored.logprobs)
    if "mini_batch" in parts.objective.needs:
        scored = parts.policy.score(mini_batch, mini_batch.routes, noise=of_gradient)
        mini_batch = parts.objective.attach_statistics(mini_batch, scored.logprobs, scored.entropy)
    return mini_batch


def build_noise(run: RunConfig, step: int, update: int, updates: int) -> tuple[Noise | None, Noise | None]:
    """The router noise of an update, counted from 0: of its ratio and of its gradient; None where there is none."""
    if not (size := run.router_noise.size(update, updates)):
        return None, None
    noise = Noise(run.router_noise.target, size, derive(run.seed, DIAL, step), run.router_noise.direction)
    applied_to = run.router_noise.applied_to
    return noise if applied_to != "gradient" else None, noise if applied_to != "ratio" else None


def drop_unknown_routes(mini_batch: Batch) -> Batch:
    """The mini-batch without a trace that contains no known routing: it routes freely then. That the trace of the whole
    batch contains some is checked by `attach_old_policy`."""
    def known(routes: RoutingTrace | None) -> RoutingTrace | None:
        return None if routes is None or routes.coverage == 0 else routes

    return replace(mini_batch, routes=known(mini_batch.routes), ratio_routes=known(mini_batch.ratio_routes))


def split_into_mini_batches(run: RunConfig, step: int, rows: int) -> list[Tensor]:
    """The row numbers of each mini-batch of a step, in the order of the updates: a split of all rows per epoch."""
    seeds = [derive(run.seed, SPLIT, step), *(derive(run.seed, SPLIT, step, e, 0) for e in range(1, run.epochs))]
    return [index for seed in seeds for index in split_rows(rows, run.mini_batches, seed)]


def split_rows(rows: int, count: int, seed: int) -> list[Tensor]:
    """A random split of the row numbers into `count` groups whose sizes differ by at most one."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return list(order.tensor_split(count))


def evaluate_held_out(run: RunConfig, parts: Parts, step: int) -> Rows:
    """The rows of the evaluation after a step; collective."""
    collector = parts.collector
    return parts.from_rank_0(lambda: evaluation_rows(
        collector.engine, collector.task, collector.held_out, sampling_of(run), run.seed, step))


def warn_void(run: RunConfig) -> list[str]:
    """What would make this run's comparison void, one sentence each."""
    found, one_update = [], run.mini_batches * run.epochs == 1
    if one_update and run.router_noise.scale:
        found.append("router_noise.scale has no effect with one update per step: the first is given no dose.")
    whole = ("old_policy", "rollout", "under_noise", "soft", "recall")
    if run.router_noise.scale and run.router_noise.target == "choice" and Component.of(run.arm.routes).name in whole:
        found.append(f"arm {run.arm.name!r} replays all routes, so router_noise.target='choice' moves none of them: "
                     "its runs are those without router noise.")
    if late := [step for step in run.hf_checkpoints if step > run.steps]:
        found.append(f"hf_checkpoints={tuple(late)} are beyond the last step, {run.steps}, so none is saved then.")
    if one_update and run.arm.anchor == "policy":
        found.append(
            "one update per step: every importance ratio is exactly 1, so losses, clipping and replay do not differ. "
            "Use mini_batches >= 2, or epochs >= 2."
        )
    assert isinstance(run.arm.advantage, tuple), "an arm makes one of a part alone"
    if run.group_size == 1 and "gae" not in (Component.of(step).name for step in run.arm.advantage):
        found.append("group_size=1: group-relative advantages are all 0, so nothing is learned. Use group_size >= 2.")
    return found
