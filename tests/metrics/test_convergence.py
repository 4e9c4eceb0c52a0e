"""Smoothing, collapse and summaries of curves, on curves whose answer is known."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moe_rl.errors import ConfigError
from moe_rl.metrics.convergence import Collapse, collapse, ema, second_half_mean


def judge(*parts):
    """Collapse of a curve given as (value, steps) pieces, the first step being step 1."""
    rewards = np.concatenate([np.full(n, value) for value, n in parts])
    return collapse(np.arange(1, len(rewards) + 1), rewards)


def test_ema_is_that_of_pandas():
    x = np.random.default_rng(0).normal(size=200)
    np.testing.assert_allclose(ema(x, 10), pd.Series(x).ewm(span=10, adjust=False).mean(), rtol=0, atol=1e-12)


def test_ema_stays_nan_after_a_nan():
    assert np.isnan(ema([1.0, math.nan, 1.0], 10)).tolist() == [False, True, True]


def test_a_fall_to_zero_collapses_when_its_average_has_halved():
    """From level 1 to 0 after step 40 the EMA10 is (9/11)^j: .548 at j = 3, .448 at j = 4, so step 44."""
    assert judge((1.0, 40), (0.0, 30)) == Collapse(step=44, recovered=False)


def test_a_healthy_curve_and_a_curve_at_half_its_best_do_not_collapse():
    rising = np.linspace(0.1, 0.9, 100)
    assert collapse(np.arange(100), rising) == Collapse(step=None, recovered=False)
    assert judge((1.0, 40), (0.5, 60)).step is None  # a dip is *below* half the best


def test_a_collapse_takes_twenty_dips_in_a_row():
    """Zero from step 41: dips from step 44. Up again at step s, the average passes one half within 4 steps."""
    assert judge((1.0, 40), (0.0, 22)) == Collapse(step=None, recovered=False, dip=44)  # 44 … 62: 19 dips
    assert judge((1.0, 40), (0.0, 23)) == Collapse(step=44, recovered=False)  # 44 … 63: 20 dips
    assert judge((1.0, 40), (0.0, 10), (1.0, 40)) == Collapse(step=None, recovered=False)


def test_a_collapse_that_recovers_is_marked_as_such():
    assert judge((1.0, 40), (0.0, 30), (1.0, 40)) == Collapse(step=44, recovered=True)
    twice = judge((1.0, 40), (0.0, 30), (1.0, 40), (0.0, 40))
    assert twice == Collapse(step=44, recovered=False)
    dips_again = judge((1.0, 40), (0.0, 30), (1.0, 40), (0.0, 10))
    assert dips_again == Collapse(step=44, recovered=True, dip=114)


PILOTS = json.loads((Path(__file__).parent / "pilot_rewards.json").read_text())
"""Rewards of real runs on 12 running sums, steps 1, 2, …; at a learning rate of 2e-4 all learnt."""


def fate(run) -> Collapse:
    return collapse(np.arange(1, len(run["rewards"]) + 1), run["rewards"])


def test_no_run_of_a_stable_pilot_collapses():
    stable = [run for run in PILOTS if run["lr"] == 2e-4]
    assert len(stable) == 9 and {fate(run) for run in stable} == {Collapse(step=None, recovered=False)}


def test_dead_pilots_collapse_for_good_and_runs_that_live_do_not():
    """Dead: below 0.1 over the second half, which none is near: 0.085 and less, or 0.25 and more. The grpo run that is
    in a dip at its last step is censored there."""
    harsh = {(run["arm"], run["seed"]): run for run in PILOTS if run["lr"] == 8e-4}
    dead = {key for key, run in harsh.items() if second_half_mean(run["rewards"]) < 0.1}
    assert len(dead) == 7 and {key for key, run in harsh.items() if fate(run).step is not None} == dead
    assert not any(fate(run).recovered for run in harsh.values())
    assert {key: fate(run).dip for key, run in harsh.items() if fate(run).dip is not None} == {("grpo", 0): 100}


def test_a_run_that_loses_its_cold_start_at_once_has_collapsed():
    """0.45 at step 1, 0.11 at step 3, 0.09 over the second half: what comes after step 10 has nothing to fall from."""
    (early,) = [run for run in PILOTS if (run["arm"], run["seed"]) == ("grpo", 10)]
    assert early["rewards"][0] > 0.4 and second_half_mean(early["rewards"]) < 0.1
    assert fate(early).step is not None and fate(early).step < 10 and not fate(early).recovered
    assert judge((1.0, 1), (0.2, 18)) == Collapse(step=None, recovered=False, dip=6)  # .2 + .8 (9/11)^5 = .49
    assert judge((0.2, 5)) == Collapse(step=None, recovered=False)


def test_a_reward_that_is_not_finite_is_a_collapse_at_once():
    assert judge((0.5, 3), (math.nan, 1), (0.5, 50)) == Collapse(step=4, recovered=False)
    assert judge((1.0, 40), (0.0, 30), (math.inf, 1)).step == 44


def test_a_run_without_reward_does_not_collapse():
    assert judge((0.0, 60)).step is None
    assert collapse([], []).step is None


def test_collapse_refuses_steps_with_gaps():
    with pytest.raises(ConfigError, match="one reward per step"):
        collapse([1, 2, 4], [0.1, 0.2, 0.3])


def test_second_half_starts_at_half_the_length():
    assert second_half_mean([9.0, 9.0, 1.0, 2.0]) == 1.5
    assert second_half_mean([9.0, 1.0, 2.0]) == 1.5
    assert math.isnan(second_half_mean([]))
