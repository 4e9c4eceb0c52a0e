"""Ranks and probabilities of improvement, worked by hand; and that every arm of the study fits where it runs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from stabilisers import study
from stabilisers_verdicts import improvement, machinery, ranks

from moe_rl.storage.frames import Frames


def test_ranks_are_means_over_seeds_with_ties_shared():
    table = pd.DataFrame({"a": [3.0, 1.0], "b": [2.0, 1.0], "c": [1.0, 5.0]})
    assert {arm: text.split(" ")[0] for arm, text in ranks(table).items()} == {"a": "1.8", "c": "2.0", "b": "2.2"}


def test_improvement_counts_pairs_of_runs_with_ties_as_halves():
    values, baseline = pd.Series({0: 1.0, 1: 2.0}), pd.Series({0: 1.0, 1: 1.5, 2: 9.0})
    assert improvement(values, baseline).startswith("0.62 "), "(½ + 0 + 1 + 1) / 4: seed 2 takes no part"


def test_grpo_must_end_above_its_cold_start_where_it_is_quiet():
    def said(end: float) -> str:
        labels = [{"study": "s", "arm": "grpo", "factors": "quiet", "seed": seed, "code": "1"} for seed in range(4)]
        steps = [row | {"step": step, "eval_exact_greedy": value + 0.01 * row["seed"]} for row in labels
                 for step, value in ((0, 0.5), (1, 0.9), (2, end))]
        runs = pd.DataFrame(labels).assign(state="finished", step=2, steps=2)
        return machinery(Frames(runs, {"steps": pd.DataFrame(steps)}))

    assert "gains 0.1" in said(0.6) and "void" not in said(0.6)
    assert "gains -0.1" in said(0.4).replace("−", "-") and said(0.4).endswith("void")


def test_every_run_of_the_study_can_run():
    from moe_rl.build import check

    checked = {}
    for planned in study.runs(Path("runs"), seeds=study.seeds[:1]):
        checked[planned.config.arm.name, planned.path.parts[-2]] = check(planned.config)
    assert len(checked) == 2 * 8 + 2 * 17 + 15
    assert not any(checked.values()), {key: texts for key, texts in checked.items() if texts}
