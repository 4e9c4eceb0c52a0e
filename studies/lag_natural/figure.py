"""The figure of lag_natural."""

from __future__ import annotations

from contrasts import values_of
from lag_natural.study import LAGS, PAIRS, RULE, study
from matplotlib.figure import Figure

from moe_rl.results import plots
from moe_rl.results.stats import interval
from moe_rl.results.summary import metric
from moe_rl.storage.frames import Frames


@plots.styled
def draw(frames: Frames) -> Figure:
    """Every planned difference, both endpoints side by side, and the token ESS of GRPO and replay by lag."""
    figure, axes = plots.new_figure(3, "Ratios that spread by themselves: who is helped?", width=16)
    arms = [arm.name for arm in study.arms]
    colours = {f"{a} − {b}": plots.colour_of(a, arms) if a in arms else plots.GREY for a, b in PAIRS}
    for ax, endpoint in zip(axes, (RULE.endpoint, RULE.secondary), strict=False):
        values = {name: form.values(frames, endpoint) for name, form in RULE.families["old rollouts"].items()}
        note = plots.rows_of(ax, values, colours)
        ax.axvspan(-RULE.margin, RULE.margin, color=plots.GREY, alpha=0.15)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(endpoint).name, xlabel="difference, mean of lags 1 and 2; shaded: the margin")
        ax.grid(axis="y", visible=False)
    ess = {lag: values_of(frames, f"lag={lag}", "token_ess") for lag in LAGS}
    for arm in ("grpo", "grpo-replay", "gspo_short"):
        bands = [interval(ess[lag][arm].dropna()) for lag in LAGS]
        mean = [band.mean for band in bands]
        whisker = [[band.mean - band.low for band in bands], [band.high - band.mean for band in bands]]
        axes[-1].errorbar(
            LAGS, mean, whisker, fmt=f"{plots.symbol_of(arm)}-", capsize=3, label=arm, color=plots.colour_of(arm, arms)
        )
    axes[-1].set(title="token ESS of the step", xlabel="lag, steps", ylabel="share", xticks=LAGS)
    axes[-1].legend()
    return plots.finish(figure, axes, f"steps 26–50; {note}", legend=False)
