"""Smoothing, collapse and the second half of a curve: one value per consecutive step. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_rl.errors import ConfigError

SPAN = 10
"""Span of the moving average."""
PATIENCE = 20
"""Consecutive steps a dip must last to be a collapse."""
FRACTION = 0.5
"""Of the best earlier average, below which a step is a dip."""


@dataclass(frozen=True)
class Collapse:
    """Whether and when a run's reward collapsed."""

    step: int | None
    """First step of the first collapse; None when there was none."""
    recovered: bool
    """There was a collapse, and none is under way at the end."""
    dip: int | None = None
    """First step of the dip in which the curve ends, still shorter than a collapse: the run is censored from there."""


def ema(values: ArrayLike, span: int) -> NDArray[np.float64]:
    """Exponential moving average: m[0] = x[0], m[t] = a·x[t] + (1 - a)·m[t-1], a = 2 / (span + 1); unit of the values.

    As `pandas.Series.ewm(span=span, adjust=False).mean()`, except that a NaN stays NaN from there on.
    """
    values = _curve(values)
    average = np.empty_like(values)
    a = 2.0 / (span + 1.0)
    for t, x in enumerate(values):
        average[t] = x if t == 0 else a * x + (1 - a) * average[t - 1]
    return average


def collapse(steps: ArrayLike, rewards: ArrayLike) -> Collapse:
    """Whether and when the reward collapsed, from the rewards of consecutive steps.

    A step is a dip when its EMA10(reward) < 0.5 · the best EMA10 of earlier steps. A collapse is a run of at least 20
    dips, and its step is the first of them. A reward that is not finite is a collapse at that step and does not
    recover. The first step counts among the best, so the loss of a cold start is a collapse.
    """
    steps, rewards = np.asarray(steps, dtype=np.int64), _curve(rewards)
    if len(steps) != len(rewards) or (np.diff(steps) != 1).any():
        raise ConfigError(f"collapse needs one reward per step, but got {len(rewards)} rewards for {steps}")
    broken = np.flatnonzero(~np.isfinite(rewards))
    end = int(broken[0]) if broken.size else len(rewards)
    runs = _runs(_dips(ema(rewards[:end], SPAN)))
    collapses = [run for run in runs if run[1] - run[0] >= PATIENCE]
    first = int(steps[collapses[0][0]]) if collapses else None
    if broken.size:
        return Collapse(step=int(steps[end]) if first is None else first, recovered=False)
    under_way = bool(runs) and runs[-1][1] == end
    lasting = under_way and runs[-1] in collapses
    dip = int(steps[runs[-1][0]]) if under_way and not lasting else None
    return Collapse(step=first, recovered=first is not None and not lasting, dip=dip)


def second_half_mean(values: ArrayLike) -> float:
    """Mean of the values from index len // 2 on, in their unit."""
    values = _curve(values)
    return float(values[len(values) // 2 :].mean()) if len(values) else float("nan")


def _curve(values: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1:
        raise ConfigError(
            f"a curve has one value per step, but this one has shape {values.shape}. Pass one run at a time."
        )
    return values


def _dips(average: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where the average is below FRACTION of the best earlier one."""
    best = np.maximum.accumulate(average)
    earlier = np.concatenate([[0.0], best[:-1]]) if len(best) else best
    return average < FRACTION * earlier


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(start, stop) of every run of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
