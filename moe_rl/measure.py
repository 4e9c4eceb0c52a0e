"""What a step measures, within its budget.

Everything that needs no extra forward is taken from all tokens at every update. The rest is measured on a *probe*:
the first few responses of every (randomly drawn) mini-batch. Each step it is scored twice under the new weights,
naturally and replaying the old policy's routes; every few steps the *detail* follows single updates.
Volatility compares natural routes, in every arm.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from moe_rl.config import Measure
from moe_rl.metrics import ratios, volatility
from moe_rl.policies.base import Policy
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Batch, Scored, Updated

Row = dict[str, float]


def response_rows(batch: Batch) -> Bool[Tensor, "batch time"]:
    """The rows of a trace that decide a response: inputs whose *next* token is a response token."""
    return nn.functional.pad(batch.response_mask[:, 1:], (0, 1))


def prompt_rows(batch: Batch) -> Bool[Tensor, "batch time"]:
    """The rows of a trace whose next token belongs to the prompt."""
    return nn.functional.pad(batch.attention_mask[:, 1:], (0, 1)) & ~response_rows(batch)


def update_row(part: Batch, old: Scored, updated: Updated, natural: Scored, forced: RoutingTrace | None) -> Row:
    """One optimizer step: ratios and clipping of its mini-batch, and how far its routes had moved before the step.

    `forced` are the routes that the arm replays on this mini-batch, None when it is live.
    """
    rows = response_rows(part)
    row = {
        "loss": updated.loss,
        "grad_norm": updated.grad_norm,
        "grad_clipped": float(updated.grad_clipped),
        "entropy": _mean(updated.entropy, part.response_mask),
        **ratio_row(part, updated.logprobs - old.logprobs, updated.lost),
    }
    if forced is not None:
        row["pull"] = volatility.route_change(forced.ids(), updated.preferred.ids(), rows).row()["slot_change"]
        row["coverage"] = forced.known[rows | prompt_rows(part)].double().mean().item()
    else:
        change = volatility.route_change(natural.routes.ids(), updated.routes.ids(), rows).row()
        row |= {f"fresh_{name}": change[name] for name in CHANGE}
    return row


def ratio_row(batch: Batch, log_ratio: Tensor, lost: Tensor) -> Row:
    """Ratio statistics and clip fractions of some tokens."""
    mask = batch.response_mask
    return ratios.ratio_statistics(log_ratio, mask) | ratios.clip_fractions(lost, mask, batch.advantages)


def engine_row(batch: Batch, natural: Scored) -> tuple[Row, list[Row]]:
    """Engine and policy at equal weights, on all response tokens of a step: a row for `steps`, and one per site.

    `natural` is the policy's scoring of the batch under the weights it was sampled with. log r is the policy's log-prob
    minus the engine's, so that `engine_kl_k3` estimates KL(engine ‖ policy) per token.
    """
    row, sites = _engine_gap(batch, natural), [{} for _ in natural.routes.layout.sites]
    if batch.rollout_routes is not None:
        routes, rows = batch.rollout_routes, response_rows(batch)
        change = volatility.route_change(natural.routes.ids(), routes.ids(), rows)
        mean = change.row()
        row |= {f"engine_{name}": mean[name] for name in ENGINE_CHANGE}
        row["engine_unknown"] = 1 - routes.known[rows | prompt_rows(batch)].double().mean().item()
        for site, values in zip(sites, change.site_rows(), strict=True):
            site |= {f"engine_{name}": values[name] for name in ("slot_change", "set_change")}
    return row, sites


def _engine_gap(batch: Batch, scored: Scored) -> Row:
    log_ratio, mask = scored.logprobs - batch.rollout_logprobs, batch.response_mask
    found = ratios.ratio_statistics(log_ratio, mask)
    return {
        "engine_logprob_mean": _mean(log_ratio.abs(), mask),
        "engine_logprob_max": found["token_log_ratio_max"],
        "engine_kl_k3": found["token_kl_k3"],
        "engine_beyond_2": found["token_beyond_2"],
    }


ENGINE_CHANGE = ("slot_change", "set_change", "any_layer_change")
CHANGE = ("slot_change", "set_change", "any_layer_change", "layers_changed", "jaccard_distance")


class Probe:
    """The responses of one step on which quantities that need an extra forward are measured."""

    def __init__(
        self, policy: Policy, batch: Batch, natural: Scored, split: list[Tensor], settings: Measure, detail: bool
    ):
        per_mini_batch = len(batch) if settings.full else max(1, settings.probe // len(split))
        self.policy, self.detail = policy, detail or settings.full
        self.parts = [index[:per_mini_batch] for index in split]
        rows = torch.cat(self.parts)
        self.batch = batch.rows(rows)
        self.old = natural.rows(rows, self.batch.tokens.shape[1])
        self.before = policy.score(self.batch, scores=True) if self.detail else None
        self.engine = self._engine_replayed() if self.detail else {}
        self.routes = self.old.routes
        """Natural routes after the last update that was followed."""

    def before_update(self, update: int) -> Row:
        """Detail: attribution on the mini-batch about to be updated (undefined at the first: nothing has moved)."""
        if not self.detail or update == 0:
            return {}
        start = sum(len(p) for p in self.parts[:update])
        rows = slice(start, start + len(self.parts[update]))
        part = self.batch.rows(rows)
        old = self.old.rows(rows, part.tokens.shape[1])
        natural, replayed = self.policy.score(part), self.policy.score(part, old.routes)
        sums = ratios.attribution(
            natural.logprobs - old.logprobs, replayed.logprobs - old.logprobs, part.response_mask
        )
        return sums.row()

    def after_update(self, update: int) -> Row:
        """Detail: how many experts this one update changed, on the whole probe."""
        if not self.detail:
            return {}
        routes = self.policy.score(self.batch).routes
        change = volatility.route_change(self.routes.ids(), routes.ids(), response_rows(self.batch)).row()
        self.routes = routes
        return {name: change[name] for name in CHANGE}

    def after_step(self) -> tuple[Row, list[Row]]:
        """What all updates of the step did together: a row for `steps`, and one per site for `layers`."""
        after = self.policy.score(self.batch, scores=self.detail)
        replayed = self.policy.score(self.batch, self.old.routes)
        row: Row = {
            "probe_responses": len(self.batch),
            "probe_tokens": int(self.batch.response_mask.sum()),
            **self._replay_gap(after, replayed),
            **self.engine,
        }
        sites: list[Row] = [{} for _ in after.routes.layout.sites]
        for suffix, rows in (("", response_rows(self.batch)), ("_prompt", prompt_rows(self.batch))):
            for part, per_site in self._changes(after, rows):
                row |= {name + suffix: value for name, value in part.items()}
                for site, values in zip(sites, per_site, strict=True):
                    site |= {name + suffix: value for name, value in values.items()}
        for site, values in zip(sites, self._use(after), strict=True):
            site |= values
        if self.detail:
            floor, per_site = self._noise_floor(after)
            row |= floor
            for site, values in zip(sites, per_site, strict=True):
                site |= values
        return row, sites

    # ------------------------------------------------------------------ parts of it
    def _engine_replayed(self) -> Row:
        """What is left of the engine's gap on the probe when the policy replays the engine's routes (R3)."""
        if self.batch.rollout_routes is None:
            return {}
        natural = _engine_gap(self.batch, self.old)
        replayed = _engine_gap(self.batch, self.policy.score(self.batch, self.batch.rollout_routes))
        return {f"{name}_natural": value for name, value in natural.items()} | {
            f"{name}_replayed": value for name, value in replayed.items()
        }

    def _replay_gap(self, natural: Scored, replayed: Scored) -> Row:
        """log π(natural) - log π(replayed) under the new weights, and what routers would pick under replay."""
        rows = response_rows(self.batch)
        gap = (natural.logprobs - replayed.logprobs)[self.batch.response_mask].double()
        pull = volatility.route_change(replayed.routes.ids(), replayed.preferred.ids(), rows).row()["slot_change"]
        return {
            "replay_gap_mean": gap.mean().item(),
            "replay_gap_std": gap.std(correction=0).item(),
            "replay_gap_max": gap.abs().max().item(),
            "pull": pull,
        }

    def _changes(self, after: Scored, rows: Tensor) -> list[tuple[Row, list[Row]]]:
        """Volatility of the tokens in `rows` from π_old to the new weights: overall, and per site."""
        old, new = self.old.routes.ids(), after.routes.ids()
        experts = max(site.num_experts for site in after.routes.layout.sites)
        gates = self.before.scores.gates if self.detail else None
        found = [volatility.route_change(old, new, rows, gates), volatility.response_change(old, new, rows, experts)]
        if self.detail:
            unused = (old < 0) | (new[..., :1] < 0)
            at_old = (s.scores.log_probs_at(old).masked_fill(unused, math.nan) for s in (self.before, after))
            found.append(volatility.router_shift(*at_old, rows))
        return [(change.row(), change.site_rows()) for change in found]

    def _use(self, after: Scored) -> list[Row]:
        """Load, and at detail margins, of the new weights' natural routing, per site."""
        rows, sites = response_rows(self.batch), after.routes.layout.sites
        load = volatility.load_statistics(after.routes.ids(), [s.num_experts for s in sites], rows).site_rows()
        margins = volatility.margin_summary(after.scores.margins, rows) if self.detail else [{}] * len(sites)
        keys = [{"site": i, "layer": site.decoder_layer} for i, site in enumerate(sites)]
        return [key | use | margin for key, use, margin in zip(keys, load, margins, strict=True)]

    def _noise_floor(self, after: Scored) -> tuple[Row, list[Row]]:
        """The same weights scored again: rows in reverse, in two calls of unequal size, with extra padding."""
        order = torch.arange(len(self.batch) - 1, -1, -1)
        changes, gap = [], torch.zeros_like(after.logprobs)
        for index in order.tensor_split([len(order) // 3]):
            part = self.batch.rows(index)
            time = part.tokens.shape[1]
            first, again = after.rows(index, time), self.policy.score(_padded(part, 3))
            gap[index, :time] = again.logprobs[:, :time] - first.logprobs
            ids = again.routes.ids()[:, :time]
            changes.append(volatility.route_change(first.routes.ids(), ids, response_rows(part)))
        change, found = changes[0] + changes[1], ratios.ratio_statistics(gap, self.batch.response_mask)
        row = {
            "noise_floor_logprob": found["token_log_ratio_max"],
            "noise_floor_kl_k3": found["token_kl_k3"],
            "noise_floor_beyond_2": found["token_beyond_2"],
            **{f"noise_floor_{name}": change.row()[name] for name in ENGINE_CHANGE},
        }
        return row, [{"noise_floor_set_change": site["set_change"]} for site in change.site_rows()]


def _padded(batch: Batch, extra: int) -> Batch:
    """The batch with `extra` more columns, which one row claims as tokens, so that no one trims them away."""

    def pad(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, extra))

    mask = pad(batch.attention_mask)
    mask[0] = True
    wide = {"tokens": pad(batch.tokens), "response_mask": pad(batch.response_mask), "attention_mask": mask}
    return replace(batch, **wide, rollout_logprobs=pad(batch.rollout_logprobs), rollout_routes=None, ref_logprobs=None)


def _mean(values: Tensor, mask: Tensor) -> float:
    return values[mask].double().mean().item()
