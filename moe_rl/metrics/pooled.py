"""Sums and counts by name, which add over batches and over ranks before anything is divided."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from moe_rl.errors import renamed

DIVIDED_BY = {
    **dict.fromkeys(("expert_change_rate", "any_change_rate", "jaccard_distance"), "volatility_tokens"),
    "gate_mass_moved": "gated_tokens",
    **dict.fromkeys(("any_layer_change", "layers_changed"), "tokens"),
    **dict.fromkeys(("response_set_change", "response_usage_change"), "responses"),
    "router_shift": "shift_n",
    **dict.fromkeys(("router_shift_ratio", "router_shift_ratio_low"), "shift_tokens"),
    "router_confidence": "confidence_n",
    "coverage": "coverage_n",
}
"""The count that divides each sum. A column of another name is no mean."""
LOG_SUMS = ("_log_n", "_log_r", "_log_r2")
"""Ends of the names of logarithms of sums that would overflow: log Σ 1, log Σ r, log Σ r²."""


@renamed(site_rows="moe_layer_rows")
class Pooled(dict[str, Tensor]):
    """Float64 sums by name, of every MoE layer or of all tokens. `+` pools two sets of tokens; `Pooled()` is empty.

    `volatility_tokens` and `volatility_unknown` count the tokens compared at every MoE layer, and those left out there;
    `tokens` counts the tokens known at every MoE layer. `load` is [MoE layer, expert].
    """

    def __add__(self, other: Pooled) -> Pooled:
        """Sums of either side keep their value where the other side has none of that name."""
        both = {name: _add(name, value, other[name]) for name, value in self.items() if name in other}
        return Pooled({**self, **other, **both})

    def over_ranks(self, group: Any = None) -> Pooled:
        """The sums of all ranks of `group` (default: all), on the CPU. Collective; names may differ by rank."""
        flat = torch.cat([value.double().reshape(-1) for value in self.values()] or [torch.empty(0)]).cpu()
        values = flat.split([value.numel() for value in self.values()]) if self else ()
        mine = Pooled({name: x.view(self[name].shape) for name, x in zip(self, values, strict=True)})
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
            return mine
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, dict(mine), group=group)
        return sum(map(Pooled, parts), Pooled())

    def row(self) -> dict[str, float]:
        """Means over everything, as columns of a table; 0 / 0 is NaN."""
        row: dict[str, float] = {}
        for name, value in self.items():
            if name in DIVIDED_BY:
                row[name] = float(value.sum() / self[DIVIDED_BY[name]].sum())
            elif name == "volatility_tokens":
                row[name] = float(self["tokens"])
            elif name == "volatility_unknown":
                row[name] = float(value.sum())
            elif name == "load":
                moe_layers = self._load_rows()
                row |= {
                    column: sum(moe_layer[column] for moe_layer in moe_layers) / len(moe_layers)
                    for column in moe_layers[0]
                }
        return row

    def moe_layer_rows(self) -> list[dict[str, float]]:
        """Means of every MoE layer, of the sums that are counted by MoE layer."""
        columns: dict[str, list[float]] = {}
        for name, value in self.items():
            if name in DIVIDED_BY and value.dim():
                columns[name] = (value / self[DIVIDED_BY[name]]).tolist()
            elif name in ("volatility_tokens", "volatility_unknown"):
                columns[name] = value.tolist()
            elif name == "load":
                moe_layers = self._load_rows()
                columns |= {column: [moe_layer[column] for moe_layer in moe_layers] for column in moe_layers[0]}
        return [dict(zip(columns, moe_layer, strict=True)) for moe_layer in zip(*columns.values(), strict=True)]

    def _load_rows(self) -> list[dict[str, float]]:
        return [load_row(counts[~counts.isnan()]) for counts in self["load"].cpu()]


def load_row(counts: Float[Tensor, " expert"]) -> dict[str, float]:
    """Of the slots that each of an MoE layer's E experts fills, f_e being its share: `load_entropy` = -Σ f log f / log
    E (1 is balanced), `load_max_violation` = max f / mean f - 1 (arXiv 2408.15664), `load_cv` = std f / mean f
    (population), and `load_dead_experts`, the number with f_e < 0.01 / E."""
    experts, total = len(counts), float(counts.sum())
    relative = counts / total * experts if total else torch.full_like(counts, math.nan)  # 1 is a fair share
    entropy = -torch.xlogy(relative / experts, relative / experts).sum()
    return {
        "load_entropy": float(entropy) / math.log(experts) if experts > 1 else math.nan,
        "load_max_violation": float(relative.max()) - 1,
        "load_cv": float(relative.std(correction=0)),
        "load_dead_experts": float((relative < 0.01).sum()) if total else math.nan,
    }


def _add(name: str, one: Tensor, other: Tensor) -> Tensor:
    return torch.logaddexp(one, other) if name.endswith(LOG_SUMS) else one + other
