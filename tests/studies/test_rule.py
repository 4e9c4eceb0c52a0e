"""The rule of the studies: what is an effect, what is no difference that matters, and what is neither."""

from __future__ import annotations

import pytest
from rule import outcomes

SEEDS = range(12)


def side(mean, spread=0.004):
    """Twelve values around a mean, by seed."""
    return {seed: mean + spread * (-1) ** seed for seed in SEEDS}


ZERO = dict.fromkeys(SEEDS, 0.0)


def outcome(primary, secondary, margin=0.02, family=1):
    """Of one comparison with 0; the others of the family are the same again."""
    pairs = {f"{i}": ((primary, secondary), (ZERO, ZERO)) for i in range(family)}
    return outcomes(pairs, margin)[0]


@pytest.mark.parametrize("primary, secondary, said, sign", [
    (side(0.05), side(0.05), "an effect", 1),
    (side(-0.05), side(0.0), "an effect", -1),
    (side(0.05), side(-0.05), "opposed: the secondary endpoint is decided with the other sign", 0),
    (side(0.01), side(-0.05), "no difference that matters", 0),
    (side(0.0), side(0.05), "no difference that matters", 0),
    (side(0.0, spread=0.1), side(0.05), "undecided", 0),
])  # fmt: skip
def test_what_is_said_of_two_endpoints(primary, secondary, said, sign):
    found = outcome(primary, secondary)
    assert (found.said, found.sign) == (said, sign)


def test_an_effect_may_be_smaller_than_the_margin():
    found = outcome(side(0.01), side(0.0))
    assert (found.said, found.equivalent) == ("an effect", True)


def test_an_interval_that_ends_beyond_the_margin_is_undecided():
    wide = side(0.0, spread=0.03)  # its 90 % interval is about ±.015
    assert outcome(wide, ZERO).said == "no difference that matters"
    assert outcome(wide, ZERO, margin=0.01).said == "undecided"


def test_holm_counts_every_comparison_of_the_family():
    """11 of 12 signs agree: two-sided p = 2 · 13 / 4096 for equal magnitudes, decided alone and not among ten."""
    nearly = {seed: 0.05 if seed else -0.05 for seed in SEEDS}
    alone, among_ten = outcome(nearly, nearly), outcome(nearly, nearly, family=10)
    assert alone.primary.p == alone.adjusted == pytest.approx(26 / 4096)
    assert among_ten.adjusted == pytest.approx(260 / 4096)
    assert (alone.said, among_ten.said) == ("an effect", "undecided")


def test_only_seeds_that_both_sides_have_count():
    more = side(0.05) | {99: -9.0}
    assert outcome(more, more).primary.n == len(SEEDS)
