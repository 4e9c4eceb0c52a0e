"""What a study found, as numbers: arm × metric with intervals over seeds, and the arms compared pair by pair."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from moe_rl.frames import Frames
from moe_rl.metrics.convergence import collapse, second_half_mean
from moe_rl.stats import Interval, Paired, holm, interval, paired, rate


def last(values: Float[np.ndarray, " step"]) -> float:
    """The last value that was measured."""
    return float(values[-1])


@dataclass(frozen=True)
class Metric:
    """One row of the summary: a column of `steps`, reduced to a number per run."""

    name: str
    column: str
    reduce: Callable[[Float[np.ndarray, " step"]], float]


METRICS = (
    Metric("reward, second half", "reward", second_half_mean),
    Metric("greedy exact match, end", "eval_exact_greedy", last),
    Metric("sampled exact match, end", "eval_exact_sampled", last),
    Metric("expert slots changed", "slot_change", second_half_mean),
    Metric("log-ratio variance, nats²", "token_log_ratio_var", second_half_mean),
    Metric("clipped tokens", "clip_tokens", second_half_mean),
    Metric("clipped sequences", "clip_sequences", second_half_mean),
    Metric("replay gap std, nats", "replay_gap_std", second_half_mean),
)
"""Without `end`: means over the second half of training. Exact match is on the held-out prompts."""
MAIN = METRICS[0]


def per_run(frames: Frames, metric: Metric) -> pd.Series:
    """One number per (arm, seed). A diverged run has no end to describe, so its number is NaN."""
    if metric.column not in frames.steps:
        return pd.Series(dtype=float)
    ended = {(run.arm, run.seed): run.state for run in frames.runs.itertuples()}
    rows = frames.steps.dropna(subset=[metric.column]).sort_values("step").groupby(["arm", "seed"])[metric.column]
    return pd.Series({key: math.nan if ended[key] == "diverged" else metric.reduce(values.to_numpy())
                      for key, values in rows}, dtype=float)


def summarise(frames: Frames, arms: Sequence[str]) -> pd.DataFrame:
    """Metric × arm, each cell an Interval over seeds; the last row is the rate of collapses.

    `frames` holds one combination of factors. A metric nobody measured has no row.
    """
    table = {}
    for metric in METRICS:
        values = per_run(frames, metric)
        if len(values):
            table[metric.name] = {a: interval(values[a].to_list()) for a in arms if a in values.index.levels[0]}
    table["collapsed runs"] = {arm: collapses(frames, arm) for arm in arms if (frames.runs["arm"] == arm).any()}
    return pd.DataFrame.from_dict(table, orient="index").reindex(columns=list(arms))


def collapses(frames: Frames, arm: str) -> Interval:
    """Rate of runs whose reward collapsed (see `metrics.convergence.collapse`) or diverged; recovered ones count."""
    runs = frames.runs[frames.runs["arm"] == arm]
    steps = frames.steps[(frames.steps["arm"] == arm) & frames.steps.get("reward", pd.Series(dtype=float)).notna()]
    curves = {seed: rows.sort_values("step") for seed, rows in steps.groupby("seed")}
    events = sum(run.state == "diverged" or (run.seed in curves and _collapsed(curves[run.seed]))
                 for run in runs.itertuples())
    return rate(events, len(runs))


def _collapsed(curve: pd.DataFrame) -> bool:
    return collapse(curve["step"].to_numpy(), curve["reward"].to_numpy()).step is not None


def compare(frames: Frames, arms: Sequence[str], metric: Metric = MAIN) -> list[tuple[str, str, Paired, float]]:
    """Every pair of arms: later minus earlier over the seeds both have, and its p adjusted by Holm over the pairs."""
    values = per_run(frames, metric)
    by_arm = {arm: values[arm].dropna().to_dict() for arm in arms if arm in values.index.levels[0]}
    found = [(b, a, paired(by_arm[b], by_arm[a])) for a, b in itertools.combinations(by_arm, 2)
             if set(by_arm[a]) & set(by_arm[b])]
    adjusted = holm([result.p for _, _, result in found])
    return [(b, a, result, p) for (b, a, result), p in zip(found, adjusted, strict=True)]
