"""The two figures of stabilisers."""

from __future__ import annotations

import pandas as pd
from contrasts import values_of
from matplotlib.figure import Figure
from stabilisers.study import OTHERS, RULE

from moe_rl.results import plots
from moe_rl.results.summary import metric
from moe_rl.storage.frames import Frames


def draw(frames: Frames) -> Figure:
    """Router noise, σ = 2."""
    return draw_conditions(frames, ("dial", "dial-further"), "Which helps under volatility, σ = 2?")


def draw_mismatch(frames: Frames) -> Figure:
    """Another engine."""
    return draw_conditions(frames, ("mismatch",), "Which helps against another engine?")


@plots.styled
def draw_conditions(frames: Frames, conditions: tuple[str, ...], title: str) -> Figure:
    """Every arm minus GRPO of the same seeds, by endpoint; the named arms first, in the order of the first endpoint."""
    tables = {
        name: pd.concat([values_of(frames, condition, name) for condition in conditions], axis=1)
        for name in RULE.endpoints
    }
    means = tables[RULE.endpoints[0]].mean().drop("grpo")
    arms = sorted(means.index, key=lambda arm: (arm not in OTHERS, -means[arm]))
    colours = {arm: plots.colour_of(arm, ("grpo", *OTHERS)) if arm in OTHERS else plots.GREY for arm in arms}
    figure, axes = plots.new_figure(len(tables), title, width=14)
    figure.set_figheight(2 + 0.3 * len(arms))
    for ax, (name, table) in zip(axes, tables.items(), strict=True):
        note = plots.rows_of(ax, {arm: (table[arm] - table["grpo"]).dropna() for arm in arms}, colours)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(name).name, xlabel="minus GRPO, within seeds")
        ax.grid(axis="y", visible=False)
    return plots.finish(figure, axes, note, legend=False)
