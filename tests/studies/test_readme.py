"""The numbers of the front page are those of the committed tables."""

from __future__ import annotations

import re
from pathlib import Path

import make
import pandas as pd
import pytest
from contrasts import slots_changed, values_of
from make import stored
from tuned_rates.study import judged

from moe_rl.metrics.rounding import number
from moe_rl.results.stats import student

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
CONDITIONS = {"fresh": "lag=0", "two steps old": "lag=2"}

MATCH = "sampled exact match, second half"
ROW = re.compile(r"^\| (fresh|two steps old) \| ([\w-]+) \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)


def by_arm(name: str, condition: str) -> pd.DataFrame:
    """Seed × arm, of the default study."""
    return values_of(stored("routing_replay"), condition, name)


@pytest.mark.parametrize("condition, arm, cells", [(c, a, rest) for c, a, *rest in ROW.findall(TEXT)])
def test_a_row_of_the_comparison_is_what_the_tables_give(condition, arm, cells):
    match, ess = (by_arm(name, CONDITIONS[condition]) for name in (MATCH, "token_ess"))
    apart = number((match[arm] - match["grpo"]).mean(), ".2f")
    assert cells == [
        number(match[arm].mean(), ".2f"),
        "–" if arm == "grpo" else apart,
        f"{ess[arm].mean():.2f}",
    ]


def test_the_comparison_has_every_arm_in_both_conditions_and_three_seeds_have_no_interval():
    rows = ROW.findall(TEXT)
    assert {row[:2] for row in rows} == {
        (c, a) for c in CONDITIONS for a in ("grpo", "grpo-replay", "gspo_short")
    } and len(rows) == 6
    assert not re.findall(r"\[-?\d\.\d+, ", TEXT)


def test_what_the_caption_says_is_so():
    by_place = {row.place.label: row.found for row in make.rows()}
    replay = {
        label
        for label, found in by_place.items()
        if "grpo-replay" in found
        and found["grpo-replay"].sign > 0
        and found["grpo-replay"].primary.difference.mean > 0.05
    }
    assert replay == {"σ = 2", "σ = 2, other seeds"}
    old = make.outcomes_of(make.OLD.study, make.OLD.condition)
    assert [old[arm].sign for arm in ("gspo_short", "grpo, half the rate", "grpo-replay")] == [1, 1, 0]
    assert [round(old[arm].primary.difference.mean, 3) for arm in ("gspo_short", "grpo, half the rate")] == [
        0.050,
        0.057,
    ]


@pytest.mark.parametrize("place", [place for place in make.GAINS if "best" in place])
@pytest.mark.parametrize("gspo", [True, False])
def test_at_the_best_rates_no_difference_matters(place, gspo):
    """The 90 % interval lies within the margin."""
    study, condition, grpo, name = make.GAINS[place]
    within = student([*make.gains_of(study, condition, grpo, name if gspo else "grpo-replay").dropna()], 0.9)
    assert within.low > -make.MARGIN and within.high < make.MARGIN


def test_by_the_declared_rule_both_help_with_old_rollouts_over_the_grpo_that_the_pilot_chose():
    found = {one.name: one.sign for one, _ in judged(stored("tuned_rates"))}
    assert {name for name, sign in found.items() if sign} == {
        f"{a} − grpo-wide, lag 2" for a in ("grpo-replay", "gspo-wide")
    }


def test_every_comparison_with_grpo_is_in_the_table_once():
    """Conditions of GRPO and another arm in the studies of the figure, and the mean that lag_natural declares."""
    arms = [
        {*frames.condition(name).runs["arm"]}
        for frames in map(stored, {place.study for place in make.PLACES})
        for name in frames.conditions
    ]
    assert len(make.every_outcome().splitlines()) == 2 + 6 + sum(len(here) - 1 for here in arms if "grpo" in here)


def test_the_noise_changes_as_many_expert_slots_as_the_index_and_the_report_state():
    shares = [
        round(100 * slots_changed(stored(study), f"router_noise.target=weights,router_noise.scale={scale}"))
        for study, scale in (("router_noise_low", 0.4), ("volatility_dial", 2))
    ]
    for page in ("README.md", "report.md"):
        found = re.findall(r"(?<![.\d])(\d+).% of the\s+slots", (make.HERE / page).read_text())
        assert found == [str(x) for x in shares]
