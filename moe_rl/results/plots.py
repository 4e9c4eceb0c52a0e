"""Figures from tables alone. One colour per arm everywhere, every seed drawn, interval, method and n named.

Each figure is a function `(frames, arms) -> Figure`; `arms` is the study's order, which fixes the colours. `frames`
holds one combination of factors. A figure whose columns nobody measured raises RunError. `figures` has more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from moe_rl.errors import RunError
from moe_rl.results.pooling import attribution, mean_by, require_columns, windows
from moe_rl.results.stats import Band, band
from moe_rl.runs.frames import Frames

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, told apart by people with any common colour blindness."""
STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e6e6e6", "grid.linewidth": 0.8, "legend.frameon": False, "lines.linewidth": 2,
    "savefig.dpi": 160, "svg.hashsalt": "moe_rl",
}
SHARES = {"replayed": "left under replay\nVar(R)", "routes": "route changes\nVar(J)",
          "covariance": "both together\n2 Cov(R, J)"}
GAPS = {"engine_{}_natural": "engine against\npolicy", "engine_{}_replayed": "routes\nreplayed (R3)",
        "noise_floor_{}": "noise\nfloor"}
DIFFER = "token × site pairs, S ≠ S′"
LABEL = 70
"""Signs of a legend's label in one line."""
LEGEND = 1.3
"""Inches of a legend for which a figure has room; it grows by what is more."""
FIGURES = ("learning", "clipping", "expert_change", "ratio_spread", "variance_shares", "engine_mismatch",
           "engine_over_steps")
styled = matplotlib.rc_context(STYLE)


@styled
def learning(frames: Frames, arms: Sequence[str]) -> Figure:
    """Training reward and held-out exact match over steps (GSPO, arXiv 2507.18071, Fig. 1 and 3, per step)."""
    figure, axes = new_figure(3, "Does it learn, and does it last?", sharey=True)
    panels = {"reward": "Training reward", "eval_exact_greedy": "Held-out exact match, greedy",
              "eval_exact_sampled": "Held-out exact match, sampled"}
    for ax, (column, title) in zip(axes, panels.items(), strict=True):
        frame, window = windows(frames["steps"], column) if column == "reward" else (frames["steps"], "")
        note = curves(ax, frame, column, "step", arms, marker="o" if column != "reward" else "")
        ax.set(title=title, xlabel="step" + window)
    axes[0].set(ylabel="mean reward, share of prompts", ylim=(-0.02, 1.02))  # a t band knows no bounds
    return finish(figure, axes, note)


@styled
def clipping(frames: Frames, arms: Sequence[str]) -> Figure:
    """Fraction of response tokens that lose their gradient, over steps and by mini-batch (GSPO, Fig. 2), log axis."""
    figure, axes = new_figure(2, "How much does clipping take away?", sharey=True)
    over_steps, window = windows(frames["steps"], "clip_tokens")
    note = curves(axes[0], over_steps, "clip_tokens", "step", arms)
    axes[0].set(title="Over training", xlabel="step" + window, ylabel="clipped share of tokens with an advantage")
    by_update = mean_by(frames["updates"], "clip_tokens", "update")
    curves(axes[1], by_update[by_update["update"] > 1], "clip_tokens", "update", arms, marker="o")
    axes[1].set(title="By mini-batch, mean over steps", xlabel="mini-batch index (the first is 0 by construction)")
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for ax in axes:
        ax.set_yscale("symlog", linthresh=1e-4, linscale=0.5)
        ax.set_ylim(0, 1)
    return finish(figure, axes, note)


@styled
def expert_change(frames: Frames, arms: Sequence[str]) -> Figure:
    """Share of expert slots that change over one step, over training and per routing site (GSPO, section 5.3)."""
    figure, axes = new_figure(2, "How many experts change in one step?", sharey=True)
    over_steps, window = windows(frames["steps"], "slot_change")
    note = curves(axes[0], over_steps, "slot_change", "step", arms)
    axes[0].set(title="Over training, all sites", xlabel="step" + window)
    axes[0].set_ylabel("expert slots changed, 1 − |S ∩ S′| / k")
    curves(axes[1], mean_by(frames["layers"], "slot_change", "site"), "slot_change", "site", arms, marker="o")
    axes[1].set(title="Per routing site, mean over steps", xlabel="routing site, in forward order")
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for ax in axes:
        ax.axhline(0.1, color="#666666", linewidth=1.2, linestyle=":", label="“roughly 10 %”: GSPO paper, 48 layers")
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.set_ylim(bottom=0)
    return finish(figure, axes, note)


@styled
def ratio_spread(frames: Frames, arms: Sequence[str]) -> Figure:
    """Standard deviation of the token log-ratio by mini-batch index, natural and with the old routes replayed.

    Sums are pooled over steps within a seed before dividing; tokens are measured before they are trained on.
    """
    spread = attribution(frames["updates"], by=["update"])
    present = [arm for arm in arms if (spread["arm"] == arm).any()]
    if not present:
        raise RunError("no run has measured attribution sums, so there is nothing to draw")
    figure, axes = new_figure(len(present), "How far do log-ratios spread as mini-batches go by?", sharey=True)
    for ax, arm in zip(axes, present, strict=True):
        for column, line, name in (("natural_std", "-", "natural"), ("replayed_std", "--", "replayed")):
            face = None if column == "natural_std" else "white"
            note = curves(ax, spread, column, "update", [arm], order=arms, marker="o", linestyle=line, face=face,
                          label=name)
        ax.set_title(arm, color=colour_of(arm, arms))
        ax.set_xlabel("mini-batch index (the first is 0)")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend(loc="upper left")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("std of log-ratio, nats per token")
    return finish(figure, axes, note, legend=False)


@styled
def variance_shares(frames: Frames, arms: Sequence[str]) -> Figure:
    """Which part of Var(log r) is associated with route changes: Var(R), Var(J), 2 Cov(R, J) as shares of Var(D).

    They sum to 1; a share can exceed 1 and the covariance can be negative. The first mini-batch is left out.
    """
    figure, (ax,) = new_figure(1, "What is the variance of log-ratios associated with?", width=7.5)
    shares = attribution(frames["updates"][frames["updates"]["update"] > 1], by=[])
    for i, arm in enumerate(arms):
        rows = shares[shares["arm"] == arm].dropna(subset=list(SHARES))
        if rows.empty:
            continue
        b = band(rows[list(SHARES)].to_numpy())
        x = np.arange(len(SHARES)) + (i - (len(arms) - 1) / 2) * 0.8 / len(arms)
        note = _note(b, "bar")
        ax.bar(x, b.mean, 0.72 / len(arms), color=colour_of(arm, arms), alpha=0.8, label=arm)
        ax.errorbar(x, b.mean, [b.mean - b.low, b.high - b.mean], fmt="none", ecolor="black", capsize=3, linewidth=1.2)
        for seed, row in rows.set_index("seed")[list(SHARES)].iterrows():
            ax.plot(x, row, "o", color="white", markeredgecolor="black", markersize=4, gid=f"{arm} seed={seed}")
    if not ax.patches:
        raise RunError("no run has attribution sums with a variance to share, so there is nothing to draw; train for "
                       "more steps or measure in more detail (--set measure.detail_every=1)")
    ax.axhline(0, color="black", linewidth=1)
    ax.set_xticks(range(len(SHARES)), list(SHARES.values()))
    ax.grid(axis="x", visible=False)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_ylabel("share of Var(log r), natural")
    return finish(figure, [ax], note)


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
    axes[0].plot(floor.index, floor, color="#666666", linestyle=":", label="noise floor")
    axes[0].set(title="Routers that differ", xlabel="routing site, in forward order", ylabel=DIFFER, ylim=(0, None))
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].yaxis.set_major_formatter(PercentFormatter(1))
    titles = {"kl_k3": "KL k3, nats per token", "beyond_2": "F(2): tokens off by more than × 2"}
    for ax, (measure, title) in zip(axes[1:], titles.items(), strict=True):
        columns = [name.format(measure) for name in GAPS]
        require_columns(frames["steps"], *columns)
        means = frames["steps"].dropna(subset=columns).groupby(["arm", "seed"])[columns].mean().reset_index()
        for i, arm in enumerate(a for a in arms if (means["arm"] == a).any()):
            offset = (i - (len(arms) - 1) / 2) * 0.7 / len(arms)
            _marks(ax, means[means["arm"] == arm].set_index("seed")[columns], arm, arms, offset)
        ax.set_yscale("symlog", linthresh=1e-5, linscale=0.4)
        ax.set(title=title, ylim=(0, None), xticks=range(len(GAPS)), xticklabels=GAPS.values())
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


def colour_of(arm: str, arms: Sequence[str]) -> str:
    """The colour of an arm, by its place in the study's order; after the last they come again, as other dashes."""
    return COLOURS[list(arms).index(arm) % len(COLOURS)]


def dashes_of(arm: str, arms: Sequence[str]) -> str:
    """The line of an arm, which tells it from another of its colour."""
    return ("-", "--", ":", "-.")[list(arms).index(arm) // len(COLOURS) % 4]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `<name>.png` and `<name>.svg`, the same bytes for the same tables; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with matplotlib.rc_context(STYLE):
        figure.savefig(paths[0], metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths


def new_figure(panels: int, title: str, width: float = 0.0, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """An empty figure with panels in a row; `width` in inches, by default by their number."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(width or 4.2 * max(panels, 2), 4.4), layout=layout)
    axes = figure.subplots(1, panels, sharey=sharey, squeeze=False)[0]
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    return figure, list(axes)


def curves(ax: Axes, frame: pd.DataFrame, column: str, x: str, arms: Sequence[str], *, marker: str = "",
           linestyle: str = "-", face: str | None = None, label: str = "", order: Sequence[str] = ()) -> str:
    """Per arm: every seed thin, their mean thick, the interval as a band. Returns the note that names it.

    `order` fixes the colours, by default `arms`. Raises RunError when no arm was measured.
    """
    require_columns(frame, column, x)
    note = ""
    for arm in arms:
        rows = frame[frame["arm"] == arm].dropna(subset=[column])
        every = rows.pivot(index="seed", columns=x, values=column)
        values = every.dropna(axis=1)  # mean and interval only where every seed was measured: n never changes
        if values.empty:
            continue
        colour = colour_of(arm, order or arms)
        b = band(values.to_numpy())
        for seed, row in every.iterrows():
            ax.plot(row.dropna().index, row.dropna(), color=colour, alpha=0.35, linewidth=0.8, linestyle=linestyle,
                    gid=f"{arm} seed={seed} {column}")
        ax.fill_between(values.columns, b.low, b.high, color=colour, alpha=0.15, linewidth=0)
        dashes = dashes_of(arm, order or arms) if linestyle == "-" else linestyle
        ax.plot(values.columns, b.mean, color=colour, linestyle=dashes, marker=marker, markersize=4.5,
                markerfacecolor=face or colour, label=label or arm, gid=f"{arm} mean {column}")
        note = _note(b, "band")
    if not note:
        raise RunError(f"no run has measured {column!r}, so there is nothing to draw")
    return note


def _marks(ax: Axes, rows: pd.DataFrame, arm: str, arms: Sequence[str], offset: float) -> None:
    """One arm at every column: each seed a small dot, their mean a large one with its interval."""
    b, x, colour = band(rows.to_numpy()), np.arange(rows.shape[1]) + offset, colour_of(arm, arms)
    for seed, row in rows.iterrows():
        ax.plot(x, row, ".", color=colour, alpha=0.35, markersize=5, gid=f"{arm} seed={seed} {rows.columns[0]}")
    ax.errorbar(x, b.mean, [b.mean - b.low, b.high - b.mean], fmt="none", ecolor=colour, capsize=3, linewidth=1.4)
    ax.plot(x, b.mean, "o", color=colour, markersize=6, gid=f"{arm} mean {rows.columns[0]}")


def _note(b: Band, what: str) -> str:
    seeds = f"n = {b.n} seed{'s' * (b.n > 1)}"
    if b.n == 1:
        return f"{seeds}: no interval"
    each = "thin lines: each seed" if what == "band" else "dots: each seed"
    return f"mean over {seeds}; {'band' if what == 'band' else 'whisker'}: {b.method} interval; {each}"


def _in_lines(label: str) -> str:
    """The label, broken after its + and commas where it is longer than a line."""
    lines = [""]
    for piece in re.split(r"(?<=[+,])", label):
        if lines[-1] and len(lines[-1] + piece) > LABEL:
            lines.append("    ")
        lines[-1] += piece
    return "\n".join(lines)


def finish(figure: Figure, axes: list[Axes], note: str, legend: bool = True) -> Figure:
    """Legend and note below the panels; the note alone where panels have legends of their own."""
    if legend:
        handles, labels = axes[0].get_legend_handles_labels()
        labels = [_in_lines(label) for label in labels]
        for columns in range(max(len(labels), 1), 0, -1):
            box = figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=note,
                                title_fontsize=9)
            if columns == 1 or box.get_window_extent().width < figure.bbox.width:
                break
            box.remove()
        box.get_title().set_color("#555555")
        above = box.get_window_extent().height / figure.dpi - LEGEND
        figure.set_figheight(figure.get_figheight() + max(above, 0))
    else:
        figure.supxlabel(note, fontsize=9, color="#555555")
    return figure
