"""What needs an extra forward, measured on a *probe*: the first few responses of every (randomly drawn) mini-batch of
the first epoch.

Each step it is scored twice under the new weights, naturally and replaying the old policy's routes; every few steps the
*detail* follows single updates. Volatility compares natural routes, in every arm.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.config import Measure
from moe_rl.metrics import ratios, routers, volatility
from moe_rl.policies.base import Policy
from moe_rl.types import Batch, Scored, prompt_rows, response_rows

Row = dict[str, float]
CHANGE = ("slot_change", "set_change", "any_layer_change", "layers_changed", "jaccard_distance")
ENGINE_CHANGE = ("slot_change", "set_change", "any_layer_change")


class Probe:
    """The responses of one step on which quantities that need an extra forward are measured."""

    def __init__(
        self, policy: Policy, batch: Batch, natural: Scored, split: list[Tensor], settings: Measure, detail: bool
    ):
        first = len(split) * len(batch) // sum(map(len, split))  # of several epochs, each of which splits all rows
        per_mini_batch = len(batch) if settings.full else max(1, settings.probe // first)
        self.policy, self.detail = policy, detail or settings.full
        self.whole, self.natural = batch, natural
        self.parts = [index[:per_mini_batch] for index in split]
        rows = torch.cat(self.parts[:first])
        self.batch = batch.rows(rows)
        self.old = natural.rows(rows, self.batch.tokens.shape[1])
        self.scores = policy.score(self.batch, scores=True).scores if self.detail else None
        self.engine = self._engine_replayed() if self.detail else {}
        self.routes = self.old.routes
        """Natural routes after the last update that was followed."""

    def before_update(self, update: int) -> Row:
        """Detail: attribution on the mini-batch about to be updated (undefined at the first: nothing has moved)."""
        if not self.detail or update == 0:
            return {}
        part = self.whole.rows(self.parts[update])
        old = self.natural.rows(self.parts[update], part.tokens.shape[1])
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
        found = [(suffix, part) for suffix, rows in (("", response_rows), ("_prompt", prompt_rows))
                 for part in self._changes(after, rows(self.batch))]
        found += [("", ({}, self._use(after))), *([("", self._noise_floor(after))] if self.detail else [])]
        for suffix, (part, per_site) in found:
            for mine, values in zip((row, *sites), (part, *per_site), strict=True):
                mine |= {name + suffix: value for name, value in values.items()}
        return row, sites

    # ------------------------------------------------------------------ parts of it
    def _engine_replayed(self) -> Row:
        """What is left of the engine's gap on the probe when the policy replays the engine's routes (R3)."""
        if self.batch.rollout_routes is None or self.batch.rollout_routes.coverage == 0:
            return {}
        natural = engine_gap(self.batch, self.old)
        replayed = engine_gap(self.batch, self.policy.score(self.batch, self.batch.rollout_routes))
        return {f"{name}_natural": value for name, value in natural.items()} | {
            f"{name}_replayed": value for name, value in replayed.items()
        }

    def _replay_gap(self, natural: Scored, replayed: Scored) -> Row:
        """log π(natural) - log π(replayed) under the new weights, and what routers would pick under replay."""
        assert replayed.preferred is not None, "a policy that replayed says what its routers preferred"
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
        old, new, layout = self.old.routes.ids(), after.routes.ids(), after.routes.layout
        gates = None if self.scores is None else self.scores.gates
        both = None
        if self.scores is not None and after.scores is not None:
            both = self.scores.log_probs_at(old), after.scores.log_probs_at(old)
        found = routers.changes(old, new, rows, layout, gates, both)
        return [(change.row(), change.site_rows()) for change in found]

    def _use(self, after: Scored) -> list[Row]:
        """Load, and at detail confidence and margins, of the new weights' natural routing, per site."""
        rows, sites = response_rows(self.batch), after.routes.layout.sites
        load = volatility.load_statistics(after.routes.ids(), [s.num_experts for s in sites], rows).site_rows()
        scores, none = after.scores, [Row() for _ in sites]
        margins = none if scores is None else volatility.margin_summary(scores.margins, rows)
        sure = none
        if scores is not None:
            sure = routers.router_confidence(scores.log_probs, after.routes.ids(), rows).site_rows()
        keys = [{"site": i, "layer": site.decoder_layer} for i, site in enumerate(sites)]
        return [key | use | mass | margin for key, use, mass, margin in zip(keys, load, sure, margins, strict=True)]

    def _noise_floor(self, after: Scored) -> tuple[Row, list[Row]]:
        """The same weights scored again: rows in reverse, in two calls of unequal size, with extra padding."""
        order = torch.arange(len(self.batch) - 1, -1, -1)
        changes, gap = [], torch.zeros_like(after.logprobs)
        for index in filter(len, order.tensor_split([len(order) // 3])):  # a probe of two has no first third
            part = self.batch.rows(index)
            time = part.tokens.shape[1]
            first, again = after.rows(index, time), self.policy.score(_padded(part, 3))
            gap[index, :time] = again.logprobs[:, :time] - first.logprobs
            ids = again.routes.ids()[:, :time]
            changes.append(volatility.route_change(first.routes.ids(), ids, response_rows(part)))
        change, found = sum(changes[1:], start=changes[0]), ratios.ratio_statistics(gap, self.batch.response_mask)
        row = {
            "noise_floor_logprob": found["token_log_ratio_max"],
            "noise_floor_kl_k3": found["token_kl_k3"],
            "noise_floor_beyond_2": found["token_beyond_2"],
            **{f"noise_floor_{name}": change.row()[name] for name in ENGINE_CHANGE},
        }
        return row, [{"noise_floor_set_change": site["set_change"]} for site in change.site_rows()]


def engine_gap(batch: Batch, scored: Scored) -> Row:
    """How far the policy's log-probs are from the engine's, on the response tokens."""
    return ratios.engine_gap(scored.logprobs - batch.rollout_logprobs, batch.response_mask)


def _padded(batch: Batch, extra: int) -> Batch:
    """The batch with `extra` more columns, which one row claims as tokens, so that no one trims them away."""
    here = {f.name: getattr(batch, f.name) for f in fields(batch)}
    columns = {n: x for n, x in here.items() if isinstance(x, Tensor) and x.dim() > 1}
    wide: dict[str, Any] = {n: nn.functional.pad(x, (0, extra)) for n, x in columns.items()}
    wide["attention_mask"][0] = True
    return replace(batch, **wide, rollout_routes=None, routes=None, ratio_routes=None, old_scores=None)
