"""The figure of router_noise_low."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from contrasts import Form, median_kl, slots_changed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from router_noise_low.study import ARMS, NONE, OTHERS, ROUTERS, RULE, SCALES, harm, medians

from moe_rl.results import plots
from moe_rl.results.stats import Interval, interval
from moe_rl.results.summary import metric
from moe_rl.storage.frames import Frames

PUBLISHED = {"PR2, a step": 0.033, "GSPO, an update": 0.10}
"""Published shares of expert slots that change: arXiv 2606.00395, from its distribution of changed slots (12.7 of the
384 slots of a token); and arXiv 2507.18071, section 5.3."""


@plots.styled
def draw(frames: Frames) -> Figure:
    """Harm over measured KL at both places, in both endpoints; their difference; and expert slots over KL."""
    figure, axes = plots.new_figure(4, "From which KL on does noise harm, and is it the routing?", width=15)
    kl = {s: float(np.sqrt(np.prod(both))) for s, both in medians(frames).items()}
    for ax, endpoint in zip(axes, (RULE.endpoint, RULE.secondary), strict=False):
        for place, conditions, style in (("in routers", ROUTERS, "-"), ("beside", OTHERS, ":")):
            for arm in ARMS:
                forms = {s: harm(arm, s, conditions) for s in SCALES}
                draw_arm(ax, frames, endpoint, forms, kl, arm, f"{arm}, {place}", style)
        ax.set(title=metric(endpoint).name, ylabel="with noise − without")
    for arm in ARMS:
        forms = {s: harm(arm, s) - harm(arm, s, OTHERS) for s in SCALES}
        found = draw_arm(axes[2], frames, RULE.endpoint, forms, kl, arm, "", "-")
    axes[2].set(title="Is it the routing?", ylabel="noise in routers − beside, sampled match")
    for ax in axes[:3]:
        ax.axhspan(-RULE.margin, RULE.margin, color=plots.GREY, alpha=0.15)
        ax.axhline(0, color="black", linewidth=1)
    draw_slots(axes[3], frames)
    for ax in axes:
        ax.set(xscale="log", xlabel="KL of GRPO to the old policy, nats per token")
    note = (
        f"mean over seeds, steps 31–60; whisker: {found.method}, n = {found.n}; shaded: differences below "
        f"{RULE.margin:g}; dashed: published shares of slots"
    )
    return plots.finish(figure, axes, note)


def draw_arm(
    ax: Axes,
    frames: Frames,
    endpoint: str,
    forms: Mapping[float, Form],
    kl: Mapping[float, float],
    arm: str,
    label: str,
    style: str,
) -> Interval:
    """Means with intervals over KL, arms beside each other; returns the last interval."""
    found = [interval(form.values(frames, endpoint)) for form in forms.values()]
    mean, low, high = (np.array([getattr(one, part) for one in found]) for part in ("mean", "low", "high"))
    x = np.array([kl[s] for s in forms]) * 1.04 ** (ARMS.index(arm) - (len(ARMS) - 1) / 2)
    colour = plots.colour_of(arm, ARMS)
    ax.errorbar(
        x,
        mean,
        [mean - low, high - mean],
        fmt=f"{plots.symbol_of(arm)}{style}",
        color=colour,
        capsize=2,
        linewidth=1.3,
        markersize=5,
        markerfacecolor="white" if style == ":" else colour,
        label=label or None,
    )
    return found[-1]


def draw_slots(ax: Axes, frames: Frames) -> None:
    """Share of expert slots that a step changes, over KL, at both places and without noise."""
    colour = plots.colour_of("grpo", ARMS)
    for conditions, face in (([NONE, *ROUTERS.values()], colour), ([*OTHERS.values()], "white")):
        points = [(median_kl(frames, one), slots_changed(frames, one)) for one in conditions]
        ax.plot(*zip(*points, strict=True), "o", color=colour, markerfacecolor=face)
    for name, share in PUBLISHED.items():
        ax.axhline(share, color=plots.GREY, linestyle="--", linewidth=1)
        ax.annotate(name, (0.99, share), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom")
    ax.set(title="Expert slots changed by a step of GRPO", ylabel="share")
