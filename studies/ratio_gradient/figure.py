"""The figure of ratio_gradient."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from ratio_gradient.study import MOVED, RULE, harm, study

from moe_rl.results import plots
from moe_rl.results.stats import interval
from moe_rl.results.summary import metric
from moe_rl.storage.frames import Frames

ARMS = [arm.name for arm in study.arms]


@plots.styled
def draw(frames: Frames) -> Figure:
    """The contrasts of the rule in both endpoints, and the harm of every part to every arm."""
    figure, axes = plots.new_figure(3, "A moved ratio, a moved gradient, and both", width=17)
    spared = {part: harm("grpo", part) - harm("gspo_short", part) for part in ("ratio", "gradient")}
    forms = RULE.families["planned"] | RULE.families["gate"]
    forms |= {"harm of the ratio − of the gradient, grpo − gspo_short": spared["ratio"] - spared["gradient"]}
    for ax, endpoint in zip(axes, (RULE.endpoint, RULE.secondary), strict=False):
        colours = {name: "black" if name in RULE.families["planned"] else plots.GREY for name in forms}
        note = plots.rows_of(ax, {name: form.values(frames, endpoint) for name, form in forms.items()}, colours)
        ax.axvspan(-RULE.margin, RULE.margin, color=plots.GREY, alpha=0.15)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(endpoint).name, xlabel="difference within seeds, mean of both σ")
        ax.grid(axis="y", visible=False)
        ax.locator_params(axis="x", nbins=5)
    for at, arm in enumerate(ARMS):
        bands = [interval(harm(arm, part).values(frames, RULE.endpoint)) for part in MOVED]
        middle, low, high = (np.array([getattr(one, part) for one in bands]) for part in ("mean", "low", "high"))
        x = np.arange(len(MOVED)) + 0.12 * (at - (len(ARMS) - 1) / 2)
        style = {"fmt": plots.symbol_of(arm), "capsize": 3, "color": plots.colour_of(arm, ARMS)}
        axes[-1].errorbar(x, middle, [middle - low, high - middle], label=arm, **style)
    axes[-1].axhline(0, color="black", linewidth=1)
    axes[-1].set(
        title="Harm by part",
        ylabel="with noise − without, sampled match",
        xticks=range(len(MOVED)),
        xticklabels=[f"{part} moved" for part in MOVED],
    )
    axes[-1].legend(fontsize=8)
    note = f"steps 31–60; black: planned; shaded: differences below {RULE.margin:g}; {note}"
    return plots.finish(figure, axes, note, legend=False)
