"""What an update of verl measures: sums over micro-batches and ranks, under the names of our columns."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from moe_rl.metrics.pooled import Pooled
from moe_rl.metrics.volatility import coverage, load_statistics, route_change
from moe_rl.routing import Layout
from moe_rl.routing.ids import used

Ids = Integer[Tensor, "tokens moe_layer k"]
Tokens = Bool[Tensor, " tokens"]
OF_ENGINE = ("expert_change_rate", "any_change_rate", "any_layer_change")
"""What our columns compare between engine and trainer."""


def sum_replay(forced: Ids, preferred: Ids, counted: Tokens, decides: Tokens) -> Pooled:
    """Coverage over all inputs, pull over those that decide a response."""
    change = route_change(forced[None], preferred[None], decides[None])
    pull = Pooled(pull=change["expert_change_rate"].sum(), pull_n=change["volatility_tokens"].sum())
    return coverage(used(forced[None, ..., 0]), counted[None]) + pull


def sum_load(ids: Ids, layout: Layout, decides: Tokens) -> Pooled:
    return load_statistics(ids[None], [moe_layer.num_experts for moe_layer in layout.moe_layers], decides[None])


def sum_ratios(name: str, log_ratio: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> Pooled:
    """Moments of log r of tokens, and of its means over sequences. log Σ r and log Σ r² do not overflow in a run that
    diverges."""
    lengths = mask.sum(1)
    means = torch.where(mask, log_ratio.detach().double(), 0).sum(1) / lengths
    sums = Pooled()
    for level, x in (("token", log_ratio.detach().double()[mask]), ("sequence", means[lengths > 0])):
        moments = {
            "n": torch.ones_like(x),
            "log": x,
            "square": x**2,
            "abs": x.abs(),
            "k3": x.exp() - 1 - x,
            "beyond_2": (x.abs() > math.log(2)).double(),
        }
        sums += Pooled({f"{name}_{level}_{moment}": values.sum() for moment, values in moments.items()})
        sums += Pooled({f"{name}_{level}_log_r": x.logsumexp(0), f"{name}_{level}_log_r2": (2 * x).logsumexp(0)})
    return sums


def row_of(sums: Pooled, layout: Layout) -> dict[str, float]:
    """The numbers of one mini-batch. Values over no tokens are left out; values that are not finite stay."""
    row = sums.row()
    if "pull" in sums:
        row["pull"] = float(sums["pull"] / sums["pull_n"])
    for moe_layer, values in zip(layout.moe_layers, sums.moe_layer_rows(), strict=False):
        names = values.keys() & {"load_max_violation", "expert_change_rate"}
        row |= {f"{name}/layer_{moe_layer.decoder_layer:02d}": values[name] for name in sorted(names)}
    row = {name: value for name, value in row.items() if not (math.isnan(value) or name.startswith("volatility_"))}
    for level in ("token", "sequence"):
        row |= {f"{level}_{name}": value for name, value in _spread(sums, f"ratio_{level}").items()}
    if gap := _spread(sums, "engine_token"):
        row["engine_logprob_mean"] = float(sums["engine_token_abs"] / sums["engine_token_n"])
        row |= {f"engine_{name}": gap[name] for name in ("kl_k3", "beyond_2")}
    return {f"routing/{name}": value for name, value in row.items()}


def _spread(sums: Pooled, name: str) -> dict[str, float]:
    """As `moe_rl.metrics.ratios.ratio_statistics` has them; nothing where there are no values."""
    n = sums.get(f"{name}_n", torch.zeros(()))
    if not n:
        return {}
    mean = sums[f"{name}_log"] / n
    statistics = {
        "log_ratio_mean": mean,
        "log_ratio_var": (sums[f"{name}_square"] / n - mean**2).clamp(min=0),
        "ess": (2 * sums[f"{name}_log_r"] - n.log() - sums[f"{name}_log_r2"]).exp(),
        "kl_k3": sums[f"{name}_k3"] / n,
        "beyond_2": sums[f"{name}_beyond_2"] / n,
    }
    return {statistic: float(value) for statistic, value in statistics.items()}
