"""From rungs to a verdict: which suspects explain the gap, by what they leave of it and by the noise beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy

from moe_rl.analysis.diagnose.ladder import Ladder, Rung, remaining
from moe_rl.analysis.diagnose.scoring import STATED, Scores
from moe_rl.analysis.diagnose.suspects import Suspect

NOTHING = 1e-9
"""KL per token, in nats, below which log-probs agree: √(2 · 10⁻⁹) is 4.5 · 10⁻⁵ nats, four printed digits."""
FLOORS = 4.0
"""Times the noise floor that is still noise."""
ROUNDINGS, DISTANCES = 4.0, 3.0
"""Times the KL, and the mean |log r|, of rounding that an honest engine in another dtype may show."""
SPARED = 100.0
"""Times the noise by which rounding moves a response, for one without a gap to say that there is no rounding."""
LITTLE, CLOSE = 0.1, 0.4
"""What may be left of the KL, with its interval, and of the mean |log r| by what explains a gap."""
WORTH = 0.5
"""What is left of the KL under a pair that is worth a row of the table."""
QUANTISED, CHANCE, NEARER = ("router_int8", "router_fp8"), 1e-3, 0.2
"""Routers that are named where rounding hides them, the chance that as many tokens come nearer by accident, and by how
much the share that does must be larger than the share that goes away, lest another small change has to do with them."""
TOKENS = 8
"""Fewer of the engine's own name nothing: of some hundred things tried, one fits a few numbers by accident."""
APART = 1.5
"""Explanations whose KL is within this factor of the best fit equally well."""


@dataclass(frozen=True)
class Explanation:
    """One thing, or two together, that the engine may do otherwise."""

    causes: tuple[str, ...]
    says: str
    rung: Rung
    left: tuple[float, float, float]
    """Of the natural KL, with its 95 % interval."""
    fault: bool
    suspects: tuple[Suspect, ...] = ()
    """What changes the model or its inputs; readings of log-probs are none."""
    responses: int = 0
    """Of how many responses with a gap it takes the gap away."""


@dataclass
class Gap:
    """The engine's gap and everything that was tried on it."""

    ladder: Ladder
    floor: Rung
    rounding: Rung
    tried: list[Explanation] = field(default_factory=list)

    @property
    def least(self) -> float:
        """KL up to which log-probs agree whatever the noise floor is: that was measured in two orders of summation, and
        the engine's is a third."""
        return max(NOTHING, self.ladder.rounded**2 / 2)

    @property
    def noise(self) -> float:
        """KL up to which log-probs agree."""
        return max(self.least, FLOORS * self.floor.mean)

    @property
    def agrees(self) -> bool:
        return self.ladder.base.mean <= self.noise

    def rounded(self, rung: Rung) -> bool:
        """Whether a gap is no larger than rounding makes it. Few tokens with heavy tails make a mean of KL an accident;
        the mean |log r| is none, so the larger gap has to be larger in both, unless its KL is out of all proportion."""
        kl = rung.mean / max(self.rounding.mean, NOTHING / ROUNDINGS)
        distance = rung.distance.mean() / max(self.rounding.distance.mean(), 1e-12)
        return bool(kl <= ROUNDINGS or (kl <= 25 * ROUNDINGS and distance <= DISTANCES))

    @property
    def small(self) -> bool:
        """Whether the engine's gap is one of rounding: no larger on average, and not a larger one of a few responses,
        while most of those that rounding would have moved are as the checkpoint has them."""
        base, rounding = self.ladder.base, self.rounding
        moved, gap = rounding.kl > SPARED * self.noise, base.kl > self.noise
        few = moved.any() and gap.any() and gap[moved].mean() <= 0.5
        larger = few and (base.kl[gap].mean() > ROUNDINGS * rounding.mean
                          and base.distance[gap].mean() > DISTANCES * rounding.distance.mean())
        return self.rounded(base) and not larger

    # ------------------------------------------------------------------ trying
    def attempt(self, suspects: Sequence[Suspect]) -> None:
        """Try every suspect alone, each under every reading of the log-probs too; then pairs, if none is enough."""
        natural = self.ladder.natural
        self._take((), natural)
        for by in (1, -1):
            self._add(("logprob_shift",), f"the engine's log-probs are off by one: that of token t is token t{by:+d}'s",
                      self.ladder.shifted(by), True)
        for suspect in suspects:
            if (found := self.ladder.under([suspect])) is not None:
                self._take((suspect,), found)
        if not self.few and not self.small and not self.explanations():
            best = sorted((e for e in self.tried if len(e.suspects) == 1 and e.left[0] < 0.7), key=lambda e: e.left[0])
            leading = list(dict.fromkeys(e.suspects[0] for e in best))[:2]
            done = set()
            for first in leading:
                for second in suspects:
                    if first.place != second.place and (pair := frozenset({first.rung, second.rung})) not in done:
                        done.add(pair)
                        if (found := self.ladder.under([first, second])) is not None:
                            self._take((first, second), found)

    def _take(self, suspects: tuple[Suspect, ...], scores: Scores) -> None:
        for reading, logprobs in scores.logprobs.items():
            if not suspects and reading == STATED:
                continue
            parts = [(s.cause, s.rung, s.says, s.fault) for s in suspects]
            if reading != STATED:
                kept = reading == "kept set"
                parts.append(("kept_set" if kept else "temperature",
                              "log-probs over the kept set" if kept else f"log-probs at {reading}",
                              self.ladder.readings[reading], True))
            parts.sort(key=lambda part: not part[3])  # what is to be mended comes first
            causes, rungs, says, faults = zip(*parts, strict=True)
            rung = self.ladder.rung(" + ".join(rungs), logprobs, scores.best)
            self._add(causes, "; and ".join(says), rung, any(faults), suspects)

    def _add(self, causes: tuple[str, ...], says: str, rung: Rung, fault: bool,
             suspects: tuple[Suspect, ...] = ()) -> None:
        base = self.ladder.base
        # Where only some responses have the fault, the others are as they are.
        helped = rung.kl < base.kl
        mixed = replace(rung, **{name: np.where(helped, getattr(rung, name), getattr(base, name))
                                 for name in ("kl", "distance", "beyond_2", "flips")})
        whole = rung.mean <= mixed.mean * APART or helped.all()
        kept = rung if whole else mixed
        left = remaining(kept, base)
        if len(causes) == 1 or left[0] < WORTH:
            helped &= base.kl > self.noise
            self.tried.append(Explanation(causes, says, kept, left, fault, suspects, int(helped.sum())))

    # ------------------------------------------------------------------ deciding
    @property
    def few(self) -> bool:
        """Whether too few tokens were looked at to tell one reason from another."""
        return int(self.ladder.own.sum()) < TOKENS

    def explanations(self) -> list[Explanation]:
        """What explains the gap, the best first, then what fits equally well; nothing where tokens are few. A pair only
        where it is needed: either of its parts alone leaves much more."""
        if self.few:
            return []
        enough = [e for e in self.tried if self.enough(e)]
        single = [e for e in enough if len(e.causes) == 1]
        found = single or [e for e in enough if self._needs_both(e)] or [e for e in self.tried if self.nearer(e)]
        if not found:
            return []
        found.sort(key=lambda e: (max(e.rung.mean, self.noise), len(e.suspects), e.rung.mean))
        limit = APART * max(found[0].rung.mean, self.noise)
        return [e for e in found if e.rung.mean <= limit]

    def enough(self, e: Explanation) -> bool:
        """Whether an explanation takes the gap away: all but little of it, in KL and in distance; or a gap whose KL is
        beyond what rounding makes, down to that or to the noise floor. Any other has to go nearly whole."""
        base, rung, rounding = self.ladder.base, e.rung, self.rounding
        distance = float(rung.distance.mean() / base.distance.mean())
        if base.mean <= max(ROUNDINGS * rounding.mean, NOTHING):
            return e.left[2] <= LITTLE / 5 and distance <= CLOSE / 2
        if e.left[2] <= LITTLE and distance <= CLOSE:
            return True
        quiet = rung.mean <= 2 * rounding.mean and rung.distance.mean() <= 2 * rounding.distance.mean()
        return bool(e.left[2] <= 1 / 3 and (quiet or rung.mean <= self.noise))

    def nearer(self, e: Explanation) -> bool:
        """Whether a quantised router is what rounding hides: what it leaves is rounding, and it brings more tokens of a
        response nearer to the engine's than it takes away. A router that is not the engine's moves them at random,
        most of them away from where they only were rounded to."""
        votes = e.rung.nearer
        if e.causes[1:] or e.causes[0] not in QUANTISED or votes.mean() < NEARER or not self.rounded(e.rung):
            return False
        return bool(np.ptp(votes) and scipy.stats.ttest_1samp(votes, 0, alternative="greater").pvalue < CHANCE)

    def _needs_both(self, e: Explanation) -> bool:
        alone = [x.rung.mean for x in self.tried if len(x.causes) < len(e.causes) and set(x.causes) <= set(e.causes)]
        return min(alone, default=np.inf) > 3 * max(e.rung.mean, self.noise)


