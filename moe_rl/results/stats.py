"""Intervals over seeds, rates, paired tests, survival. Arrays in, numbers with method and n out; no torch, no tables.

The unit of replication is the seed: a step, a prompt or a token is never counted as one.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # which imports scipy.stats, most of a second, when first asked for it
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike

from moe_rl.errors import ConfigError
from moe_rl.metrics.rounding import number

LARGEST_LOG = math.log(sys.float_info.max)
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
    """The smallest p this number of seeds can give: with 3 seeds no difference, however large, goes below 0.25."""
    n: int
    method: str


def interval(values: ArrayLike, confidence: float = 0.95, seed: int = 0, scale: str = "linear") -> Interval:
    """Mean over seeds and its confidence interval; the arguments of `band`, for one quantity."""
    b = band(np.asarray(values, dtype=float)[:, None], confidence, seed, scale)
    return Interval(float(b.mean[0]), float(b.low[0]), float(b.high[0]), b.n, b.method)


@dataclass(frozen=True)
class Band:
    """An interval at every column of a matrix: what `interval` is for one."""

    mean: Float[np.ndarray, " column"]
    low: Float[np.ndarray, " column"]
    high: Float[np.ndarray, " column"]
    n: int
    method: str


def band(values: Float[np.ndarray, "seed column"], confidence: float = 0.95, seed: int = 0,
         scale: str = "linear") -> Band:
    """Mean and confidence interval of each column of `values` [seed, column].

    Under 12 seeds mean ± t(n−1) · sd / √n (Student); from 12 on a BCa bootstrap of the mean (Efron 1987, 9,999
    resamples, its generator seeded with `seed`), which covers 93 % of the means of 12 to 20 normal values. One seed has
    no interval, and seeds that agree one of zero width. `scale`: `log` for a quantity above 0, `logit` for one between
    0 and 1, takes the former on that scale (delta method), so that it ends where the quantity does; resampled means
    never leave the range of the data.
    """
    values = np.asarray(values, dtype=float)
    n = values.shape[0]
    if n == 0:
        raise ConfigError("an interval needs at least one seed")
    mean = values.mean(0)
    if n == 1:
        return Band(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan), 1, "one seed, no interval")
    if n < FEW:
        half = scipy.stats.t.ppf((1 + confidence) / 2, n - 1) * values.std(0, ddof=1) / np.sqrt(n)
        there, back, slope = SCALES[scale]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # a mean at the end of its range
            ends = [np.where(half > 0, back(there(mean) + side * half * slope(mean)), mean) for side in (-1, 1)]
        on = "" if scale == "linear" else f", {scale} scale"
        return Band(mean, ends[0], ends[1], n, f"{100 * confidence:.3g}% Student t{on}")
    low, high = mean.copy(), mean.copy()
    varied = np.ptp(values, axis=0) > 0  # BCa divides by the spread; NaN columns stay NaN
    if varied.any():
        result = scipy.stats.bootstrap((values[:, varied],), np.mean, confidence_level=confidence, n_resamples=9999,
                                 method="BCa", axis=0, rng=np.random.default_rng(seed), batch=500)
        low[varied], high[varied] = result.confidence_interval
    return Band(mean, low, high, n, f"{100 * confidence:.3g}% BCa bootstrap")


def geometric_band(values: Float[np.ndarray, "seed column"]) -> Band:
    """What `geometric` is for one quantity, at every column of a matrix. Raises ConfigError unless all is above 0."""
    if not (values > 0).all():
        raise ConfigError(f"a geometric mean needs numbers above 0, but one is {np.min(values):g}. Use a linear axis.")
    b = band(np.log(values))
    return Band(np.exp(b.mean), np.exp(b.low), np.exp(b.high), b.n, f"{b.method} of logs")


def rate(events: int, n: int, confidence: float = 0.95) -> Interval:
    """A share of runs with its exact interval (Clopper and Pearson 1934, two-sided)."""
    low, high = scipy.stats.binomtest(events, n).proportion_ci(confidence, method="exact")
    return Interval(events / n, float(low), float(high), n, f"{100 * confidence:.3g}% Clopper–Pearson (rates)")


def paired(a: Mapping[int, float], b: Mapping[int, float], confidence: float = 0.95, seed: int = 0) -> Paired:
    """a − b over the seeds (keys) both have, tested by flipping signs within pairs.

    Two-sided p = share of the 2^n sign patterns whose |mean| is at least the observed one: exact up to 16 seeds, where
    the observed pattern and its mirror image count, so that p is at least 2 / 2^n. Above that 65,535 random patterns
    and the observed one: at least 1 / 65,536 (Phipson and Smyth 2010).

    Raises ConfigError where the difference of a seed is not finite: leaving out the seeds that failed would favour the
    arm that fails more, so whoever calls decides what a failed run counts as.
    """
    shared = sorted(set(a) & set(b))
    if not shared:
        raise ConfigError(f"the arms share no seed: one has {sorted(a)}, the other {sorted(b)}. Run both with the same "
                          "seeds.")
    d = np.array([a[s] - b[s] for s in shared])
    if odd := [s for s, x in zip(shared, d, strict=True) if not math.isfinite(x)]:
        raise ConfigError(f"seeds {odd} have no finite difference: {[a[s] for s in odd]} − {[b[s] for s in odd]}. Give "
                          "them a value, or remove them from both arms and report it.")
    n, exact = len(d), len(d) <= 16
    # Rounding must not lose the pattern itself, nor its equals: tables keep float32, whose half unit is 2^-24.
    least = np.abs(d.mean()) - 2**-22 * np.mean([abs(a[s]) + abs(b[s]) for s in shared])
    patterns, reached, rng = 2**n if exact else 65_536, 0, np.random.default_rng(seed)
    for first in range(0, patterns, 4096):  # a part at a time: of thousands of pairs all would be gigabytes
        some = min(4096, patterns - first)
        signs = (1 - 2 * ((np.arange(first, first + some)[:, None] >> np.arange(n)) & 1) if exact else
                 rng.choice([-1, 1], size=(some, n)))
        signs[: first == 0] = 1
        reached += int((np.abs((signs * d).mean(1)) >= least).sum())
    kind = "exact" if exact else "65,535 random"
    smallest = (2 if exact else 1) / patterns
    return Paired(interval(d, confidence, seed), reached / patterns, smallest, n, f"{kind} sign flips")


def detectable(sd: float, n: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest true mean of `n` differences, of standard deviation `sd`, that a two-sided t-test at `alpha` finds
    with probability `power` (Cohen 1988). NaN for one difference, 0 where they do not scatter. `sd` is taken as known:
    from few seeds it is a rough guess itself."""
    if n < 2 or not math.isfinite(sd):
        return math.nan
    bound = scipy.stats.t.isf(alpha / 2, n - 1)
    quantiles = (np.arange(4000) + 0.5) / 4000  # of the sample's deviation; scipy's noncentral t is NaN in its tails
    bounds = bound * np.sqrt(scipy.stats.chi2.ppf(quantiles, n - 1) / (n - 1))

    def excess(shift: float) -> float:
        return float((scipy.special.ndtr(shift - bounds) + scipy.special.ndtr(-shift - bounds)).mean()) - power

    return sd / math.sqrt(n) * scipy.optimize.brentq(excess, 0, 4 * bound + 10)


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


@dataclass(frozen=True)
class Survival:
    """Share of runs without the event by time, as a step curve from time 0; NaN bounds where there is no interval."""

    times: Float[np.ndarray, " time"]
    share: Float[np.ndarray, " time"]
    low: Float[np.ndarray, " time"]
    high: Float[np.ndarray, " time"]
    n: int
    events: int
    method: str


def survival(times: ArrayLike, observed: ArrayLike, confidence: float = 0.95) -> Survival:
    """S(t) = Π over event times t_i ≤ t of (1 − events_i / at risk_i) (Kaplan and Meier 1958).

    `times` holds a value per run: of its event where `observed`, else the last time it was known to be without one
    (censored). The interval is Greenwood's on the log(−log S) scale; it is undefined while S is 1 and once it is 0.
    """
    times, observed = np.asarray(times, dtype=float), np.asarray(observed, dtype=bool)
    if not len(times):
        raise ConfigError("a survival curve needs at least one seed")
    curve = scipy.stats.ecdf(_censored(times, observed)).sf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about where the interval is undefined: NaN says so
        bounds = curve.confidence_interval(confidence, method="log-log")
    return Survival(np.r_[0, curve.quantiles], np.r_[1, curve.probabilities], np.r_[np.nan, bounds.low.probabilities],
                    np.r_[np.nan, bounds.high.probabilities], len(times), int(observed.sum()),
                    f"{100 * confidence:.3g}% log–log Greenwood")


def log_rank(a: tuple[ArrayLike, ArrayLike], b: tuple[ArrayLike, ArrayLike]) -> float:
    """Two-sided p of equal times to the event in two groups, each (times, observed) as in `survival`; unpaired.

    Asymptotic (Mantel 1966), so rough for a handful of runs; NaN when no run of either group had the event, or all had
    it at once.
    """
    groups = [(np.asarray(t, dtype=float), np.asarray(o, dtype=bool)) for t, o in (a, b)]
    if not any(o.any() for _, o in groups):
        return math.nan
    with np.errstate(invalid="ignore"):
        return float(scipy.stats.logrank(*(_censored(t, o) for t, o in groups)).pvalue)


def _censored(times: Float[np.ndarray, " run"], observed: Bool[np.ndarray, " run"]) -> scipy.stats.CensoredData:
    return scipy.stats.CensoredData(uncensored=times[observed], right=times[~observed])


@dataclass(frozen=True)
class Crossing:
    """Where a curve falls below a level; `censored`: it never does, and `x` is the last point that was looked at."""

    x: float
    censored: bool


def half_lost(x: ArrayLike, y: ArrayLike, fraction: float = 0.5) -> Crossing | None:
    """Where a curve falls below `fraction` of its best, past its best: linear in y, linear in log x between points.

    The first such crossing, in the unit of x. None for a curve that is nowhere above 0, and so has nothing to lose.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(x) != len(y) or not len(x) or (x <= 0).any() or (np.diff(x) <= 0).any() or not np.isfinite(y).all():
        raise ConfigError(f"the half-loss of a curve needs positive, increasing x and finite y, not {x} and {y}")
    best = int(np.argmax(y))
    if y[best] <= 0:
        return None
    level = fraction * y[best]
    below = np.flatnonzero((y < level) & (np.arange(len(y)) > best))
    if not below.size:
        return Crossing(float(x[-1]), censored=True)
    i = below[0]
    share = (y[i - 1] - level) / (y[i - 1] - y[i])
    return Crossing(float(x[i - 1] * (x[i] / x[i - 1]) ** share), censored=False)


@dataclass(frozen=True)
class Shift:
    """By which factor one arm's crossings lie higher than another's, over the seeds both have."""

    ratio: Interval
    p: float
    p_smallest: float
    censored: int
    """Seeds in which either curve was never seen to cross: it counts at its last point, so the ratio is a bound."""


def shift(a: Mapping[int, Crossing], b: Mapping[int, Crossing], confidence: float = 0.95) -> Shift:
    """exp of the mean of log(x_a / x_b) over shared seeds, its interval and sign-flip p being those of the logs."""
    log_a, log_b = ({s: math.log(c.x) for s, c in side.items()} for side in (a, b))
    logs = paired(log_a, log_b, confidence)
    censored = sum(a[s].censored or b[s].censored for s in set(a) & set(b))
    return Shift(_exp(logs.difference), logs.p, logs.p_smallest, censored)


def geometric(values: ArrayLike, confidence: float = 0.95) -> Interval:
    """Geometric mean over seeds with the interval of the mean of the logs."""
    return _exp(interval(np.log(np.asarray(values, dtype=float)), confidence))


def _exp(i: Interval) -> Interval:
    mean, low, high = (math.inf if x > LARGEST_LOG else math.exp(x) for x in (i.mean, i.low, i.high))
    return Interval(mean, low, high, i.n, f"{i.method} of logs")
