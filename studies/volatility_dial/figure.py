"""The figure of volatility_dial."""

from __future__ import annotations

import numpy as np
import pandas as pd
from base import noise
from contrasts import values_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from volatility_dial.study import FORMS, SIGMAS, study

from moe_rl.results import plots
from moe_rl.results.stats import Interval, interval
from moe_rl.storage.frames import Frames

ARMS = [arm.name for arm in study.arms]
MOVES = dict(zip(FORMS, ("gates and sets move", "sets alone move"), strict=True))


@plots.styled
def draw(frames: Frames) -> Figure:
    """Level of GRPO and what replay and GSPO add to it, over the dose, paired by seed; a row of panels per form."""
    figure, axes = plots.new_figure(2 * len(FORMS), "Volatility as an assigned dose", width=17)
    for form, left, right in zip(FORMS, axes[::2], axes[1::2], strict=True):
        names = {0.0: noise("weights", 0)} | {sigma: noise(form, sigma) for sigma in SIGMAS}
        rewards = {sigma: values_of(frames, name, study.endpoint) for sigma, name in names.items()}
        for arm in ARMS:
            draw_arm(left, {s: table[arm] for s, table in rewards.items() if arm in table}, arm)
        for a, b in study.comparisons:
            gaps = {s: table[a] - table[b] for s, table in rewards.items() if a in table}
            found = draw_arm(right, gaps, a, seeds=True)
        right.axhline(0, color="black", linewidth=1)
        plots.cold_start(left, frames["steps"], "reward")
        unit = "router noise σ, standard deviations of router weights"
        left.set(title=f"{form}: {MOVES[form]}", xlabel=unit, ylabel="reward")
        right.set(title=f"{form}: minus GRPO", xlabel="router noise σ", ylabel="difference in reward")
    axes[0].legend(loc="center left")
    note = f"mean over n = {found.n} seeds, steps 26–50; whisker: {found.method}; dots: each seed; noise is injected"
    return plots.finish(figure, axes, note, legend=False)


def draw_arm(ax: Axes, by_sigma: dict[float, pd.Series], arm: str, seeds: bool = False) -> Interval:
    """Means with intervals over σ, and every seed where asked; returns the first interval."""
    colour, shift = plots.colour_of(arm, ARMS), 0.03 * (ARMS.index(arm) - 1)
    found = {sigma: interval(series.dropna()) for sigma, series in by_sigma.items()}
    x = np.array(list(found)) + shift
    mean, low, high = (np.array([getattr(i, part) for i in found.values()]) for part in ("mean", "low", "high"))
    style = {"fmt": f"{plots.symbol_of(arm)}-", "capsize": 3, "linewidth": 1.4, "markersize": 5}
    ax.errorbar(x, mean, [mean - low, high - mean], color=colour, label=arm, **style)
    if seeds:
        for at, series in zip(x, by_sigma.values(), strict=True):
            ax.plot(np.full(len(series), at), series, ".", color=colour, alpha=0.4, markersize=4)
    return next(iter(found.values()))
