"""Figures of a study, from its tables alone, and their names: FIGURES, `against:<factor>[:<metric>]`, and a user's own.

Each figure is a function `(frames, arms) -> Figure`; `arms` is the study's order, which fixes the colours. `frames`
holds one condition, or all of them for those that are TOGETHER. A figure whose columns nobody measured
raises RunError.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from moe_rl.errors import ConfigError, RunError
from moe_rl.metrics.attribution import AttributionSums
from moe_rl.registry import Component, lookup, unknown
from moe_rl.results import plots, stats
from moe_rl.results.summary import (
    ACROSS,
    MAIN,
    Metric,
    against,
    factor_of,
    gaps,
    geometrically_spaced,
    metric,
    name_of,
    numeric,
    pairs_of,
)
from moe_rl.storage.frames import Frames

Draw = Callable[[Frames, Sequence[str]], Figure]
SHARES = {
    "replayed": "left under replay\nVar(R)",
    "routes": "route changes\nVar(J)",
    "covariance": "both together\n2 Cov(R, J)",
}
LEARNING = {
    "reward": "Training reward",
    "eval_exact_greedy": "Held-out exact match, greedy",
    "eval_exact_sampled": "Held-out exact match, sampled",
}
RATIOS = {
    "token_ess": ("Token ESS", "effective share of tokens"),
    "token_log_ratio_var": ("Spread of log-ratios", "variance, nats²"),
    "clip_tokens": ("Clipping", "share of tokens clipped"),
}
LAYERS = {
    "expert_change_rate": ("Expert change", "expert slots changed"),
    "load_max_violation": ("Load", "max f / mean f − 1"),
}
NONE = pd.Series(dtype=float)
GAPS = {
    "engine_{}_unconstrained": "engine against\npolicy",
    "engine_{}_replayed": "routes\nreplayed (R3)",
    "noise_floor_{}": "noise\nfloor",
}
DIFFER = "token × MoE layer pairs, S ≠ S′"
POINTS = 25
"""Most points of a curve over steps: more are averaged within windows of equal length, so that bands stay readable."""


# ---------------------------------------------------------------------- training
@plots.styled
def learning(
    frames: Frames, arms: Sequence[str], *, endpoint: Metric = MAIN, comparisons: Sequence[Sequence[str]] = ()
) -> Figure:
    """Training reward and held-out exact match over steps (GSPO, arXiv 2507.18071, Fig. 1 and 3), and the endpoint's
    differences within seeds, by condition.

    What no run measured has no panel.
    """
    measured = [column for column in LEARNING if frames["steps"].get(column, NONE).notna().any()]
    if not measured:
        raise RunError(f"no run measured {', '.join(LEARNING)}, so there is nothing to draw")
    panels = {column: LEARNING[column] for column in measured[: 2 if len(frames.conditions) > 1 else None]}
    by_condition = {
        condition: differences_of(frames.condition(condition), arms, endpoint, comparisons)
        for condition in frames.conditions
    }
    wide = len(panels) + any(by_condition.values())
    figure, axes = plots.new_figure(wide * len(by_condition), "Reward and held-out match over training")
    notes: dict[str, str] = {}
    curves, apart = list[Axes](), list[Axes]()
    for i, (condition, differences) in enumerate(by_condition.items()):
        row = axes[wide * i : wide * (i + 1)]
        note = draw_learning(row, panels, frames.condition(condition), arms)
        if differences:
            note += draw_differences(row[-1], differences, arms, endpoint)
            apart.append(row[-1])
        elif wide > len(panels):
            row.pop().remove()
        if note:  # of a condition whose runs have only begun there is nothing to draw
            notes[note] = f"{notes[note]}, {condition}" if note in notes else condition
        curves += row[: len(panels)]
        _title(row, condition, frames)
    plots.same_limits(apart, "x")
    plots.same_limits(curves)
    texts = notes if len(notes) == 1 else (f"{names}: {note}" for note, names in notes.items())
    return plots.finish(figure, curves, "; ".join(texts))


def draw_learning(axes: Sequence[Axes], panels: Mapping[str, str], frames: Frames, arms: Sequence[str]) -> str:
    """Columns of `steps` over training, a panel each, with the level before RL; returns the note."""
    note = ""
    for ax, (column, title) in zip(axes, panels.items(), strict=False):
        ax.set(title=title, xlabel="step", ylabel="mean reward" if column == "reward" else "share of prompts")
        if frames["steps"][column].notna().any():
            frame, window = windows(frames["steps"], column) if column == "reward" else (frames["steps"], "")
            note = plots.curves(ax, frame, column, "step", arms, marker="o" if column != "reward" else "")
            plots.cold_start(ax, frames["steps"], column)
            ax.set_xlabel("step" + window)
    return note


def differences_of(
    frames: Frames, arms: Sequence[str], endpoint: Metric, comparisons: Sequence[Sequence[str]]
) -> dict[str, pd.Series]:
    """The endpoint's differences within seeds, by name."""
    pairs = pairs_of([arm for arm in arms if (frames.runs["arm"] == arm).any()], comparisons)
    return {f"{a} − {b}": gap for (a, b), gap in gaps(frames, pairs, endpoint).items() if len(gap)}


def draw_differences(ax: Axes, differences: Mapping[str, pd.Series], arms: Sequence[str], endpoint: Metric) -> str:
    """A row per difference, around 0; returns the note."""
    named = {name + f": {stats.EQUAL}" * (not gap.any()): gap for name, gap in differences.items()}
    colours = {name: plots.colour_of(name.partition(" − ")[0], arms) for name in named}
    rows = plots.rows_of(ax, named, colours, arms)
    ax.axvline(0, color="black", linewidth=1)
    ax.set(title="Differences within seeds", xlabel=endpoint.name)
    ax.grid(axis="y", visible=False)
    return f". Differences: {rows.removeprefix('mean over ')}"


@plots.styled
def clipping(frames: Frames, arms: Sequence[str]) -> Figure:
    """Fraction of response tokens that lose their gradient, over steps and by mini-batch (GSPO, Fig. 2), log axis."""
    figure, axes = plots.new_figure(2, "Clipped share of tokens", sharey=True)
    over_steps, window = windows(frames["steps"], "clip_tokens")
    note = plots.curves(axes[0], over_steps, "clip_tokens", "step", arms)
    axes[0].set(title="Over training", xlabel="step" + window)
    by_update = mean_by(frames["updates"], "clip_tokens", "update")
    plots.curves(axes[1], by_update[by_update["update"] > 1], "clip_tokens", "update", arms, marker="o")
    axes[1].set(title="By mini-batch, mean over steps", xlabel="mini-batch index (the first is 0 by construction)")
    most = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_yscale("symlog", linthresh=1e-4, linscale=0.5)
        ax.set(ylim=(0, min(max(most, 1e-3), 1)), ylabel="clipped share of tokens with an advantage")
    return plots.finish(figure, axes, note)


@plots.styled
def expert_change(frames: Frames, arms: Sequence[str]) -> Figure:
    """Share of expert slots that change over one step, over training and per routing MoE layer (GSPO, section 5.3)."""
    figure, axes = plots.new_figure(2, "Expert slots that change in one step", sharey=True)
    over_steps, window = windows(frames["steps"], "expert_change_rate")
    note = plots.curves(axes[0], over_steps, "expert_change_rate", "step", arms)
    axes[0].set(title="Over training, all MoE layers", xlabel="step" + window)
    plots.curves(
        axes[1],
        mean_by(frames["layers"], "expert_change_rate", "moe_layer"),
        "expert_change_rate",
        "moe_layer",
        arms,
        marker="o",
    )
    axes[1].set(title="Per routing MoE layer, mean over steps", xlabel="routing MoE layer, in forward order")
    for ax in axes:
        ax.axhline(0.1, color=plots.GREY, linewidth=1.2, linestyle=":", label="“roughly 10 %”: GSPO paper, 48 layers")
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.set(ylim=(0, None), ylabel="expert slots changed, 1 − |S ∩ S′| / k")
    return plots.finish(figure, axes, note)


@plots.styled
def ratio_spread(frames: Frames, arms: Sequence[str]) -> Figure:
    """Standard deviation of the token log-ratio by mini-batch index, unconstrained and with the old routes replayed.

    Sums are pooled over steps within a seed before dividing. Tokens are measured before they are trained on. In arms
    that do not replay, the replayed spread is counterfactual.
    """
    spread = attribution(frames["updates"], by=["update"])
    present = [arm for arm in arms if (spread["arm"] == arm).any()]
    if not present:
        raise RunError("no run measured attribution sums, so there is nothing to draw")
    figure, axes = plots.new_figure(len(present), "Spread of log-ratios within a step", sharey=True)
    for ax, arm in zip(axes, present, strict=True):
        for name, line in (("unconstrained", "-"), ("replayed", "--")):
            note = plots.curves(
                ax,
                spread,
                f"{name}_std",
                "update",
                [arm],
                order=arms,
                marker="o",
                linestyle=line,
                label=name,
                scale="log",
            )
        ax.set_title(arm, color=plots.colour_of(arm, arms))
        ax.set(xlabel="mini-batch index (the first is 0)", ylabel="std of log-ratio, nats per token", ylim=(0, None))
        ax.legend(loc="upper left")
    return plots.finish(figure, axes, note, legend=False)


@plots.styled
def variance_shares(frames: Frames, arms: Sequence[str]) -> Figure:
    """Which part of Var(log r) is associated with route changes: Var(R), Var(J), 2 Cov(R, J) as shares of Var(D).

    They sum to 1; a share can exceed 1 and the covariance can be negative. The first mini-batch is left out.
    """
    figure, (ax,) = plots.new_figure(1, "Parts of the variance of log-ratios", width=7.5)
    shares, bands = attribution(frames["updates"][frames["updates"]["update"] > 1], by=[]), []
    for i, arm in enumerate(arms):
        rows = shares[shares["arm"] == arm].dropna(subset=list(SHARES))
        if rows.empty:
            continue
        b = stats.band(rows[list(SHARES)].to_numpy())
        x = np.arange(len(SHARES)) + (i - (len(arms) - 1) / 2) * 0.8 / len(arms)
        bands.append(b)
        ax.bar(x, b.mean, 0.72 / len(arms), color=plots.colour_of(arm, arms), alpha=0.8, label=arm)
        plots.whiskers(ax, x, b, "black", linewidth=1.2)
        for seed, row in rows.set_index("seed")[list(SHARES)].iterrows():
            ax.plot(x, row, "o", color="white", markeredgecolor="black", markersize=4, gid=f"{arm} seed={seed}")
    if not bands:
        raise RunError("no run measured attribution sums with a variance. Use --set measure.detail_every=1.")
    ax.axhline(0, color="black", linewidth=1)
    ax.set_xticks(range(len(SHARES)), list(SHARES.values()))
    ax.grid(axis="x", visible=False)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_ylabel("share of Var(log r), unconstrained")
    return plots.finish(figure, [ax], plots.note_of(bands, "whisker", "dots"))


# ---------------------------------------------------------------------- engine and policy at equal weights
@plots.styled
def engine_mismatch(frames: Frames, arms: Sequence[str]) -> Figure:
    """Engine against policy at equal weights: routes per MoE layer (all response tokens), KL k3 and F(2) (on the
    probe).

    Per arm the mean over steps, beside what is left when the policy replays the engine's routes (R3, arXiv 2510.11370)
    and the noise floor: the policy scoring the same tokens twice.
    """
    figure, axes = plots.new_figure(3, "Engine against policy at equal weights")
    per_moe_layer = mean_by(frames["layers"], "engine_any_change_rate", "moe_layer")
    note = plots.curves(axes[0], per_moe_layer, "engine_any_change_rate", "moe_layer", arms, marker="o")
    floor = mean_by(frames["layers"], "noise_floor_any_change_rate", "moe_layer")
    floor = floor.groupby("moe_layer")["noise_floor_any_change_rate"].mean()
    axes[0].plot(floor.index, floor, color=plots.GREY, linestyle=":", label="noise floor")
    axes[0].set(
        title="Routers that differ", xlabel="routing MoE layer, in forward order", ylabel=DIFFER, ylim=(0, None)
    )
    axes[0].yaxis.set_major_formatter(PercentFormatter(1))
    titles = {"kl_k3": "KL k3, nats per token", "beyond_2": "F(2): tokens off by more than × 2"}
    for ax, (measure, title) in zip(axes[1:], titles.items(), strict=True):
        columns = [name.format(measure) for name in GAPS]
        plots.require_columns(frames["steps"], *columns)
        means = frames["steps"].dropna(subset=columns).groupby(["arm", "seed"])[columns].mean().reset_index()
        present = [arm for arm in arms if (means["arm"] == arm).any()]
        for i, arm in enumerate(present):
            offset = (i - (len(present) - 1) / 2) * 0.7 / len(present)
            plots.marks(ax, means[means["arm"] == arm].set_index("seed")[columns], arm, arms, offset)
        ax.set_yscale("symlog", linthresh=1e-5, linscale=0.4)
        ax.set(title=title, ylim=(0, max(ax.get_ylim()[1], 1e-4)), xticks=range(len(GAPS)), xticklabels=GAPS.values())
        ax.grid(axis="x", visible=False)
    return plots.finish(figure, axes, note)


# ---------------------------------------------------------------------- runs, and a number per run against a factor
@plots.styled
def ratios(frames: Frames, arms: Sequence[str]) -> Figure:
    """Effective sample size of tokens, variance of token log-ratios and clipped share over steps: a row of panels per
    condition."""
    return by_condition(frames, arms, "steps", RATIOS, "Importance ratios over training")


@plots.styled
def layers(frames: Frames, arms: Sequence[str]) -> Figure:
    """Expert change in one step and load of the fullest expert per routing MoE layer, mean over steps: a row of panels
    per condition."""
    return by_condition(frames, arms, "layers", LAYERS, "Routing by MoE layer")


def by_condition(
    frames: Frames, arms: Sequence[str], table: str, columns: Mapping[str, tuple[str, str]], title: str
) -> Figure:
    """Columns of a table, each a title and a label, over steps or MoE layers; what no run measured has no panel."""
    measured = [column for column in columns if frames[table].get(column, NONE).notna().any()]
    if not measured:
        raise RunError(f"no run measured {', '.join(columns)}, so there is nothing to draw")
    figure, axes = plots.new_figure(len(measured) * len(frames.conditions), title)
    for i, condition in enumerate(frames.conditions):
        row, rows = axes[len(measured) * i :][: len(measured)], frames.condition(condition)[table]
        for ax, column in zip(row, measured, strict=True):
            ax.set(title=columns[column][0], ylabel=columns[column][1], xlabel="routing MoE layer")
            if table == "steps":
                frame, window = windows(rows, column)
                ax.set(xlabel="step" + window)
            else:
                frame = mean_by(rows, column, "moe_layer")
            if len(frame):
                at = "step" if table == "steps" else "moe_layer"
                note = plots.curves(ax, frame, column, at, arms, marker="" if at == "step" else "o")
        _title(row, condition, frames)
    for i in range(len(measured)):
        plots.same_limits(axes[i :: len(measured)])
    return plots.finish(figure, axes, note)


def _title(axes: Sequence[Axes], condition: str, frames: Frames) -> None:
    """Name the condition above the titles of its panels, where there are several."""
    for ax in axes if len(frames.conditions) > 1 else ():
        ax.set_title(f"{condition}\n{ax.get_title(loc='left')}")


@plots.styled
def against_factor(
    frames: Frames,
    arms: Sequence[str],
    *,
    factor: str,
    metric: Metric = MAIN,
    comparisons: Sequence[Sequence[str]] = (),
) -> Figure:
    """A number per run against a factor, and beside it the differences within seeds: every seed, mean and interval.

    A pair of panels per combination of the other factors; a log axis where the values are spaced like one.
    """
    table = against(frames, factor, metric)
    values = list(dict.fromkeys(table["x"]))
    is_number = numeric(values)
    table = table.assign(at=table["x"] if is_number else table["x"].map(values.index))
    panels = list(table.groupby("others", sort=False))
    present = [arm for arm in arms if (table["arm"] == arm).any()]
    pairs = pairs_of(present, comparisons) if len(present) > 1 else ()
    width = 1 + bool(pairs)
    figure, axes = plots.new_figure(len(panels) * width, f"{metric.name} against {name_of(factor)}")
    for ax in axes:
        _ticks(ax, values, is_number)
        ax.set(xlabel=name_of(factor))
    for i, (others, rows) in enumerate(panels):
        left = axes[i * width]
        scale = plots.scale_of(metric.column, rows["value"].to_numpy())
        note = plots.curves(left, rows, "value", "at", arms, marker="o", scale=scale)
        level = "" if metric.since_start else metric.column  # what was gained begins at 0
        before = plots.before_training(frames["steps"], level).groupby(level=0).mean()
        line = before.reindex(rows["condition"]).groupby(rows["at"].to_numpy()).mean().dropna()
        left.plot(line.index, line, **plots.BEFORE if len(line) else {}, gid=f"before RL {metric.column}")
        left.set(title=str(others), ylabel=metric.name)
        if scale == "logit" and (metric.column in plots.COLD_START or metric.column.startswith("eval_")):
            left.set_ylim(-0.02, 1.02)
        if pairs:
            note += draw_differences_over(axes[i * width + 1], rows, pairs, arms)
            axes[i * width + 1].set(ylabel=textwrap.fill(f"difference in {metric.name}", 36))
    return plots.finish(figure, axes, note)


def draw_differences_over(ax: Axes, rows: pd.DataFrame, pairs: Sequence[Sequence[str]], arms: Sequence[str]) -> str:
    """First minus second arm over the factor, around 0; returns the note on them."""
    wide = rows.pivot(index=["at", "seed"], columns="arm", values="value")
    note, firsts = "", [a for a, _ in pairs]
    for i, (a, b) in enumerate(pairs):
        gap = (wide[a] - wide[b]).dropna().rename("value").reset_index() if {a, b} <= {*wide} else wide.iloc[:0]
        if len(gap):
            name = f"{a} − {b}" + f": {stats.EQUAL}" * (not gap["value"].any())
            line = ("-", "--", ":", "-.")[firsts[:i].count(a) % 4]  # tells apart pairs of one first arm
            gap = gap.assign(arm=name)
            note = plots.curves(ax, gap, "value", "at", [name], order=arms, marker="o", linestyle=line, scale="linear")
    ax.axhline(0, color="black", linewidth=1)
    ax.set(title="Differences within seeds")
    return f". Differences: {note.removeprefix('mean over ')}" if note else ""


def _ticks(ax: Axes, values: Sequence[float | str], is_number: bool) -> None:
    """A tick at every value that was run."""
    at: Sequence[float] = [float(v) for v in values] if is_number else range(len(values))
    if is_number and geometrically_spaced(at):
        ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(at))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([f"{v:g}" if is_number else str(v) for v in values], rotation=30 if len(values) > 5 else 0)


# ---------------------------------------------------------------------- rows of many runs, pooled
def attribution(updates: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Pool the attribution sums of each run (and each value of `by`), then divide: `AttributionSums.shares`, with
    `unconstrained_std` and `replayed_std`, the standard deviations of D and R in nats."""
    sums = ["attribution_n", *(f"attribution_sum_{s}" for s in ("d", "r", "dd", "rr", "jj", "rj"))]
    if not set(sums) <= set(updates):
        raise RunError("no run measured attribution sums. Use --set measure.detail_every=1.")
    pooled = updates.dropna(subset=sums).groupby(["arm", "seed", *by])[sums].sum()
    shares = [AttributionSums(*row).shares() for row in pooled.itertuples(index=False)]
    table = pooled.reset_index().join(pd.DataFrame(shares, columns=["variance", "replayed", "routes", "covariance"]))
    return table.assign(
        unconstrained_std=table["variance"] ** 0.5, replayed_std=(table["replayed"] * table["variance"]) ** 0.5
    )


def windows(steps: pd.DataFrame, column: str) -> tuple[pd.DataFrame, str]:
    """Means of a column within windows of steps, per run, at most POINTS of them; and how to say so on the axis.

    A window stands at the middle of its steps, whichever of them a run has measured.
    """
    plots.require_columns(steps, column)
    measured = steps.dropna(subset=[column])
    width = -(-measured["step"].nunique() // POINTS) if len(measured) else 1
    first, there = measured["step"].min(), pd.Series(measured["step"].unique())
    window = ((measured["step"] - first) // width).rename("window")
    middle = there.groupby((there - first) // width).mean()
    means = measured.groupby([measured["arm"], measured["seed"], window])[column].mean().reset_index()
    means = means.assign(step=means["window"].map(middle).astype(float))
    return means, f" (each point: mean of {width} steps)" if width > 1 else ""


def mean_by(frame: pd.DataFrame, column: str, by: str) -> pd.DataFrame:
    """Means of a column per run and value of `by`."""
    plots.require_columns(frame, column, by)
    return frame.dropna(subset=[column]).groupby(["arm", "seed", by])[column].mean().reset_index()


# ---------------------------------------------------------------------- by name
FIGURES: dict[str, Draw] = {
    draws.__name__: draws
    for draws in (learning, clipping, expert_change, ratio_spread, variance_shares, engine_mismatch, ratios, layers)
}
TOGETHER = ("learning", "ratios", "layers")
"""Figures of all conditions, as `against:…` are. The page of every study shows them."""


def draw(name: str, endpoint: str, comparisons: Sequence[Sequence[str]] = ()) -> Draw:
    """The figure of a name: one of FIGURES, or a user's own `pkg.module:function`. `against:optimizer.lr` draws the
    endpoint over a factor, `against:optimizer.lr:expert_change_rate` another metric. One that has keyword parameters
    `endpoint` or `comparisons` gets the study's. Raises ConfigError for an unknown one."""
    if name.startswith(ACROSS):
        factor, _, column = name.removeprefix(ACROSS).partition(":")
        return partial(against_factor, factor=factor, metric=metric(column or endpoint), comparisons=comparisons)
    if name not in FIGURES and not Component(name).own:
        unknown("figure", name, [*FIGURES, f"{ACROSS}<factor>", f"{ACROSS}<factor>:<metric>", "pkg.module:name"])
    function = lookup("figure", name, FIGURES)
    study = {"endpoint": metric(endpoint), "comparisons": comparisons}
    return partial(function, **{k: v for k, v in study.items() if k in inspect.signature(function).parameters})


def plan_figures(
    names: Sequence[str], conditions: Sequence[str], *, every: bool = False
) -> list[tuple[str, str | None]]:
    """Which figures to draw of which condition (None: of all together).

    A figure of one combination is drawn where there is only one, or of `every` one.
    """
    across = [name for name in names if factor_of(name) or name in TOGETHER]
    return [(name, None) for name in across] + [
        (name, condition)
        for condition in conditions
        if every or len(conditions) == 1
        for name in names
        if name not in across
    ]


def draw_planned(
    frames: Frames, declared: Mapping[str, Any], *, every: bool = False
) -> Iterator[tuple[str, str | None, Figure | RunError]]:
    """The figures that `plan_figures` names: name, condition, and the figure, or why there is none:
    nobody measured its columns, or a user's own function fails."""
    arms = [arm["name"] for arm in declared["arms"]] or sorted(frames.runs["arm"].unique())
    for name, condition in plan_figures(declared["figures"], frames.conditions, every=every):
        own = Component(name).own and not name.startswith(ACROSS)
        here = frames if condition is None else frames.condition(condition)
        figure: Figure | RunError
        try:
            figure = draw(name, declared["endpoint"], declared["comparisons"])(here, arms)
            if own:
                _check(figure)
        except (RunError, ConfigError) as error:  # a study of another version may name another figure
            figure = RunError(str(error))
        except (Exception, SystemExit) as error:  # their code may raise anything
            if not own:
                raise
            figure = RunError(f"{type(error).__name__}: {error}")
        yield name, condition, figure


def _check(figure: object) -> None:
    """Raise what saving it would raise."""
    if not isinstance(figure, Figure):
        raise RunError(f"its function returned {figure!r}. Return the matplotlib Figure.")
    figure.draw_without_rendering()


def file_name(name: str) -> str:
    """The name of a figure's files."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def title_of(name: str) -> str:
    """The first sentence about a figure, for a caption."""
    about = against_factor if name.startswith(ACROSS) else lookup("figure", name, FIGURES)
    return " ".join((about.__doc__ or "").split("\n\n")[0].split())
