"""What a step measures, within its budget: `begin`, `before` and `after` every update, `end` → rows per table.

Everything that needs no extra forward is taken from all tokens at every update; the rest on a probe (`probe.py`). A
study that measures more passes a subclass to the trainer and calls these methods.
"""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from moe_rl.config import RunConfig
from moe_rl.metrics import ratios, routers, volatility
from moe_rl.policies.base import Policy
from moe_rl.probe import CHANGE, ENGINE_CHANGE, Probe, engine_gap
from moe_rl.registry import Use
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Batch, Scored, Updated, prompt_rows, response_rows

Row = dict[str, Any]
Rows = dict[str, list[Row]]
"""Rows by the name of their table."""


class Recorder:
    """Measures one step after the other. Nothing here may change what is sampled, scored or trained."""

    def __init__(self, run: RunConfig, policy: Policy):
        self.run, self.policy = run, policy
        self.seconds: dict[str, float] = {}
        """Of the step's phases so far."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to the phase's."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    # ------------------------------------------------------------------ one step, in the order of its calls
    def begin(self, step: int, batch: Batch, natural: Scored, split: list[Tensor]) -> None:
        """Before the first update. `natural` is the policy's scoring of the batch under the weights that training
        begins with, `split` the rows of every update's mini-batch, epoch after epoch."""
        self.step, self.batch, self.natural, self.split = step, batch, natural, split
        if self.run.truncates and self.run.sampling_mask and batch.kept is None:
            warnings.warn("the engine does not say which tokens it kept, so log-probs are over the whole vocabulary, "
                          "which is not what it draws from", stacklevel=2)
        self.lags = None if batch.sampled_at is None else step - 1 - batch.sampled_at
        """Steps between the weights that drew a response token and those of `natural`."""
        self.fresh = self.lags is None or not bool(self.lags[batch.response_mask].any())
        self.updates: list[Row] = []
        self.per_epoch = len(split) // self.run.epochs
        self.log_ratio = torch.zeros_like(batch.rollout_logprobs).repeat(self.run.epochs, 1)
        self.clipped_by = torch.zeros(self.log_ratio.shape, dtype=torch.int8)
        self.counted = batch.response_mask.repeat(self.run.epochs, 1)
        self.routes: list[RoutingTrace] = []
        with self.timed("measure"):
            detail = step % self.run.measure.detail_every == 0
            # An engine is compared with the policy at equal weights.
            probed = batch if self.fresh else replace(batch, rollout_routes=None)
            self.probe = Probe(self.policy, probed, natural, split, self.run.measure, detail)

    def before(self, update: int, part: Batch) -> None:
        """Before the update of a mini-batch, counted from 0."""
        with self.timed("measure"):
            count = update + 1
            lr = self.run.optimizer.lr_at((self.step - 1) * len(self.split) + count)
            self.updates.append({"step": self.step, "update": count, "lr": lr} | self.probe.before_update(update))
            if self.run.epochs > 1:
                self.updates[-1]["epoch"] = update // self.per_epoch + 1
            if self.run.dial.sigma:
                self.updates[-1]["dial_dose"] = self.run.dial.size(update, len(self.split))

    def after(self, update: int, part: Batch, updated: Updated) -> None:
        """After that update. `part` is what was trained on, ratios' log-probs and all."""
        with self.timed("measure"):
            assert part.old_logprobs is not None, "the trainer fills it in before an update"
            index, width = self.split[update], part.tokens.shape[1]
            natural = self.natural.rows(index, width)
            log_ratio = (updated.logprobs if part.ratio_logprobs is None else part.ratio_logprobs) - part.old_logprobs
            self.updates[-1] |= update_row(part, log_ratio, updated, natural) | self.probe.after_update(update)
            rows = index + update // self.per_epoch * len(self.batch)
            self.log_ratio[rows, :width], self.clipped_by[rows, :width] = log_ratio, updated.clipped_by
            self.routes.append(updated.routes if updated.preferred is None else updated.preferred)
            if part.loss_mask is not None:
                self.counted[rows, :width] = part.loss_mask

    def end(self, push_gap: float | None) -> Rows:
        """After the weights went to the engine: the rows of the step. `push_gap` is what that check found, in nats."""
        with self.timed("measure"):
            probed, sites = self.probe.after_step()
            nothing: tuple[Row, list[Row]] = {}, [{} for _ in sites]
            engine, engine_sites = engine_row(self.batch, self.natural) if self.fresh else nothing
            row = {"step": self.step, **batch_row(self.batch, self.natural), **probed, **engine}
            row |= ratio_row(self.batch, self.log_ratio, self.clipped_by, self.counted)
            row |= {} if push_gap is None else {"push_gap_max": push_gap}
            for name in ("grad_norm", "grad_clipped", "grad_cosine"):
                if found := [update[name] for update in self.updates if name in update]:
                    row[name] = sum(found) / len(found)
            by_lag = self._by_lag() if Use.of(self.run.batches).options.get("lag") or not self.fresh else []
            if self.lags is not None and by_lag:
                of_tokens = self.lags[self.batch.response_mask].double()
                row |= {"lag_mean": of_tokens.mean().item(), "lag_max": of_tokens.max().item()}
            row["first_update_log_ratio_max"] = self.updates[0]["token_log_ratio_max"]
        layers = [{"step": self.step} | a | b for a, b in zip(sites, engine_sites, strict=True)]
        return {"steps": [row], "updates": self.updates, "layers": layers} | ({"lags": by_lag} if by_lag else {})

    def _by_lag(self) -> list[Row]:
        """A row per lag that response tokens have: how far the policy had gone from what drew them before it trained on
        them, and what the arm's ratios and clips then did to them."""
        if self.lags is None:
            return []
        rows = []
        for lag in self.lags[self.batch.response_mask].unique().tolist():
            part = replace(self.batch, response_mask=self.batch.response_mask & (self.lags == lag))
            counted = self.counted & part.response_mask.repeat(self.run.epochs, 1)
            gap = engine_row(part, self.natural)[0]
            rows.append({"step": self.step, "lag": lag, "lag_tokens": int(part.response_mask.sum())}
                        | {name.replace("engine", "stale"): x for name, x in gap.items() if name != "engine_unknown"}
                        | ratio_row(part, self.log_ratio, self.clipped_by, counted))
        return rows

    def flips(self, rows: Int[Tensor, " rows"]) -> Int[Tensor, "rows time"]:
        """At how many sites the routers chose another set for a token than π_old's did, or would have chosen under
        replay, right before the last update on it; for some rows of the batch. Where a route is unknown none counts."""
        found = torch.zeros(len(rows), self.batch.tokens.shape[1], dtype=torch.long)
        for index, routes in zip(self.split, self.routes, strict=True):
            here, there = (index[:, None] == rows).nonzero().T
            now = routes.rows(here)
            old = self.natural.routes.rows(rows[there], now.shape[1])
            changed = ~old.same_sets(now) & old.known & now.known
            found[there, 1 : now.shape[1]] = changed.sum(-1)[:, :-1].cpu()  # decided where it is no input yet
        return found

    def cost(self) -> Row:
        """Seconds per phase since the last call, their sum, and the peak of this process's memory so far."""
        columns = {f"seconds_{phase}": value for phase, value in self.seconds.items()}
        columns |= {"seconds_step": sum(self.seconds.values()), "memory_peak_mb": peak_memory_mb()}
        self.seconds = {}
        return columns


# ---------------------------------------------------------------------- rows
def update_row(part: Batch, log_ratio: Tensor, updated: Updated, natural: Scored) -> Row:
    """One optimizer step: ratios and clipping of its mini-batch, and how far its routes had moved before the step."""
    rows = response_rows(part)
    row = {
        "loss": updated.loss,
        "grad_norm": updated.grad_norm,
        "grad_clipped": float(updated.grad_clipped),
        "entropy": updated.entropy[part.response_mask].double().mean().item(),
        **ratio_row(part, log_ratio, updated.clipped_by, part.loss_mask),
        **updated.metrics,
    }
    if part.routes is not None:
        assert updated.preferred is not None, "a policy that replayed says what its routers preferred"
        pull = volatility.route_change(part.routes.ids(), updated.preferred.ids(), rows).row()["slot_change"]
        return row | {"pull": pull} | routers.coverage(part.routes.known, rows | prompt_rows(part)).row()
    change = volatility.route_change(natural.routes.ids(), updated.routes.ids(), rows).row()
    return row | {f"fresh_{name}": change[name] for name in CHANGE}


def ratio_row(batch: Batch, log_ratio: Tensor, clipped_by: Tensor, counted: Tensor | None = None) -> Row:
    """Ratio statistics and clip fractions of a batch's tokens, of every epoch: its rows follow each other as often.
    `counted` are the tokens that no filter took out, which have no gradient that a clip could take."""
    epochs = len(log_ratio) // len(batch)
    mask, advantages = batch.response_mask.repeat(epochs, 1), batch.advantages.repeat(epochs, 1)
    return ratios.ratio_statistics(log_ratio, mask) | ratios.clip_fractions(
        clipped_by, mask if counted is None else counted, advantages)


def batch_row(batch: Batch, natural: Scored) -> Row:
    """What was sampled, and how well it did."""
    groups = batch.rewards.view(-1, int((batch.prompt_index == batch.prompt_index[0]).sum()))
    row = {
        "reward": batch.rewards.double().mean().item(),
        "exact": exact(batch.rewards),
        "reward_std": batch.rewards.double().std(correction=0).item(),
        "groups_without_signal": (batch.advantages == 0).all(1).view_as(groups).all(1).double().mean().item(),
        "response_tokens": batch.response_mask.sum(1).double().mean().item(),
        "truncated": (~batch.finished).double().mean().item(),
        "entropy": natural.entropy[batch.response_mask].double().mean().item(),
        **({} if batch.kept is None else {"kept_tokens": len(batch.kept.ids) / int(batch.response_mask.sum())}),
    }
    if batch.turn is not None:
        said = batch.attention_mask & ~batch.response_mask & (batch.response_mask.cumsum(1) > 0)
        row |= {"turns": batch.turn.amax(1).double().mean().item(),
                "environment_tokens": said.sum(1).double().mean().item()}
    return row


def engine_row(batch: Batch, natural: Scored) -> tuple[Row, list[Row]]:
    """Engine and policy at equal weights, on all response tokens of a step: a row for `steps`, and one per site."""
    row, sites = engine_gap(batch, natural), [Row() for _ in natural.routes.layout.sites]
    if batch.rollout_routes is not None:
        routes, rows = batch.rollout_routes, response_rows(batch)
        change = volatility.route_change(natural.routes.ids(), routes.ids(), rows)
        mean = change.row()
        row |= {f"engine_{name}": mean[name] for name in ENGINE_CHANGE}
        row["engine_unknown"] = 1 - routes.known[rows | prompt_rows(batch)].double().mean().item()
        for site, values in zip(sites, change.site_rows(), strict=True):
            site |= {f"engine_{name}": values[name] for name in ("slot_change", "set_change")}
    return row, sites


def exact(rewards: Tensor) -> float:
    """Share of rewards that are 1, up to rounding."""
    return (rewards >= 1 - 1e-6).double().mean().item()


def peak_memory_mb() -> float:
    """Peak resident memory of this process so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)
