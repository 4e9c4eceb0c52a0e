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
    """Best .6: the mean of the last five must be .3, which seed 1 has and seed 2 misses."""
    rows = pd.DataFrame([{"seed": seed, "start": "before", "variant": "GSPO", "step": step, "best": 0.6, "reward": 0.0,
                          "held_out": high if step % 2 else 0.3}
                         for seed, high in ((1, 0.31), (2, 0.29)) for step in range(1, trainer.STEPS + 1)])
    assert verdicts.recovered(rows, "before", "GSPO") == (1, 2)
    assert verdicts.recovered(rows, "collapsed", "GSPO") == (0, 0)
