"""The figure of tuned_rates."""

from __future__ import annotations

from matplotlib.figure import Figure
from tuned_rates.study import RULES

from moe_rl.results import plots
from moe_rl.results.summary import metric
from moe_rl.storage.frames import Frames


@plots.styled
def draw(frames: Frames) -> Figure:
    """Every planned difference, in both endpoints."""
    figure, axes = plots.new_figure(2, "Who gains when every method has its own best rate and clip range?", width=12)
    forms = {name: form for lag, rule in RULES.items() for name, form in rule.families[f"lag {lag}"].items()}
    arms = ["grpo", "grpo-replay", "gspo_short"]
    colours = {name: plots.colour_of("gspo_short" if "gspo" in name else "grpo-replay", arms) for name in forms}
    (first, *_) = RULES.values()
    for ax, endpoint in zip(axes, (first.endpoint, first.secondary), strict=True):
        note = plots.rows_of(ax, {name: form.values(frames, endpoint) for name, form in forms.items()}, colours)
        ax.axvspan(-first.margin, first.margin, color=plots.GREY, alpha=0.15)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(endpoint).name, xlabel="difference; shaded: the margin")
        ax.grid(axis="y", visible=False)
    return plots.finish(figure, axes, f"steps 26–50; {note}", legend=False)
