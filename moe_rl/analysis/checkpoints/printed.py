"""What a comparison of two checkpoints prints and draws, from its tables alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from moe_rl.analysis.checkpoints.figures import FIGURES, series_figure
from moe_rl.analysis.checkpoints.tables import SEEN, SHOWN, Frames, top_share
from moe_rl.results import plots
from moe_rl.storage.terminal import say

SHARES = ("slot_change", "set_change", "jaccard_distance", "gate_mass_moved", "any_layer_change", "response_set_change",
          "response_usage_change", "router_shift_ratio_low", "coactivation_change")
"""Metrics that are shares, to be read in percent."""


def print_report(console: Console, frames: Frames, out: Path) -> None:
    """The summary, where change concentrates, and the figures, which are drawn into `out`."""
    settings = json.loads((out / "comparison.json").read_text())
    counts = settings["finished"]
    say(console, (settings["before"], "bold"), " → ", (settings["after"], "bold"),
        f": {counts['lines']} texts, {counts['tokens']:,} tokens", wrap=True)
    if counts["cut_lines"]:
        lost = counts.get("lost_lines", 0)
        nothing = f", {lost} of them to nothing but prompt: their responses are in no number" * bool(lost)
        say(console, (f"{counts['cut_lines']} texts were cut", "yellow"),
            f" at {settings['max_tokens']} tokens (--max-tokens){nothing}", wrap=True)
    console.print(_metrics(frames["summary"], counts))
    console.print(_layers(frames["layers"]))
    for line in concentration(frames):
        say(console, f"· {line}", wrap=True)
    say(console, ("In short", "bold"), f": {conclusion(frames['summary'])}", wrap=True)
    for name, draw in FIGURES.items():
        paths = plots.save(draw(frames), out, name)
        say(console, f"figure {' '.join(map(str, paths))}")
    say(console, f"tables {out}/*.parquet")


def print_series(console: Console, table: pd.DataFrame, out: Path) -> None:
    """A row per checkpoint, and the curve, which is drawn into `out`."""
    shown = _table("How far routing moved along the series")
    titles = {"slot_change": "slots", "any_layer_change": "any layer", "router_shift": "shift", "token_kl_k3": "KL"}
    metrics = [metric for metric in titles if (table["metric"] == metric).any()]
    shown.add_column("\nchange since", overflow="fold")
    for title in (*(f"{titles[m]}\n{s}" for m in metrics for s in ("previous", "first")), "slots\nnoise"):
        shown.add_column(title, justify="right", overflow="fold")
    values = table.set_index(["index", "since", "metric"])
    for index, name in table.groupby("index")["checkpoint"].first().items():
        cells = [_cell(m, values.at[(index, s, m), "response"]) for m in metrics for s in ("previous", "first")]
        shown.add_row(Path(name).name, *cells, _cell("slot_change", values.at[(index, "first", "slot_change"),
                                                                              "noise_floor"]))
    shown.caption = ("slots: expert slots changed; any layer: tokens whose set changed in any; shift, KL: nats. Means "
                     "over the rows that decide a response. Every pair is a comparison of its own: "
                     f"{out}/<first>-<second>/*.parquet")
    console.print(shown)
    paths = plots.save(series_figure(table), out, "series")
    say(console, f"figure {' '.join(map(str, paths))}")
    say(console, f"table {out / 'series.parquet'}")


def concentration(frames: Frames) -> list[str]:
    """Where change concentrates: by layer, token, position, token id and expert, one sentence each."""
    layers, spread, positions = frames["layers"], frames["layers_changed"], frames["positions"]
    changed = (layers["set_change"] * layers["volatility_tokens"]).to_numpy()
    if not changed.sum():
        return ["no expert set changed anywhere"]
    worst = layers.sort_values("set_change").iloc[-1]
    lines = [f"by layer: decoder layer {worst['layer']:.0f} changes most, {_percent(worst['set_change'])} of its sets; "
             f"{_tenth(len(layers), 'site')} {_percent(top_share(changed, 0.1))} of all changes"]
    somewhere = 1 - spread["tokens"][0] / spread["tokens"].sum()
    most = top_share(spread["layers_changed"].to_numpy(), 0.1, spread["tokens"].to_numpy())
    lines.append(f"by token: {_percent(somewhere)} of tokens change somewhere; "
                 f"{_tenth(int(spread['tokens'].sum()), 'token')} {_percent(most)} of all changes")
    early, late = positions[positions["position"] < 16], positions[positions["position"] >= 16]
    if len(late):
        rates = [np.average(part["slot_change"], weights=part["n"]) for part in (early, late)]
        lines.append(f"by position: {_percent(rates[0])} of slots change in the first 16 tokens of a response, "
                     f"{_percent(rates[1])} after")
    common = frames["tokens"][frames["tokens"]["n"] >= SEEN].sort_values("slot_change", ascending=False)
    if len(common):
        named = ", ".join(f"{row.text!r} {_percent(row.slot_change)}" for row in common.head(5).itertuples())
        lines.append(f"by token id (seen {SEEN} times or more): {named}")
    left = frames["experts"]["left"].to_numpy()
    lines.append(f"by expert: {_tenth(len(left), '(layer, expert) pair')} {_percent(top_share(left, 0.1))} of all "
                 "departures")
    return lines


def conclusion(summary: pd.DataFrame) -> str:
    """What the numbers come to, in a sentence: slots changed, beside the noise floor and random routes."""
    by = summary.set_index("metric")
    slots, floor = by.loc["slot_change", ["response", "noise_floor"]]
    tokens = by.loc["any_layer_change", "response"]
    if math.isnan(slots):
        return "no token of a response was compared."
    if not slots:
        return "no expert of any response token changed."
    chance = by["chance"]["slot_change"] if "chance" in by else math.nan  # of a comparison that older code finished
    beside = ("the noise floor is 0" if not floor else "no more than the noise floor" if slots <= floor else
              f"{slots / floor:{'.2g' if slots < 10 * floor else ',.0f'}} times the noise floor")
    if not math.isnan(chance):
        beside += f", random routes would change {_percent(chance)}"
    return (f"{_percent(slots)} of the experts of response tokens changed ({beside}); {_percent(tokens)} of these "
            "tokens changed an expert in some layer.")


def _metrics(summary: pd.DataFrame, counts: Mapping[str, int]) -> Table:
    table = _table("How far routing moved")
    for column in ("metric", "response", "prompt", "noise floor", "chance", "formula"):
        words = column in ("metric", "formula")
        table.add_column(column, justify="left" if words else "right", no_wrap=column != "formula")
    for row in summary.itertuples():
        chance = getattr(row, "chance", math.nan)  # of a comparison that older code finished
        cells = [_cell(row.metric, value) for value in (row.response, row.prompt, row.noise_floor, chance)]
        table.add_row(row.metric, *cells, row.formula, style="dim" if "tokens" in row.metric else "")
    table.caption = (f"Noise floor: BEFORE's own weights on {counts['noise_batches']} of {counts['batches']} batches, "
                     "seen again with rows in reverse, other batch sizes and more padding. Chance: both routings "
                     "drawn at random; where a metric sums over tokens first, what sampling alone leaves. Response, "
                     "prompt: rows that "
                     "decide a token of either. S experts of a token, U of a response, f their shares of its slots, "
                     "q shares of pairs serving one token, p the router's probabilities.")
    return table


def _layers(layers: pd.DataFrame) -> Table:
    table = _table("By layer")
    change = {"slots\nchanged": "slot_change", "\nnoise": "noise_slot_change", "sets\nchanged": "set_change",
              "gates\nmoved": "gate_mass_moved", "router\nshift": "router_shift"}
    both = {"margin,\nmedian": "margin_q50", "load\nentropy": "load_entropy", "\ndead": "load_dead_experts"}
    for title in ("layer", *change, *both):
        table.add_column(title, justify="right", overflow="fold")
    shown = layers if len(layers) <= 2 * SHOWN else layers.sort_values("slot_change").tail(2 * SHOWN).sort_index()
    for _, row in shown.iterrows():
        cells = [_cell(c, row.get(c, math.nan), digits=2) for c in change.values()]
        pairs = ["→".join(_cell(c, row[f"{c}_{when}"]) for when in ("before", "after")) for c in both.values()]
        table.add_row(f"{row['layer']:.0f}", *cells, *pairs)
    if len(shown) < len(layers):
        table.caption = f"the {len(shown)} of {len(layers)} sites that change most; all are in layers.parquet"
    return table


# ---------------------------------------------------------------------- small parts
def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", caption_justify="left", box=box.SIMPLE_HEAD,
                 collapse_padding=True, pad_edge=False)


def _cell(metric: str, value: float, digits: int = 3) -> str:
    if value is None or math.isnan(value):
        return "–"
    if metric in ("tokens", "unknown_rows") or "dead" in metric:
        return f"{value:,.0f}"
    return _percent(value, digits) if metric.removeprefix("noise_") in SHARES else f"{value:.2g}"


def _tenth(count: int, what: str) -> str:
    """The largest tenth of so many, one at least, as the subject of a sentence that goes on with a share."""
    some = max(1, math.ceil(0.1 * count))
    return f"the {f'{some:,} most changed' if some > 1 else 'most changed one'} of {count:,} {what}s " + (
        "hold" if some > 1 else "holds")


def _percent(value: float, digits: int = 3) -> str:
    return f"{100 * value:.{digits}g} %" if value < 0.9995 else f"{100 * value:.0f} %"
