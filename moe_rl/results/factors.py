"""A metric against a factor: its values per run, and where half of it is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_rl.errors import RunError
from moe_rl.results.stats import Crossing, Interval, Shift, geometric, half_lost, shift
from moe_rl.results.summary import Metric, per_run
from moe_rl.storage.frames import Frames

ACROSS = "against:"
"""How the name of a figure begins that spans all combinations of factors."""
NAMES = {"optimizer.lr": "learning rate", "optimizer.router_lr_scale": "learning rate of routers, relative",
         "dial.sigma": "dose σ", "dial.form": "form", "N": "updates per batch, N", "group_size": "responses per prompt",
         "mini_batches": "mini-batches per step", "cold_start.seed": "cold start"}


def name_of(factor: str) -> str:
    """What a reader calls a setting: `learning rate`, not `optimizer.lr`."""
    return NAMES.get(factor, factor.rpartition(".")[2].replace("_", " "))


def factor_of(name: str) -> str | None:
    """The factor that a figure is drawn against; None for a figure of one combination of factors."""
    return name.removeprefix(ACROSS).partition(":")[0] if name.startswith(ACROSS) else None


def settings_of(cell: str) -> dict[str, float | str]:
    """The settings that a combination of factors names: `optimizer.lr=0.0004,task=x` → numbers and words.

    As in the run's path, where every character of a word beyond letters, digits and `._+-` reads `_`.
    """
    pairs = (part.partition("=") for part in cell.split(",") if "=" in part)
    return {key: _number(text) for key, _, text in pairs}


def against(frames: Frames, factor: str, metric: Metric) -> pd.DataFrame:
    """One row per run: arm, seed, `x` (the factor's value), `value` (the metric's), `others` (the other factors) and
    `cell` (all of them).

    Rows are in increasing x, words in the order of the runs. Raises RunError when no run varies the factor.
    """
    parts = []
    for cell in frames.cells:
        settings = settings_of(cell)
        if factor not in settings:
            continue
        x = settings.pop(factor)
        values = per_run(frames.cell(cell), metric).rename_axis(["arm", "seed"]).rename("value").reset_index()
        others = ", ".join(f"{name_of(k)} = {v:g}" if isinstance(v, float) else f"{name_of(k)} = {v}"
                           for k, v in settings.items())
        parts.append(values.assign(x=x, others=others, cell=cell))
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["x"])
    if table["x"].nunique() < 2:
        raise RunError(f"no two runs differ in {factor}, so there is nothing to draw against it")
    return table.sort_values("x", kind="stable") if numeric(table["x"].to_list()) else table


def numeric(values: Sequence[float | str]) -> bool:
    """Whether a factor's values are numbers."""
    return all(isinstance(v, float) for v in values)


def geometrically_spaced(values: Sequence[float]) -> bool:
    """Whether a log axis suits: positive, and over more than a decade or in (nearly) equal ratios, three at least."""
    x = np.unique(np.asarray(values, dtype=float))
    if x[0] <= 0:
        return False
    steps = np.diff(np.log(x))
    return bool(x[-1] > 10 * x[0] or (len(x) > 2 and np.allclose(steps, steps.mean(), rtol=0.1)))


@dataclass(frozen=True)
class HalfLost:
    """Where each arm has lost half of its best, and by which factor those points differ, at fixed other factors."""

    others: str
    points: dict[str, Interval]
    """Geometric mean over seeds, in the factor's unit."""
    censored: dict[str, int]
    """Seeds whose curve never falls to half within the values that were run: they count at the largest of these, so
    that the mean is a lower bound."""
    shifts: dict[tuple[str, str], Shift]


def half_lost_points(frames: Frames, factor: str, metric: Metric, contrasts: Sequence[Sequence[str]]) -> list[HalfLost]:
    """Per combination of the other factors: `stats.half_lost` of every seed's curve over the factor.

    Seeds count that were measured at every value of the factor and whose best is above 0. Intervals of shifts are at
    95 % for all contrasts together (Bonferroni), those of points at 95 % each. Raises RunError when no run varies the
    factor.
    """
    found, together = [], 1 - 0.05 / max(len(contrasts), 1)
    for others, table in against(frames, factor, metric).groupby("others", sort=False):
        by_arm = {str(arm): _crossings(rows) for arm, rows in table.groupby("arm", sort=False)}
        by_arm = {arm: crossings for arm, crossings in by_arm.items() if crossings}
        pairs = [(a, b) for a, b in contrasts if set(by_arm.get(a, ())) & set(by_arm.get(b, ()))]
        found.append(HalfLost(
            str(others),
            {arm: geometric([c.x for c in crossings.values()]) for arm, crossings in by_arm.items()},
            {arm: sum(c.censored for c in crossings.values()) for arm, crossings in by_arm.items()},
            {(a, b): shift(by_arm[a], by_arm[b], together) for a, b in pairs}))
    return found


def _crossings(rows: pd.DataFrame) -> Mapping[int, Crossing]:
    """Of one arm, by seed."""
    curves = rows.pivot(index="seed", columns="x", values="value").dropna()
    found = {int(seed): half_lost(curves.columns, curve) for seed, curve in curves.iterrows()}
    return {seed: crossing for seed, crossing in found.items() if crossing is not None}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
