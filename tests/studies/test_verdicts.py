"""What the declared rules say of tables whose answer is known."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import per_seed
import pytest
import volatility_controls_verdicts as controls
import volatility_dial_verdicts as router_noise
from volatility_dial import SIGMAS, noise

from moe_rl.errors import RunError
from moe_rl.results.stats import interval
from moe_rl.storage.frames import Frames

CELLS = [noise("weights", 0), *(noise(form, s) for form in router_noise.FORMS for s in SIGMAS)]


def dial_frames(hurt: float, cured: tuple[str, ...], gain: float = 0.1, arms: list[str] = router_noise.ARMS) -> Frames:
    """Eight seeds; at the largest dose GRPO loses `hurt`, and so does every arm that is not `cured`."""
    rng, runs, steps = np.random.default_rng(0), [], []
    for cell in CELLS:
        worst = cell.endswith(f"={max(SIGMAS):g}")
        for arm in arms:
            for seed in range(8):
                still = arm == "grpo-replay" and "choice" in cell
                level = 0.6 - hurt * (worst and arm not in cured and not still) + (0 if still else seed / 1000)
                key = {"arm": arm, "factors": cell, "seed": seed}
                runs.append({**key, "state": "finished", "step": 10, "steps": 10})
                jitter = np.zeros(11) if arm == "grpo-replay" else rng.normal(0, 0.002, 11)
                steps += [{**key, "step": t, "reward": level + jitter[t] if t else np.nan,
                           "eval_exact_greedy": level + jitter[t] if t else 0.6 - gain} for t in range(11)]
    frame = pd.DataFrame(steps)
    still = (frame["arm"] == "grpo-replay") & frame["factors"].isin([noise("weights", 0), noise("choice", max(SIGMAS))])
    frame.loc[still & (frame["step"] > 0), ["reward", "eval_exact_greedy"]] = 0.6
    return Frames(pd.DataFrame(runs), {"steps": frame})


def test_harm_that_replay_alone_takes_away_is_said_so():
    said = router_noise.verdict(dial_frames(0.2, cured=("grpo-replay",)))
    for form in router_noise.FORMS:
        (harm,) = [line for line in said if line.startswith(f"{form}: volatility")]
        assert "volatility harms GRPO at σ = 2 (reward -0.20" in harm
        assert f"{form}: grpo-replay − grpo, an effect" in said
        assert f"{form}: gspo − grpo, no effect by the rule" in said
        assert f"{form}, σ = 0.4: gspo − grpo equivalent within ±0.02" in said
    assert not any("void" in line for line in said)


def test_a_rate_that_damages_the_model_makes_the_study_void():
    said = router_noise.verdict(dial_frames(0.0, cured=(), gain=-0.2))
    assert [line.split(" does")[0] for line in said if "void" in line] == [f"void: {arm}" for arm in router_noise.ARMS]
    assert any("volatility is not shown to harm GRPO" in line for line in said)


def test_a_rule_without_its_runs_is_no_verdict():
    with pytest.raises(RunError, match="needs runs of grpo, grpo-replay, gspo"):
        router_noise.verdict(dial_frames(0.1, cured=(), arms=["grpo", "grpo-replay"]))


@pytest.mark.parametrize("first, said", [
    ([0.0, 9.9e-5], "within 9.9e-05, and must be within 0.0001: holds"), ([0.0, 1.1e-4], "within 0.00011.*FAILS.*void"),
    ([0.0, np.nan], "within nan.*FAILS"), ([], "within nan.*FAILS")])
def test_wrong_replay_is_void_where_the_first_ratios_are_not_one(first, said):
    """The bound that volatility_controls declares; before the first step there is no ratio."""
    key = {"arm": "grpo-wrong-replay", "factors": "wrong-replay", "seed": 0}
    rows = [{**key, "step": t, "first_update_log_ratio_max": x} for t, x in enumerate([np.nan, *first])]
    frames = Frames(pd.DataFrame([{**key, "state": "finished"}]), {"steps": pd.DataFrame(rows)})
    assert re.search(said, controls.machinery(frames)) and "ratios are 1 within 1e-4" in controls.study.decision_rule


def test_a_slope_by_hand_and_that_of_equal_values_is_exactly_0():
    """As of an arm that its dose does not touch, whose runs are equal bit for bit."""
    level = np.linspace(0.1, 0.9, 17)
    values = pd.DataFrame({x: level for x in (0.0, 0.4, 1.0, 2.0)})
    found = per_seed.slopes(values, [0.0, 0.4, 1.0, 2.0])
    assert not found.any() and str(interval(found)) == "0.000 [0.000, 0.000]"
    assert per_seed.slopes(pd.DataFrame([[1.0, 2.0, 6.0]]), [0, 1, 2]) == pytest.approx([2.5])
