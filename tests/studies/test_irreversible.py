"""Where `irreversible` goes back to, and what its rule says, worked by hand."""

from __future__ import annotations

import irreversible_trainer as trainer
import irreversible_verdicts as verdicts
import numpy as np
import pandas as pd
import pytest

from moe_rl.metrics.convergence import collapse


def test_states_lie_at_least_ten_steps_before_the_onset_and_where_the_collapse_is_established():
    """Twenty dips from step 37 on are there after step 56, which is kept after 60."""
    assert trainer.starts(37, 70) == {"collapsed": 60, "before": 25}
    assert trainer.starts(51, 70) == {"collapsed": 70, "before": 40}
    assert trainer.starts(52, 70) == trainer.starts(None, 70) == {}
    assert trainer.starts(6, 70) == {"collapsed": 25, "before": 0}


def test_the_best_average_is_that_of_steps_before_the_onset():
    rewards = np.array([0.6] * 30 + [0.0] * 40)
    onset = collapse(np.arange(1, 71), rewards).step
    assert onset is not None and onset > 31
    assert trainer.best(rewards, onset) == pytest.approx(0.6)
    assert trainer.best([0.2, 0.9], 2) == pytest.approx(0.2)


def test_the_rule_asks_for_seven_of_eight_or_one():
    said = [verdicts.decided(k, 8) for k in range(9)]
    assert said == ["irreversible"] * 2 + ["undetermined at n = 8"] * 5 + ["reversible"] * 2
    assert verdicts.decided(1, 7) == "undetermined at n = 7" and verdicts.decided(0, 5) == "irreversible"
    assert verdicts.decided(0, 4) == verdicts.decided(4, 4) == "undetermined at n = 4"
    none = [(0, 8)] * 4
    assert verdicts.claim([*none, (1, 8)]) == "no resuming helps, reproduced"
    assert verdicts.claim([*none, (7, 8)]) == verdicts.claim([*none, (2, 8)]) == "undetermined at n = 8"
    assert verdicts.claim([*none, (8, 8)]) == "resuming helps, contradicted"


def test_a_seed_recovers_by_its_held_out_reward_of_the_last_steps():
    """Best .6: the mean of the last five must be .3, which seed 1 has and seed 2 misses, whatever came before."""
    rows = pd.DataFrame([{"seed": seed, "start": "before", "variant": "GSPO", "step": step, "best": 0.6, "reward": 0.0,
                          "held_out": early if step <= trainer.STEPS - 5 else high if step % 2 else 0.3}
                         for seed, early, high in ((1, 0.3, 0.31), (2, 1.0, 0.29))
                         for step in range(1, trainer.STEPS + 1)])
    assert verdicts.recovered(rows, "before", "GSPO") == (1, 2)
    assert verdicts.recovered(rows, "collapsed", "GSPO") == (0, 0)


@pytest.fixture
def rows(monkeypatch):
    """Two states from which every restart earns the same."""
    monkeypatch.setattr(verdicts, "collapsed_of", lambda frames: "1 of 1")
    again = [{"seed": 1, "start": start, "variant": "again", "step": 0, "apart": 0.0} for start in trainer.STARTS]
    restarts = [{**one, "variant": name, "step": step, "apart": np.nan, "reward": 0.4, "held_out": 0.4, "best": 0.6}
                for one in again for name in trainer.VARIANTS for step in range(1, trainer.STEPS + 1)]
    return pd.DataFrame(again + restarts)


def test_restarts_that_are_not_what_they_should_be_make_it_void(rows):
    """Longer responses and other queries alone may earn something else in the first step."""
    first = rows["step"] == 1
    free = rows["variant"].isin(["longer generation", "other queries"])
    fine = rows.assign(reward=rows["reward"].mask(first & free, 0.9))
    assert verdicts.verdict(None, fine)[0] == "1 of 1 collapsed in time"
    for name in set(trainer.VARIANTS) - {"longer generation", "other queries"}:
        one = first & (rows["variant"] == name) & (rows["start"] == "before")
        wrong = fine.assign(reward=fine["reward"].mask(one, 0.5))
        assert verdicts.verdict(None, wrong)[0] == "void: first rewards of variants that sample alike differ by 0.1"
    for apart in (0.1, np.nan):
        line = verdicts.verdict(None, fine.assign(apart=apart))[0]
        assert line == f"void: rewards of a run and of its kept state differ by {apart}"
