"""The numbers of the front page are those of the committed tables."""

from __future__ import annotations

import re
from pathlib import Path

import overview
import pytest
from per_seed import stored

from moe_rl.results.stats import Interval, interval
from moe_rl.results.summary import metric, per_run

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
CONDITIONS = {"none": "quiet", "σ = 2": "volatile"}
ARMS = {"GRPO": "grpo", "GRPO + replay": "grpo-replay", "GSPO": "gspo"}
METRICS = ("reward, second half", "greedy exact match, gained since the start", "token_ess")
ROW = re.compile(r"^\| (none|σ = 2) \| ([\w+ ]+) \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)


def of(name: str, arm: str, condition: str) -> Interval:
    """Over the seeds of an arm of the default study."""
    return interval(per_run(stored("routing_replay").cell(condition), metric(name))[arm])


@pytest.mark.parametrize("condition, arm, cells", [(c, a, rest) for c, a, *rest in ROW.findall(TEXT)])
def test_a_row_of_the_comparison_is_what_the_tables_give(condition, arm, cells):
    for name, cell in zip(METRICS, cells, strict=True):
        one = of(name, ARMS[arm], CONDITIONS[condition])
        assert cell in (f"{one.mean:.2f}", f"{one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]"), name


def test_the_comparison_has_every_arm_in_both_conditions_and_every_interval_is_in_it():
    rows = ROW.findall(TEXT)
    assert {row[:2] for row in rows} == {(c, a) for c in CONDITIONS for a in ARMS} and len(rows) == 6
    assert len(re.findall(r"\[-?\d\.\d+, ", TEXT)) == len(re.findall(r"\[-?\d\.\d+, ", " ".join(map(" ".join, rows))))


def test_what_the_caption_says_is_so():
    effects = {(row.place.label, arm) for row, arm, one in overview.each() if one.sign > 0}
    assert {label for label, arm in effects if arm == "grpo-replay"} == {"σ = 2", "σ = 2, other seeds"}
    assert {("σ = 0.4", "gspo"), ("rate 4e-4", "gspo")} <= effects


def test_the_noise_changes_as_many_expert_choices_as_stated():
    noisy = stored("volatility_dial").cell("router_noise.target=weights,router_noise.scale=2")
    updates = noisy["updates"].query("arm == 'grpo'")
    last = updates[updates["update"] == updates["update"].max()]
    (stated,) = re.findall(r"changes (\d+) % of the expert choices", TEXT)
    assert round(100 * last.groupby("seed")["fresh_expert_change_rate"].mean().mean()) == int(stated)
