"""Figures by the names that studies give them: those of `plots`, `survival`, and `against:<factor>[:<metric>]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from moe_rl.errors import RunError
from moe_rl.lookup import Use, lookup, unknown
from moe_rl.results import plots, stats
from moe_rl.results.factors import ACROSS, against, factor_of, geometrically_spaced, numeric
from moe_rl.results.summary import Metric, metric, outcomes
from moe_rl.runs.frames import Frames

Draw = Callable[[Frames, Sequence[str]], Figure]
def draw(name: str, endpoint: str) -> Draw:
    """The figure of a name: one of FIGURES, or a user's own `pkg.module:function`. `against:optimizer.lr` draws the
    endpoint over a factor, `against:optimizer.lr:slot_change` another metric. Raises ConfigError for an unknown one."""
    if name.startswith(ACROSS):
        factor, _, column = name.removeprefix(ACROSS).partition(":")
        return partial(against_factor, factor=factor, metric=metric(column or endpoint))
    if name not in FIGURES and not Use(name).own:
        unknown("figure", name, [*FIGURES, f"{ACROSS}<factor>", f"{ACROSS}<factor>:<metric>", "pkg.module:name"])
    return lookup("figure", name, FIGURES)


def planned(names: Sequence[str], cells: Sequence[str], *, every: bool = False) -> list[tuple[str, str | None]]:
    """Which figures to draw of which combination of factors (None: of all together).

    A figure of one combination is drawn where there is only one, or of `every` one.
    """
    across = [(name, None) for name in names if factor_of(name)]
    return across + [(name, cell) for cell in cells if every or len(cells) == 1 for name in names
                     if not factor_of(name)]


def drawn(frames: Frames, declared: Mapping[str, Any], *,
          every: bool = False) -> Iterator[tuple[str, str | None, Figure | RunError]]:
    """The figures that are `planned` of a study: name, combination of factors, and the figure, or why there is none."""
    arms = [arm["name"] for arm in declared["arms"]] or sorted(frames.runs["arm"].unique())
    for name, cell in planned(declared["figures"], frames.cells, every=every):
        try:
            yield name, cell, draw(name, declared["endpoint"])(frames if cell is None else frames.cell(cell), arms)
        except RunError as error:
            yield name, cell, error


def file_name(name: str) -> str:
    """The name of a figure's files."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def title_of(name: str) -> str:
    """The first sentence about a figure, for a caption."""
    about = against_factor if name.startswith(ACROSS) else lookup("figure", name, FIGURES)
    return " ".join((about.__doc__ or "").split("\n\n")[0].split())


@plots.styled
def survival(frames: Frames, arms: Sequence[str]) -> Figure:
    """Share of runs whose reward has not collapsed, by step (Kaplan–Meier); recovered collapses count, and are named.

    A run that ends without collapse is censored there, or where the dip began in which it ends.
    """
    figure, (ax,) = plots.new_figure(1, "How long does it last?", width=7.5)
    fates = outcomes(frames)
    end = fates["time"].max()
    for i, arm in enumerate(arms):
        rows = fates[fates["arm"] == arm]
        if rows.empty:
            continue
        curve = stats.survival(rows["time"], rows["fate"] != "stable")
        x = np.append(curve.times, end)
        share, low, high = (np.append(y, y[-1]) for y in (curve.share, curve.low, curve.high))
        recovered = int((rows["fate"] == "recovered").sum())
        label = f"{arm}: {curve.events} of {curve.n} collapsed" + f", {recovered} recovered" * bool(recovered)
        colour = plots.colour_of(arm, arms)
        below, above = (np.repeat(y, 2)[:-1] for y in (low, high))
        ax.fill_between(np.repeat(x, 2)[1:], below, above, color=colour, alpha=0.12,
                        linewidth=0)  # step="post" would lose the last step before a NaN
        ax.step(x, share, where="post", color=colour, label=label, linewidth=1.8 + 0.8 * (len(arms) - 1 - i),
                gid=f"{arm} survival")
        censored = rows.loc[rows["fate"] == "stable", "time"]
        at = share[np.searchsorted(x[:-1], censored, side="right") - 1]
        ax.plot(censored, at, "|", color=colour, markersize=10, markeredgewidth=1.5, gid=f"{arm} censored")
        note = f"|: runs that ended before any collapse; band: {curve.method} interval, where defined"
    ax.set(xlabel="step", ylabel="share of runs not collapsed", ylim=(-0.02, 1.04))
    return plots.finish(figure, [ax], note)


@plots.styled
def against_factor(frames: Frames, arms: Sequence[str], *, factor: str, metric: Metric) -> Figure:
    """A number per run against a factor: every seed thin, the mean over seeds thick, its interval as a band.

    A panel per combination of the other factors; a log axis where the values are spaced like one.
    """
    table = against(frames, factor, metric)
    values = list(dict.fromkeys(table["x"]))
    is_number = numeric(values)
    table = table.assign(at=table["x"] if is_number else table["x"].map(values.index))
    panels = list(table.groupby("others", sort=False))
    figure, axes = plots.new_figure(len(panels), f"{metric.name} against {factor}", sharey=True)
    for ax, (others, rows) in zip(axes, panels, strict=True):
        note = plots.curves(ax, rows, "value", "at", arms, marker="o")
        ax.set(title=str(others), xlabel=factor)
        _ticks(ax, values, is_number)
    axes[0].set_ylabel(metric.name)
    if metric.column in ("reward", "exact") or metric.column.startswith("eval_"):
        axes[0].set_ylim(-0.02, 1.02)  # a t band knows no bounds
    return plots.finish(figure, axes, note)


def _ticks(ax: Axes, values: Sequence[float | str], is_number: bool) -> None:
    """A tick at every value that was run."""
    at: Sequence[float] = [float(v) for v in values] if is_number else range(len(values))
    if is_number and geometrically_spaced(at):
        ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(at))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([f"{v:g}" if is_number else str(v) for v in values], rotation=30 if len(values) > 5 else 0)


FIGURES: dict[str, Draw] = {name: getattr(plots, name) for name in plots.FIGURES} | {"survival": survival}
