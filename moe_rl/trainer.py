"""The loop. It knows protocols only: a task, a policy, a rollout engine; an arm is data, its parts are functions."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, Diverged
from moe_rl.models.load import skeleton
from moe_rl.objectives import Advantage, Objective
from moe_rl.objectives.advantages import explain_zeros
from moe_rl.objectives.methods import components
from moe_rl.objectives.spelling import fill_in, suggest_field
from moe_rl.policies.base import Policy
from moe_rl.policies.critic import HFCritic
from moe_rl.recorder import Recorder, Row, Rows, evaluation_rows
from moe_rl.registry import Component, check_component, lookup, needs_of
from moe_rl.rollouts.batches import BatchSource, Collector, Queue
from moe_rl.rollouts.engine import sampling_of
from moe_rl.routing.moe_layers import layout_of
from moe_rl.routing.router_noise import Noise
from moe_rl.routing.sources import ALL, BASE, BASES, NOTHING, SOURCES
from moe_rl.routing.trace import RoutingTrace
from moe_rl.seeds import DIAL, SPLIT, derive
from moe_rl.types import Batch, MiniBatch, Rollouts, RouteSource, Scored, ScoredRollouts

T = TypeVar("T")
ITSELF = (
    "the engine samples with the policy's own weights and numerics. Use another engine, e.g. "
    "engine='perturbed(dtype=bfloat16)', or older rollouts, batches='lagged(lag=2)'."
)
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
    critic: HFCritic | None = None
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
    """Run `run` in `folder` until `run.steps`; resumes at the last commit and ends identical.

    A run whose gradients or weights stop being finite ends there, with what was measured committed. Returns how it
    diverged, for `folder.finish`.
    """
    for text in warn_void(run):
        warnings.warn(text, stacklevel=2)
    if (diverged := folder.diverged()) is not None:
        return diverged
    start, checkpoint = folder.latest()
    if checkpoint is not None:
        load(parts, checkpoint)
    parts.collector.engine.load(parts.policy.weights())
    if checkpoint is None:
        if 0 in run.hf_checkpoints and parts.export:
            parts.export(0)
        _add(folder, listen, evaluate_held_out(run, parts, 0))
    recorder = parts.recorder(run, parts.policy)
    for step in range(start + 1, run.steps + 1):
        rows: Rows = {}
        try:
            rows = train_step(run, parts, step, recorder)
            if step % run.eval_every == 0 or step == run.steps:
                with recorder.timed("evaluate"):
                    evaluation = evaluate_held_out(run, parts, step)
                rows |= evaluation | {"steps": [rows["steps"][0] | evaluation["steps"][0]]}
            if run.exports_after(step) and parts.export:
                parts.export(step)
        except Diverged as error:
            diverged = f"step {step}: {error}"
            warnings.warn(diverged, stacklevel=2)
        if rows:  # else the step itself broke off
            rows["steps"][0] |= getattr(parts.batches, "row", {})
            with recorder.timed("measure"):
                rows |= parts.watch(recorder, rows["steps"][0])
            rows["steps"][0] |= recorder.cost()
            _add(folder, listen, rows)
        if folder.stopping() or diverged or step % run.save_every == 0 or step == run.steps:
            folder.commit(step if rows else step - 1, lambda path: save(parts, path), diverged)
        if diverged:
            break
    return diverged


def _add(folder: Folder, listen: Listener, rows: Rows) -> None:
    for table, new in rows.items():
        folder.add(table, new)
    listen(rows)


def save(parts: Parts, folder: Path) -> None:
    """Write what resuming needs; collective."""
    parts.policy.save(folder)
    parts.from_rank_0(lambda: parts.advantage.save(folder))
    parts.from_rank_0(lambda: parts.batches.save(folder))
    if parts.critic:
        parts.critic.save(folder)


def load(parts: Parts, folder: Path) -> None:
    """Read what `save` wrote; collective."""
    parts.policy.load(folder)
    parts.advantage.load(folder)
    parts.from_rank_0(lambda: parts.batches.load(parts.collector, folder))
    if parts.critic:
        parts.critic.load(folder)


# ---------------------------------------------------------------------- one step
def train_step(run: RunConfig, parts: Parts, step: int, recorder: Recorder) -> Rows:
    """One batch of rollouts and its updates; the rows that describe them."""
    policy, objective, timed = parts.policy, parts.objective, recorder.timed
    with timed("sample"):
        rollouts = sample(parts, step)
    with timed("score"):
        unconstrained = policy.score(rollouts, scores=parts.needs_scores)
        batch = attach_advantages(parts, step, attach_old_policy(run, parts, step, rollouts, unconstrained))
    split = split_into_mini_batches(run, step, len(batch))
    recorder.begin(step, batch, unconstrained, split)
    probe = recorder.start_probe()  # its calls are the forwards that measuring needs
    for number, index in enumerate(split):
        mini_batch = objective.attach_weights(drop_unknown_routes(batch.rows(index)))
        recorder.before(number, mini_batch, probe.score_before(number))
        with timed("update"):
            of_ratio, of_gradient = build_noise(run, step, number, len(split))
            mini_batch = attach_current_policy(parts, mini_batch, of_ratio, of_gradient)
            updated = policy.update(mini_batch, objective, noise=of_gradient)
            if parts.critic:
                updated = replace(updated, metrics={**updated.metrics, **parts.critic.update(mini_batch)})
        recorder.after(number, mini_batch, updated, probe.score_after(number))
    with timed("sample"):
        push_gap = parts.collector.engine.load(policy.weights())
    return recorder.end(push_gap, probe.score_at_end())


def sample(parts: Parts, step: int) -> Rollouts:
    """The rollouts that a step trains on, on every rank."""
    return parts.from_rank_0(lambda: parts.batches.next(parts.collector, step))


def attach_old_policy(
    run: RunConfig, parts: Parts, step: int, rollouts: Rollouts, unconstrained: Scored
) -> ScoredRollouts:
    """The rollouts with the routing to replay, the log-probs of π_old and of the reference under that routing, and the
    critic's values.

    Both sides of a ratio use the same routing, so `unconstrained` is π_old only where the arm replays nothing, or the
    routing of `unconstrained` itself (R2).
    """
    routes = parts.source(rollouts, unconstrained)
    ratio_routes = parts.ratio_source(rollouts, unconstrained) if parts.ratio_source else routes
    for source, trace in ((run.arm.routes, routes), (run.arm.ratio_routes, ratio_routes)):
        if trace is None:
            continue
        if not isinstance(trace, RoutingTrace) or trace.shape[:2] != rollouts.tokens.shape:
            raise ConfigError(
                f"the route source {source} of arm {run.arm.name!r} returned a {type(trace).__name__} of shape "
                f"{tuple(getattr(trace, 'shape', ()))}. Return a RoutingTrace of the tokens, whose shape is "
                f"{tuple(rollouts.tokens.shape)}, or None."
            )
        trace.require_known()

    def score_under(trace: RoutingTrace | None, scores: bool = False) -> Scored:
        same = trace is None or trace is unconstrained.routes
        return unconstrained if same else parts.policy.score(rollouts, trace, scores)

    with_scores = score_under(routes, scores=True) if "router" in parts.objective.needs else None
    if run.arm.anchor == "engine":
        old = rollouts.rollout_logprobs
    else:
        old = (with_scores if with_scores and ratio_routes is routes else score_under(ratio_routes)).logprobs
    drawn_at = rollouts.sampled_at
    return ScoredRollouts(
        **vars(rollouts),
        old_logprobs=old,
        lag=None if drawn_at is None else step - 1 - drawn_at,
        routes=routes,
        ratio_routes=ratio_routes if parts.ratio_source else None,
        ref_logprobs=None if parts.reference is None else parts.reference.score(rollouts, routes).logprobs,
        old_scores=with_scores.scores if with_scores else None,
        values=None if parts.critic is None else parts.critic.values(rollouts),
    )


def attach_advantages(parts: Parts, step: int, scored: ScoredRollouts) -> Batch:
    """The batch of a step. Warns where nothing is learned from its rewards."""
    batch = parts.advantage.attach_advantages(scored)
    if not parts.advantage.needs and (reason := explain_zeros(batch.advantages, batch.rewards, batch.prompt_index)):
        warnings.warn(f"step {step}: {reason}", stacklevel=2)
    return batch


def split_into_mini_batches(run: RunConfig, step: int, rows: int) -> list[Tensor]:
    """The row numbers of each mini-batch of a step, in the order of the updates: a split of all rows per epoch."""
    seeds = [derive(run.seed, SPLIT, step), *(derive(run.seed, SPLIT, step, e, 0) for e in range(1, run.epochs))]
    return [index for seed in seeds for index in split_rows(rows, run.mini_batches, seed)]


def split_rows(rows: int, count: int, seed: int) -> list[Tensor]:
    """A random split of the row numbers into `count` groups whose sizes differ by at most one."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return list(order.tensor_split(count))


def drop_unknown_routes(part: Batch) -> Batch:
    """Some rows of a batch without a trace that contains no known routing of them: they route freely. That the trace of
    the batch contains some is checked by `attach_old_policy`."""

    def known(routes: RoutingTrace | None) -> RoutingTrace | None:
        return None if routes is None or routes.coverage == 0 else routes

    return replace(part, routes=known(part.routes), ratio_routes=known(part.ratio_routes))


def attach_current_policy(
    parts: Parts, mini_batch: MiniBatch, of_ratio: Noise | None, of_gradient: Noise | None
) -> MiniBatch:
    """The mini-batch with what its loss needs of π_θ before the update: the log-probs of the ratio, where routing or
    noise of the ratio are not those of the gradient, and statistics over all of the mini-batch."""
    if parts.ratio_source or of_ratio != of_gradient:
        routes = mini_batch.ratio_routes if parts.ratio_source else mini_batch.routes
        scored = parts.policy.score(mini_batch, routes, noise=of_ratio)
        mini_batch = replace(mini_batch, ratio_logprobs=scored.logprobs)
    if "mini_batch" in needs_of(parts.objective.loss):
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


def evaluate_held_out(run: RunConfig, parts: Parts, step: int) -> Rows:
    """The rows of the evaluation after a step; collective."""
    collector = parts.collector
    return parts.from_rank_0(
        lambda: evaluation_rows(collector.engine, collector.task, collector.held_out, sampling_of(run), run.seed, step)
    )


def warn_void(run: RunConfig) -> list[str]:
    """What would make this run's comparison void, one sentence each."""
    arm = (f"arm {run.arm.name!r}: {text}" for text in _void_parts(run))
    return [*_void_settings(run), *arm, *_void_routes(run)]


def _void_settings(run: RunConfig) -> Iterator[str]:
    one_update = run.mini_batches * run.epochs == 1
    if one_update and run.router_noise.scale:
        yield "router_noise.scale has no effect with one update per step: the first has no noise."
    if late := [step for step in run.hf_checkpoints if step > run.steps]:
        yield f"hf_checkpoints={tuple(late)} are beyond the last step, {run.steps}, so none is saved then."
    if one_update and (run.arm.anchor == "policy" or run.samples_itself):
        yield (
            "one update per step: every importance ratio is exactly 1, so losses, clipping and replay do not differ. "
            "Use mini_batches >= 2, or epochs >= 2."
        )


def _void_parts(run: RunConfig) -> Iterator[str]:
    """Components of the objective that have no effect in this run, a sentence each."""
    arm, batches, loss = run.arm, Component.of(run.batches), Component.of(run.arm.loss)
    known = [(use, needs_of(components().get(use.name))) for use in map(Component.of, (*arm.corrections, *arm.filters))]
    if run.samples_itself and (idle := [str(use) for use, marks in known if "engine" in marks]):
        yield f"every weight of {', '.join(idle)} is 1, because {ITSELF}"
    if run.samples_itself and arm.anchor == "engine":
        yield f"anchor='engine' is anchor='policy', because {ITSELF}"
    if "lag" in needs_of(components().get(loss.name)) and not batches.own and batches.options.get("lag", 0) < 2:
        yield f"{loss} is the clip of PPO at a lag below 2. Use older rollouts, batches='lagged(lag=2)'."
    steps = " ".join(str(fill_in(step)) for step in arm.advantage)  # `group` is a word of options, too
    if run.group_size == 1 and re.search(r"\b(group|leave_one_out|opo)\b", steps):
        yield "group_size=1: group-relative advantages are all 0, so nothing is learned. Use group_size >= 2."
    for use in map(Component.of, (*arm.terms, *arm.advantage)):
        if use.options.get("coef") == 0:
            yield f"{use} does nothing. Remove it, or give it another coef."


def _void_routes(run: RunConfig) -> Iterator[str]:
    """What the replay of the arm does not do in this run, a sentence each. Raises ConfigError for a source that cannot
    be used."""
    for part in [run.arm.routes, *([] if run.arm.ratio_routes is None else [run.arm.ratio_routes])]:
        source, use = lookup("route source", part, SOURCES, suggest_field), Component.of(part)
        base = use.options.get("base", "old_policy")
        does = check_component(source, run)
        if type(does) is int:  # that many MoE layers
            does = NOTHING if not does else BASE if does >= len(layout_of(skeleton(run.model)).moe_layers) else None
        if does == NOTHING:
            yield f"{use} replays nothing. Use routes=live for a run without replay."
        if does == BASE:
            yield f"{use} is {base}. Use that name, or an option in between."
        if run.samples_itself and "engine" in needs_of(source) | needs_of(BASES.get(base)):
            yield f"arm {run.arm.name!r}: {use} replays the routes of old_policy, because {ITSELF}"
        if does in (BASE, ALL) and run.router_noise.scale and run.router_noise.target == "choice":
            yield f"arm {run.arm.name!r} replays all routes, so router_noise.target='choice' moves none. Use 'weights'."
