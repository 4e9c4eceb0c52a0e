"""The numbers of the front page are those of the committed tables."""

from __future__ import annotations

import re
from pathlib import Path

import overview
import pages
import pandas as pd
import pytest
from per_seed import stored

from moe_rl.metrics.rounding import number
from moe_rl.results.stats import Interval, interval
from moe_rl.results.summary import metric, per_run

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
CONDITIONS = {"fresh": "lag=0", "two steps old": "lag=2"}
ARMS = {"GRPO": "grpo", "GRPO + replay": "grpo-replay", "GSPO": "gspo"}
MATCH = "sampled exact match, second half"
ROW = re.compile(r"^\| (fresh|two steps old) \| ([\w+ ]+) \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)


def by_arm(name: str, condition: str) -> pd.DataFrame:
    """Seed × arm, of the default study."""
    return per_run(stored("routing_replay").cell(condition), metric(name)).unstack(0)


@pytest.mark.parametrize("condition, arm, cells", [(c, a, rest) for c, a, *rest in ROW.findall(TEXT)])
def test_a_row_of_the_comparison_is_what_the_tables_give(condition, arm, cells):
    match, ess = (by_arm(name, CONDITIONS[condition]) for name in (MATCH, "token_ess"))
    apart = interval(match[ARMS[arm]] - match["grpo"])
    assert cells == [said(interval(match[ARMS[arm]])), "–" if arm == "GRPO" else said(apart),
                     f"{ess[ARMS[arm]].mean():.2f}"]


def said(one: Interval) -> str:
    mean, low, high = (number(x, ".2f") for x in (one.mean, one.low, one.high))
    return f"{mean} [{low}, {high}]"


def test_the_comparison_has_every_arm_in_both_conditions_and_every_interval_is_in_it():
    rows = ROW.findall(TEXT)
    assert {row[:2] for row in rows} == {(c, a) for c in CONDITIONS for a in ARMS} and len(rows) == 6
    assert len(re.findall(r"\[-?\d\.\d+, ", TEXT)) == len(re.findall(r"\[-?\d\.\d+, ", " ".join(map(" ".join, rows))))


def test_what_the_caption_says_is_so():
    effects = {(row.place.label, arm) for row, arm, one in overview.each() if one.sign > 0}
    assert {label for label, arm in effects if arm == "grpo-replay"} == {"σ = 2", "σ = 2, other seeds"}
    assert {("σ = 0.4", "gspo"), ("rate 4e-4", "gspo"), (overview.OLD.label, "gspo")} <= effects


def test_the_noise_changes_as_many_expert_slots_as_the_index_and_the_report_state():
    shares = []
    for study, scale in (("router_noise_low", 0.4), ("volatility_dial", 2)):
        updates = stored(study).cell(f"router_noise.target=weights,router_noise.scale={scale}")["updates"]
        last = updates[(updates["arm"] == "grpo") & (updates["update"] == updates["update"].max())]
        shares.append(round(100 * last.groupby("seed")["fresh_expert_change_rate"].mean().mean()))
    for page in ("README.md", "report.md"):
        assert re.findall(r"(\d+)\s% of the\s+slots", (pages.HERE / page).read_text()) == [str(x) for x in shares]
