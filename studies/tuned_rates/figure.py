"""The figure of tuned_rates."""

from __future__ import annotations

from collections.abc import Iterable

from contrasts import Rule
from matplotlib.figure import Figure
from tuned_rates.study import RULES

from moe_rl.results import plots
from moe_rl.results.summary import metric
from moe_rl.storage.frames import Frames


def draw(frames: Frames) -> Figure:
    """Every planned difference, in both endpoints."""
    title = "Who gains when every method has its own best rate and clip range?"
    return draw_rules(frames, RULES.values(), title)


@plots.styled
def draw_rules(frames: Frames, rules: Iterable[Rule], title: str) -> Figure:
    """Every contrast of the rules, in the colour of its first arm and in both endpoints, which the rules share."""
    figure, axes = plots.new_figure(2, title, width=12)
    rules = [*rules]
    forms = {name: form for rule in rules for family in rule.families.values() for name, form in family.items()}
    figure.set_figheight(max(figure.get_figheight(), 1.5 + 0.42 * len(forms)))
    first = {
        name: next(arm for _, arm in form.weights).replace("gspo-wide", "gspo_short") for name, form in forms.items()
    }
    colours = {name: plots.colour_of(arm, [*dict.fromkeys(first.values())]) for name, arm in first.items()}
    for ax, endpoint in zip(axes, (rules[0].endpoint, rules[0].secondary), strict=True):
        rows = plots.rows_of(ax, {name: form.values(frames, endpoint) for name, form in forms.items()}, colours)
        ax.axvspan(-rules[0].margin, rules[0].margin, color=plots.GREY, alpha=0.15)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(endpoint).name, xlabel="difference; shaded: the margin")
        ax.grid(axis="y", visible=False)
    last = int(frames["steps"]["step"].max())
    return plots.finish(figure, axes, f"steps {last // 2 + 1}–{last}; {rows}", legend=False)
