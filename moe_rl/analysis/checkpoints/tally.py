"""Sums over batches of one comparison: bounded memory, saved and restored at any batch, divided only at the end."""

from __future__ import annotations

import math
import os
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from numpy.typing import NDArray
from torch import Tensor

from moe_rl.analysis.checkpoints.observed import Observed
from moe_rl.analysis.checkpoints.texts import TextBatch
from moe_rl.errors import RunError, raise_os_errors
from moe_rl.metrics import volatility
from moe_rl.routing.trace import Layout

EDGES = 10 ** torch.linspace(-8, 4, 601, dtype=torch.float64)
"""Bins of margins: fifty per decade, so that a quantile is known to 5 %; the first and last bin are open."""
Margins = Float[Tensor, "tokens site"]
PARTS = ("response", "prompt")
RESPONSE = ("line", "batch", "row", "tokens", "slot_change", "any_layer_change", "layers_changed")
"""Columns of the table of responses: where it is, and means over its known rows."""


class Tally:
    """What changed from one observation of the same tokens to another.

    `sums` maps a group to its named tensors; adding a batch adds to each. All but `change.prompt` and `shift.prompt`
    count the rows that decide a response.
    """

    def __init__(self, name: str, layout: Layout, max_tokens: int, vocabulary: int):
        self.name, self.layout = name, layout
        self.experts = max(site.num_experts for site in layout.sites)
        self.done = 0
        """Batches added."""
        sites = len(layout.sites)
        self.sums: dict[str, dict[str, Tensor]] = {
            "use": {name: torch.zeros(sites, self.experts, dtype=torch.float64)
                    for name in ("before", "after", "left", "entered")},
            "pairs": {name: torch.zeros(sites, self.experts**2, dtype=torch.int64) for name in ("before", "after")},
            "margins": {name: torch.zeros(sites, len(EDGES) + 1, dtype=torch.int64)
                        for name in ("before", "after", "changed")},
            "positions": {name: torch.zeros(max_tokens, dtype=torch.float64) for name in ("n", "slot", "layers")},
            "tokens": {name: torch.zeros(vocabulary, dtype=torch.float64) for name in ("n", "slot", "layers")},
            "layers_changed": {"tokens": torch.zeros(sites + 1, dtype=torch.int64)},
        }
        self._responses: list[Float[Tensor, "responses columns"]] = []

    def add(self, batch: TextBatch, index: int, before: Observed, after: Observed) -> None:
        """Compare two observations of the batch of this index."""
        old, new = before.routes.ids(), after.routes.ids()
        for part, mask in zip(PARTS, (batch.response_rows, batch.prompt_rows), strict=True):
            self._add(f"change.{part}", volatility.route_change(old, new, mask, before.gates))
            if before.log_probs is not None and after.log_probs is not None:
                first, second = (x.masked_fill(old < 0, torch.nan) for x in (before.log_probs, after.log_probs))
                self._add(f"shift.{part}", volatility.router_shift(first, second, mask))
        rows = batch.response_rows
        self._add("responses", volatility.response_change(old, new, rows, self.experts))
        known = rows & (old[..., 0] >= 0).all(-1) & (new[..., 0] >= 0).all(-1)
        self._add_concentration(batch, index, old, new, known)
        if before.margins is not None and after.margins is not None:
            changed = ~before.routes.same_sets(after.routes)[known]
            self._add_margins(before.margins[known], after.margins[known], changed)
        for name, now in (("ratios", after.logprobs), ("ratios_replayed", after.replayed_logprobs)):
            if before.logprobs is not None and now is not None:
                self._add_ratios(name, (now - before.logprobs)[batch.response_mask].double())
        self.done += 1

    def table_of_responses(self) -> Float[NDArray, "responses columns"]:
        """A row per response with a known row, in the order in which they came; columns as in RESPONSE."""
        return torch.cat(self._responses).numpy() if self._responses else np.zeros((0, len(RESPONSE)))

    # ------------------------------------------------------------------ where change concentrates
    def _add_concentration(
        self, batch: TextBatch, index: int, old: volatility.Ids, new: volatility.Ids, known: Bool[Tensor, "batch time"]
    ) -> None:
        used, used_after = old >= 0, new >= 0
        same = (old[..., :, None] == new[..., None, :]) & used[..., :, None]
        left, entered = used & ~same.any(-1), used_after & ~same.any(-2)
        slot = (left.sum(-1) / used.sum(-1).clamp(min=1)).double().mean(-1)  # batch, time
        layers = (left.any(-1) | entered.any(-1)).sum(-1)
        for name, ids, hit in (("before", old, used), ("after", new, used_after), ("left", old, left),
                               ("entered", new, entered)):
            self.sums["use"][name] += self._count(ids[known], hit[known])
        for name, ids in (("before", old), ("after", new)):
            self.sums["pairs"][name] += self._pairs(ids[known])
        place = (known.cumsum(1) - 1)[known]
        for group, where in (("positions", place), ("tokens", batch.tokens[known])):
            for name, value in (("n", torch.ones_like(slot)), ("slot", slot), ("layers", layers.double())):
                self.sums[group][name].index_add_(0, where, value[known])
        histogram = torch.bincount(layers[known], minlength=len(self.layout.sites) + 1)
        self.sums["layers_changed"]["tokens"] += histogram
        n = known.sum(1)
        means = [(x.double() * known).sum(1) / n for x in (slot, layers > 0, layers)]
        place_of = [torch.tensor(batch.lines), torch.full_like(n, index), torch.arange(len(n)), n]
        rows = torch.stack([x.double() for x in (*place_of, *means)], 1)
        self._responses.append(rows[n > 0])  # of a response that was cut off whole nothing is known

    def _count(
        self, ids: Int64[Tensor, "tokens site k"], hit: Bool[Tensor, "tokens site k"]
    ) -> Float[Tensor, "site experts"]:
        index = ids.clamp(min=0).transpose(0, 1).flatten(1)
        counts = torch.zeros(ids.shape[1], self.experts, dtype=torch.float64)
        return counts.scatter_add_(1, index, hit.transpose(0, 1).flatten(1).double())

    def _pairs(self, ids: Int64[Tensor, "tokens site k"]) -> Int[Tensor, "site pairs"]:
        """How often two experts serve one token: counts of a · E + b, a < b."""
        ids = ids.sort(-1).values
        a, b = torch.triu_indices(ids.shape[-1], ids.shape[-1], 1)
        first, second = ids[..., a], ids[..., b]
        counts = []
        for s in range(ids.shape[1]):
            both = first[:, s] >= 0
            index = (first[:, s] * self.experts + second[:, s])[both]
            counts.append(torch.bincount(index, minlength=self.experts**2))
        return torch.stack(counts)

    def _add_margins(self, before: Margins, after: Margins, changed: Bool[Tensor, "tokens site"]) -> None:
        bins = torch.bucketize(before.double(), EDGES, right=True)
        everywhere = torch.ones_like(changed)
        counted = (("before", bins, everywhere), ("changed", bins, changed),
                   ("after", torch.bucketize(after.double(), EDGES, right=True), everywhere))
        for name, index, hit in counted:
            self.sums["margins"][name].scatter_add_(1, index.T.contiguous(), hit.T.contiguous().long())

    def _add_ratios(self, group: str, log_ratio: Float[Tensor, " token"]) -> None:
        """The sums of KL and of ESS; Σ r and Σ r² as logarithms, because large ratios would overflow."""
        none, nothing = (torch.tensor(x, dtype=torch.float64) for x in (0.0, -math.inf))
        mine = self.sums.setdefault(group, {"n": none, "kl": none, "log_r": nothing, "log_r_squared": nothing})
        mine["n"] = mine["n"] + len(log_ratio)
        mine["kl"] = mine["kl"] + (log_ratio.expm1() - log_ratio).sum()
        mine["log_r"] = mine["log_r"].logaddexp(log_ratio.logsumexp(0))
        mine["log_r_squared"] = mine["log_r_squared"].logaddexp((2 * log_ratio).logsumexp(0))

    def _add(self, group: str, sums: volatility.Pooled) -> None:
        mine = self.sums.setdefault(group, {})
        for field in fields(sums):
            value = getattr(sums, field.name)
            mine[field.name] = mine[field.name] + value if field.name in mine else value

    # ------------------------------------------------------------------ going on after a kill
    def save(self, folder: Path) -> None:
        """Write everything; whole or not at all."""
        from safetensors.torch import save_file

        tensors = {f"{group}|{name}": x.contiguous() for group, sums in self.sums.items() for name, x in sums.items()}
        tensors["responses"] = torch.from_numpy(self.table_of_responses())
        aside = folder / f".tmp-{self.name}"
        with raise_os_errors(aside):
            save_file(tensors, aside, metadata={"done": str(self.done)})
        os.replace(aside, folder / f"{self.name}.safetensors")

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote, if it did. Raises RunError for a file that is damaged."""
        from safetensors import SafetensorError, safe_open

        path = folder / f"{self.name}.safetensors"
        if not path.is_file():
            return
        try:
            with safe_open(str(path), "pt") as file:
                self.done = int(file.metadata()["done"])
                self._responses = [file.get_tensor("responses")]
                for key in file.keys():  # noqa: SIM118
                    if key != "responses":
                        group, name = key.split("|")
                        self.sums.setdefault(group, {})[name] = file.get_tensor(key)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path} is damaged ({error}); remove it, and its sums are taken again") from error
