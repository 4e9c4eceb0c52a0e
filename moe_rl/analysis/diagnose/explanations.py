"""Which hypotheses explain the gap: every one is tried, gets one score, and is held against one threshold.

The score of a hypothesis is the share of the mean |log r| that is left under it. Rounding is a hypothesis like others:
it is tried as a copy of the model in the engine's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import scipy

from moe_rl.analysis.diagnose.hypotheses import Hypothesis
from moe_rl.analysis.diagnose.scoring import STATED, Fit, Scorer, Scores, compute_left

EXPLAINED = 0.4
"""The score of what explains a gap, at most, upper end of the interval."""
APART = 1.25
"""Explanations whose score is within this factor of the best fit equally well."""
NOTHING = 1e-9
"""KL per token, in nats, below which log-probs agree: √(2 · 10⁻⁹) is 4.5 · 10⁻⁵ nats, four printed digits."""
FLOORS = 4.0
"""Times the noise floor that is still noise."""
ROUNDINGS, DISTANCES = 4.0, 3.0
"""Times the KL, or the mean |log r|, of rounding that forced routes, or a quantised router, may leave."""
EVIDENT = 0.7
"""The score of "all in" the engine's dtype where rounding is the reason, at most. Of n tokens 1/√n is granted, as it is
to NEARER."""
SPARED = 100.0
"""Times the noise by which rounding moves a response, for one without a gap to show that there is no rounding."""
NEARER = 0.2
"""By how much the share of tokens that come nearer must be larger than that of those that go away, to be evidence of
rounding or of a quantised router that rounding hides."""
QUANTISED, CHANCE = ("router_int8", "router_fp8"), 1e-3
"""Routers that are named where rounding hides them, and the chance that as many tokens come nearer by accident."""
TOKENS = 8
"""Fewer of the engine's own name nothing: of some hundred things tried, one fits a few numbers by accident."""
LEAD, LEADING = 0.7, (2, 5)
"""The score of what is tried with every other hypothesis, and is mentioned where nothing explains the gap, at most; and
how many hypotheses are tried so, and in another dtype."""
DTYPES = ("float32", "bfloat16", "float16")
QUIET = {"dtype", "experts", "router_fp32"}
"""What an honest engine may do otherwise."""


@dataclass(frozen=True)
class Explanation:
    """One thing, or two together, that the engine may do otherwise."""

    causes: tuple[str, ...]
    says: str
    fit: Fit
    left: tuple[float, float, float]
    """Of the mean |log r|, with its 95 % interval."""
    fault: bool
    hypotheses: tuple[Hypothesis, ...] = ()
    """What changes the model or its inputs; readings of log-probs are none."""
    responses: int = 0
    """Of how many responses with a gap it takes the gap away."""


@dataclass
class Gap:
    """The engine's gap and everything that was tried on it."""

    scorer: Scorer
    floor: Fit
    rounding: Fit
    engine_dtype: str | None = None
    tried: list[Explanation] = field(default_factory=list)

    # ------------------------------------------------------------------ its size
    @property
    def least(self) -> float:
        """KL up to which log-probs agree whatever the noise floor is: that was measured in two orders of summation, and
        the engine's is a third."""
        return max(NOTHING, self.scorer.rounded**2 / 2)

    @property
    def noise(self) -> float:
        """KL up to which log-probs agree."""
        return max(self.least, FLOORS * self.floor.mean)

    @property
    def agrees(self) -> bool:
        return self.scorer.base.mean <= self.noise

    def is_rounding(self, fit: Fit) -> bool:
        """Whether a fit is as near as rounding leaves it. Few tokens with heavy tails make a mean of KL an accident;
        the mean |log r| is none, so the larger one has to be larger in both."""
        return bool(fit.mean <= ROUNDINGS * max(self.rounding.mean, NOTHING / ROUNDINGS)
                    or fit.distance.mean() <= DISTANCES * self.rounding.distance.mean())

    # ------------------------------------------------------------------ rounding, as a hypothesis
    @property
    def own_dtype(self) -> str:
        return str(next(self.scorer.model.parameters()).dtype).removeprefix("torch.")

    @property
    def dtypes(self) -> list[Explanation]:
        """The model in another dtype, as far as it was tried."""
        return [e for e in self.tried if e.causes == ("dtype",)]

    @property
    def shrinks(self) -> bool:
        """Whether there is evidence that rounding is the reason: in a dtype that the engine may have, our side comes
        nearer to the engine's log-probs, of most tokens too, and as near as rounding leaves them."""
        error = 1 / math.sqrt(self.scorer.own.sum())
        allowed = (1 + 2 * error) * self.rounding.distance.mean()
        return any(e.left[0] <= EVIDENT + error and e.fit.distance.mean() <= allowed
                   and np.average(e.fit.nearer, weights=self.scorer.counts) >= NEARER - error for e in self.dtypes)

    @property
    def small(self) -> bool:
        """Whether the engine's gap is one of rounding: with evidence; or without, up to the rounding that is measured
        here, unless the engine's dtype is known to be another, or a few responses have a larger gap while most of those
        that rounding moves have none. The mean |log r| decides, because one tie between experts rules a mean of
        squares; of n tokens 4/√n are granted. Two sides in 16 bits have rounding e and e′: E|e − e′| ≤ 2 E|e|."""
        base, rounding = self.scorer.base, self.rounding
        moved, gap = rounding.kl > SPARED * self.noise, base.kl > self.noise
        spared = moved.any() and gap.any() and gap[moved].mean() <= 0.5 and (
            base.kl[gap].mean() > ROUNDINGS * rounding.mean
            and base.distance[gap].mean() > DISTANCES * rounding.distance.mean())
        known = (None, "bfloat16") if self.own_dtype == "float32" else (None, self.own_dtype, "float32")
        most = (1 if self.own_dtype == "float32" else 2) * (1 + 4 / math.sqrt(self.scorer.own.sum()))
        within = base.distance.mean() <= most * rounding.distance.mean()
        return bool(self.shrinks or (self.engine_dtype in known and within and not spared))

    # ------------------------------------------------------------------ trying
    def try_all(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Try readings of the log-probs and dtypes first. Where rounding is evident only a quantised router can be told
        beside it. Else try every hypothesis, those of a forward per layer and pairs where nothing explains the gap."""
        self._add_readings((), self.scorer.natural)
        for cause, says, fit in self.scorer.compare_readings():
            self._add((cause,), says, fit, True)
        dtypes = [h for h in hypotheses if h.cause == "dtype"]
        self._try((h,) for h in dtypes if self.engine_dtype in (None, h.name.removeprefix("all in ")))
        single = [h for h in hypotheses if not h.late and h.cause != "dtype"]
        evident = self.shrinks
        self._try((h,) for h in single if not evident or h.cause in QUANTISED)
        if self._is_open():
            self._try((h,) for h in hypotheses if h.late)
        if self._is_open():
            self._try(self._list_pairs(single))
        found, dtypes = self.find_explanations(), [e.hypotheses[0] for e in self.dtypes]
        if len({e.causes for e in found}) > 1:  # rounding may hide which of them it is
            self._try(product((h for e in found if len(e.hypotheses) == 1 for h in e.hypotheses if h not in dtypes),
                              dtypes))

    def _is_open(self) -> bool:
        return not (self.few or self.small or self.find_explanations())

    def _list_pairs(self, hypotheses: Sequence[Hypothesis]) -> list[tuple[Hypothesis, Hypothesis]]:
        """The nearest hypotheses with every other one, and some more in another dtype."""
        ranked = sorted((e for e in self.tried if len(e.hypotheses) == 1), key=lambda e: e.left[0])
        near = list(dict.fromkeys(e.hypotheses[0] for e in ranked if e.left[0] < LEAD))[: LEADING[0]]
        more = list(dict.fromkeys(e.hypotheses[0] for e in ranked))[: LEADING[1]]
        pairs = [*product(near, hypotheses), *product(more, (e.hypotheses[0] for e in self.dtypes))]
        return list({frozenset({a.name, b.name}): (a, b) for a, b in pairs if a.target != b.target}.values())

    def _try(self, together: Iterator[tuple[Hypothesis, ...]] | Sequence[tuple[Hypothesis, ...]]) -> None:
        for hypotheses in together:
            if (found := self.scorer.score_under(hypotheses)) is not None:
                self._add_readings(hypotheses, found)

    def _add_readings(self, hypotheses: tuple[Hypothesis, ...], scores: Scores) -> None:
        for reading, logprobs in scores.logprobs.items():
            if not hypotheses and reading == STATED:
                continue
            parts = [(s.cause, s.name, s.says, s.fault) for s in hypotheses]
            if reading != STATED:
                kept = reading == "kept set"
                parts.append(("kept_set" if kept else "temperature",
                              "log-probs over the kept set" if kept else f"log-probs at {reading}",
                              self.scorer.readings[reading], True))
            parts.sort(key=lambda part: not part[3])  # what is to be mended comes first
            causes, fits, says, faults = zip(*parts, strict=True)
            fit = self.scorer.compare(" + ".join(fits), logprobs, scores.best)
            self._add(causes, "; and ".join(says), fit, any(faults), hypotheses)

    def _add(self, causes: tuple[str, ...], says: str, fit: Fit, fault: bool,
             hypotheses: tuple[Hypothesis, ...] = ()) -> None:
        base = self.scorer.base
        # Where only some responses have the fault, the others are as they are.
        helped = fit.kl < base.kl
        mixed = replace(fit, **{name: np.where(helped, getattr(fit, name), getattr(base, name))
                                for name in ("kl", "distance", "beyond_2", "flips", "squares", "products", "peak")})
        whole = fit.mean <= mixed.mean * APART**2 or helped.all()
        kept = fit if whole else mixed
        left = compute_left(kept, base)
        if len(causes) == 1 or left[0] < LEAD:
            helped &= base.kl > self.noise
            self.tried.append(Explanation(causes, says, kept, left, fault, hypotheses, int(helped.sum())))

    # ------------------------------------------------------------------ deciding
    @property
    def few(self) -> bool:
        """Whether too few tokens were looked at to tell one reason from another."""
        return int(self.scorer.own.sum()) < TOKENS

    def find_explanations(self) -> list[Explanation]:
        """What explains the gap, the best first, then what fits equally well; nothing where tokens are few. A pair only
        where it is needed: either of its parts that is a fault, alone or left out, leaves much more."""
        if self.few:
            return []
        enough = [e for e in self.tried if self.explains(e)]
        single = [e for e in enough if len(e.causes) == 1]
        found = single or [e for e in enough if self._needs_both(e)] or [e for e in self.tried if self.moves_nearer(e)]
        found.sort(key=lambda e: (self._measure_best(e), len(e.hypotheses), e.fit.mean))
        return [e for e in found if self._measure_best(e) <= APART * self._measure_best(found[0])]

    def explains(self, e: Explanation) -> bool:
        """Whether an explanation takes the gap away, also without the token with the largest: a tie between experts may
        be most of it. What is to be mended has to do so better than any dtype."""
        rungs, base = [self._measure(x) for x in self.dtypes], self.scorer.base
        most = np.arange(len(base.kl)) == np.argmax(base.peak)
        rest, gap = (float((x.distance - x.peak * most).sum()) for x in (e.fit, base))
        return (e.left[2] <= EXPLAINED and rest <= max(EXPLAINED * gap, len(base.kl) * math.sqrt(2 * self.noise))
                and (not e.fault or APART * self._measure(e) <= min(rungs, default=math.inf)))

    def moves_nearer(self, e: Explanation) -> bool:
        """Whether a quantised router is what rounding hides: what it leaves is rounding, and it brings more tokens of a
        response nearer to the engine's than it takes away, and nearer than any dtype. A router that is not the engine's
        moves them at random, most of them away from where they only were rounded to."""
        votes = e.fit.nearer
        if e.causes[1:] or e.causes[0] not in QUANTISED or votes.mean() < NEARER or not self.is_rounding(e.fit):
            return False
        if any(e.fit.distance.mean() > x.fit.distance.mean() for x in self.dtypes):
            return False
        return bool(np.ptp(votes) and scipy.stats.ttest_1samp(votes, 0, alternative="greater").pvalue < CHANCE)

    def _measure(self, e: Explanation) -> float:
        """The mean |log r| that is left, at least that of noise."""
        return max(float(e.fit.distance.mean()), math.sqrt(2 * self.noise))

    def _measure_best(self, e: Explanation) -> float:
        """The same in the dtype, of those tried with it, that leaves least."""
        return min(self._measure(x) for x in (e, *self.tried) if {*e.causes} <= {*x.causes} <= {*e.causes, "dtype"})

    def _needs_both(self, e: Explanation) -> bool:
        """Whether no part of it without one of its faults comes near it."""
        parts = [x for x in self.tried if set(x.causes) < set(e.causes) and set(e.causes) - set(x.causes) - QUIET]
        return all(self._measure(x) > APART**2 * self._measure(e) for x in parts)
