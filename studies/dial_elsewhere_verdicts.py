"""What dial_elsewhere found, place by place: exploratory."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from dial_elsewhere import PLACES, SIGMA, study
from matplotlib.figure import Figure
from per_seed import stored
from volatility_dial_verdicts import ENDPOINTS, after_start

from moe_rl.errors import RunError
from moe_rl.results import plots
from moe_rl.results.stats import Interval, interval
from moe_rl.results.summary import metric, per_run
from moe_rl.storage.frames import Frames

FOLDER = Path(__file__).parent / "results" / study.name
WHAT = {"grpo": f"harm of σ = {SIGMA:g}", **{a: f"{a} − {b}" for a, b in study.comparisons}}
"""What is compared, by the arm that it is of."""


def main() -> None:
    frames = stored(study.name)
    for place in PLACES:
        print(f"{place}: GRPO at σ = 0 gains {gained(frames, place)} of greedy exact match over its cold start")
        for name in (*ENDPOINTS, "token_ess", "expert_change_rate", "entropy"):
            found = ", ".join(f"{WHAT[arm]} {interval(gap)}" for arm, gap in gaps(frames, place, name).items())
            moved = per_run(frames.cell(cell(frames, place, SIGMA)), metric(name)).unstack(0)
            print(f"  {name}: {found}; GRPO at σ = {SIGMA:g} {interval(moved['grpo'])}")
    plots.save(draw(frames), FOLDER / "figures", study.name)


def verdict(frames: Frames) -> list[str]:
    """Of every place whether it says anything, and the three differences in both endpoints."""
    lines = []
    for place in PLACES:
        if (gain := gained(frames, place)).mean <= 0:
            lines.append(f"{place}: says nothing, GRPO at σ = 0 gains {gain} over its cold start")
            continue
        reward, greedy = (gaps(frames, place, name) for name in ENDPOINTS)
        lines += [f"{place}: {what}, reward {interval(reward[arm])}, greedy match {interval(greedy[arm])}"
                  for arm, what in WHAT.items()]
    return lines


def gained(frames: Frames, place: str) -> Interval:
    """Greedy exact match that GRPO gains without a dose, from its cold start to the evaluations that count."""
    return after_start(frames, "grpo", cell(frames, place, 0))


def gaps(frames: Frames, place: str, name: str) -> dict[str, pd.Series]:
    """By seed what the dose does to GRPO, under its name, and what each cure adds to it there, under the cure's."""
    still, moved = (per_run(frames.cell(cell(frames, place, sigma)), metric(name)).unstack(0) for sigma in (0, SIGMA))
    found = {"grpo": moved["grpo"] - still["grpo"], **{a: moved[a] - moved[b] for a, b in study.comparisons}}
    return {arm: gap.dropna() for arm, gap in found.items()}


def cell(frames: Frames, place: str, sigma: float) -> str:
    """The name of a cell that has run."""
    if (name := f"{place},sigma={sigma:g}") not in frames.cells:
        raise RunError(f"the rule needs runs of {name}")
    return name


@plots.styled
def draw(frames: Frames) -> Figure:
    """The three differences at every place, an endpoint per panel, every seed a dot."""
    figure, axes = plots.new_figure(len(ENDPOINTS), "The dial elsewhere", width=14)
    names = [arm.name for arm in study.arms]
    for ax, name in zip(axes, ENDPOINTS, strict=True):
        rows, colours = {}, {}
        for place in PLACES:
            for arm, gap in gaps(frames, place, name).items():
                row = f"{place}: {WHAT[arm]}"
                rows[row], colours[row] = gap, plots.colour_of(arm, names)
        note = plots.rows_of(ax, rows, colours)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(name).name, xlabel="difference, within seeds")
        ax.grid(axis="y", visible=False)
    figure.set_figheight(2 + 0.3 * len(rows))
    return plots.finish(figure, axes, note, legend=False)
