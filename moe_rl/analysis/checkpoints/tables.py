"""A finished comparison as tables. Every number is a ratio of pooled sums; column `noise_x` is `x` of the noise floor.

Rows that decide a response count, unless a column starts with `prompt_`. S, S′ are the expert sets before and after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moe_rl.analysis.checkpoints.tally import EDGES, RESPONSE, Tally
from moe_rl.errors import RunError
from moe_rl.metrics import chance
from moe_rl.metrics.volatility import Load, ResponseChange, RouteChange, RouterShift
from moe_rl.storage.commits import read_parquet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METRICS = {
    "slot_change": "1 − |S ∩ S′| / k",
    "set_change": "S ≠ S′",
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
            raise RunError(f"{file} is missing, although the comparison has finished; restore it from a copy, or "
                           f"remove {folder} and compare again")
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
    means = RouteChange(**tally.sums[f"change.{part}"]).row()
    if f"shift.{part}" in tally.sums:
        means |= RouterShift(**tally.sums[f"shift.{part}"]).row()
    if part == "response":
        means |= ResponseChange(**tally.sums["responses"]).row()
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
        load = Load(tally.sums["use"][when], tuple(s.num_experts for s in sites)).site_rows()
        parts += [pd.DataFrame(load).add_suffix(f"_{when}"), _margin_columns(tally, when).add_suffix(f"_{when}")]
    return pd.concat(parts, axis=1)


def _site_metrics(tally: Tally, part: str) -> pd.DataFrame:
    frames = [pd.DataFrame(RouteChange(**tally.sums[f"change.{part}"]).site_rows())]
    if f"shift.{part}" in tally.sums:
        frames.append(pd.DataFrame(RouterShift(**tally.sums[f"shift.{part}"]).site_rows()))
    if part == "response":
        frames.append(pd.DataFrame(ResponseChange(**tally.sums["responses"]).site_rows()))
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
    return pd.DataFrame({"n": n[seen].astype(int), "slot_change": sums["slot"].numpy()[seen] / n[seen],
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
