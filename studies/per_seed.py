"""What the answers of the studies are made of: tables, and numbers of every seed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from moe_rl.errors import RunError
from moe_rl.results.stats import Interval, interval
from moe_rl.results.summary import metric, per_run
from moe_rl.storage.frames import Frames, load_study

MIXED = ("in_two_trainers",)
"""Studies whose runs were made by several versions of the code, as their pages say."""
RESULTS = Path(__file__).parent / "results"


@cache
def stored(study: str) -> Frames:
    """The tables of a study, read once; what reads them changes none."""
    return load_study(RESULTS / study, mix_code=study in MIXED)


def seed_by_arm(frames: Frames, cell: str, name: str, arms: Sequence[str]) -> pd.DataFrame:
    """A metric of one cell, seed × arm. Raises RunError where runs of these arms are missing."""
    table = per_run(frames.cell(cell), metric(name)).unstack(0) if cell in frames.cells else pd.DataFrame()
    if missing := [arm for arm in arms if arm not in table]:
        raise RunError(f"the rule needs runs of {', '.join(missing)} in {cell}, which are not there; run the study to "
                       "its end, and collect it again")
    return table[list(arms)]


def differences(values: pd.DataFrame, a: str, b: str, confidence: float = 0.95) -> Interval:
    """a − b over the seeds (rows) both columns have."""
    return interval((values[a] - values[b]).dropna(), confidence)


def own_table(study: str, name: str) -> pd.DataFrame:
    """A table that the study's own trainer wrote, in float64."""
    table = pd.read_parquet(RESULTS / study / f"{name}.parquet")
    return table.astype({c: "float64" for c in table.select_dtypes("float32")})


def slopes(values: pd.DataFrame, x: Sequence[float]) -> np.ndarray:
    """Least-squares slope of every row over x; exactly 0 where its values are equal."""
    along, rows = np.asarray(x, dtype=float) - np.mean(x), values.to_numpy(dtype=float)
    return (rows - rows[:, :1]) @ along / (along @ along)
