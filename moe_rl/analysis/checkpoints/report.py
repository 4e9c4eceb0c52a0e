"""What a comparison of two checkpoints, or a series, prints and draws, from its tables alone, in the style of
`moe_rl.results.plots`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich import box
from rich.console import Console
from rich.table import Table

from moe_rl.analysis.checkpoints.tables import SEEN, SHOWN, Frames, top_share
from moe_rl.results import plots
from moe_rl.storage.terminal import say

SHARES = ("expert_change_rate", "any_change_rate", "jaccard_distance", "gate_mass_moved", "any_layer_change",
          "response_set_change", "response_usage_change", "router_shift_ratio_low", "coactivation_change")
"""Metrics that are shares, to be read in percent."""
SERIES = {"expert_change_rate": ("slots", "Expert slots changed"),
          "any_layer_change": ("any layer", "Tokens that changed in any layer"),
          "router_shift": ("shift", "Router shift, nats"), "token_kl_k3": ("KL", "")}
"""Metrics of a series: the head of a column, and the title of a panel, where there is one."""
SITE = "routing site, in forward order"
BEFORE, AFTER, FLOOR = plots.COLOURS[0], plots.COLOURS[1], "#666666"
styled = matplotlib.rc_context(plots.STYLE)


def print_report(console: Console, frames: Frames, out: Path) -> None:
    """The summary, where change concentrates, and the figures, which are drawn into `out`."""
    settings = json.loads((out / "comparison.json").read_text())
    counts = settings["finished"]
    say(console, (settings["before"], "bold"), " → ", (settings["after"], "bold"),
        f": {counts['lines']} texts, {counts['tokens']:,} tokens", wrap=True)
    if counts["cut_lines"]:
        lost = counts["lost_lines"]
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
    metrics = [metric for metric in SERIES if (table["metric"] == metric).any()]
    shown.add_column("\nchange since", overflow="fold")
    for title in (*(f"{SERIES[m][0]}\n{s}" for m in metrics for s in ("previous", "first")), "slots\nnoise"):
        shown.add_column(title, justify="right", overflow="fold")
    values = table.set_index(["index", "since", "metric"])
    for index, name in table.groupby("index")["checkpoint"].first().items():
        cells = [_cell(m, values.at[(index, s, m), "response"]) for m in metrics for s in ("previous", "first")]
        floor = values.at[(index, "first", "expert_change_rate"), "noise_floor"]
        shown.add_row(Path(name).name, *cells, _cell("expert_change_rate", floor))
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
    changed = (layers["any_change_rate"] * layers["volatility_tokens"]).to_numpy()
    if not changed.sum():
        return ["no expert set changed anywhere"]
    worst = layers.sort_values("any_change_rate").iloc[-1]
    lines = [
        f"by layer: decoder layer {worst['layer']:.0f} changes most, {_percent(worst['any_change_rate'])} of its sets; "
        f"{_tenth(len(layers), 'site')} {_percent(top_share(changed, 0.1))} of all changes"
    ]
    somewhere = 1 - spread["tokens"][0] / spread["tokens"].sum()
    most = top_share(spread["layers_changed"].to_numpy(), 0.1, spread["tokens"].to_numpy())
    lines.append(f"by token: {_percent(somewhere)} of tokens change somewhere; "
                 f"{_tenth(int(spread['tokens'].sum()), 'token')} {_percent(most)} of all changes")
    early, late = positions[positions["position"] < 16], positions[positions["position"] >= 16]
    if len(late):
        rates = [np.average(part["expert_change_rate"], weights=part["n"]) for part in (early, late)]
        lines.append(f"by position: {_percent(rates[0])} of slots change in the first 16 tokens of a response, "
                     f"{_percent(rates[1])} after")
    common = frames["tokens"][frames["tokens"]["n"] >= SEEN].sort_values("expert_change_rate", ascending=False)
    if len(common):
        named = ", ".join(f"{row.text!r} {_percent(row.expert_change_rate)}" for row in common.head(5).itertuples())
        lines.append(f"by token id (seen {SEEN} times or more): {named}")
    left = frames["experts"]["left"].to_numpy()
    lines.append(f"by expert: {_tenth(len(left), '(layer, expert) pair')} {_percent(top_share(left, 0.1))} of all "
                 "departures")
    return lines


def conclusion(summary: pd.DataFrame) -> str:
    """What the numbers come to, in a sentence: slots changed, beside the noise floor and random routes."""
    by = summary.set_index("metric")
    slots, floor = by.loc["expert_change_rate", ["response", "noise_floor"]]
    tokens = by.loc["any_layer_change", "response"]
    if math.isnan(slots):
        return "no token of a response was compared."
    if not slots:
        return "no expert of any response token changed."
    beside = ("the noise floor is 0" if not floor else "no more than the noise floor" if slots <= floor else
              f"{slots / floor:{'.2g' if slots < 10 * floor else ',.0f'}} times the noise floor")
    return (f"{_percent(slots)} of the experts of response tokens changed ({beside}, random routes would change "
            f"{_percent(by['chance']['expert_change_rate'])}); {_percent(tokens)} of these tokens changed an expert "
            "in some layer.")


def _metrics(summary: pd.DataFrame, counts: Mapping[str, int]) -> Table:
    table = _table("How far routing moved")
    for column in ("metric", "response", "prompt", "noise floor", "chance", "formula"):
        words = column in ("metric", "formula")
        table.add_column(column, justify="left" if words else "right", no_wrap=column != "formula")
    for row in summary.itertuples():
        cells = [_cell(row.metric, value) for value in (row.response, row.prompt, row.noise_floor, row.chance)]
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
    change = {
        "slots\nchanged": "expert_change_rate",
        "\nnoise": "noise_expert_change_rate",
        "sets\nchanged": "any_change_rate",
        "gates\nmoved": "gate_mass_moved",
        "router\nshift": "router_shift",
    }
    both = {"margin,\nmedian": "margin_q50", "load\nentropy": "load_entropy", "\ndead": "load_dead_experts"}
    for title in ("layer", *change, *both):
        table.add_column(title, justify="right", overflow="fold")
    shown = (
        layers if len(layers) <= 2 * SHOWN else layers.sort_values("expert_change_rate").tail(2 * SHOWN).sort_index()
    )
    for _, row in shown.iterrows():
        cells = [_cell(c, row.get(c, math.nan), digits=2) for c in change.values()]
        pairs = ["→".join(_cell(c, row[f"{c}_{when}"]) for when in ("before", "after")) for c in both.values()]
        table.add_row(f"{row['layer']:.0f}", *cells, *pairs)
    if len(shown) < len(layers):
        table.caption = f"the {len(shown)} of {len(layers)} sites that change most; all are in layers.parquet"
    return table


# ---------------------------------------------------------------------- figures
@styled
def by_layer(frames: Frames) -> Figure:
    """Change per site with its noise floor; margins before and after; how a small margin goes with change."""
    layers = frames["layers"]
    figure, axes = plots.new_figure(3, "Where do routes change, and how sure were the routers?")
    ax = axes[0]
    ax.plot(
        layers["site"], layers["expert_change_rate"], "o-", color=AFTER, markersize=4, label="slots, 1 − |S ∩ S′| / k"
    )
    ax.plot(layers["site"], layers["any_change_rate"], "s--", color=AFTER, markersize=3.5, markerfacecolor="white",
            linewidth=1.2, label="sets, S ≠ S′")
    ax.plot(layers["site"], layers["noise_expert_change_rate"], ":", color=FLOOR, label="noise floor, slots")
    ax.set(title="Change by site", ylabel="share of response rows", xlabel=SITE)
    _share_axis(ax)
    _whole(ax)
    ax.legend()
    ax = axes[1]
    for when, colour in (("before", BEFORE), ("after", AFTER)):
        low, middle, high = (layers[f"margin_{q}_{when}"].replace(math.inf, math.nan) for q in ("q10", "q50", "q90"))
        ax.fill_between(layers["site"], low, high, color=colour, alpha=0.15, linewidth=0)
        ax.plot(layers["site"], middle, "o-", color=colour, markersize=4, label=f"{when}: median, 10–90 % band")
    margins = layers.filter(regex="^margin_q").to_numpy()
    known = bool(((margins > 0) & (margins < math.inf)).any())  # none where routers hand out no scores, or use all
    ax.set(title="Router margin" if known else "Router margin: none known", xlabel=SITE,
           yscale="log" if known else "linear", ylabel="k-th minus next choice score")
    _whole(ax)
    ax.legend()
    _margin_panel(axes[2], frames["margins"])
    return figure


def _margin_panel(ax: Axes, margins: pd.DataFrame) -> None:
    decade = (np.log10(margins["low"].clip(lower=1e-8)) * 50).round() // 25 / 2  # edges are no exact powers
    pooled = margins.assign(bin=decade).groupby("bin")[["before", "changed"]].sum()
    pooled = pooled[pooled["before"] >= SEEN]
    ax.bar(10**pooled.index, pooled["changed"] / pooled["before"], width=10 ** (pooled.index + 0.5) - 10**pooled.index,
           align="edge", color=AFTER, edgecolor="white", alpha=0.8)
    ax.set(title="Change by margin", xscale="log", xlabel="margin before, two bins per decade",
           ylabel="share of sets changed")
    _share_axis(ax)
    ax.set_ylim(top=1)


@styled
def concentration_figure(frames: Frames) -> Figure:
    """By position in the response, by number of layers per token, and by token id."""
    figure, axes = plots.new_figure(3, "Which tokens change?")
    ax, positions = axes[0], frames["positions"]
    width = max(1, -(-len(positions) // 40))
    groups = positions.assign(w=positions["expert_change_rate"] * positions["n"]).groupby(
        positions["position"] // width
    )
    pooled = groups[["w", "n"]].sum().assign(position=groups["position"].mean())
    pooled = pooled[pooled["n"] >= SEEN]
    ax.plot(pooled["position"], pooled["w"] / pooled["n"], "o-", color=AFTER, markersize=4)
    ax.set(title="By position in the response", ylabel="expert slots changed",
           xlabel="token of the response" + (f" (each point: {width} tokens)" if width > 1 else ""))
    _share_axis(ax)
    ax, spread = axes[1], frames["layers_changed"]
    ax.bar(spread["layers_changed"], spread["tokens"] / spread["tokens"].sum(), color=AFTER, alpha=0.8, width=0.85)
    ax.set(title="By token", xlabel="layers in which a token's set changed", ylabel="share of response tokens")
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    _whole(ax)
    ax = axes[2]
    common = frames["tokens"][frames["tokens"]["n"] >= SEEN].sort_values("expert_change_rate").tail(SHOWN)
    ax.barh([_plain(text) for text in common["text"]], common["expert_change_rate"], color=AFTER, alpha=0.8)
    ax.set(title=f"Token ids that change most (n ≥ {SEEN})", xlabel="expert slots changed where it is the input")
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.grid(axis="y", visible=False)
    return figure


@styled
def experts_figure(frames: Frames) -> Figure:
    """Load of every expert before and its change, and how far co-activation moved per site."""
    experts, layers = frames["experts"], frames["layers"]
    figure, axes = plots.new_figure(3, "Which experts are used, before and after?")
    load = {when: experts.pivot(index="site", columns="expert", values=when) for when in ("before", "after")}
    fair = {when: frame.div(frame.sum(1), axis=0).mul(frame.notna().sum(1), axis=0) for when, frame in load.items()}
    change = fair["after"] - fair["before"]
    most = max(1e-9, float(np.nanquantile(change.abs(), 0.995)))
    panels = (("Load before", fair["before"], "viridis", 0, float(np.nanquantile(fair["before"], 0.995))),
              ("Change of load", change, "RdBu_r", -most, most))
    for ax, (title, frame, colours, low, high) in zip(axes, panels, strict=False):
        image = ax.imshow(frame, aspect="auto", origin="lower", cmap=colours, vmin=low, vmax=high,
                          interpolation="nearest")
        figure.colorbar(image, ax=ax, label="1 = fair share, slots · E / all slots")
        ax.set(title=title, xlabel="expert", ylabel=SITE)
        ax.grid(visible=False)
        _whole(ax)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax = axes[2]
    ax.plot(layers["site"], layers["coactivation_change"], "o-", color=AFTER, markersize=4,
            label="co-activation, ½ Σ |q − q′|")
    ax.plot(layers["site"], layers["noise_coactivation_change"], ":", color=FLOOR, label="its noise floor")
    ax.set(title="Pairs of experts", xlabel=SITE, ylabel="share of pairs that moved")
    _share_axis(ax)
    _whole(ax)
    ax.legend()
    return figure


@styled
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
            ax.plot(x, rows["noise_floor"], ":", color=FLOOR, label="noise floor" if since == "first" else None)
        ax.set(title=SERIES[metric][1],
               xlabel="checkpoint, in the order given" if at is None else "step of the checkpoint")
        _whole(ax)
        ax.set_ylim(bottom=0)
        if metric != "router_shift":
            ax.yaxis.set_major_formatter(PercentFormatter(1))
    axes[0].set_ylabel("mean over response tokens")
    axes[0].legend()
    return figure


FIGURES = {"by_layer": by_layer, "concentration": concentration_figure, "experts": experts_figure}


# ---------------------------------------------------------------------- small parts
def _whole(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _share_axis(ax: Axes) -> None:
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_ylim(bottom=0)


def _plain(text: str) -> str:
    """A token as a label: spaces visible, no mathematics, nothing a font lacks."""
    shown = "".join(c if c.isprintable() and ord(c) < 0x250 else f"\\x{ord(c):02x}" for c in text.replace(" ", "␣"))
    return shown.replace("\\x2423", "␣").replace("$", r"\$")[:16]


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
