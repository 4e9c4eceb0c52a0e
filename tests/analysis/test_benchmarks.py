"""Metrics per problem, intervals over problems, differences paired by problem: by hand on tiny tables."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from moe_rl.analysis.benchmarks import of_problems, summarise


def rows(rewards: dict[str, list[list[float]]], votes=None, benchmark: str = "aime") -> pd.DataFrame:
    """Rows of `evaluations`: per checkpoint and problem the rewards of its drawn completions."""
    return pd.DataFrame(
        [
            {
                "checkpoint": name,
                "benchmark": benchmark,
                "problem": p,
                "sample": s + 1,
                "reward": reward,
                "response_tokens": float(10 * (p + 1) + s),
                "truncated": float(s == 0),
                "vote": votes[p][s] if votes else float(1 + drawn.index(reward)),
            }
            for name, problems in rewards.items()
            for p, drawn in enumerate(problems)
            for s, reward in enumerate(drawn)
        ]
    )


def test_every_metric_of_a_problem_by_hand():
    found = of_problems(rows({"a": [[1, 0, 0, 0], [1, 1, 0.5, 0]]}, votes=[[1, 2, 2, math.nan], [1, 1, 3, 4]]))
    assert found == {
        "avg@4": {0: 0.25, 1: 0.5},
        "pass@2": {0: 0.5, 1: pytest.approx(5 / 6)},
        "pass@4": {0: 1, 1: 1},
        "maj@4": {0: 0, 1: 1},
        "reward": {0: 0.25, 1: 0.625},
        "response_tokens": {0: 11.5, 1: 21.5},
        "truncated": {0: 0.25, 1: 0.25},
    }


def test_greedy_is_apart_and_one_completion_has_neither_pass_nor_majority():
    table = rows({"a": [[1.0], [0.0]]})
    greedy = table.assign(sample=0, reward=[0.0, 1.0], vote=math.nan)
    found = of_problems(pd.concat([greedy, table]))
    assert found.keys() == {"avg@1", "reward", "response_tokens", "truncated", "greedy"}
    assert found["greedy"] == {0: 0, 1: 1} and found["avg@1"] == {0: 1, 1: 0}


def test_a_table_in_which_nobody_votes_is_read():
    """Where no completion has an answer, a run's own column holds None, not NaN."""
    table = rows({"a": [[0.0, 0.0]]}).assign(vote=pd.Series([None, None], dtype=object))
    assert of_problems(table)["maj@2"] == {0: 0.0}


def test_intervals_are_over_problems_and_differences_paired_by_problem():
    """Four problems: avg@2 is 0, ½, 1, ½ before and ½, ½, 1, ½ after; differences ½, 0, 0, 0."""
    table = rows({"before": [[0, 0], [1, 0], [1, 1], [0, 1]], "after": [[1, 0], [0, 1], [1, 1], [0, 1]]})
    found = summarise(table).set_index(["checkpoint", "metric"])
    before, after = found.loc[("before", "avg@2")], found.loc[("after", "avg@2")]
    half = scipy.stats.t.ppf(0.975, 3) * np.std([0, 0.5, 1, 0.5], ddof=1) / math.sqrt(4)
    low = 1 / (1 + math.exp(half / 0.25))  # on the logit scale, whose slope at a half is 4: within 0 and 1
    assert (before["mean"], before["n"]) == (0.5, 4) and before["low"] == pytest.approx(low)
    assert math.isnan(before["difference"]) and after["difference"] == pytest.approx(1 / 8)
    half = scipy.stats.t.ppf(0.975, 3) * np.std([0.5, 0, 0, 0], ddof=1) / math.sqrt(4)
    assert after["difference_high"] == pytest.approx(1 / 8 + half)
    assert after["p"] == after["p_holm"] == 1.0, "one problem moved, and either sign of it is as likely"


def test_p_is_adjusted_over_the_checkpoints():
    good = [[1, 1]] * 6
    found = summarise(rows({"a": [[0, 0]] * 6, "b": good, "c": good, "d": good}))
    found = found[found["metric"] == "avg@2"].set_index("checkpoint")
    assert found.loc["b", "p"] == 2 / 2**6 and found.loc["b", "p_holm"] == 3 * 2 / 2**6


def test_none_solved_is_not_certainly_none():
    """Resampling zeros gives zeros; the exact interval of 0 in 30 ends at 1 − 0.025^(1/30)."""
    found = summarise(rows({"a": [[0, 0]] * 30})).set_index("metric").loc["avg@2"]
    assert (found["mean"], found["low"]) == (0, 0) and found["high"] == pytest.approx(1 - 0.025 ** (1 / 30))


def test_benchmarks_are_apart_and_a_runs_own_table_goes_by_step():
    table = pd.concat([rows({"1": [[1]] * 3}), rows({"1": [[0]] * 4}, benchmark="math")])
    found = summarise(table.rename(columns={"checkpoint": "step"}), by="step")
    assert found[found["metric"] == "avg@1"][["benchmark", "step", "mean", "n"]].to_numpy().tolist() == [
        ["aime", "1", 1.0, 3],
        ["math", "1", 0.0, 4],
    ]
