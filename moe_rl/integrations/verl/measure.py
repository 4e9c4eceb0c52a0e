"""What an update of verl measures: sums on the device, reduced once over all ranks, under the names of our columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from moe_rl.metrics.volatility import Load, changes, load_statistics, route_change
from moe_rl.routing import Layout
from moe_rl.routing.ids import used

Ids = Integer[Tensor, "tokens site k"]
Tokens = Bool[Tensor, " tokens"]
CHANGE = "change_"
OF_ENGINE = ("expert_change_rate", "any_change_rate", "any_layer_change")
"""What our columns compare between engine and trainer."""


class Sums:
    """Float64 sums by name: of micro-batches, then of ranks. Every rank adds the same names."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self.found[name] = self.found[name] + value if name in self.found else value

    def reduced(self) -> dict[str, Tensor]:
        """The sums over all ranks, on the CPU, by one collective call."""
        flat = torch.cat([value.reshape(-1) for value in self.found.values()])
        if dist.is_initialized():
            dist.all_reduce(flat)
        parts = flat.cpu().split([value.numel() for value in self.found.values()])
        return {name: part.view(value.shape) for (name, value), part in zip(self.found.items(), parts, strict=True)}


def add_replay(sums: Sums, forced: Ids, preferred: Ids, counted: Tokens, decides: Tokens) -> None:
    """Coverage over all inputs, pull over those that decide a response."""
    sums.add("coverage_forced", used(forced[..., 0])[counted].sum())
    sums.add("coverage_n", counted.sum() * forced.shape[1])
    change = route_change(forced[None], preferred[None], decides[None])
    sums.add("pull_changed", change.expert_change_rate.sum())
    sums.add("pull_n", change.n.sum())


def add_load(sums: Sums, ids: Ids, layout: Layout, decides: Tokens) -> None:
    sums.add("load", load_statistics(ids[None], [s.num_experts for s in layout.sites], decides[None]).counts)


def add_ratios(sums: Sums, name: str, log_ratio: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> None:
    """Moments of log r of tokens, and of its means over sequences."""
    values = torch.where(mask, log_ratio.detach().double(), 0)
    lengths = mask.sum(1)
    means = values.sum(1) / lengths.clamp(min=1)
    for level, x, counts in (("token", values, mask), ("sequence", means, lengths > 0)):
        found = {"n": torch.ones_like(x), "log": x, "square": x**2, "abs": x.abs(), "r": x.exp(), "r2": (2 * x).exp(),
                 "k3": x.exp() - 1 - x, "beyond_2": (x.abs() > math.log(2)).double()}
        for moment, value in found.items():
            sums.add(f"{name}_{level}_{moment}", torch.where(counts, value, 0).sum())


def add_change(sums: Sums, before: Integer[Tensor, "batch time site k"], after: Integer[Tensor, "batch time site k"],
               decides: Bool[Tensor, "batch time"], layout: Layout) -> None:
    """Volatility of the same tokens before and after an update, or a step; of the trainer and the engine."""
    for found in changes(before, after, decides, layout):
        for name, (change, n) in found._means().items():
            sums.add(CHANGE + name, change)
            sums.add(f"n_{CHANGE}{name}", n)


def row_of(sums: Mapping[str, Tensor], layout: Layout) -> dict[str, float]:
    """The numbers of one mini-batch; what is not defined, for want of tokens, is left out."""
    row: dict[str, Any] = {}
    if "coverage_n" in sums:
        row["coverage"] = sums["coverage_forced"] / sums["coverage_n"]
        row["pull"] = sums["pull_changed"] / sums["pull_n"]
    if "load" in sums:
        load = Load(sums["load"], tuple(site.num_experts for site in layout.sites))
        row |= load.row()
        for site, found in zip(layout.sites, load.site_rows(), strict=True):
            row[f"load_max_violation/layer_{site.decoder_layer:02d}"] = found["load_max_violation"]
    for level in ("token", "sequence"):
        if f"ratio_{level}_n" in sums:
            row |= {f"{level}_{name}": value for name, value in _spread(sums, f"ratio_{level}").items()}
    if "engine_token_n" in sums:
        gap = _spread(sums, "engine_token")
        row["engine_logprob_mean"] = sums["engine_token_abs"] / sums["engine_token_n"]
        row |= {f"engine_{name}": gap[name] for name in ("kl_k3", "beyond_2")}
    for name in [name for name in sums if name.startswith(CHANGE)]:
        row[name.removeprefix(CHANGE)] = sums[name].sum() / sums[f"n_{name}"].sum()
    if "change_expert_change_rate" in sums:
        shares = sums["change_expert_change_rate"] / sums["n_change_expert_change_rate"]
        row |= {f"expert_change_rate/layer_{site.decoder_layer:02d}": share
                for site, share in zip(layout.sites, shares.tolist(), strict=True)}
    return {f"routing/{name}": float(value) for name, value in row.items() if not math.isnan(float(value))}


def _spread(sums: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """As `moe_rl.metrics.ratios.ratio_statistics` has them."""
    n, r = sums[f"{name}_n"], sums[f"{name}_r"]
    mean = sums[f"{name}_log"] / n
    return {"log_ratio_mean": mean, "log_ratio_var": (sums[f"{name}_square"] / n - mean**2).clamp(min=0),
            "ess": r**2 / (n * sums[f"{name}_r2"]), "kl_k3": sums[f"{name}_k3"] / n,
            "beyond_2": sums[f"{name}_beyond_2"] / n}
