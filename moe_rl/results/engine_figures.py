"""Figures of how far engine and policy are apart at equal weights, from tables alone."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from moe_rl.results.plots import GREY, curves, finish, marks, new_figure, styled
from moe_rl.results.pooling import mean_by, require_columns, windows
from moe_rl.storage.frames import Frames

GAPS = {"engine_{}_natural": "engine against\npolicy", "engine_{}_replayed": "routes\nreplayed (R3)",
        "noise_floor_{}": "noise\nfloor"}
DIFFER = "token × site pairs, S ≠ S′"
FIGURES = ("engine_mismatch", "engine_over_steps")


@styled
def engine_mismatch(frames: Frames, arms: Sequence[str]) -> Figure:
    """Engine against policy at equal weights: routes per site (all response tokens), KL k3 and F(2) (on the probe).

    Per arm the mean over steps, beside what is left when the policy replays the engine's routes (R3, arXiv 2510.11370)
    and the noise floor: the policy scoring the same tokens twice.
    """
    figure, axes = new_figure(3, "How much do engine and policy differ at equal weights?")
    per_site = mean_by(frames["layers"], "engine_set_change", "site")
    note = curves(axes[0], per_site, "engine_set_change", "site", arms, marker="o")
    floor = mean_by(frames["layers"], "noise_floor_set_change", "site")
    floor = floor.groupby("site")["noise_floor_set_change"].mean()
    axes[0].plot(floor.index, floor, color=GREY, linestyle=":", label="noise floor")
    axes[0].set(title="Routers that differ", xlabel="routing site, in forward order", ylabel=DIFFER, ylim=(0, None))
    axes[0].yaxis.set_major_formatter(PercentFormatter(1))
    titles = {"kl_k3": "KL k3, nats per token", "beyond_2": "F(2): tokens off by more than × 2"}
    for ax, (measure, title) in zip(axes[1:], titles.items(), strict=True):
        columns = [name.format(measure) for name in GAPS]
        require_columns(frames["steps"], *columns)
        means = frames["steps"].dropna(subset=columns).groupby(["arm", "seed"])[columns].mean().reset_index()
        present = [arm for arm in arms if (means["arm"] == arm).any()]
        for i, arm in enumerate(present):
            offset = (i - (len(present) - 1) / 2) * 0.7 / len(present)
            marks(ax, means[means["arm"] == arm].set_index("seed")[columns], arm, arms, offset)
        ax.set_yscale("symlog", linthresh=1e-5, linscale=0.4)
        ax.set(title=title, ylim=(0, max(ax.get_ylim()[1], 1e-4)), xticks=range(len(GAPS)), xticklabels=GAPS.values())
        ax.grid(axis="x", visible=False)
    return finish(figure, axes, note)


@styled
def engine_over_steps(frames: Frames, arms: Sequence[str]) -> Figure:
    """Whether engine and policy drift apart while training: routes that differ, and KL k3, over steps, log axis."""
    figure, axes = new_figure(2, "Does the mismatch grow in training?")
    panels = {"engine_set_change": "Routers that differ", "engine_kl_k3": "KL k3, nats per token"}
    for ax, (column, title) in zip(axes, panels.items(), strict=True):
        over_steps, window = windows(frames["steps"], column)
        note = curves(ax, over_steps, column, "step", arms)
        ax.set(title=title, xlabel="step" + window)
    axes[0].set(ylabel=DIFFER, ylim=(0, None))
    axes[0].yaxis.set_major_formatter(PercentFormatter(1))
    axes[1].set_yscale("log", nonpositive="clip")
    return finish(figure, axes, note)
