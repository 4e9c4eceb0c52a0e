"""pass@k and the majority's vote, by hand and against brute force."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from moe_rl.analysis.benchmarks import majority, pass_at


def test_pass_at_k_by_hand():
    assert pass_at(1, 4, 1) == 0.25 and pass_at(2, 4, 1) == 0.5, "half of the pairs of four hold the one that is right"
    assert pass_at(2, 4, 2) == pytest.approx(1 - 1 / 6), "of six pairs one holds none of the two"
    assert [pass_at(k, 4, 0) for k in (1, 4)] == [0, 0] and pass_at(3, 4, 2) == pass_at(4, 4, 1) == 1
    assert pass_at(16, 4096, 1) == pytest.approx(16 / 4096, rel=1e-12), "no factorial overflows"


def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_right_one():
    for n in range(1, 7):
        for right, k in product(range(n + 1), range(1, n + 1)):
            subsets = list(combinations([i < right for i in range(n)], k))
            assert pass_at(k, n, right) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


@pytest.mark.parametrize(
    "votes, right, score",
    [
        ((1, 1, 3), (1, 1, 0), 1.0),
        ((1, 2, 2), (1, 0, 0), 0.0),
        ((1, 2), (1, 0), 0.5),  # a tie: either is drawn
        ((1, 1, 3, 3, 5), (1, 1, 0, 0, 1), 0.5),  # of the leaders alone
        ((1, 2, 3), (0, 1, 0), 1 / 3),
        ((None, None, 3), (0, 0, 1), 1.0),  # who gives no answer does not vote, however many they are
        ((None, None), (0, 0), 0.0),
        ((1, 1, 3), (1, 0, 0), 0.5),  # one answer, scored unlike by how it was written
    ],
)
def test_the_majority_by_hand(votes, right, score):
    assert majority(votes, right) == pytest.approx(score)


def test_the_majority_is_the_mean_over_all_draws_among_the_leaders():
    for votes in product((1, 2, None), repeat=4):
        right = [float(v == 1) for v in votes]
        counts = {v: votes.count(v) for v in (1, 2)}
        leaders = [v for v in counts if counts[v] == max(counts.values()) > 0]
        assert majority(votes, right) == (sum(v == 1 for v in leaders) / len(leaders) if leaders else 0)
