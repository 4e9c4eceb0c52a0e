"""Figures of a comparison of two checkpoints, from its tables alone, in the style of `moe_rl.results.plots`."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from moe_rl.analysis.checkpoints.tables import SEEN, SHOWN, Frames
from moe_rl.results import plots

BEFORE, AFTER, FLOOR = plots.COLOURS[0], plots.COLOURS[1], "#666666"
styled = matplotlib.rc_context(plots.STYLE)


@styled
def by_layer(frames: Frames) -> Figure:
    """Change per site with its noise floor; margins before and after; how a small margin goes with change."""
    layers = frames["layers"]
    figure, axes = plots.new_figure(3, "Where do routes change, and how sure were the routers?")
    ax = axes[0]
    ax.plot(layers["site"], layers["slot_change"], "o-", color=AFTER, markersize=4, label="slots, 1 − |S ∩ S′| / k")
    ax.plot(layers["site"], layers["set_change"], "s--", color=AFTER, markersize=3.5, markerfacecolor="white",
            linewidth=1.2, label="sets, S ≠ S′")
    ax.plot(layers["site"], layers["noise_slot_change"], ":", color=FLOOR, label="noise floor, slots")
    ax.set(title="Change by site", ylabel="share of response rows", xlabel="routing site, in forward order")
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    _whole(ax)
    ax.set_ylim(bottom=0)
    ax.legend()
    ax = axes[1]
    for when, colour in (("before", BEFORE), ("after", AFTER)):
        low, middle, high = (layers[f"margin_{q}_{when}"].replace(math.inf, math.nan) for q in ("q10", "q50", "q90"))
        ax.fill_between(layers["site"], low, high, color=colour, alpha=0.15, linewidth=0)
        ax.plot(layers["site"], middle, "o-", color=colour, markersize=4, label=f"{when}: median, 10–90 % band")
    margins = layers.filter(regex="^margin_q").to_numpy()
    known = bool(((margins > 0) & (margins < math.inf)).any())  # none where routers hand out no scores, or use all
    ax.set(title="Router margin" if known else "Router margin: none known", xlabel="routing site, in forward order",
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
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1))


@styled
def concentration_figure(frames: Frames) -> Figure:
    """By position in the response, by number of layers per token, and by token id."""
    figure, axes = plots.new_figure(3, "Which tokens change?")
    ax, positions = axes[0], frames["positions"]
    width = max(1, -(-len(positions) // 40))
    groups = positions.assign(w=positions["slot_change"] * positions["n"]).groupby(positions["position"] // width)
    pooled = groups[["w", "n"]].sum().assign(position=groups["position"].mean())
    pooled = pooled[pooled["n"] >= SEEN]
    ax.plot(pooled["position"], pooled["w"] / pooled["n"], "o-", color=AFTER, markersize=4)
    ax.set(title="By position in the response", ylabel="expert slots changed",
           xlabel="token of the response" + (f" (each point: {width} tokens)" if width > 1 else ""))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_ylim(bottom=0)
    ax, spread = axes[1], frames["layers_changed"]
    ax.bar(spread["layers_changed"], spread["tokens"] / spread["tokens"].sum(), color=AFTER, alpha=0.8, width=0.85)
    ax.set(title="By token", xlabel="layers in which a token's set changed", ylabel="share of response tokens")
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    _whole(ax)
    ax = axes[2]
    common = frames["tokens"][frames["tokens"]["n"] >= SEEN].sort_values("slot_change").tail(SHOWN)
    ax.barh([_plain(text) for text in common["text"]], common["slot_change"], color=AFTER, alpha=0.8)
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
        ax.set(title=title, xlabel="expert", ylabel="routing site, in forward order")
        ax.grid(visible=False)
        _whole(ax)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax = axes[2]
    ax.plot(layers["site"], layers["coactivation_change"], "o-", color=AFTER, markersize=4,
            label="co-activation, ½ Σ |q − q′|")
    ax.plot(layers["site"], layers["noise_coactivation_change"], ":", color=FLOOR, label="its noise floor")
    ax.set(title="Pairs of experts", xlabel="routing site, in forward order", ylabel="share of pairs that moved")
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_ylim(bottom=0)
    _whole(ax)
    ax.legend()
    return figure


@styled
def series_figure(table: pd.DataFrame) -> Figure:
    """A metric over the checkpoints of a series: since the previous one, since the first, and their noise floor."""
    shown = [m for m in ("slot_change", "any_layer_change", "router_shift") if (table["metric"] == m).any()]
    figure, axes = plots.new_figure(len(shown), "How far has routing moved, and how fast?")
    steps = table.groupby("index", sort=True)["step"].first()
    at = steps if steps.notna().all() and steps.is_monotonic_increasing and steps.is_unique else None
    for ax, metric in zip(axes, shown, strict=True):
        for since, colour, line in (("first", AFTER, "o-"), ("previous", BEFORE, "s--")):
            rows = table[(table["metric"] == metric) & (table["since"] == since)].sort_values("index")
            x = rows["index"] if at is None else rows["index"].map(at)
            ax.plot(x, rows["response"], line, color=colour, markersize=4, label=f"since the {since}")
            ax.plot(x, rows["noise_floor"], ":", color=FLOOR, label="noise floor" if since == "first" else None)
        ax.set(title={"slot_change": "Expert slots changed", "any_layer_change": "Tokens that changed in any layer",
                      "router_shift": "Router shift, nats"}[metric],
               xlabel="checkpoint, in the order given" if at is None else "step of the checkpoint")
        _whole(ax)
        ax.set_ylim(bottom=0)
        if metric != "router_shift":
            ax.yaxis.set_major_formatter(PercentFormatter(1))
    axes[0].set_ylabel("mean over response tokens")
    axes[0].legend()
    return figure


FIGURES = {"by_layer": by_layer, "concentration": concentration_figure, "experts": experts_figure}


def _whole(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plain(text: str) -> str:
    """A token as a label: spaces visible, no mathematics, nothing a font lacks."""
    shown = "".join(c if c.isprintable() and ord(c) < 0x250 else f"\\x{ord(c):02x}" for c in text.replace(" ", "␣"))
    return shown.replace("\\x2423", "␣").replace("$", r"\$")[:16]
