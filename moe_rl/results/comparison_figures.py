"""Figures of what became of runs: how long they last, and a number per run against a factor; as `training_figures`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from moe_rl.results import plots, stats
from moe_rl.results.factors import against, geometrically_spaced, name_of, numeric
from moe_rl.results.summary import MAIN, Metric, collapsed, outcomes, pairs_of
from moe_rl.results.training_figures import LEARNING, differences_of, draw_differences, draw_learning
from moe_rl.storage.frames import Frames

VOID = "×: every run of the arm collapsed there"


@plots.styled
def survival(frames: Frames, arms: Sequence[str]) -> Figure:
    """Share of runs whose reward has not collapsed, by step (Kaplan–Meier); recovered collapses count, and are named.

    A run that ends without collapse is censored there, or where the dip began in which it ends. Below: how many runs
    are still looked at.
    """
    figure, (ax,) = plots.new_figure(1, "How long does it last?", width=7.5)
    fates, methods = outcomes(frames), []
    end, present = int(fates["time"].max()), [arm for arm in arms if (fates["arm"] == arm).any()]
    ax.set(xlabel="step", ylabel="share of runs not collapsed", xlim=(0, 1.02 * end), ylim=(-0.02, 1.04))
    plots.whole(ax)
    for i, arm in enumerate(present):
        rows, colour = fates[fates["arm"] == arm], plots.colour_of(arm, arms)
        curve = stats.survival(rows["time"], rows["fate"] != "stable")
        x = np.append(curve.times, end)
        share, low, high = (np.append(y, y[-1]) for y in (curve.share, curve.low, curve.high))
        recovered = int((rows["fate"] == "recovered").sum())
        label = f"{arm}: {curve.events} of {curve.n} collapsed" + f", {recovered} recovered" * bool(recovered)
        if curve.n >= plots.FEWEST:
            below, above = (np.repeat(y, 2)[:-1] for y in (low, high))
            ax.fill_between(np.repeat(x, 2)[1:], below, above, color=colour, alpha=0.12,
                            linewidth=0)  # step="post" would lose the last step before a NaN
            methods.append(curve.method)
        width = 1.8 + 0.8 * (len(present) - 1 - i) * (len(present) <= plots.ARMS)  # curves that coincide are all seen
        ax.step(x, share, where="post", color=colour, linestyle=plots.dashes_of(arm, arms), label=label,
                linewidth=width, gid=f"{arm} survival")
        censored = rows.loc[rows["fate"] == "stable", "time"]
        at = share[np.searchsorted(x[:-1], censored, side="right") - 1]
        ax.plot(censored, at, "|", color=colour, markersize=10, markeredgewidth=1.5, gid=f"{arm} censored")
        _at_risk(ax, rows["time"], arm, colour, i, end)
    said = [f"band: {method} interval, where defined" for method in dict.fromkeys(methods)]
    return plots.finish(figure, [ax], "; ".join(["|: runs that ended before any collapse", *said]))


def _at_risk(ax: Axes, times: pd.Series, arm: str, colour: str, row: int, end: int) -> None:
    """How many runs had neither collapsed nor ended before each tick: a row of numbers under the axis."""
    style: dict[str, Any] = {"color": colour, "fontsize": 8, "va": "top", "annotation_clip": False,
                             "textcoords": "offset points"}
    across = ax.get_xaxis_transform()
    ax.annotate(f"{arm}, at risk  ", (0, 0), xytext=(-6, -36 - 11 * row), xycoords=across, ha="right", **style)
    for tick in ax.get_xticks():
        if 0 <= tick <= end:
            ax.annotate(f"{int((times >= tick).sum())}", (tick, 0), xytext=(0, -36 - 11 * row), xycoords=across,
                        ha="center", gid=f"{arm} at risk at {tick:g}", **style)


@plots.styled
def learning_by_cell(frames: Frames, arms: Sequence[str], *, endpoint: Metric = MAIN,
                     contrasts: Sequence[Sequence[str]] = ()) -> Figure:
    """Training reward and greedy held-out exact match over steps, and the endpoint's differences within seeds: a row of
    panels per combination of factors. Where the dial injects noise, the row says so."""
    figure, axes = plots.new_figure(3 * len(frames.cells), "Does it learn, and does it last?")
    panels = {column: LEARNING[column] for column in ("reward", "eval_exact_greedy")}
    notes: dict[str, str] = {}
    for i, cell in enumerate(frames.cells):
        row, here = axes[3 * i : 3 * i + 3], frames.cell(cell)
        note = draw_learning(row, panels, here, arms)
        note += draw_differences(row[2], differences_of(here, arms, endpoint, contrasts), arms, endpoint)
        notes[note] = f"{notes[note]}, {cell}" if note in notes else cell
        dials = [json.loads(c).get("dial", {}) for c in here.runs.get("config", ())]
        sigma = max((dial.get("sigma", 0.0) for dial in dials), default=0.0)
        where = "into all but" if any(dial.get("form") == "beside" for dial in dials) else "into"
        injected = f": noise is injected {where} its routers, σ = {sigma:g}" if sigma else ""
        row[0].set(title=f"{cell}{injected}\n{panels['reward']}")
    limits = [ax.get_xlim() for ax in axes[2::3]]
    for ax in axes[2::3]:  # one scale, so that rows can be compared
        ax.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    said = notes if len(notes) == 1 else (f"{cells}: {note}" for note, cells in notes.items())
    return plots.finish(figure, [ax for i, ax in enumerate(axes) if i % 3 < 2], "; ".join(said))


@plots.styled
def against_factor(frames: Frames, arms: Sequence[str], *, factor: str, metric: Metric = MAIN,
                   contrasts: Sequence[Sequence[str]] = ()) -> Figure:
    """A number per run against a factor, and beside it the differences within seeds: every seed, mean and interval.

    A pair of panels per combination of the other factors; a log axis where the values are spaced like one. Where every
    run of an arm collapsed there is no number to speak of: a cross at the foot says so.
    """
    table, lost = against(frames, factor, metric), collapsed(frames)
    values = list(dict.fromkeys(table["x"]))
    is_number = numeric(values)
    table = table.assign(at=table["x"] if is_number else table["x"].map(values.index))
    void = [key in lost for key in zip(table["arm"], table["cell"], strict=True)]
    panels = list(table.assign(void=void).groupby("others", sort=False))
    present = [arm for arm in arms if (table["arm"] == arm).any()]
    pairs = pairs_of(present, contrasts) if len(present) > 1 else ()
    figure, axes = plots.new_figure(len(panels) * (1 + bool(pairs)), f"{metric.name} against {name_of(factor)}")
    for i, (others, rows) in enumerate(panels):
        left, right = axes[i * (1 + bool(pairs))], axes[i * (1 + bool(pairs)) + 1] if pairs else None
        for ax in filter(None, (left, right)):
            _ticks(ax, values, is_number)
            ax.set(xlabel=name_of(factor))
        kept = rows[~rows["void"]]
        scale = plots.scale_of(metric.column, kept["value"].to_numpy())
        note = plots.curves(left, kept, "value", "at", arms, marker="o", scale=scale)
        before = plots.before_training(frames["steps"], metric.column).groupby(level=0).mean()
        line = before.reindex(rows["cell"]).groupby(rows["at"].to_numpy()).mean().dropna()
        left.plot(line.index, line, **plots.BEFORE if len(line) else {}, gid=f"cold start {metric.column}")
        _crosses(left, rows[rows["void"]], arms)
        left.set(title=str(others), ylabel=metric.name)
        if scale == "logit" and (metric.column in plots.COLD_START or metric.column.startswith("eval_")):
            left.set_ylim(-0.02, 1.02)
        if right is not None:
            note += _differences(right, rows, pairs, arms)
            right.set(title="Differences within seeds", ylabel=textwrap.fill(f"difference in {metric.name}", 36))
    note += f"; {VOID}" * any(void)
    return plots.finish(figure, axes, note)


def _differences(ax: Axes, rows: pd.DataFrame, pairs: Sequence[Sequence[str]], arms: Sequence[str]) -> str:
    """First minus second arm over the factor, where not both have collapsed. Says what differs in method."""
    wide, found, firsts = rows.set_index(["arm", "at", "seed"]), [], [a for a, _ in pairs]
    for i, (a, b) in enumerate(pairs):
        if {a, b} <= set(rows["arm"]):
            both = wide.loc[a].join(wide.loc[b], lsuffix="_a", rsuffix="_b", how="inner")
            gap = (both["value_a"] - both["value_b"])[~(both["void_a"] & both["void_b"])].rename("value").reset_index()
            line = ("-", "--", ":", "-.")[firsts[:i].count(a) % 4]  # tells it from another of the same first arm
            found.append(plots.over(ax, gap, "at", plots.colour_of(a, arms), f"{a} − {b}", linestyle=line,
                                    shift=0.02 * (i - (len(pairs) - 1) / 2)) if len(gap) else None)
    bands = [b for b in found if b is not None]
    ax.axhline(0, color="black", linewidth=1)
    return f". Differences: {plots.note_of(bands, 'whisker', 'dots').removeprefix('mean over ')}" if bands else ""


def _crosses(ax: Axes, void: pd.DataFrame, arms: Sequence[str]) -> None:
    """One per arm and value of the factor, at the foot, beside each other."""
    for arm, rows in void.groupby("arm"):
        for at in rows["at"].unique():
            ax.annotate("×", (at, 0), xytext=(9 * (list(arms).index(arm) - (len(arms) - 1) / 2), 3), ha="center",
                        xycoords=ax.get_xaxis_transform(), textcoords="offset points", fontweight="bold",
                        color=plots.colour_of(arm, arms), gid=f"{arm} void at {at:g}")


def _ticks(ax: Axes, values: Sequence[float | str], is_number: bool) -> None:
    """A tick at every value that was run."""
    at: Sequence[float] = [float(v) for v in values] if is_number else range(len(values))
    if is_number and geometrically_spaced(at):
        ax.set_xscale("log")
    ax.set_xlim(*_room(ax, at))
    ax.xaxis.set_major_locator(FixedLocator(at))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([f"{v:g}" if is_number else str(v) for v in values], rotation=30 if len(values) > 5 else 0)


def _room(ax: Axes, at: Sequence[float]) -> tuple[float, float]:
    """The values with a margin, also where those at the ends were not drawn."""
    there, back = (np.log, np.exp) if ax.get_xscale() == "log" else (np.asarray, np.asarray)
    low, high = there(min(at)), there(max(at))
    room = 0.07 * (high - low)
    return float(back(low - room)), float(back(high + room))
