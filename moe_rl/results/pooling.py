"""The rows of many runs pooled for a figure: attribution sums, windows of steps, means per group."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from moe_rl.errors import RunError
from moe_rl.metrics.attribution import AttributionSums
from moe_rl.storage.frames import Frames

POINTS = 25
"""Most points of a curve over steps: more are averaged within windows of equal length, so that bands stay readable."""


def attribution(updates: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Pool the attribution sums of each run (and each value of `by`), then divide: `AttributionSums.shares`, with
    `natural_std` and `replayed_std`, the standard deviations of D and R in nats."""
    sums = ["attribution_n", *(f"attribution_sum_{s}" for s in ("d", "r", "dd", "rr", "jj", "rj"))]
    if not set(sums) <= set(updates):
        raise RunError("no run has measured attribution sums, so there is nothing to draw; train for more steps or "
                       "measure in more detail (--set measure.detail_every=1)")
    pooled = updates.dropna(subset=sums).groupby(["arm", "seed", *by])[sums].sum()
    shares = [AttributionSums(*row).shares() for row in pooled.itertuples(index=False)]
    found = pooled.reset_index().join(pd.DataFrame(shares, columns=["variance", "replayed", "routes", "covariance"]))
    return found.assign(natural_std=found["variance"] ** 0.5,
                        replayed_std=(found["replayed"] * found["variance"]) ** 0.5)


def windows(steps: pd.DataFrame, column: str) -> tuple[pd.DataFrame, str]:
    """Means of a column within windows of steps, per run, at most POINTS of them; and how to say so on the axis.

    A window stands at the middle of its steps, whichever of them a run has measured.
    """
    require_columns(steps, column)
    measured = steps.dropna(subset=[column])
    width = -(-measured["step"].nunique() // POINTS) if len(measured) else 1
    first, there = measured["step"].min(), pd.Series(measured["step"].unique())
    window = ((measured["step"] - first) // width).rename("window")
    middle = there.groupby((there - first) // width).mean()
    means = measured.groupby([measured["arm"], measured["seed"], window])[column].mean().reset_index()
    means = means.assign(step=means["window"].map(middle).astype(float))
    return means, f" (each point: mean of {width} steps)" if width > 1 else ""


def tokens_sampled(frames: Frames) -> pd.DataFrame:
    """The steps, with the `tokens` of all responses that were sampled for each: their mean length times their number,
    or, with refills, of all groups that were drawn."""
    steps = frames["steps"]
    require_columns(steps, "response_tokens")
    responses = {(arm, seed): (config := json.loads(text))["prompts_per_step"] * config["group_size"]
                 for arm, seed, text in zip(*(frames.runs[c] for c in ("arm", "seed", "config")), strict=True)}
    number = [responses[run] for run in zip(steps["arm"], steps["seed"], strict=True)]
    kept = steps["response_tokens"] * number
    return steps.assign(tokens=steps["drawn_tokens"].fillna(kept) if "drawn_tokens" in steps else kept)


def over(frame: pd.DataFrame, steps: pd.DataFrame, spent: str) -> pd.DataFrame:
    """`frame` with a column `spent` beside its `step`: what an arm's runs had spent by then since they began, on
    average; between steps on a straight line."""
    ordered = steps.sort_values("step").fillna({spent: 0})  # nothing before the first step
    totals = ordered.assign(total=ordered.groupby(["arm", "seed"])[spent].cumsum()).groupby(["arm", "step"])["total"]
    by_arm = {arm: total.droplevel("arm") for arm, total in totals.mean().groupby(level="arm")}
    points = zip(frame["arm"], frame["step"], strict=True)
    return frame.assign(**{spent: [np.interp(step, by_arm[arm].index, by_arm[arm]) for arm, step in points]})


def mean_by(frame: pd.DataFrame, column: str, by: str) -> pd.DataFrame:
    """Means of a column per run and value of `by`."""
    require_columns(frame, column, by)
    return frame.dropna(subset=[column]).groupby(["arm", "seed", by])[column].mean().reset_index()


def require_columns(frame: pd.DataFrame, *columns: str) -> None:
    """Raise RunError for a column that no run has."""
    if missing := [c for c in columns if c not in frame.columns]:
        raise RunError(f"no run has measured {', '.join(missing)}, so there is nothing to draw")
