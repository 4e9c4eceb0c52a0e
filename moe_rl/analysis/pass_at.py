"""What several completions of one problem say: pass@k and the vote of the majority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

from moe_rl.errors import ConfigError

GREEDY = 0
"""The number of the greedy completion of a problem among its samples; those that are drawn count from 1."""


def pass_at(k: int, n: int, right: int) -> float:
    """Probability that one of k completions is right, estimated without bias from `right` right ones of n:
    1 − C(n − right, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374). Raises ConfigError unless 1 ≤ k ≤ n."""
    if not (1 <= k <= n and 0 <= right <= n):
        raise ConfigError(f"pass@{k} of {right} right ones in {n} completions is undefined: draw at least k of them")
    return 1 - comb(n - right, k) / comb(n, k)


def majority(votes: Sequence[int | None], right: Sequence[float]) -> float:
    """Score of the answer that most completions give (Wang et al. 2022, arXiv 2203.11171), in [0, 1].

    `votes` are equal where answers are, None where there is none: such a completion does not vote, and where none does
    the score is 0. Of answers with equally many votes one is drawn: the score is the mean over them, hence its
    expectation. An answer's score is the mean of `right` over its completions.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    scores = [sum(r for v, r in zip(votes, right, strict=True) if v == vote) / most
              for vote, count in counts.items() if count == most]
    return sum(scores) / len(scores) if scores else 0.0
