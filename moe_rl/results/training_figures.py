"""Figures of what arms do in training: reward, clipping, routes and log-ratios, from tables alone.

Each figure is a function `(frames, arms) -> Figure`; `arms` is the study's order, which fixes the colours. `frames`
holds one combination of factors. A figure whose columns nobody measured raises RunError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from moe_rl.errors import RunError
from moe_rl.results import plots, pooling
from moe_rl.results.plots import GREY, colour_of, curves, finish, new_figure, note_of, styled
from moe_rl.results.pooling import attribution, mean_by, windows
from moe_rl.results.stats import band
from moe_rl.results.summary import MAIN, Metric, gaps, pairs_of, replaying
from moe_rl.storage.frames import Frames

SHARES = {"replayed": "left under replay\nVar(R)", "routes": "route changes\nVar(J)",
          "covariance": "both together\n2 Cov(R, J)"}
LEARNING = {"reward": "Training reward", "eval_exact_greedy": "Held-out exact match, greedy",
            "eval_exact_sampled": "Held-out exact match, sampled"}
FIGURES = ("learning", "learning_over_compute", "clipping", "expert_change", "ratio_spread", "variance_shares")


@styled
def learning(frames: Frames, arms: Sequence[str], *, endpoint: Metric = MAIN,
             contrasts: Sequence[Sequence[str]] = ()) -> Figure:
    """Training reward and held-out exact match over steps (GSPO, arXiv 2507.18071, Fig. 1 and 3, per step), and the
    endpoint's differences within seeds."""
    differences = differences_of(frames, arms, endpoint, contrasts)
    figure, axes = new_figure(len(LEARNING) + bool(differences), "Does it learn, and does it last?")
    note = draw_learning(axes, LEARNING, frames, arms)
    if differences:
        note += draw_differences(axes[-1], differences, arms, endpoint)
    return finish(figure, axes[: len(LEARNING)], note)


def draw_learning(axes: Sequence[Axes], panels: Mapping[str, str], frames: Frames, arms: Sequence[str]) -> str:
    """Columns of `steps` over training, a panel each, with the cold start's level; returns what a note says of it."""
    for ax, (column, title) in zip(axes, panels.items(), strict=False):
        frame, window = windows(frames["steps"], column) if column == "reward" else (frames["steps"], "")
        note = curves(ax, frame, column, "step", arms, marker="o" if column != "reward" else "")
        plots.cold_start(ax, frames["steps"], column)
        ax.set(title=title, xlabel="step" + window, ylim=(-0.02, 1.02))
    axes[0].set(ylabel="mean reward, share of prompts")
    return note


COMPUTE = {"tokens": "response tokens sampled", "seconds_step": "seconds"}


@styled
def learning_over_compute(frames: Frames, arms: Sequence[str]) -> Figure:
    """Training reward and held-out exact match over what training took (GSPO, arXiv 2507.18071, Fig. 1): tokens
    sampled, and seconds of steps, evaluations aside, where the tables still have them.

    A point stands where its arm's runs had come by that step on average.
    """
    steps = pooling.tokens_sampled(frames)
    spent = [column for column in COMPUTE if column in steps]
    figure, axes = new_figure(2 * len(spent), "What does learning cost?")
    for i, column in enumerate(spent):
        for ax, learned in zip(axes[2 * i :], ("reward", "eval_exact_greedy"), strict=False):
            frame = windows(steps, learned)[0] if learned == "reward" else steps
            frame = pooling.over(frame, steps, column)
            note = curves(ax, frame, learned, column, arms, marker="" if learned == "reward" else "o")
            plots.cold_start(ax, steps, learned)
            ax.set(title=LEARNING[learned], xlabel=COMPUTE[column], ylim=(-0.02, 1.02))
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[0].set(ylabel="mean reward, share of prompts")
    return finish(figure, axes, note)


def differences_of(
    frames: Frames, arms: Sequence[str], endpoint: Metric, contrasts: Sequence[Sequence[str]]
) -> dict[str, pd.Series]:
    """The endpoint's differences within seeds, by name; of many arms without contrasts each against the first."""
    present = [arm for arm in arms if (frames.runs["arm"] == arm).any()]
    pairs = pairs_of(present, contrasts)
    if len(pairs) > 2 * plots.ARMS and not contrasts:
        pairs = [(arm, present[0]) for arm in present[1:]]
    return {f"{a} − {b}": gap for (a, b), gap in gaps(frames, pairs, endpoint).items() if len(gap)}


def draw_differences(ax: Axes, differences: Mapping[str, pd.Series], arms: Sequence[str], endpoint: Metric) -> str:
    """A row per difference, around 0; returns what a note says of it."""
    colours = {name: colour_of(name.partition(" − ")[0], arms) for name in differences}
    rows = plots.rows_of(ax, differences, colours)
    ax.axvline(0, color="black", linewidth=1)
    ax.set(title="Differences within seeds", xlabel=endpoint.name)
    ax.grid(axis="y", visible=False)
    return f". Differences: {rows.removeprefix('mean over ')}"


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
    for ax in axes:
        ax.axhline(0.1, color=GREY, linewidth=1.2, linestyle=":", label="“roughly 10 %”: GSPO paper, 48 layers")
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.set_ylim(bottom=0)
    return finish(figure, axes, note)


@styled
def ratio_spread(frames: Frames, arms: Sequence[str]) -> Figure:
    """Standard deviation of the token log-ratio by mini-batch index, natural and with the old routes replayed.

    Sums are pooled over steps within a seed before dividing; tokens are measured before they are trained on. In arms
    that do not replay, what replay would leave is counterfactual.
    """
    spread = attribution(frames["updates"], by=["update"])
    present = [arm for arm in arms if (spread["arm"] == arm).any()]
    if not present:
        raise RunError("no run has measured attribution sums, so there is nothing to draw")
    figure, axes = new_figure(len(present), "How far do log-ratios spread as mini-batches go by?", sharey=True)
    replay = replaying(frames)
    for ax, arm in zip(axes, present, strict=True):
        for column, line, name in (("natural_std", "-", "natural"), ("replayed_std", "--", "replayed")):
            face = None if column == "natural_std" else "white"
            what = name + (", counterfactual" if name == "replayed" and replay.get(arm) is False else "")
            note = curves(ax, spread, column, "update", [arm], order=arms, marker="o", linestyle=line, face=face,
                          label=what, scale="log")
        ax.set_title(arm, color=colour_of(arm, arms))
        ax.set_xlabel("mini-batch index (the first is 0)")
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
    shares, found = attribution(frames["updates"][frames["updates"]["update"] > 1], by=[]), []
    for i, arm in enumerate(arms):
        rows = shares[shares["arm"] == arm].dropna(subset=list(SHARES))
        if rows.empty:
            continue
        b = band(rows[list(SHARES)].to_numpy())
        x = np.arange(len(SHARES)) + (i - (len(arms) - 1) / 2) * 0.8 / len(arms)
        found.append(b)
        ax.bar(x, b.mean, 0.72 / len(arms), color=colour_of(arm, arms), alpha=0.8, label=arm)
        plots.whiskers(ax, x, b, "black", linewidth=1.2)
        for seed, row in rows.set_index("seed")[list(SHARES)].iterrows():
            ax.plot(x, row, "o", color="white", markeredgecolor="black", markersize=4, gid=f"{arm} seed={seed}")
    if not found:
        raise RunError("no run has attribution sums with a variance to share, so there is nothing to draw; train for "
                       "more steps or measure in more detail (--set measure.detail_every=1)")
    ax.axhline(0, color="black", linewidth=1)
    ax.set_xticks(range(len(SHARES)), list(SHARES.values()))
    ax.grid(axis="x", visible=False)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_ylabel("share of Var(log r), natural")
    return finish(figure, [ax], note_of(found, "whisker", "dots"))
