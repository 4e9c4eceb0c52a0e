"""The rule of a diagnosis, on numbers alone: `decide` takes log-ratios of tokens and returns what explains them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy
from jaxtyping import Bool, Float, Integer
from numpy.typing import NDArray

from moe_rl.analysis.diagnose.causes import CAUSES
from moe_rl.results.stats import Interval, interval

EXPLAINED = 0.4
"""Share of the mean |log r| that an explanation leaves at most, upper end of the interval."""
APART = 1.25
"""Explanations whose mean |log r| is within this factor of the best fit equally well. A fault beats dtypes by it."""
REMAINS, PART = 2.0, 0.15
"""Times the mean |log r| of rounding, or share of the gap, that a fault leaves at most."""
NOTHING = 1e-9
"""KL per token, in nats, below which log-probs agree: √(2 · 10⁻⁹) is 4.5 · 10⁻⁵ nats, four printed digits."""
EVIDENT = 0.7
"""Share of the mean |log r| that the engine's dtype leaves where rounding is evident, at most."""
NEARER, CHANCE = 0.2, 1e-3
"""Tokens that come nearer, less those that go away, as a share; and the chance of that by accident."""
SOME = 0.1
"""Share of responses, one at least, that a fault may not owe its lead over a dtype to."""
ALIKE = 4
"""Responses at least, where all have the same share."""
KLS = 2.0
"""Times the KL of rounding that a gap of rounding has at most; its mean |log r| has once that of rounding."""
TIES = 0.02
"""Share of tokens, one at least, left out of both means: a tie between experts makes one token's |log r| large."""
TOKENS = 8
"""Fewer tokens of the engine name nothing: one of many hypotheses fits a few numbers by accident."""
DTYPES = ("float32", "bfloat16", "float16")
LARGEST = 60.0
"""Log-ratios are cut here, so that one token cannot make a sum infinite."""


@dataclass(frozen=True, eq=False)
class Fit:
    """How far one forward is from the engine's log-probs."""

    name: str
    log_ratio: Float[NDArray, " token"]
    """log p(this forward) − log p(engine) of the engine's own tokens."""
    owner: Integer[NDArray, " token"]
    """The response of each token."""
    causes: tuple[str, ...] = ()
    """What the forward does as the engine may do; a fault and a dtype at most."""
    detail: str = ""
    source: Any = None
    """The hypothesis and the dtype (None: the trainer's) of a forward of a changed model."""

    @cached_property
    def size(self) -> Float[NDArray, " token"]:
        return np.abs(np.clip(self.log_ratio, -LARGEST, LARGEST))

    @cached_property
    def kls(self) -> Float[NDArray, " token"]:
        """k3 = r − 1 − log r in nats, r = p(this forward) / p(engine): an estimate of KL(engine ‖ forward)."""
        x = np.clip(self.log_ratio, -LARGEST, LARGEST).astype(np.float64)
        return np.expm1(x) - x

    @cached_property
    def kl(self) -> Float[NDArray, " response"]:
        return average(self.kls, self.owner)

    @cached_property
    def distance(self) -> float:
        """Mean |log r| of a response, averaged over responses."""
        return float(average(self.size, self.owner).mean())

    @property
    def mean(self) -> float:
        return float(self.kl.mean())

    @property
    def interval(self) -> Interval:
        """Of the KL, over responses."""
        return interval(self.kl)

    @property
    def usual(self) -> Bool[NDArray, " token"]:
        """Tokens without those of the largest |log r|."""
        count = len(self.size)
        return np.argsort(np.argsort(self.size)) < max(1, count - math.ceil(TIES * count))

    @property
    def fault(self) -> bool:
        return any(CAUSES[cause].fault for cause in self.causes)


@dataclass(frozen=True)
class Evidence:
    """The numbers that decide."""

    base: Fit
    """The trainer's own forward."""
    rounding: Fit
    """The trainer's model against itself in another dtype."""
    noise: float
    """KL up to which log-probs agree."""
    tried: Sequence[Fit] = ()
    trainer_dtype: str = "float32"
    engine_dtype: str | None = None

    @property
    def dtypes(self) -> list[Fit]:
        return [fit for fit in self.tried if fit.causes == ("dtype",)]

    def measure(self, fit: Fit) -> float:
        """The mean |log r|, at least that of noise."""
        return max(fit.distance, math.sqrt(2 * self.noise))


@dataclass(frozen=True)
class Decision:
    kind: str
    """agrees, explained, rounding, few_tokens or unexplained."""
    best: tuple[Fit, ...] = ()
    """What explains the gap: the best, then those that fit equally well."""
    evident: bool = False
    """Of rounding: whether the engine's dtype takes a part of the gap away."""


def decide(evidence: Evidence) -> Decision:
    if evidence.base.mean <= evidence.noise:
        return Decision("agrees")
    few = len(evidence.base.size) < TOKENS
    if not few and (best := find_explanations(evidence)):
        return Decision("explained", tuple(best))
    evident = is_evident(evidence)
    if is_rounding(evidence, evident):
        return Decision("rounding", evident=evident)
    return Decision("few_tokens" if few else "unexplained")


def find_explanations(evidence: Evidence) -> list[Fit]:
    """The best first, then those that fit equally well. Faults are compared in the dtype that suits each."""
    fits = [fit for fit in evidence.tried if explains(fit, evidence)]
    alone = {fit.causes[0] for fit in fits if len(fit.causes) == 1}
    fits = [fit for fit in fits if len(fit.causes) == 1 or fit.causes[0] not in alone]
    size = {fit: min(map(evidence.measure, in_any_dtype(fit, evidence.tried))) for fit in fits}
    fits.sort(key=lambda fit: (size[fit], fit.mean))
    return [fit for fit in fits if size[fit] <= APART * size[fits[0]]]


def in_any_dtype(fit: Fit, tried: Sequence[Fit]) -> Iterator[Fit]:
    yield fit
    yield from (other for other in tried if fit.fault and other.causes == (fit.causes[0], "dtype"))


def explains(fit: Fit, evidence: Evidence) -> bool:
    """Whether a fit leaves little of the gap, with and without the token of the largest gap. A fault beats the base and
    every dtype; it may leave more of the gap then, but no more than rounding."""
    base = evidence.base
    rest = np.arange(len(base.size)) != np.argmax(base.size)
    noise = math.sqrt(2 * evidence.noise)
    little = (
        compute_left(fit, base)[2] <= EXPLAINED
        and fit.size[rest].mean() <= max(EXPLAINED * base.size[rest].mean(), noise)
        and fit.distance <= max(REMAINS * evidence.rounding.distance, PART * base.distance, noise)
    )
    if not fit.fault:
        return bool(little)
    as_rounding = fit.distance <= APART * evidence.rounding.distance
    return bool(little or as_rounding) and all(beats(fit, other, noise) for other in (base, *evidence.dtypes))


def beats(fit: Fit, other: Fit, noise: float) -> bool:
    """Whether a fit leaves less than another one by APART, at the upper end of the interval, and also without the tenth
    of the responses, one at least, in which it gains most: a tie between experts moves one token and those after it,
    and any fit may undo it. Tokens count as responses where there is one response."""
    a, b = (np.maximum(x.size, noise) for x in (fit, other))
    if np.ptp(fit.owner):
        a, b = average(a, fit.owner), average(b, fit.owner)
    rest = np.argsort(b - a)[: len(a) - math.ceil(SOME * len(a))]
    return bool(APART * a[rest].sum() <= b[rest].sum() and APART * compute_left(fit, other)[2] <= 1)


def brings_nearer(fit: Fit, other: Fit, noise: float) -> bool:
    """Whether a fit is nearer to the engine than another one at most tokens of most responses."""
    votes = average(np.sign(np.maximum(other.size, noise) - np.maximum(fit.size, noise)), fit.owner)
    if votes.mean() < NEARER or np.ptp(votes) == 0:
        return bool(votes.mean() >= NEARER and len(votes) >= ALIKE)
    return bool(scipy.stats.ttest_1samp(votes, 0, alternative="greater").pvalue < CHANCE)


def is_evident(evidence: Evidence) -> bool:
    """Whether a dtype that the engine may have brings the tokens nearer to the engine's, and as near as rounding leaves
    them. Of n tokens 1/√n is granted."""
    base, rounding, error = evidence.base, evidence.rounding, 1 / math.sqrt(len(evidence.base.size))
    return any(
        compute_left(fit, base)[0] <= EVIDENT + error
        and fit.distance <= (1 + 2 * error) * rounding.distance
        and np.sign(base.size - fit.size).mean() >= NEARER - error
        for fit in evidence.dtypes
    )


def is_rounding(evidence: Evidence, evident: bool) -> bool:
    """Whether the gap is no larger than rounding makes it, in KL and in mean |log r|, and the engine's dtype may be
    another one, or few responses have a gap: ties between experts. Two sides in 16 bits have rounding e and e′:
    E|e − e′| ≤ 2 E|e|."""
    base, rounding, own = evidence.base, evidence.rounding, evidence.trainer_dtype
    known = (None, "bfloat16") if own == "float32" else (None, own, "float32")
    times = 1.0 if own == "float32" else 2.0
    if exceeds(base.kls * base.usual, KLS * times * rounding.kls * rounding.usual, base.owner, 8):
        return False
    within = not exceeds(base.size * base.usual, times * rounding.size * rounding.usual, base.owner, 4)
    tied = (base.kl > evidence.noise).mean() <= 0.25
    return bool(evident or (within and (evidence.engine_dtype in known or tied)))


def exceeds(values: NDArray, others: NDArray, owner: NDArray, granted: float) -> bool:
    """Whether the mean of one value of tokens is above that of another one, by more than 1.64 standard errors of
    responses or of tokens, from `granted` / √n of the other to twice that, for n tokens, few of which may not show
    theirs."""
    more = average(values - others, owner)
    of_tokens = (values - others - more.mean()) / np.bincount(owner)[owner]
    error = 1.64 * math.sqrt(max(np.sum((more - more.mean()) ** 2), np.sum(of_tokens**2)))
    least = granted / math.sqrt(len(owner)) * average(others, owner).sum()
    return bool(more.sum() > min(max(error, least), 2 * least))


def compute_left(fit: Fit, base: Fit) -> tuple[float, float, float]:
    """What a fit leaves of the mean |log r| of `base`, as a ratio R of means, with its 95 % interval: R ± 1.96 √Σ e² /
    Σ b, e = a − R b, of the a and b of responses, or of tokens, whichever is wider (delta method)."""
    a, b = (average(x.size, base.owner) for x in (fit, base))
    if not b.sum() > 0:
        return 1.0, 1.0, 1.0
    ratio = float(a.sum() / b.sum())
    of_tokens = (fit.size - ratio * base.size) / np.bincount(base.owner)[base.owner]
    error = 1.96 * float(np.sqrt(max(np.sum((a - ratio * b) ** 2), np.sum(of_tokens**2))) / b.sum())
    return ratio, max(0.0, ratio - error), ratio + error


def average(values: NDArray, owner: NDArray) -> Float[NDArray, " response"]:
    """Means over the tokens of each response."""
    return np.bincount(owner, values) / np.bincount(owner)
