"""The rule of the studies: what is an effect, what is no difference that matters, and what is neither."""

from __future__ import annotations

import pytest
from contrasts import (
    NAMES,
    Both,
    Condition,
    Gains,
    Rule,
    Within,
    joined,
    outcomes,
    spoken,
    table_of,
    table_of_both,
    values_of,
)

from moe_rl.errors import RunError
from tests.studies.test_planned import START, frames_of

SEEDS = range(12)


def side(mean, spread=0.004):
    """Twelve values around a mean, by seed."""
    return {seed: mean + spread * (-1) ** seed for seed in SEEDS}


ZERO = dict.fromkeys(SEEDS, 0.0)


def outcome(primary, secondary, margin=0.02, family=1):
    """Of one comparison with 0; the others of the family are the same again."""
    pairs = {f"{i}": ((primary, secondary), (ZERO, ZERO)) for i in range(family)}
    return outcomes(pairs, margin)[0]


@pytest.mark.parametrize(
    "primary, secondary, said, sign",
    [
        (side(0.05), side(0.05), "an effect", 1),
        (side(-0.05), side(0.0), "an effect", -1),
        (side(0.05), side(-0.05), "opposed", 0),
        (side(0.01), side(-0.05), "no difference that matters", 0),
        (side(0.0), side(0.05), "no difference that matters", 0),
        (side(0.0, spread=0.1), side(0.05), "undecided", 0),
    ],
)
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


# ---------------------------------------------------------------------- contrasts as declared
QUIET, OLD = Condition("quiet"), Condition("old")
ENDPOINTS = {"endpoint": "sampled exact match, second half", "secondary": "greedy exact match, second half"}


def made_up(**gain):
    """Exact match of arms in two conditions; what is not named is as good as `LEVEL`."""

    def values(cell, arm, seed):
        return dict.fromkeys(("sampled", "greedy"), gain.get(f"{cell}_{arm}", 0.0)) | {"token_ess": 0.8}

    return frames_of(["quiet", "old"], ["grpo", "gspo"], values)


def test_a_form_is_a_sum_over_conditions_and_arms_of_each_seed():
    """Interaction, by hand: (.07 − .01) − (.02 − .04) / 2 = .07."""
    frames = made_up(old_gspo=0.07, old_grpo=0.01, quiet_gspo=0.02, quiet_grpo=0.04)
    form = (OLD["gspo"] - OLD["grpo"]) - (QUIET["gspo"] - QUIET["grpo"]) / 2
    assert list(form.by_seed(frames, ENDPOINTS["secondary"]).values()) == pytest.approx([0.07] * 12)
    with pytest.raises(RunError, match="r2 in old"):
        (OLD["r2"] - OLD["grpo"]).by_seed(frames, ENDPOINTS["secondary"])


def test_a_rule_judges_every_family_by_itself_and_its_intervals_are_students():
    rule = Rule(
        **ENDPOINTS,
        families={
            "old": {"GSPO − GRPO": OLD["gspo"] - OLD["grpo"]},
            "quiet": {"GSPO − GRPO": QUIET["gspo"] - QUIET["grpo"], "the same again": QUIET["gspo"] - QUIET["grpo"]},
        },
    )
    found = rule.outcomes(made_up(old_gspo=0.05))
    assert [(family, one.said) for family, several in found.items() for one in several] == [
        ("old", "an effect"),
        *[("quiet", "no difference that matters")] * 2,
    ]
    (effect,) = found["old"]
    assert effect.primary.p == effect.adjusted == 2 / 2**12 and effect.primary.difference.method == "95% Student t"


@pytest.mark.parametrize("level, ess, passed", [(0.0, 0.9, True), (-0.2, 0.9, False), (0.0, 0.7, False)])
def test_nothing_is_concluded_where_a_gate_is_failed(level, ess, passed):
    """GRPO ends at .6 + level, from a start of .5; token ESS is .8."""
    rule = Rule(
        **ENDPOINTS,
        families={"old": {"GSPO − GRPO": OLD["gspo"] - OLD["grpo"]}},
        gates=(Gains(OLD["grpo"]), Within(OLD["grpo"], "token_ess", 0, ess)),
    )
    first, second, outcome = spoken(rule.judged, rule)(made_up(old_grpo=level, old_gspo=0.05))
    assert START == 0.5 and f"{0.1 + level:.2f}" in first
    assert first.startswith("gate passed") == (level >= 0) and second.startswith("gate passed") == (ess > 0.8)
    assert ("an effect" in outcome) == passed and ("void" in outcome) != passed


# ---------------------------------------------------------------------- tables, and other studies
def test_outcomes_of_the_one_rule_are_rows_with_both_endpoints():
    """0.05 and 0.03 on every of four seeds, p = 2 / 2⁴ in each; twice as large after Holm over two."""
    first, second, none = ({seed: value for seed in range(4)} for value in (0.05, 0.03, 0.0))
    found = outcomes({name: ((first, second), (none, none)) for name in ("a − b", "c − b")}, 0.02)
    text = table_of([(one, one.said) for one in found], "Holm over the 2 comparisons", NAMES.values())
    assert "| a − b | 4 | 0.050 [0.050, 0.050] | [0.050, 0.050] | 0.25 | 0.030 [0.030, 0.030] | undecided |" in text


@pytest.mark.parametrize(
    "greedy, words", [(0.05, "an effect"), (0.0, "no effect by the rule"), (-0.05, "no effect by the rule")]
)
def test_the_earlier_rule_asks_both_endpoints_for_one_sign(greedy, words):
    def values(condition, arm, seed):
        return {"sampled": 0.05, "greedy": greedy} if arm == "gspo" else {}

    frames = frames_of(["quiet"], ["grpo", "gspo"], values)
    rule = Both((*ENDPOINTS.values(),), {"all": {"gspo − grpo": QUIET["gspo"] - QUIET["grpo"]}})
    ((name, family, n, *_, said),) = rule.rows(frames)
    assert (name, family, n, said) == ("gspo − grpo", "all", "12", words)
    assert f"| {words} |" in table_of_both(rule, frames, "one")


def test_conditions_of_another_study_are_joined_under_names_of_their_own():
    mine, other = made_up(old_grpo=0.1), made_up(quiet_grpo=0.2)
    both = joined(mine, other, {"quiet": "none"})
    means = [values_of(both, name, ENDPOINTS["secondary"])["grpo"].mean() for name in ("quiet", "old", "none")]
    assert means == pytest.approx([0.6, 0.7, 0.8]) and both.conditions == ["quiet", "old", "none"]


def test_a_column_of_runs_is_taken_as_it_is():
    frames = made_up()
    assert values_of(frames, "old", "fresh_expert_change_rate")["gspo"].tolist() == [0.1] * 12
    assert values_of(frames, "elsewhere", "token_ess").empty
