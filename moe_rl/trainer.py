"""The loop. It knows protocols only: a task, a policy, a rollout engine; an arm is data (loss, routes, anchor)."""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from moe_rl.advantages import group_advantages
from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, Diverged
from moe_rl.losses import Objective
from moe_rl.measure import Probe, engine_row, ratio_row, update_row
from moe_rl.policies.base import Policy
from moe_rl.ranks import SharedFolder
from moe_rl.rollouts.base import RolloutEngine
from moe_rl.routing.sources import RouteSource, needs_scores
from moe_rl.routing.trace import RoutingTrace
from moe_rl.runs import RunFolder
from moe_rl.seeds import NOISE, PROMPTS, SPLIT, derive
from moe_rl.tasks.base import Task, checked_reward, draw
from moe_rl.types import Batch, Prompt, Sampling, Scored, collate

Row = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of. `execute.py` builds them from a RunConfig; a user may build their own."""

    task: Task
    policy: Policy
    engine: RolloutEngine
    objective: Objective
    source: RouteSource
    encode: Callable[[list[Prompt]], list[Prompt]]
    """Fills in the token ids of prompts."""
    pad_token: int
    held_out: list[Prompt]
    """Encoded prompts of the evaluation; never trained on."""
    ratio_source: RouteSource | None = None
    """Routes of the ratio, where they are not those of the gradient."""
    reference: Policy | None = None
    """Scores the batch for the KL term, where the arm has one."""
    export: Callable[[int], None] | None = None
    """Called after every step that the run wants as a Hugging Face checkpoint."""
    once: Callable[[Callable[[], T]], T] = lambda function: function()  # noqa: E731
    """Calls a function, with several ranks on rank 0 alone, and gives its result to all of them: for what samples,
    rewards and evaluates."""


def train(
    run: RunConfig, parts: Parts, folder: RunFolder | SharedFolder, on_step: Callable[[Row], None] | None = None
) -> None:
    """Run, or go on with, `run` in `folder` until `run.steps`; resumes at the last commit and ends identical.

    Each step draws prompts, samples completions, scores them under π_old, and takes one update per mini-batch. A run
    whose gradients stop being finite is finished there, with what was measured, and says so in its manifest.
    """
    for text in warn_void(run):
        warnings.warn(text, stacklevel=2)
    start, checkpoint = folder.latest()
    if checkpoint is not None:
        parts.policy.load(checkpoint)
    parts.engine.load(parts.policy.weights())
    if checkpoint is None:
        folder.add("steps", [{"step": 0, **parts.once(lambda: evaluate(run, parts))}])
    for step in range(start + 1, run.steps + 1):
        clock = Clock()
        try:
            row, updates, layers = train_step(run, parts, step, clock)
        except Diverged as error:
            warnings.warn(f"step {step}: {error}", stacklevel=2)
            folder.commit(step - 1, parts.policy.save)
            folder.finish(diverged=f"step {step}: {error}")
            return
        if step % run.eval_every == 0 or step == run.steps:
            with clock("evaluate"):
                row |= parts.once(lambda: evaluate(run, parts))
        if step in run.hf_checkpoints and parts.export:
            parts.export(step)
        row |= clock.columns() | {"memory_peak_mb": peak_memory_mb()}
        for table, rows in (("steps", [row]), ("updates", updates), ("layers", layers)):
            folder.add(table, rows)
        if step % run.save_every == 0 or step == run.steps:
            folder.commit(step, parts.policy.save)
        if on_step:
            on_step(row)
    folder.finish()


def train_step(run: RunConfig, parts: Parts, step: int, clock: Clock) -> tuple[Row, list[Row], list[Row]]:
    """One batch of rollouts and its updates: rows for `steps`, `updates` and `layers`."""
    policy, arm = parts.policy, run.arm
    with clock("sample"):
        batch = parts.once(lambda: roll_out(run, parts, step))
    with clock("score"):
        natural = policy.score(batch, scores=needs_scores(parts.source))
        routes = parts.source(batch, natural)
        ratio_routes = parts.ratio_source(batch, natural) if parts.ratio_source else routes
        # Both sides of a ratio use the same routes: only live arms and R2 may reuse the natural scoring.
        reused = ratio_routes is None or ratio_routes is natural.routes
        old = natural if reused else policy.score(batch, ratio_routes)
        if arm.anchor == "engine":
            old = replace(old, logprobs=batch.rollout_logprobs)
        if parts.reference is not None:
            batch = replace(batch, ref_logprobs=parts.reference.score(batch).logprobs)
    split = mini_batches(len(batch), run.mini_batches, derive(run.seed, SPLIT, step))
    with clock("measure"):
        detail = step % run.measure.detail_every == 0
        probe = Probe(policy, batch, natural, split, run.measure, detail)
    rows = []
    log_ratio, lost = torch.zeros_like(old.logprobs), torch.zeros(old.logprobs.shape, dtype=torch.int8)
    for number, index in enumerate(split):
        part = batch.rows(index)
        width = part.tokens.shape[1]
        old_part, natural_part = old.rows(index, width), natural.rows(index, width)
        with clock("measure"):
            detail_row = probe.before_update(number)
        forced = None if routes is None else routes.rows(index, width)
        with clock("update"):
            if parts.ratio_source:
                of_ratio = None if ratio_routes is None else ratio_routes.rows(index, width)
                old_part = carried_over(policy, part, old_part, of_ratio, forced)
            updated = policy.update(part, old_part, parts.objective, forced)
        with clock("measure"):
            row = update_row(part, old_part, updated, natural_part, forced)
            detail_row |= probe.after_update(number)
            log_ratio[index, :width] = updated.logprobs - old_part.logprobs
            lost[index, :width] = updated.lost
        lr = run.optimizer.lr_at((step - 1) * len(split) + number + 1)
        rows.append({"step": step, "update": number + 1, "lr": lr} | row | detail_row)
    with clock("sample"):
        push_gap = parts.engine.load(policy.weights())
    with clock("measure"):
        probed, sites = probe.after_step()
        engine, engine_sites = engine_row(batch, natural)
        row = {"step": step, **batch_row(batch, natural), **ratio_row(batch, log_ratio, lost), **probed, **engine}
        sites = [site | values for site, values in zip(sites, engine_sites, strict=True)]
        row |= {} if push_gap is None else {"push_gap_max": push_gap}
        for name in ("grad_norm", "grad_clipped"):
            row[name] = sum(r[name] for r in rows) / len(rows)
        row["first_update_log_ratio_max"] = rows[0]["token_log_ratio_max"]
    return row, rows, [{"step": step} | site for site in sites]


def carried_over(
    policy: Policy, part: Batch, old: Scored, of_ratio: RoutingTrace | None, of_gradient: RoutingTrace | None
) -> Scored:
    """The old log-probs with which an update under the gradient's routes has the ratio of other routes.

    With R the log-ratio under the ratio's routes and π_g the policy under the gradient's, both before the update,
    log π_g − (log π_g − R) has the value R and the gradient of log π_g.
    """
    ratio = policy.score(part, of_ratio).logprobs - old.logprobs
    return replace(old, logprobs=policy.score(part, of_gradient).logprobs - ratio)


def roll_out(run: RunConfig, parts: Parts, step: int) -> Batch:
    """The step's prompts, their completions, rewards and advantages."""
    excluding = {prompt.text for prompt in parts.held_out}
    prompts = parts.encode(draw(parts.task, run.prompts_per_step, derive(run.seed, PROMPTS, step), excluding))
    rollouts = parts.engine.generate(
        prompts, run.group_size, key=(run.seed, NOISE, step), sampling=sampling_of(run)
    )
    rewards = [checked_reward(parts.task, r.prompt, r.text) for r in rollouts]
    groups = [i for i in range(len(prompts)) for _ in range(run.group_size)]
    batch = collate(rollouts, groups, rewards, parts.pad_token)
    batch = replace(batch, advantages=group_advantages(batch.rewards, batch.prompt_index))
    if not bool(batch.advantages.any()):
        warnings.warn(
            f"step {step}: all rewards of every group are equal, so nothing can be learned from it. If this goes on, "
            "make the task easier or harder, or start from a better cold start.",
            stacklevel=2,
        )
    return batch


def mini_batches(rows: int, count: int, seed: int) -> list[Tensor]:
    """A random split of the rows into `count` parts whose sizes differ by at most one."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return list(order.tensor_split(count))


def batch_row(batch: Batch, natural: Scored) -> Row:
    """What was sampled, and how well it did."""
    groups = batch.rewards.view(-1, int((batch.prompt_index == batch.prompt_index[0]).sum()))
    return {
        "reward": batch.rewards.double().mean().item(),
        "exact": exact(batch.rewards),
        "reward_std": batch.rewards.double().std(correction=0).item(),
        "groups_without_signal": (batch.advantages.view_as(groups) == 0).all(1).double().mean().item(),
        "response_tokens": batch.response_mask.sum(1).double().mean().item(),
        "truncated": (~batch.finished).double().mean().item(),
        "entropy": natural.entropy[batch.response_mask].double().mean().item(),
    }


def evaluate(run: RunConfig, parts: Parts) -> Row:
    """Reward and exact match on the held-out prompts, greedy and sampled; the same noise at every evaluation."""
    row: Row = {"eval_n": len(parts.held_out)}
    for name, greedy in (("greedy", True), ("sampled", False)):
        sampling = replace(sampling_of(run), greedy=greedy)
        rollouts = parts.engine.generate(parts.held_out, 1, key=(run.seed, NOISE, 0), sampling=sampling)
        rewards = torch.tensor([checked_reward(parts.task, r.prompt, r.text) for r in rollouts])
        row |= {f"eval_reward_{name}": rewards.double().mean().item(), f"eval_exact_{name}": exact(rewards)}
    return row


def exact(rewards: Tensor) -> float:
    """Share of rewards that are 1, up to rounding."""
    return (rewards >= 1 - 1e-6).double().mean().item()


def sampling_of(run: RunConfig) -> Sampling:
    return Sampling(run.temperature, run.max_new_tokens, tuple(run.stop))


def warn_void(run: RunConfig) -> list[str]:
    """What would make this run's comparison void, one sentence each. Raises ConfigError where it cannot run at all."""
    rows = run.prompts_per_step * run.group_size
    if run.mini_batches > rows:
        raise ConfigError(f"{run.mini_batches} mini-batches cannot be cut from {rows} rollouts per step.")
    found = []
    if run.mini_batches == 1 and run.arm.anchor == "policy":
        found.append(
            "one update per step: every importance ratio is exactly 1, so losses, clipping and replay do not differ. "
            "Use mini_batches >= 2."
        )
    if run.group_size == 1:
        found.append("group_size=1: group-relative advantages are all 0, so nothing is learned. Use group_size >= 2.")
    return found


@dataclass
class Clock:
    """Seconds per phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def columns(self) -> Row:
        self.seconds["step"] = time.perf_counter() - self.started
        return {f"seconds_{phase}": value for phase, value in self.seconds.items()}


def peak_memory_mb() -> float:
    """Peak resident memory of this process so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)
