"""A comparison as sums over batches, saved and restored at any batch, and as tables, for which they are divided.

Every number of a table is a ratio of pooled sums; column `noise_x` is `x` of the noise floor. Rows that decide a
response count, unless a column starts with `prompt_`. S, S′ are the expert sets before and after.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int, Int64
from numpy.typing import NDArray
from torch import Tensor

from moe_rl.analysis.checkpoints.texts import TextBatch
from moe_rl.errors import RunError, raise_os_errors
from moe_rl.metrics import chance, volatility
from moe_rl.routing.trace import Layout, RoutingTrace
from moe_rl.storage.commits import read_parquet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    "coactivation_change": "½ Σ |q − q′|",
}
"""Every volatility metric. Per token: S its experts, p the router's probability of those used before. Per response: U
all its experts, f the share of its slots per expert. Per layer: q the share of pairs that serve one token, per pair."""
RATIOS = {"token_ess": "(Σ r)² / (n Σ r²)", "token_kl_k3": "r − 1 − log r, nats",
          "token_ess_replayed": "the same, BEFORE's", "token_kl_k3_replayed": "routes replayed"}
"""What is said of r = π(after) / π(before) of the response tokens, all of them together."""
TABLES = ("summary", "layers", "positions", "tokens", "layers_changed", "experts", "pairs", "margins", "responses")
"""What a finished comparison has, each in a file of its own."""
SEEN = 20
"""Times a token must have been read to appear in a ranking: rarer ones are noise."""
SHOWN = 12
"""Entries of a ranking."""
Frames = Mapping[str, pd.DataFrame]
MARGIN_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9}
EDGES = 10 ** torch.linspace(-8, 4, 601, dtype=torch.float64)
"""Bins of margins: fifty per decade, so that a quantile is known to 5 %; the first and last bin are open."""
PARTS = ("response", "prompt")
RESPONSE = ("line", "batch", "row", "tokens", "expert_change_rate", "any_layer_change", "layers_changed")
"""Columns of the table of responses: where it is, and means over its known rows."""

PerSlot = Float[Tensor, "batch time site k"]
PerToken = Float[Tensor, "batch time"]
Margins = Float[Tensor, "tokens site"]


@dataclass(frozen=True)
class Observed:
    """Natural routes of a batch and how sure the routers were. The scores are None for a family that hands out none."""

    routes: RoutingTrace
    gates: PerSlot | None = None
    """Combine weights of the used experts."""
    log_probs: PerSlot | None = None
    """Of the experts of a reference (by default the used ones themselves), from the router's full softmax."""
    margins: Float[Tensor, "batch time site"] | None = None
    """k-th minus (k+1)-th choice score, in the router's own units."""
    logprobs: PerToken | None = None
    """log π of the response tokens, in nats at temperature 1; 0 elsewhere. None unless they were asked for."""
    replayed_logprobs: PerToken | None = None
    """The same with the routes of the reference forced."""

    def save(self, path: Path, batch: TextBatch) -> None:
        """Write a trace file that carries the scores and the response beside the routes; whole or not at all."""
        beside = {"response": batch.response_mask}
        if self.gates is not None and self.log_probs is not None and self.margins is not None:
            beside |= {"gates": self.gates.half(), "log_probs": self.log_probs, "margins": self.margins}
        if self.logprobs is not None:
            beside["logprobs"] = self.logprobs
        aside = path.with_name(f".tmp-{path.name}")
        self.routes.save(aside, beside)
        os.replace(aside, path)

    @staticmethod
    def load(path: Path) -> Observed:
        """Read what `save` wrote."""
        beside = RoutingTrace.load_beside(path)
        gates = beside.get("gates")
        return Observed(
            RoutingTrace.load(path), None if gates is None else gates.float(), beside.get("log_probs"),
            beside.get("margins"), beside.get("logprobs"),
        )


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
        experts = before.routes.experts, after.routes.experts
        old, new = before.routes.ids(), after.routes.ids()
        for part, mask in zip(PARTS, (batch.response_rows, batch.prompt_rows), strict=True):
            self._add(f"change.{part}", volatility.route_change(*experts, mask, before.gates))
            if before.log_probs is not None and after.log_probs is not None:
                first, second = (x.masked_fill(old < 0, torch.nan) for x in (before.log_probs, after.log_probs))
                self._add(f"shift.{part}", volatility.router_shift(first, second, mask))
        rows = batch.response_rows
        self._add("responses", volatility.response_change(*experts, rows, self.experts))
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
            raise RunError(f"{path} is damaged ({error}). Delete it to compute its sums again.") from error


# ---------------------------------------------------------------------- tables
def tables(tally: Tally, noise: Tally, tokenizer: PreTrainedTokenizerBase) -> dict[str, pd.DataFrame]:
    """Each of TABLES by its name."""
    layers, responses = _layers(tally, noise), _responses(tally)
    return {
        "summary": _summary(tally, noise, chance_levels(layers, responses)),
        "layers": layers,
        "positions": _positions(tally),
        "tokens": _tokens(tally, tokenizer),
        "layers_changed": _layers_changed(tally),
        "experts": _experts(tally),
        "pairs": _pairs(tally),
        "margins": _margins(tally),
        "responses": responses,
    }


def chance_levels(layers: pd.DataFrame, responses: pd.DataFrame) -> dict[str, float]:
    """What random routes of the same responses would show, by metric: `metrics.chance`."""
    sizes = layers["experts"].to_list(), layers["k"].to_list()
    if not len(responses):
        return chance.token_levels(*sizes)
    return chance.token_levels(*sizes) | chance.response_levels(*sizes, responses["tokens"]) | {
        "coactivation_change": chance.coactivation_change(*sizes, int(responses["tokens"].sum()))}


def write(frames: dict[str, pd.DataFrame], folder: Path) -> None:
    """One parquet file per table."""
    for name, frame in frames.items():
        frame.to_parquet(folder / f"{name}.parquet", index=False)


def read(folder: Path) -> dict[str, pd.DataFrame]:
    """What `write` wrote of a finished comparison. Raises RunError for a table that is missing or damaged."""
    for name in TABLES:
        if not (file := folder / f"{name}.parquet").exists():
            raise RunError(f"{file} is missing, although the comparison has finished. Restore it from a copy, or "
                           f"delete {folder} and compare again.")
    return {name: read_parquet(folder / f"{name}.parquet").to_pandas() for name in TABLES}


def top_share(values: np.ndarray, part: float, counts: np.ndarray | None = None) -> float:
    """Share of the sum that the largest `part` of the values hold (at least one value); NaN of nothing.

    `counts` says how often each value occurs, by default once.
    """
    counts = np.ones(len(values)) if counts is None else counts
    order = np.argsort(values)[::-1]
    values, counts = values[order], counts[order]
    total, wanted = (values * counts).sum(), max(1, math.ceil(counts.sum() * part))
    taken = np.clip(wanted - (np.cumsum(counts) - counts), 0, counts)
    return float((values * taken).sum() / total) if total else math.nan


def _responses(tally: Tally) -> pd.DataFrame:
    return pd.DataFrame(tally.table_of_responses(), columns=list(RESPONSE)).astype(
        {"line": int, "batch": int, "row": int, "tokens": int}).sort_values("line", ignore_index=True)


def _summary(tally: Tally, noise: Tally, random: Mapping[str, float]) -> pd.DataFrame:
    """A row per metric: its mean over response rows, over prompt rows, its noise floor, and what random routes would
    show."""
    response, prompt, floor = _means(tally, "response"), _means(tally, "prompt"), _means(noise, "response")
    rows = [{"metric": name, "response": response[name], "prompt": prompt.get(name, math.nan),
             "noise_floor": floor.get(name, math.nan), "chance": random.get(name, math.nan), "formula": formula}
            for name, formula in (METRICS | RATIOS).items() if name in response]
    counts = {"tokens": "volatility_tokens", "unknown_rows": "volatility_unknown"}
    return pd.DataFrame(rows + [
        {"metric": name, "response": response[key], "prompt": prompt[key], "noise_floor": floor[key],
         "chance": math.nan, "formula": "known in every layer" if name == "tokens" else "(token, layer)"}
        for name, key in counts.items()])


def _means(tally: Tally, part: str) -> dict[str, float]:
    means = volatility.RouteChange(**tally.sums[f"change.{part}"]).row()
    if f"shift.{part}" in tally.sums:
        means |= volatility.RouterShift(**tally.sums[f"shift.{part}"]).row()
    if part == "response":
        means |= volatility.ResponseChange(**tally.sums["responses"]).row()
        means["coactivation_change"] = float(np.mean(_coactivation_change(tally)))
        for suffix in ("", "_replayed"):
            if sums := tally.sums.get(f"ratios{suffix}"):
                means[f"token_ess{suffix}"] = float((2 * sums["log_r"] - sums["log_r_squared"]).exp() / sums["n"])
                means[f"token_kl_k3{suffix}"] = float(sums["kl"] / sums["n"])
    return means


def _layers(tally: Tally, noise: Tally) -> pd.DataFrame:
    """A row per site: every metric with its noise floor, margins and load before and after."""
    sites = tally.layout.sites
    keys = pd.DataFrame([{"site": i, "layer": s.decoder_layer, "name": s.name, "experts": s.num_experts, "k": s.top_k}
                         for i, s in enumerate(sites)])
    found = _site_metrics(tally, "response")
    parts = [keys, found, _site_metrics(tally, "prompt").add_prefix("prompt_"),
             _site_metrics(noise, "response")[list(found)].add_prefix("noise_")]
    for when in ("before", "after"):
        load = volatility.Load(tally.sums["use"][when], tuple(s.num_experts for s in sites)).site_rows()
        parts += [pd.DataFrame(load).add_suffix(f"_{when}"), _margin_columns(tally, when).add_suffix(f"_{when}")]
    return pd.concat(parts, axis=1)


def _site_metrics(tally: Tally, part: str) -> pd.DataFrame:
    frames = [pd.DataFrame(volatility.RouteChange(**tally.sums[f"change.{part}"]).site_rows())]
    if f"shift.{part}" in tally.sums:
        frames.append(pd.DataFrame(volatility.RouterShift(**tally.sums[f"shift.{part}"]).site_rows()))
    if part == "response":
        frames.append(pd.DataFrame(volatility.ResponseChange(**tally.sums["responses"]).site_rows()))
        frames.append(pd.DataFrame({"coactivation_change": _coactivation_change(tally)}))
    return pd.concat(frames, axis=1)


def _coactivation_change(tally: Tally) -> np.ndarray:
    counts = [tally.sums["pairs"][when] for when in ("before", "after")]
    before, after = (x.double() / x.sum(1, keepdim=True) for x in counts)
    return ((before - after).abs().sum(1) / 2).numpy()


def _margin_columns(tally: Tally, when: str) -> pd.DataFrame:
    """Quantiles of the margin, and the share below 0.01 and 0.1."""
    rows = []
    edges = EDGES.numpy()
    for counts in tally.sums["margins"][when].numpy():
        total = counts.sum()
        cumulative = np.cumsum(counts) / total if total else np.full(len(counts), math.nan)
        row = {}
        for name, q in MARGIN_QUANTILES.items():
            i = int(np.searchsorted(cumulative, q)) if total else 0
            middle = 0.0 if i == 0 else math.inf if i == len(edges) else math.sqrt(edges[i - 1] * edges[i])
            row[f"margin_{name}"] = middle if total else math.nan
        for limit in (0.01, 0.1):
            row[f"margin_below_{limit:g}"] = float(cumulative[int(np.argmin(np.abs(edges - limit)))])
        rows.append(row)
    return pd.DataFrame(rows)


def _positions(tally: Tally) -> pd.DataFrame:
    """By place in the response: position 0 is the row that predicts its first token."""
    return _rates(tally.sums["positions"]).rename_axis("position").reset_index()


def _tokens(tally: Tally, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """By id of the input token."""
    frame = _rates(tally.sums["tokens"]).rename_axis("token").reset_index()
    texts = [tokenizer.decode([token]) for token in frame["token"]]
    pieces = tokenizer.convert_ids_to_tokens(frame["token"].tolist())  # part of a character is no text
    return frame.assign(text=[piece if "\ufffd" in text else text for text, piece in zip(texts, pieces, strict=True)])


def _rates(sums: dict[str, Tensor]) -> pd.DataFrame:
    n = sums["n"].numpy()
    seen = np.flatnonzero(n)
    return pd.DataFrame({"n": n[seen].astype(int), "expert_change_rate": sums["slot"].numpy()[seen] / n[seen],
                         "layers_changed": sums["layers"].numpy()[seen] / n[seen]}, index=seen)


def _layers_changed(tally: Tally) -> pd.DataFrame:
    """How many tokens changed in how many layers."""
    counts = tally.sums["layers_changed"]["tokens"].numpy()
    return pd.DataFrame({"layers_changed": np.arange(len(counts)), "tokens": counts})


def _experts(tally: Tally) -> pd.DataFrame:
    """Per site and expert: slots filled before and after, and how often it left or entered a token's set."""
    frames = []
    for s, site in enumerate(tally.layout.sites):
        columns = {name: x[s, : site.num_experts].numpy().astype(int) for name, x in tally.sums["use"].items()}
        keys = {"site": s, "layer": site.decoder_layer, "expert": range(site.num_experts)}
        frames.append(pd.DataFrame(keys | columns))
    return pd.concat(frames, ignore_index=True)


def _pairs(tally: Tally) -> pd.DataFrame:
    """Per site, how often two experts served one token, before and after; pairs that never did are left out."""
    before, after = tally.sums["pairs"]["before"], tally.sums["pairs"]["after"]
    site, index = torch.nonzero(before + after, as_tuple=True)
    layers = np.array([s.decoder_layer for s in tally.layout.sites])
    return pd.DataFrame({"site": site, "layer": layers[site.numpy()], "a": index // tally.experts,
                         "b": index % tally.experts, "before": before[site, index], "after": after[site, index]})


def _margins(tally: Tally) -> pd.DataFrame:
    """Per site and bin of the margin: tokens before and after, and how many of those before changed their set."""
    sums = tally.sums["margins"]
    site, index = torch.nonzero(sums["before"] + sums["after"], as_tuple=True)
    edges = torch.cat([torch.tensor([-math.inf]), EDGES, torch.tensor([math.inf])])
    return pd.DataFrame({"site": site, "low": edges[index], "high": edges[index + 1],
                         **{name: x[site, index] for name, x in sums.items()}})
