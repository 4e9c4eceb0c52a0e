"""What a comparison of two checkpoints, or a series, prints and draws, from its tables alone, in the style of
`moe_rl.results.plots`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console

from moe_rl.analysis.checkpoints.tables import Frames
from moe_rl.results import plots
from moe_rl.results.printed import print_table
from moe_rl.results.tables import Shown
from moe_rl.storage.terminal import say

SERIES = {
    "expert_change_rate": ("slots", "Expert slots changed"),
    "any_layer_change": ("any layer", "Tokens that changed in any layer"),
    "router_shift": ("shift", "Router shift, nats"),
    "token_kl_k3": ("KL", ""),
}
"""Metrics of a series: the head of a column, and the title of a panel, where there is one."""
MOE_LAYER = "routing MoE layer, in forward order"
BEFORE, AFTER = plots.COLOURS[:2]


def print_report(console: Console, frames: Frames, out: Path) -> None:
    """The summary, and the figure, which is drawn into `out`."""
    settings = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    counts = settings["finished"]
    before, after = (name.rpartition(" ")[0] for name in settings["checkpoints"])
    texts = f": {counts['lines']} texts, {counts['tokens']:,} tokens"
    say(console, (before, "bold"), " → ", (after, "bold"), texts, wrap=True)
    if cut := counts["cut_lines"]:
        limit = f" at {settings['max_tokens']} tokens (--max-tokens)"
        lost = f"; {counts['lost_lines']} lost their whole response and are not counted"
        say(console, (f"{cut} texts were cut", "yellow"), limit, lost if counts["lost_lines"] else "", wrap=True)
    note = (
        f"Noise floor: BEFORE against itself on {counts['noise_batches']} of {counts['batches']} batches, in other "
        "batches and padding. Response: rows that decide a token of it."
    )
    share = frames["summary"].set_index("metric")["response"]
    changed = (
        f"{share['expert_change_rate']:.2%} of the expert slots changed, {share['any_change_rate']:.2%} of the sets"
    )
    say(console, (changed, "bold"), wrap=True)
    columns = ["response", "noise_floor"]
    rows = [(row["metric"], *(_number(row[c]) for c in columns)) for row in frames["summary"].to_dict("records")]
    header = ("metric", "response", "noise floor")
    print_table(console, Shown("How far routing moved", header, rows, note))
    say(console, f"figure {' '.join(map(str, plots.save(by_layer(frames), out, 'by_layer')))}")
    say(console, f"tables {out}/*.parquet")


def print_series(console: Console, table: pd.DataFrame, out: Path) -> None:
    """A row per checkpoint, and the curve, which is drawn into `out`."""
    metrics = [metric for metric in SERIES if (table["metric"] == metric).any()]
    places = [(s, m) for m in metrics for s in ("previous", "first")]
    header = ("change since", *(f"{SERIES[m][0]}\n{s}" for s, m in places), "slots\nnoise")
    values, rows = table.set_index(["index", "since", "metric"]), []
    for index, name in table.groupby("index")["checkpoint"].first().items():
        cells = [_number(values.at[(index, *place), "response"]) for place in places]
        floor = values.at[(index, "first", "expert_change_rate"), "noise_floor"]
        rows.append((Path(name).name, *cells, _number(floor)))
    note = (
        "slots: expert slots changed; any layer: tokens whose set changed in any; shift, KL: nats. Means over the rows "
        f"that decide a response. Every pair is a comparison of its own: {out}/<first>-<second>/*.parquet"
    )
    print_table(console, Shown("How far routing moved along the series", header, rows, note))
    say(console, f"figure {' '.join(map(str, plots.save(series_figure(table), out, 'series')))}")
    say(console, f"table {out / 'series.parquet'}")


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# ---------------------------------------------------------------------- figures
@plots.styled
def by_layer(frames: Frames) -> Figure:
    """Change per MoE layer with its noise floor, and margins before and after."""
    layers = frames["layers"]
    figure, axes = plots.new_figure(2, "Where do routes change, and how sure were the routers?")
    ax, moe_layers = axes[0], layers["moe_layer"]
    ax.plot(moe_layers, layers["expert_change_rate"], "o-", color=AFTER, markersize=4, label="slots, 1 − |S ∩ S′| / k")
    ax.plot(moe_layers, layers["any_change_rate"], "s--", color=AFTER, markersize=4, label="sets, S ≠ S′")
    ax.plot(moe_layers, layers["noise_expert_change_rate"], ":", color=plots.GREY, label="noise floor, slots")
    ax.set(title="Change by MoE layer", ylabel="share of response rows", xlabel=MOE_LAYER, ylim=(0, None))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax = axes[1]
    for when, colour in (("before", BEFORE), ("after", AFTER)):
        low, middle, high = (layers[f"margin_{q}_{when}"].replace(math.inf, math.nan) for q in ("q10", "q50", "q90"))
        ax.fill_between(moe_layers, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.plot(moe_layers, middle, "o-", color=colour, markersize=4, label=f"{when}: median, 10–90 % band")
    ax.set(title="Router margin", xlabel=MOE_LAYER, ylabel="k-th minus next choice score")
    ax.set_yscale("log", nonpositive="mask")
    for ax in axes[:2]:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend()
    return figure


@plots.styled
def series_figure(table: pd.DataFrame) -> Figure:
    """A metric over the checkpoints of a series: since the previous one, since the first, and their noise floor."""
    shown = [metric for metric, (_, title) in SERIES.items() if title and (table["metric"] == metric).any()]
    figure, axes = plots.new_figure(len(shown), "How far has routing moved, and how fast?")
    steps = table.groupby("index", sort=True)["step"].first()
    at = steps if steps.notna().all() and steps.is_monotonic_increasing and steps.is_unique else None
    for ax, metric in zip(axes, shown, strict=True):
        for since, colour, line in (("first", AFTER, "o-"), ("previous", BEFORE, "s--")):
            rows = table[(table["metric"] == metric) & (table["since"] == since)].sort_values("index")
            x = rows["index"] if at is None else rows["index"].map(at)
            ax.plot(x, rows["response"], line, color=colour, markersize=4, label=f"since the {since}")
            ax.plot(x, rows["noise_floor"], ":", color=plots.GREY, label="noise floor" if since == "first" else None)
        ax.set(
            title=SERIES[metric][1], xlabel="checkpoint, in the order given" if at is None else "step of the checkpoint"
        )
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_ylim(bottom=0)
        if metric != "router_shift":
            ax.yaxis.set_major_formatter(PercentFormatter(1))
    axes[0].set_ylabel("mean over response tokens")
    axes[0].legend()
    return figure
