"""The answers can be had again from the tables in the repository."""

from __future__ import annotations

import math
import re
from functools import cache

import answers
import early_warning
import pages
import per_seed
import pytest

from moe_rl.results import plots


@cache
def answered(name) -> tuple[str, list[tuple[str, str]]]:
    """What is printed, and which figures are saved: study and name."""
    saved = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save", lambda figure, folder, name: saved.append((folder.parent.name, name)))
        return pages.printed(name), saved


@pytest.mark.parametrize("name", pages.names())
def test_every_number_is_made_from_the_committed_tables(name):
    out, saved = answered(name)
    assert out == (pages.PRINTED / f"{name}.txt").read_text(), "the text is not of today: make results"
    assert not re.search(r"-0(\.0*)?(?![.\d])", out), "a zero has no sign"
    assert "nan" not in out.lower() or name == "gradient_quality"  # a mini-batch that is clipped whole has no cosine
    for folder, figure in saved:
        assert (per_seed.RESULTS / folder / "figures" / f"{figure}.png").exists()


def test_every_study_with_results_has_a_page():
    assert {*pages.names()} == {page.stem for page in pages.pages()} - {"README", "report"}


@pytest.mark.parametrize(("name", "measured"), [
    ("ratio_variance", "expert slots changed: 0.98 [0.88, 1.08]"),
    ("expert_volatility", "any_change_rate: one update 0.013 [0.010, 0.016], one step 0.08 [0.07, 0.09]"),
])  # fmt: skip
def test_the_readme_says_what_the_tables_say(name, measured):
    """Two rows by way of example: numbers that a change of the code must not move in silence."""
    assert measured in answered(name)[0]


def test_early_warning_counts_what_became_of_the_runs_of_one_learning_rate():
    """Six of its 16 runs collapse: GRPO three of four, with replay two, GSPO with replay one; each gives at most ten
    steps before its collapse."""
    table = early_warning.moments(per_seed.stored("learning_rates").cell("optimizer.lr=0.000566"))
    near = table.groupby("run")["soon"].sum()
    collapsed = (near > 0).groupby(near.index.str.split("/").str[0]).sum().to_dict()
    assert collapsed == {"grpo": 3, "grpo-replay": 2, "gspo": 0, "gspo-replay": 1}
    assert near.max() == early_warning.HORIZON and table["step"].min() == early_warning.FIRST
    assert table["lr"].unique() == pytest.approx([math.log(5.66e-4)], abs=1e-3)
    found = early_warning.compare(table, ["reward", "step"])
    assert found["runs"].tolist() == [16, 16, 16, 8, 8, 16] and found["collapses"].tolist() == [6, 6, 6, 3, 3, 6]


@pytest.mark.parametrize(("name", "sentence"), [
    ("confirmation", "gspo − grpo: reproduced (0.09 [0.04, 0.14], Holm p 0.0091)"),
    ("why_gspo", "weight: sequence weights with token clipping are decided above GRPO and above the reverse"),
    ("placebos", "replay by dose: undetermined at n = 4 (slope -0.06 [-0.18, 0.06])"),
])  # fmt: skip
def test_a_rule_gives_its_verdict_from_the_committed_tables(name, sentence):
    declared = answers.read_declaration(per_seed.RESULTS / name, trust=True)
    assert sentence in answers.verdict_of(per_seed.stored(name), declared)


def test_runs_are_shared_where_rewards_are_equal_and_nowhere_else():
    assert pages.shared("why_replay")["grpo with grpo of why_gspo"] == list(range(40, 48))
    assert set(pages.shared("clip_fraction")) == {
        "grpo with grpo in optimizer.lr=0.0004 of learning_rates",
        "gspo with gspo in optimizer.lr=0.0004 of learning_rates"}
    assert pages.shared("confirmation") == {} == pages.shared("engine_vllm")
    assert per_seed.stored("why_replay").runs["created"].isna().all()
