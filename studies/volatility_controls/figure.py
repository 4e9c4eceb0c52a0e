"""The figure of volatility_controls."""

from __future__ import annotations

from matplotlib.figure import Figure
from volatility_controls.study import CONTRASTS, RULE, study

from moe_rl.results import plots
from moe_rl.results.summary import metric
from moe_rl.storage.frames import Frames

ARMS = [arm.name for arm in study.arms]


@plots.styled
def draw(frames: Frames) -> Figure:
    """Every difference of the rule within seeds, by endpoint: what the doses cost GRPO, and what the cures add."""
    harms = dict(zip(("applied_to=ratio", "applied_to=gradient", "twin"), RULE.families["harm"].values(), strict=True))
    forms = {f"harm: {name}": form for name, form in harms.items()}
    cures = zip(CONTRASTS, RULE.families["contrasts"].values(), strict=True)
    forms |= {f"{a}: {name}": form for (name, a, _), form in cures}
    colours = dict.fromkeys(forms, plots.GREY)
    colours |= {name: plots.colour_of(a, ARMS) for name in forms for a in ARMS[1:] if name.startswith(f"{a}:")}
    figure, axes = plots.new_figure(len(RULE.endpoints), "What harms, and what do the cures act on?", width=14)
    for ax, endpoint in zip(axes, RULE.endpoints, strict=True):
        note = plots.rows_of(ax, {name: form.values(frames, endpoint) for name, form in forms.items()}, colours)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(endpoint).name, xlabel="minus GRPO, within seeds; harm: minus GRPO without a dose")
        ax.grid(axis="y", visible=False)
    return plots.finish(figure, axes, note, legend=False)
