"""Intervals over seeds, rates, paired tests. Arrays in, numbers with method and n out; no torch, no tables.

The unit of replication is the seed: a step, a prompt or a token is never counted as one. Fewer than FEWEST values have
no interval and no p-value wherever they are shown: bounds are NaN, and `printed_p` gives a dash. A p-value itself
stays a number, so that a rule such as `p > 0.05` holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy  # which imports scipy.stats, most of a second, when first asked for it
from jaxtyping import Float
from numpy.typing import ArrayLike

from moe_rl.errors import ConfigError
from moe_rl.metrics.rounding import number

FEWEST = 4
"""Of three seeds no p-value can be below 0.25, and an interval rests on two degrees of freedom."""
TOO_FEW = f"none below n = {FEWEST}"
"""The method of what fewer values do not have."""
EQUAL, COINCIDE = "equal", "none where all pairs are equal"
"""How a difference that is exactly 0 in every pair is printed, and its method."""
PATTERNS, MOST_EXACT = 65_536, 40
"""Sign patterns that are drawn where there are more pairs than `MOST_EXACT`."""
FEW = 12
"""Below this many seeds every interval of a mean is Student's: a bootstrap of so few values is too narrow."""


SCALES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "linear": (lambda m: m, lambda y: y, lambda m: 1.0),
    "log": (np.log, np.exp, lambda m: 1 / m),
    "logit": (lambda m: np.log(m / (1 - m)), lambda y: 1 / (1 + np.exp(-y)), lambda m: 1 / (m * (1 - m))),
}
"""To a scale, back from it, and its slope at a mean."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval. `low` and `high` are NaN where there is none; `method` says why."""

    mean: float
    low: float
    high: float
    n: int
    method: str

    def __str__(self) -> str:
        if self.method == COINCIDE:
            return EQUAL
        half = float(number((self.high - self.low) / 2, ".12g"))  # its first digit is the last that means something
        digits = min(max(-math.floor(math.log10(half)), 2), 9) if 1e-12 < half < math.inf else 3
        return self.printed(f".{digits}f" if math.isfinite(half) else ".3g")

    def printed(self, form: str) -> str:
        """Estimate and interval, each number in this format."""
        mean, low, high = (number(x, form) for x in (self.mean, self.low, self.high))
        return f"{mean} [–]" if np.isnan(self.low) else f"{mean} [{low}, {high}]"


@dataclass(frozen=True)
class Paired:
    """A difference between two arms over the seeds they share."""

    difference: Interval
    p: float
    p_smallest: float
    """The smallest p this number of seeds can give: with 4 seeds no difference, however large, goes below 0.125."""
    n: int
    method: str


def interval(values: ArrayLike, scale: str = "linear") -> Interval:
    """Mean over seeds and its 95 % interval: `band`, for one quantity."""
    return _of_one(band(np.asarray(values, dtype=float)[:, None], scale))


def _of_one(b: Band) -> Interval:
    return Interval(float(b.mean[0]), float(b.low[0]), float(b.high[0]), b.n, b.method)


def student(values: ArrayLike, confidence: float = 0.95) -> Interval:
    """Mean ± t(n−1) · sd / √n, however many seeds. No random generator is in it, so a decision may depend on it."""
    values = np.asarray(values, dtype=float)
    if len(values) < FEWEST:
        return interval(values)
    return _of_one(_student_band(values[:, None], confidence, "linear"))


@dataclass(frozen=True)
class Band:
    """An interval at every column of a matrix: what `interval` is for one."""

    mean: Float[np.ndarray, " column"]
    low: Float[np.ndarray, " column"]
    high: Float[np.ndarray, " column"]
    n: int
    method: str


def band(values: Float[np.ndarray, "seed column"], scale: str = "linear") -> Band:
    """Mean and 95 % interval of each column of `values` [seed, column].

    From 4 to 11 seeds mean ± t(n−1) · sd / √n (Student); from 12 on a BCa bootstrap of the mean (Efron 1987, 9,999
    resamples, its generator seeded with 0), which covers 93 % of the means of 12 to 20 normal values. Fewer than 4
    have no interval, and seeds that agree one of zero width. `scale`: `log` for a quantity above 0, `logit` for one
    between 0 and 1, takes the former on that scale (delta method), so that it ends where the quantity does; resampled
    means never leave the range of the data.
    """
    values = np.asarray(values, dtype=float)
    n = values.shape[0]
    if n == 0:
        raise ConfigError("an interval needs at least one seed")
    mean = values.mean(0)
    if n < FEWEST:
        return Band(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan), n, TOO_FEW)
    if n < FEW:
        return _student_band(values, 0.95, scale)
    low, high = mean.copy(), mean.copy()
    varied = np.ptp(values, axis=0) > 0  # BCa divides by the spread; NaN columns stay NaN
    if varied.any():
        result = scipy.stats.bootstrap(
            (values[:, varied],),
            np.mean,
            confidence_level=0.95,
            n_resamples=9999,
            method="BCa",
            axis=0,
            rng=np.random.default_rng(0),
            batch=500,
        )
        low[varied], high[varied] = result.confidence_interval
    return Band(mean, low, high, n, "95% BCa bootstrap")


def _student_band(values: Float[np.ndarray, "seed column"], confidence: float, scale: str) -> Band:
    mean, n = values.mean(0), len(values)
    half = scipy.stats.t.ppf((1 + confidence) / 2, n - 1) * values.std(0, ddof=1) / np.sqrt(n)
    there, back, slope = SCALES[scale]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # a mean at the end of its range
        ends = [np.where(half > 0, back(there(mean) + side * half * slope(mean)), mean) for side in (-1, 1)]
    on = "" if scale == "linear" else f", {scale} scale"
    return Band(mean, ends[0], ends[1], n, f"{100 * confidence:.3g}% Student t{on}")


def rate(events: int, n: int) -> Interval:
    """A share of runs with its exact 95 % interval (Clopper and Pearson 1934, two-sided)."""
    if n < FEWEST:
        return Interval(events / n, math.nan, math.nan, n, TOO_FEW)
    low, high = scipy.stats.binomtest(events, n).proportion_ci(0.95, method="exact")
    return Interval(events / n, float(low), float(high), n, "95% Clopper–Pearson (rates)")


def printed_p(p: float, n: int, form: str = ".3g") -> str:
    """A p-value of `n` pairs in this format; a dash where there is none, or fewer than FEWEST pairs."""
    return "–" if n < FEWEST or math.isnan(p) else format(p, form)


def difference(values: ArrayLike) -> Interval:
    """The interval of the differences of pairs; its method is COINCIDE where all of them are exactly 0."""
    mean = interval(values)
    return mean if np.any(values) else replace(mean, method=COINCIDE)


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired:
    """a − b over the seeds (keys) both have, tested by flipping signs within pairs.

    Two-sided p = share of the 2^n sign patterns whose |mean| is at least the observed one: exact up to 40 seeds, where
    the observed pattern and its mirror image count, so that p is at least 2 / 2^n. Above that 65,535 random patterns
    and the observed one: at least 1 / 65,536 (Phipson and Smyth 2010).

    Raises ConfigError for a seed whose difference is not finite. Leaving out the seeds that failed would favour the arm
    that fails more, so the caller decides the value of a failed run.
    """
    shared = sorted(set(a) & set(b))
    if not shared:
        raise ConfigError(
            f"the arms share no seed: one has {sorted(a)}, the other {sorted(b)}. Run both with the same seeds."
        )
    d = np.array([a[s] - b[s] for s in shared], dtype=float)
    if odd := [s for s, x in zip(shared, d, strict=True) if not math.isfinite(x)]:
        raise ConfigError(
            f"seeds {odd} have no finite difference: {[a[s] for s in odd]} − {[b[s] for s in odd]}. Give "
            "them a value, or remove them from both arms and report it."
        )
    n = len(d)
    # Rounding must not lose the pattern itself, nor its equals: tables keep float32, whose half unit is 2^-24.
    least = np.abs(d.sum()) - 2**-22 * sum(abs(a[s]) + abs(b[s]) for s in shared)
    if n <= MOST_EXACT:
        p, smallest, kind = _share_of_patterns(d, least), 2.0 ** (1 - n), "exact"
    else:
        p, smallest, kind = _share_of_random_patterns(d, least), 1 / PATTERNS, f"{PATTERNS - 1:,} random"
    return Paired(difference(d), p, smallest, n, f"{kind} sign flips")


def _share_of_patterns(d: Float[np.ndarray, " pair"], least: float) -> float:
    """Share of all sign patterns for which |Σ ± d| is at least `least`.

    Every sum is one over half of the pairs plus one over the other half."""
    if least <= 0:
        return 1.0
    some, others = (np.zeros(1), np.zeros(1))
    for x in d[: len(d) // 2]:
        some = np.r_[some - x, some + x]
    for x in d[len(d) // 2 :]:
        others = np.r_[others - x, others + x]
    others.sort()
    reached = len(others) - np.searchsorted(others, least - some)
    return 2 * int(reached.sum()) / 2.0 ** len(d)  # a pattern and its mirror image


def _share_of_random_patterns(d: Float[np.ndarray, " pair"], least: float) -> float:
    """The same of random patterns, with the observed one as the first."""
    reached, rng = 0, np.random.default_rng(0)
    for first in range(0, PATTERNS, 4096):  # a part at a time: of thousands of pairs all would be gigabytes
        signs = rng.choice([-1, 1], size=(4096, len(d)))
        signs[: first == 0] = 1
        reached += int((np.abs((signs * d).sum(1)) >= least).sum())
    return reached / PATTERNS


def holm(p: Sequence[float], family: int = 0) -> list[float]:
    """p-values adjusted for the number of comparisons (Holm 1979): p(i) · (m − i), kept rising, at most 1.

    m is their number, or `family` where more were declared: those that are missing may still turn out larger.
    """
    order = np.argsort(p, kind="stable")
    factors = max(len(order), family) - np.arange(len(order))
    adjusted = np.maximum.accumulate(np.asarray(p, dtype=float)[order] * factors)
    result = np.empty(len(order))
    result[order] = np.minimum(adjusted, 1)
    return result.tolist()
