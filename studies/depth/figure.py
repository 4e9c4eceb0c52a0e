"""The figure of depth."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from contrasts import Condition, values_of
from depth.study import EQUAL_KL, EQUAL_RATE, STEP, UPDATE, at, with_logs
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_rl.results import plots
from moe_rl.results.stats import band
from moe_rl.storage.frames import Frames


@plots.styled
def draw(frames: Frames) -> Figure:
    """Slots of GRPO that a step and an update change, at one rate and at rates of equal KL, by depth; and by layer."""
    frames = with_logs(frames)
    figure, axes = plots.new_figure(3, "Do routes change more in deeper models?", width=13)
    deeper = {**EQUAL_RATE, 48: at(48, 2e-4)}
    for ax, name in zip(axes, (STEP, UPDATE), strict=False):
        draw_line(ax, frames, name, deeper, "one rate, 2e-4", "-")
        draw_line(ax, frames, name, EQUAL_KL, "rates of equal KL in the pilot", ":")
        ax.set(title=name.removeprefix("log ").capitalize(), xlabel="layers", xscale="log")
        ax.set(xticks=[*deeper], xticklabels=[*deeper])
        ax.minorticks_off()
    for i, (depth, here) in enumerate(deeper.items()):
        rows = frames.condition(here.name)["layers"].query("arm == 'grpo'")
        share = 100 * rows.groupby("moe_layer")["expert_change_rate"].mean()
        axes[2].plot(share.index + 1, share, ".-", color=plots.COLOURS[i], linewidth=1.4, label=f"{depth} layers")
    axes[2].set(title="Changed by a step, layer by layer, one rate", xlabel="layer, counted from the input")
    for ax in axes:
        ax.set(ylim=(0, None), ylabel="% of the expert slots, GRPO")
        ax.legend(fontsize=8)
    return plots.finish(figure, axes, "steps 11–20; mean and 95 % interval over 8 seeds (48 layers: 3)", legend=False)


def draw_line(ax: Axes, frames: Frames, name: str, places: Mapping[int, Condition], label: str, style: str) -> None:
    """Percent of GRPO's slots over depths, means with intervals; `name` is that of their log."""
    colour, means = plots.colour_of("grpo", ["grpo"]), []
    x = [depth * (0.96 if style == ":" else 1) for depth in places]
    for depth, here in zip(x, places.values(), strict=True):
        of_place = band(100 * np.exp(values_of(frames, here.name, name)["grpo"].to_numpy()[:, None]), "log")
        plots.whiskers(ax, depth, of_place, colour)
        means.append(of_place.mean.item())
    ax.plot(x, means, f"o{style}", color=colour, label=label, fillstyle=None if style == "-" else "none")
