"""A comparison of two traced checkpoints as sums over batches, and as tables, for which these are divided.

Every number of a table is a ratio of pooled sums; column `noise_x` is `x` of the noise floor. Rows that decide a
response count. S, S′ are the expert sets before and after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.analysis.checkpoints.texts import TextBatch
from moe_rl.analysis.checkpoints.traces import Traced
from moe_rl.metrics import volatility
from moe_rl.metrics.pooled import Pooled, load_row
from moe_rl.routing.trace import Layout

METRICS = {
    "expert_change_rate": "1 − |S ∩ S′| / k",
    "any_change_rate": "S ≠ S′",
    "jaccard_distance": "1 − |S ∩ S′| / |S ∪ S′|",
    "gate_mass_moved": "Σ gates of S \\ S′ / Σ of S",
    "any_layer_change": "S ≠ S′ in any layer",
    "layers_changed": "layers with S ≠ S′",
    "response_set_change": "1 − |U ∩ U′| / |U|",
    "response_usage_change": "½ Σ |f − f′|",
    "router_shift": "mean |Δ log p|, nats",
    "router_shift_ratio": "γ of RSPO",
    "router_shift_ratio_low": "γ < 0.7",
}
"""Every volatility metric. Per token: S its experts, p the router's probability of those used before. Per response: U
all its experts, f the share of its slots per expert."""
RATIOS = {
    "token_ess": "(Σ r)² / (n Σ r²)",
    "token_kl_k3": "r − 1 − log r, nats",
    "token_ess_replayed": "the same, BEFORE's",
    "token_kl_k3_replayed": "routes replayed",
}
"""Statistics of r = π(after) / π(before) over all response tokens."""
TABLES = ("summary", "layers", "responses")
"""What a finished comparison has, each in a file of its own."""
Frames = Mapping[str, pd.DataFrame]
MARGINS = 2**16
"""Tokens, the first ones, of whose margins there are quantiles: these cannot be pooled."""
RESPONSE = ("line", "batch", "row", "tokens", "expert_change_rate", "any_layer_change", "layers_changed")
"""Columns of the table of responses: where it is, and means over its known rows."""


class Tally:
    """What changed from one routing of the same tokens to another: sums by group, to which each batch adds its
    rows that decide a response."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.sums: dict[str, Pooled] = {}
        self.margins = {name: torch.empty(0, len(layout.moe_layers)) for name in ("before", "after")}
        self.responses: list[Float[Tensor, "responses columns"]] = []

    def add(self, batch: TextBatch, index: int, before: Traced, after: Traced, name: str) -> None:
        """Compare two routings of the batch of this index. `after` has log-probabilities at the routes of `before`
        under this name."""
        experts, first, then = (before.routes.experts, after.routes.experts), before.beside, after.beside
        old, new = before.routes.ids(), after.routes.ids()
        rows = batch.response_rows
        at_old = then.get(f"log_probs_at_{name}")
        both = (first["log_probs"], at_old) if "log_probs" in first and at_old is not None else None
        self._add("change", volatility.changes(*experts, rows, self.layout, first.get("gates"), both))
        known = rows & (old[..., 0] >= 0).all(-1) & (new[..., 0] >= 0).all(-1)
        self._add_responses(batch, index, old, new, known)
        sizes = [moe_layer.num_experts for moe_layer in self.layout.moe_layers]
        for when, side, ids in (("before", first, experts[0]), ("after", then, experts[1])):
            self._add(f"load.{when}", volatility.load_statistics(ids, sizes, known))
            if "margins" in side and len(self.margins[when]) < MARGINS:
                self.margins[when] = torch.cat([self.margins[when], side["margins"][known]])
        for group, scored in (("ratios", "logprobs"), ("ratios_replayed", f"replayed_logprobs_{name}")):
            if "logprobs" in first and scored in then:
                self._add(group, _ratio_sums((then[scored] - first["logprobs"])[batch.response_mask].double()))

    def _add(self, group: str, sums: Pooled) -> None:
        self.sums[group] = self.sums.get(group, Pooled()) + sums

    def _add_responses(
        self, batch: TextBatch, index: int, old: volatility.Ids, new: volatility.Ids, known: Bool[Tensor, "batch time"]
    ) -> None:
        """A row per response."""
        used, used_after = old >= 0, new >= 0
        same = (old[..., :, None] == new[..., None, :]) & used[..., :, None]
        left, entered = used & ~same.any(-1), used_after & ~same.any(-2)
        slot = (left.sum(-1) / used.sum(-1).clamp(min=1)).double().mean(-1)  # batch, time
        layers = (left.any(-1) | entered.any(-1)).sum(-1)
        n = known.sum(1)
        means = [(x.double() * known).sum(1) / n for x in (slot, layers > 0, layers)]
        place = [torch.tensor(batch.lines), torch.full_like(n, index), torch.arange(len(n)), n]
        rows = torch.stack([x.double() for x in (*place, *means)], 1)
        self.responses.append(rows[n > 0])  # of a response that was cut off whole nothing is known


def _ratio_sums(log_ratio: Float[Tensor, " token"]) -> Pooled:
    """The sums of KL and of ESS, of r and r² as logarithms."""
    return Pooled(
        n=torch.tensor(len(log_ratio), dtype=torch.float64),
        kl=(log_ratio.expm1() - log_ratio).sum(),
        sum_log_r=log_ratio.logsumexp(0),
        sum_log_r2=(2 * log_ratio).logsumexp(0),
    )


# ---------------------------------------------------------------------- tables
def tables(tally: Tally, noise: Tally) -> dict[str, pd.DataFrame]:
    """Each of TABLES by its name."""
    summary, layers = _summary(tally, noise), _layers(tally, noise)
    return {"summary": summary, "layers": layers, "responses": _responses(tally)}


def write(frames: Frames, folder: Path) -> None:
    """One parquet file per table."""
    folder.mkdir(exist_ok=True)
    for name, frame in frames.items():
        frame.to_parquet(folder / f"{name}.parquet", index=False)


def read(folder: Path) -> dict[str, pd.DataFrame] | None:
    """What `write` wrote of a finished comparison; None where a table is missing."""
    files = {name: folder / f"{name}.parquet" for name in TABLES}
    return {n: pd.read_parquet(file) for n, file in files.items()} if all(map(Path.exists, files.values())) else None


def _responses(tally: Tally) -> pd.DataFrame:
    return (
        pd.DataFrame(torch.cat(tally.responses).numpy(), columns=list(RESPONSE))
        .astype({"line": int, "batch": int, "row": int, "tokens": int})
        .sort_values("line", ignore_index=True)
    )


def _summary(tally: Tally, noise: Tally) -> pd.DataFrame:
    """A row per metric: its mean over response rows, and its noise floor."""
    response, floor = _means(tally), _means(noise)
    rows = [(name, name, formula) for name, formula in (METRICS | RATIOS).items() if name in response]
    rows += [("tokens", "volatility_tokens", "known in every layer")]
    rows += [("unknown_rows", "volatility_unknown", "(token, layer)")]
    values = [
        (name, *(means.get(key, math.nan) for means in (response, floor)), formula) for name, key, formula in rows
    ]
    return pd.DataFrame(values, columns=["metric", "response", "noise_floor", "formula"])


def _means(tally: Tally) -> dict[str, float]:
    means = tally.sums["change"].row()
    for suffix in ("", "_replayed"):
        if sums := tally.sums.get(f"ratios{suffix}"):
            means[f"token_ess{suffix}"] = float((2 * sums["sum_log_r"] - sums["sum_log_r2"]).exp() / sums["n"])
            means[f"token_kl_k3{suffix}"] = float(sums["kl"] / sums["n"])
    return means


def _layers(tally: Tally, noise: Tally) -> pd.DataFrame:
    """A row per MoE layer: every metric with its noise floor, margins and load before and after."""
    moe_layers = tally.layout.moe_layers
    keys = pd.DataFrame(
        [
            {"moe_layer": i, "layer": s.decoder_layer, "name": s.name, "experts": s.num_experts, "k": s.top_k}
            for i, s in enumerate(moe_layers)
        ]
    )
    changes, floor = (pd.DataFrame(x.sums["change"].moe_layer_rows()) for x in (tally, noise))
    parts = [keys, changes, floor[list(changes)].add_prefix("noise_")]
    for when in ("before", "after"):
        load = [
            load_row(x[: s.num_experts]) for x, s in zip(tally.sums[f"load.{when}"]["load"], moe_layers, strict=True)
        ]
        margins = tally.margins[when][None]
        rows = volatility.margin_summary(margins, torch.ones(margins.shape[:2], dtype=torch.bool))
        parts += [pd.DataFrame(x).add_suffix(f"_{when}") for x in (load, rows)]
    return pd.concat(parts, axis=1)
