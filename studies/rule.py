"""The one rule by which studies decide a planned comparison: a primary endpoint, a secondary one, and a margin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_rl.metrics.rounding import number
from moe_rl.results.stats import Interval, Paired, holm, interval, paired

LEVEL = 0.05
VOID, NOTHING = "void", "nothing is concluded"
"""The words of a comparison where the gate of a study, or of that comparison, is not passed."""
BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Outcome:
    """What the rule says of one comparison, first minus second, over the seeds that both have."""

    name: str
    primary: Paired
    """In the primary endpoint, 95 % interval."""
    adjusted: float
    """Its p-value, after Holm over all comparisons of the family."""
    secondary: Paired
    narrow: Interval
    """90 % interval in the primary endpoint, for equivalence (two one-sided tests at 5 %)."""
    margin: float

    @property
    def sign(self) -> int:
        """1 or −1 for an effect, 0 for anything else."""
        here = _sign(self.primary, self.adjusted)
        return 0 if _sign(self.secondary, self.secondary.p) == -here else here

    @property
    def equivalent(self) -> bool:
        """Whether the 90 % interval lies within the margin."""
        return -self.margin <= self.narrow.low and self.narrow.high <= self.margin

    @property
    def said(self) -> str:
        """`an effect`, `no difference that matters`, `opposed` (the endpoints contradict each other) or `undecided`."""
        if self.sign:
            return "an effect"
        if self.equivalent:
            return "no difference that matters"
        opposed = _sign(self.primary, self.adjusted) != 0
        return "opposed: the secondary endpoint is decided with the other sign" if opposed else "undecided"

    def __str__(self) -> str:
        return self.worded(self.said)

    def worded(self, said: str) -> str:
        """The outcome in these words, with its numbers."""
        return (f"{self.name}: {said} ({self.primary.difference.printed('.3f')}, 90 % {self.within}, n = "
                f"{self.primary.n}, Holm p {self.adjusted:.2g}; secondary {self.secondary.difference.printed('.3f')})")

    @property
    def within(self) -> str:
        """The 90 % interval, printed."""
        return f"[{number(self.narrow.low, '.3f')}, {number(self.narrow.high, '.3f')}]"


def outcomes(pairs: Mapping[str, tuple[Sequence[BySeed], Sequence[BySeed]]], margin: float) -> list[Outcome]:
    """The outcome of each comparison of a family, by name: two sides, each with its values by seed in the primary and
    in the secondary endpoint."""
    tests = {name: [paired(a, b) for a, b in zip(*sides, strict=True)] for name, sides in pairs.items()}
    adjusted = holm([first.p for first, _ in tests.values()])
    found = []
    for (name, (first, second)), p in zip(tests.items(), adjusted, strict=True):
        a, b = (side[0] for side in pairs[name])
        narrow = interval([a[seed] - b[seed] for seed in sorted(set(a) & set(b))], 0.9)
        found.append(Outcome(name, first, p, second, narrow, margin))
    return found


def unfinished(found: Iterable[Outcome], seeds: int) -> list[str]:
    """A line where a comparison has fewer seeds than the `seeds` of the declaration."""
    least = min(one.primary.n for one in found)
    return [f"not finished: {least} of {seeds} declared seeds"] if least < seeds else []


def against_zero(differences: Sequence[BySeed]) -> tuple[Sequence[BySeed], Sequence[BySeed]]:
    """The two sides of a comparison whose differences by seed are known, in the primary and the secondary endpoint."""
    return differences, [dict.fromkeys(one, 0.0) for one in differences]


def _sign(test: Paired, p: float) -> int:
    """Of a difference that is decided at 5 %."""
    return 0 if p > LEVEL else 1 if test.difference.mean > 0 else -1
