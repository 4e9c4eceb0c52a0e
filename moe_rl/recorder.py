"""What a step measures, within its budget: `begin`, `before` and `after` every update, `end` → rows per table.

Everything that needs no extra forward is taken from all tokens at every update. The rest is measured on a *probe*: the
first few responses of every (randomly drawn) mini-batch of the first epoch. Each step the probe is scored twice under
the new weights, without replay and replaying the old policy's routes; every few steps the *detail* follows single
updates. Volatility compares unconstrained routes, in every arm. A study that measures more passes a subclass of
`Recorder` to the trainer."""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from moe_rl.config import Measure, RunConfig
from moe_rl.errors import NotFinite
from moe_rl.metrics import ratios, volatility
from moe_rl.metrics.pooled import Pooled
from moe_rl.models.memory import Sizes, estimate_peak, measure_sizes, share_of_peak
from moe_rl.policies.base import Policy
from moe_rl.registry import Component
from moe_rl.rollouts.engine import Sampler
from moe_rl.routing.hooks import RouterScores
from moe_rl.routing.trace import RoutingTrace
from moe_rl.seeds import NOISE
from moe_rl.tasks.base import RIGHT, AnyTask, votes_of
from moe_rl.tasks.environments import compute_rewards, sample_rollouts
from moe_rl.types import (
    Batch,
    MiniBatch,
    Prompt,
    Rollout,
    Rollouts,
    Sampling,
    Scored,
    Stage,
    Updated,
    prompt_rows,
    response_rows,
)

Row = dict[str, Any]
Rows = dict[str, list[Row]]
"""Rows by the name of their table."""
CHANGE = ("expert_change_rate", "any_change_rate", "any_layer_change", "layers_changed", "jaccard_distance")
ENGINE_CHANGE = ("expert_change_rate", "any_change_rate", "any_layer_change")
GREEDY = 0
"""The number of the greedy completion of a problem among its samples; those that are drawn count from 1."""


class Recorder:
    """Measures one step after the other. Nothing here may change what is sampled, scored or trained."""

    def __init__(self, run: RunConfig, policy: Policy):
        self.run, self.policy = run, policy
        self.seconds: dict[str, float] = {}
        """Of the step's phases so far."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to the phase's, on a GPU until it has done all of it."""
        start = self._now()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - start

    # ------------------------------------------------------------------ one step, in the order of its calls
    def begin(self, step: int, batch: Batch, unconstrained: Scored, split: list[Tensor]) -> None:
        """Before the first update. `unconstrained` is the policy's scoring of the batch under the weights that training
        begins with, `split` the rows of every update's mini-batch, epoch after epoch."""
        self.step, self.batch, self.unconstrained, self.split = step, batch, unconstrained, split
        if self.run.truncates and self.run.sampling_mask and batch.kept_tokens is None:
            warnings.warn("the engine does not report what sampling kept: log-probs are over all tokens", stacklevel=2)
        self.fresh = batch.lag is None or not bool(batch.lag[batch.response_mask].any())
        self.updates: list[Row] = []
        self.per_epoch = len(split) // self.run.epochs
        self.log_ratio = torch.zeros_like(batch.rollout_logprobs).repeat(self.run.epochs, 1)
        self.clipped_by = torch.zeros(self.log_ratio.shape, dtype=torch.int8)
        self.counted = batch.response_mask.repeat(self.run.epochs, 1)
        self.routes: list[RoutingTrace] = []

    def start_probe(self) -> Probe:
        """After `begin`: the responses of the step that are scored again. Its calls are the forwards of measuring."""
        with self.timed("measure"):
            detail = self.step % self.run.measure.detail_every == 0
            # An engine is compared with the policy at equal weights.
            probed = self.batch if self.fresh else replace(self.batch, rollout_routes=None)
            self.probe = Probe(
                self.policy, probed, self.unconstrained, self.split, self.run.measure, detail, self.timed
            )
        return self.probe

    def before(self, update: int, mini_batch: MiniBatch, probed: Row) -> None:
        """Before the update of `mini_batch`, counted from 0; `probed` is the row of `Probe.score_before`."""
        with self.timed("measure"):
            count = update + 1
            lr = self.run.optimizer.lr_at((self.step - 1) * len(self.split) + count)
            self.updates.append({"step": self.step, "update": count, "lr": lr} | probed)
            if self.run.epochs > 1:
                self.updates[-1]["epoch"] = update // self.per_epoch + 1
            if self.run.router_noise.scale:
                self.updates[-1]["noise_scale"] = self.run.router_noise.size(update, len(self.split))

    def after(self, update: int, mini_batch: MiniBatch, updated: Updated, probed: Row) -> None:
        """After that update of `mini_batch`; `probed` is the row of `Probe.score_after`."""
        with self.timed("measure"):
            index, width = self.split[update], mini_batch.tokens.shape[1]
            unconstrained = self.unconstrained.rows(index, width)
            own = mini_batch.ratio_logprobs
            log_ratio = (updated.logprobs if own is None else own) - mini_batch.old_logprobs
            self.updates[-1] |= update_row(mini_batch, log_ratio, updated, unconstrained) | probed
            rows = index + update // self.per_epoch * len(self.batch)
            self.log_ratio[rows, :width], self.clipped_by[rows, :width] = log_ratio, updated.clipped_by
            self.routes.append(updated.routes if updated.preferred is None else updated.preferred)
            self.counted[rows, :width] = mini_batch.mask

    def end(self, push_gap: float | None, probed: tuple[Row, list[Row]]) -> Rows:
        """After the weights went to the engine: the rows of the step. `push_gap` is what that check found, in nats;
        `probed`: what `Probe.score_at_end` says of the step and of each MoE layer."""
        with self.timed("measure"):
            of_step, moe_layers = probed
            nothing: tuple[Row, list[Row]] = {}, [{} for _ in moe_layers]
            engine, engine_moe_layers = engine_row(self.batch, self.unconstrained) if self.fresh else nothing
            row = {"step": self.step, **batch_row(self.batch, self.unconstrained), **of_step, **engine}
            row |= ratio_row(self.batch, self.log_ratio, self.clipped_by, self.counted)
            row |= {} if push_gap is None else {"push_gap_max": push_gap}
            for name in ("grad_norm", "grad_clipped", "grad_cosine", "weights_changed"):
                if values := [update[name] for update in self.updates if name in update]:
                    row[name] = sum(values) / len(values)
            by_lag = self._by_lag() if Component.of(self.run.batches).options.get("lag") or not self.fresh else []
            if self.batch.lag is not None and by_lag:
                of_tokens = self.batch.lag[self.batch.response_mask].double()
                row |= {"lag_mean": of_tokens.mean().item(), "lag_max": of_tokens.max().item()}
            row["first_update_log_ratio_max"] = self.updates[0]["token_log_ratio_max"]
        layers = [{"step": self.step} | a | b for a, b in zip(moe_layers, engine_moe_layers, strict=True)]
        return {"steps": [row], "updates": self.updates, "layers": layers} | ({"lags": by_lag} if by_lag else {})

    def _by_lag(self) -> list[Row]:
        """A row per lag that response tokens have: how far the policy had gone from what drew them before it trained on
        them, and what the arm's ratios and clips then did to them."""
        if self.batch.lag is None:
            return []
        rows = []
        for lag in self.batch.lag[self.batch.response_mask].unique().tolist():
            part = replace(self.batch, response_mask=self.batch.response_mask & (self.batch.lag == lag))
            counted = self.counted & part.response_mask.repeat(self.run.epochs, 1)
            gap = engine_row(part, self.unconstrained)[0]
            rows.append(
                {"step": self.step, "lag": lag, "lag_tokens": int(part.response_mask.sum())}
                | {name.replace("engine", "stale"): x for name, x in gap.items() if name != "engine_unknown"}
                | ratio_row(part, self.log_ratio, self.clipped_by, counted)
            )
        return rows

    def flips(self, rows: Int[Tensor, " rows"]) -> Int[Tensor, "rows time"]:
        """At how many MoE layers the routers chose another set for a token than π_old's did, or would have chosen under
        replay, right before the last update on it; for some rows of the batch. Where a route is unknown none counts."""
        flips = torch.zeros(len(rows), self.batch.tokens.shape[1], dtype=torch.long)
        for index, routes in zip(self.split, self.routes, strict=True):
            here, there = (index[:, None] == rows).nonzero().T
            now = routes.rows(here)
            old = self.unconstrained.routes.rows(rows[there], now.shape[1])
            changed = ~old.same_sets(now) & old.known & now.known
            flips[there, 1 : now.shape[1]] = changed.sum(-1)[:, :-1].cpu()  # decided where it is no input yet
        return flips

    def _device(self) -> torch.device | None:
        """The policy's GPU; None: torch's own choice."""
        device = getattr(self.policy, "device", None)
        return device if isinstance(device, torch.device) and device.type == "cuda" else None

    def _now(self) -> float:
        """Seconds of a clock, once a GPU that is in use has done what it was asked."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize(self._device())
        return time.perf_counter()

    def cost(self) -> Row:
        """Seconds per phase since the last call, their sum, tokens per second of it, and the peak of this process's
        memory so far; on a GPU also its memory's and the update's share of the card's peak."""
        seconds, self.seconds = self.seconds, {}
        columns = {f"seconds_{phase}": value for phase, value in seconds.items()}
        columns |= {"seconds_step": sum(seconds.values()), "memory_peak_mb": peak_memory_mb()}
        columns["tokens_per_second"] = int(self.batch.attention_mask.sum()) / columns["seconds_step"]
        if (padding := getattr(self.policy, "padding", None)) is not None:
            columns["padding"] = padding
        if torch.cuda.is_initialized():
            columns["memory_device_peak_mb"] = torch.cuda.max_memory_allocated(self._device()) / 1e6
            if self._sizes is not None:
                lengths = self.batch.attention_mask.sum(1)
                tokens = getattr(self.policy, "micro_batch_tokens", None)
                columns["memory_device_estimate_mb"] = (
                    estimate_peak(self.run, self._sizes, int(lengths.max()), tokens) / 1e6
                )
                columns["peak_share"] = share_of_peak(
                    self.run, self._sizes, int(lengths.float().mean()), seconds["update"]
                )
        return columns

    @cached_property
    def _sizes(self) -> Sizes | None:
        """The sizes of the policy's model, where it is one of Hugging Face's."""
        model = getattr(self.policy, "model", None)
        return measure_sizes(model) if hasattr(getattr(model, "config", None), "get_text_config") else None


@contextmanager
def unless_not_finite() -> Iterator[None]:
    """Warn where routers have no finite scores any more: what was to be measured is missing, and the run ends with the
    next rollouts."""
    try:
        yield
    except NotFinite as error:
        warnings.warn(str(error), stacklevel=3)


class Probe:
    """The responses of one step on which quantities that need an extra forward are measured."""

    def __init__(
        self,
        policy: Policy,
        batch: Batch,
        unconstrained: Scored,
        split: list[Tensor],
        settings: Measure,
        detail: bool,
        timed: Callable[[str], AbstractContextManager[None]],
    ):
        first = len(split) * len(batch) // sum(map(len, split))  # of several epochs, each of which splits all rows
        per_mini_batch = len(batch) if settings.full else max(1, settings.responses // first)
        self.policy, self.detail, self.timed = policy, detail or settings.full, timed
        self.step_batch, self.unconstrained = batch, unconstrained
        self.parts = [index[:per_mini_batch] for index in split]
        rows = torch.cat(self.parts[:first])
        self.batch = batch.rows(rows)
        self.old = unconstrained.rows(rows, self.batch.tokens.shape[1])
        self.scores = policy.score(self.batch, scores=True).scores if self.detail else None
        self.engine = self._engine_replayed() if self.detail else {}
        self.routes = self.old.routes
        """Unconstrained routes after the last update that was followed."""
        self.followed: list[list[Row]] = []
        """What each of these updates changed, a row per MoE layer."""

    def score_before(self, update: int) -> Row:
        """Detail: attribution on the mini-batch about to be updated (undefined at the first: nothing has moved)."""
        if not self.detail or update == 0:
            return {}
        with self.timed("measure"):
            part = self.step_batch.rows(self.parts[update])
            old = self.unconstrained.rows(self.parts[update], part.tokens.shape[1])
            unconstrained, replayed = self.policy.score(part), self.policy.score(part, old.routes)
            sums = ratios.attribution(
                unconstrained.logprobs - old.logprobs, replayed.logprobs - old.logprobs, part.response_mask
            )
            return sums.row()

    def score_after(self, update: int) -> Row:
        """Detail: how many experts this one update changed, on the whole probe."""
        if not self.detail:
            return {}
        with self.timed("measure"), unless_not_finite():
            routes = self.policy.score(self.batch).routes
            change = volatility.route_change(self.routes.experts, routes.experts, response_rows(self.batch))
            self.routes = routes
            self.followed.append(change.moe_layer_rows())
            row = change.row()
            return {name: row[name] for name in CHANGE}
        return {}

    def score_at_end(self) -> tuple[Row, list[Row]]:
        """What all updates of the step did together: a row for `steps`, and one per MoE layer for `layers`."""
        with self.timed("measure"), unless_not_finite():
            after = self.policy.score(self.batch, scores=self.detail)
            replayed = self.policy.score(self.batch, self.old.routes)
            row: Row = {
                "measured_responses": len(self.batch),
                "measured_tokens": int(self.batch.response_mask.sum()),
                **self._replay_gap(after, replayed),
                **self.engine,
            }
            moe_layers = [Row() for _ in after.routes.layout.moe_layers]

            def add(of_step: Row, per_moe_layer: list[Row], suffix: str = "") -> None:
                for target, values in zip((row, *moe_layers), (of_step, *per_moe_layer), strict=True):
                    target |= {name + suffix: value for name, value in values.items()}

            add(*self._changes(after, response_rows(self.batch)))
            add(*self._changes(after, prompt_rows(self.batch)), suffix="_prompt")
            add({}, self._use(after))
            if self.detail:
                add(*self._noise_floor(after))
            for n, of_update in enumerate(self.followed, 1):
                add({}, [{f"change_update_{n}": moe_layer["expert_change_rate"]} for moe_layer in of_update])
            return row, moe_layers
        return {}, [{} for _ in self.old.routes.layout.moe_layers]

    # ------------------------------------------------------------------ parts of it
    def _engine_replayed(self) -> Row:
        """What is left of the engine's gap on the probe when the policy replays the engine's routes (R3)."""
        if self.batch.rollout_routes is None or self.batch.rollout_routes.coverage == 0:
            return {}
        unconstrained = engine_gap(self.batch, self.old)
        replayed = engine_gap(self.batch, self.policy.score(self.batch, self.batch.rollout_routes))
        return {f"{name}_unconstrained": value for name, value in unconstrained.items()} | {
            f"{name}_replayed": value for name, value in replayed.items()
        }

    def _replay_gap(self, unconstrained: Scored, replayed: Scored) -> Row:
        """log π(unconstrained) - log π(replayed) under the new weights, and what routers would pick under replay."""
        assert replayed.preferred is not None, "a policy that replayed says what its routers preferred"
        rows = response_rows(self.batch)
        gap = (unconstrained.logprobs - replayed.logprobs)[self.batch.response_mask].double()
        pull = volatility.route_change(replayed.routes.experts, replayed.preferred.experts, rows).row()
        return {
            "replay_gap_mean": gap.mean().item(),
            "replay_gap_std": gap.std(correction=0).item(),
            "replay_gap_max": gap.abs().max().item(),
            "pull": pull["expert_change_rate"],
        }

    def _changes(self, after: Scored, rows: Tensor) -> tuple[Row, list[Row]]:
        """Volatility of the tokens in `rows` from π_old to the new weights: overall, and per MoE layer."""
        old, new = self.old.routes, after.routes
        gates = None if self.scores is None else self.scores.gates
        both = None
        if self.scores is not None and after.scores is not None:
            both = self.scores.log_probs_at(old.ids()), after.scores.log_probs_at(old.ids())
        change = volatility.changes(old.experts, new.experts, rows, new.layout, gates, both)
        return change.row(), change.moe_layer_rows()

    def _use(self, after: Scored) -> list[Row]:
        """Load, and at detail confidence and margins, of the new weights' unconstrained routing, per MoE layer."""
        rows, moe_layers = response_rows(self.batch), after.routes.layout.moe_layers
        load = volatility.load_statistics(
            after.routes.experts, [s.num_experts for s in moe_layers], rows
        ).moe_layer_rows()
        result = [
            {"moe_layer": i, "layer": moe_layer.decoder_layer} | load[i] for i, moe_layer in enumerate(moe_layers)
        ]
        if (scores := after.scores) is not None:
            confidence = volatility.router_confidence(scores.log_probs, after.routes.experts, rows).moe_layer_rows()
            margins = volatility.margin_summary(scores.margins, rows)
            result = [a | b | c for a, b, c in zip(result, confidence, margins, strict=True)]
        return result

    def _noise_floor(self, after: Scored) -> tuple[Row, list[Row]]:
        """The same weights scored again: rows in reverse, in two calls of unequal size, with extra padding."""
        order = torch.arange(len(self.batch) - 1, -1, -1)
        changes, gap = [], torch.zeros_like(after.logprobs)
        for index in filter(len, order.tensor_split([len(order) // 3])):  # a probe of two has no first third
            part = self.batch.rows(index)
            time = part.tokens.shape[1]
            first, again = after.rows(index, time), self.policy.score(_padded(part, 3))
            gap[index, :time] = again.logprobs[:, :time] - first.logprobs
            experts = again.routes.experts[:, :time]
            changes.append(volatility.route_change(first.routes.experts, experts, response_rows(part)))
        change, statistics = sum(changes, Pooled()), ratios.ratio_statistics(gap, self.batch.response_mask)
        row = {
            "noise_floor_logprob": statistics["token_log_ratio_max"],
            "noise_floor_kl_k3": statistics["token_kl_k3"],
            "noise_floor_beyond_2": statistics["token_beyond_2"],
            **{f"noise_floor_{name}": change.row()[name] for name in ENGINE_CHANGE},
        }
        return row, [
            {"noise_floor_any_change_rate": moe_layer["any_change_rate"]} for moe_layer in change.moe_layer_rows()
        ]


# ---------------------------------------------------------------------- rows
def update_row(part: MiniBatch, log_ratio: Tensor, updated: Updated, unconstrained: Scored) -> Row:
    """One optimizer step: ratios and clipping of its mini-batch, and how far its routes had moved before the step."""
    rows = response_rows(part)
    row = {
        "loss": updated.loss,
        "grad_norm": updated.grad_norm,
        "grad_clipped": float(updated.grad_clipped),
        "entropy": updated.entropy[part.response_mask].double().mean().item(),
        **ratio_row(part, log_ratio, updated.clipped_by, part.mask),
        **updated.metrics,
    }
    if part.routes is not None:
        assert updated.preferred is not None, "a policy that replayed says what its routers preferred"
        pull = volatility.route_change(part.routes.experts, updated.preferred.experts, rows).row()
        covered = volatility.coverage(part.routes.known, rows | prompt_rows(part)).row()
        return row | {"pull": pull["expert_change_rate"]} | covered
    change = volatility.route_change(unconstrained.routes.experts, updated.routes.experts, rows).row()
    return row | {f"fresh_{name}": change[name] for name in CHANGE}


def ratio_row(batch: Batch, log_ratio: Tensor, clipped_by: Tensor, counted: Tensor | None = None) -> Row:
    """Ratio statistics and clip fractions of a batch's tokens, of every epoch: its rows follow each other as often.
    `counted` are the tokens that no filter took out, which have no gradient that a clip could take."""
    epochs = len(log_ratio) // len(batch)
    mask, advantages = batch.response_mask.repeat(epochs, 1), batch.advantages.repeat(epochs, 1)
    return ratios.ratio_statistics(log_ratio, mask) | ratios.clip_fractions(
        clipped_by, mask if counted is None else counted, advantages
    )


def batch_row(batch: Batch, unconstrained: Scored) -> Row:
    """What was sampled, and how well it did."""
    groups = batch.prompt_index.unique(return_inverse=True)[1]
    differing = torch.zeros(int(groups.max()) + 1, dtype=torch.float64, device=groups.device).index_add(
        0, groups, (batch.advantages != 0).any(1).double()
    )
    row = {
        "reward": batch.rewards.double().mean().item(),
        "exact": exact(batch.rewards),
        "reward_std": batch.rewards.double().std(correction=0).item(),
        "zero_variance_groups": (differing == 0).double().mean().item(),
        "response_tokens": batch.response_mask.sum(1).double().mean().item(),
        "truncated": (~batch.finished).double().mean().item(),
        "entropy": unconstrained.entropy[batch.response_mask].double().mean().item(),
    }
    if batch.kept_tokens is not None:
        row["kept_tokens"] = len(batch.kept_tokens.ids) / int(batch.response_mask.sum())
    if batch.turn is not None:
        replies = batch.attention_mask & ~batch.response_mask & (batch.response_mask.cumsum(1) > 0)
        row |= {
            "turns": batch.turn.amax(1).double().mean().item(),
            "environment_tokens": replies.sum(1).double().mean().item(),
        }
    return row


def engine_row(batch: Rollouts, unconstrained: Scored) -> tuple[Row, list[Row]]:
    """Engine and policy at equal weights, on all response tokens of a step: a row for `steps`, and one per MoE
    layer."""
    row, moe_layers = engine_gap(batch, unconstrained), [Row() for _ in unconstrained.routes.layout.moe_layers]
    if batch.rollout_routes is not None:
        routes, rows = batch.rollout_routes, response_rows(batch)
        change = volatility.route_change(unconstrained.routes.experts, routes.experts, rows)
        mean = change.row()
        row |= {f"engine_{name}": mean[name] for name in ENGINE_CHANGE}
        row["engine_unknown"] = 1 - routes.known[rows | prompt_rows(batch)].double().mean().item()
        for moe_layer, values in zip(moe_layers, change.moe_layer_rows(), strict=True):
            moe_layer |= {f"engine_{name}": values[name] for name in ("expert_change_rate", "any_change_rate")}
    return row, moe_layers


def exact(rewards: Tensor) -> float:
    """Share of rewards that are 1, up to rounding."""
    return (rewards >= RIGHT).double().mean().item()


def peak_memory_mb() -> float:
    """Peak resident memory of this process so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e6


def engine_gap(batch: Rollouts, scored: Scored) -> Row:
    """How far the policy's log-probs are from the engine's, on the response tokens."""
    return ratios.engine_gap(scored.logprobs - batch.rollout_logprobs, batch.response_mask)


def _padded(batch: Stage, extra: int) -> Stage:
    """The batch with `extra` more columns, which one row claims as tokens, so that no one trims them away."""
    columns = {name: x for name, x in vars(batch).items() if isinstance(x, Tensor) and x.dim() > 1}
    wide: dict[str, Any] = {name: nn.functional.pad(x, (0, extra)) for name, x in columns.items()}
    wide["attention_mask"][0] = True
    wide |= {name: None for name, x in vars(batch).items() if isinstance(x, RoutingTrace | RouterScores)}
    return replace(batch, **wide)


# ---------------------------------------------------------------------- evaluation
def evaluate(
    engine: Sampler,
    task: AnyTask,
    prompts: list[Prompt],
    sampling: Sampling,
    *,
    key: tuple[int, ...],
    samples: int = 1,
    greedy: bool = True,
    first: int = 0,
) -> list[tuple[Row, Rollout]]:
    """Every completion with its row of the table `evaluations`, but for step and benchmark: the greedy one of every
    prompt, then `samples` drawn ones of each. Problems count from `first`; `key` is that of their noise."""
    completions: list[tuple[Row, Rollout]] = []
    for is_greedy in [True] * greedy + [False]:
        count = 1 if is_greedy else samples
        how = replace(sampling, greedy=is_greedy, keep_mask=False)
        rollouts = sample_rollouts(engine.generate, task, prompts, count, key=key, sampling=how)
        rewards = compute_rewards(task, rollouts)
        for i, prompt in enumerate(prompts):
            here = slice(i * count, (i + 1) * count)
            votes = [None] if is_greedy else votes_of(task, prompt, [answer_of(r) for r in rollouts[here]])
            for n, (rollout, reward, vote) in enumerate(zip(rollouts[here], rewards[here], votes, strict=True)):
                row = {
                    "problem": first + i,
                    "sample": GREEDY if is_greedy else 1 + n,
                    "reward": float(reward),
                    **getattr(reward, "parts", {}),
                    "response_tokens": float(rollout.own_tokens),
                    "truncated": float(not rollout.finished),
                    "vote": None if vote is None else 1 + vote,
                }
                completions.append((row, rollout))
    return completions


def answer_of(rollout: Rollout) -> str:
    """What a completion answers; of a conversation its last turn."""
    return rollout.turns[-1].text if rollout.turns else rollout.text


def evaluation_rows(
    engine: Sampler, task: AnyTask, prompts: list[Prompt], sampling: Sampling, seed: int, step: int
) -> Rows:
    """What a run measures after a step on its held-out prompts, one greedy and one drawn completion of each: a part of
    its row of `steps`, and the rows of `evaluations`. The noise is the same at every evaluation of a seed."""
    rows = [row for row, _ in evaluate(engine, task, prompts, sampling, key=(seed, NOISE, 0))]
    means: Row = {"step": step, "eval_n": len(prompts)}
    for name in ("greedy", "sampled"):
        rewards = torch.tensor([r["reward"] for r in rows if (r["sample"] == GREEDY) == (name == "greedy")])
        means |= {f"eval_reward_{name}": rewards.double().mean().item(), f"eval_exact_{name}": exact(rewards)}
    return {"steps": [means], "evaluations": [{"step": step, "benchmark": "held_out", **row} for row in rows]}
