"""The endpoint of many_turns, worked by hand, and what its rule says of tables whose answer is known."""

from __future__ import annotations

import many_turns_verdicts as rule
import numpy as np
import pandas as pd
import pytest
from many_turns import study

from moe_rl.errors import RunError
from moe_rl.storage.frames import Frames

ARMS = [arm.name for arm in study.arms]


def run_of(tokens: float, rewards: list[float], turns: float = 1.5) -> pd.DataFrame:
    """Steps with an evaluation each: `tokens` per rollout and step."""
    return pd.DataFrame({"step": range(len(rewards)), "response_tokens": [np.nan, *[tokens] * (len(rewards) - 1)],
                         "eval_reward_greedy": rewards, "turns": [np.nan, *[turns] * (len(rewards) - 1)]})


def frames_of(runs: dict[tuple[str, int], pd.DataFrame], state: str = "finished") -> Frames:
    keys = [{"arm": arm, "factors": "base", "seed": seed} for arm, seed in runs]
    steps = pd.concat([frame.assign(**key) for key, frame in zip(keys, runs.values(), strict=True)])
    return Frames(pd.DataFrame([key | {"state": state, "step": 2, "steps": 50} for key in keys]), {"steps": steps})


def endpoint(frame: pd.DataFrame, state: str = "finished") -> float:
    return rule.held_out_at_equal_tokens(frames_of({("grpo", 0): frame}, state).run("grpo", 0))


def test_the_endpoint_is_at_equal_tokens_not_at_equal_steps():
    """450 tokens: from 225 on. A run of 450 per step is in its first step there; one of 225 in its second;
    one that ends before stays; a diverged one is at 0."""
    assert rule.TOKENS == 450
    assert endpoint(run_of(450, [0.0, 0.8, 0.1])) == pytest.approx(0.6, abs=1e-6)
    assert endpoint(run_of(225, [0.0, 0.4, 0.8])) == pytest.approx(0.6, abs=1e-6)
    assert endpoint(run_of(100, [0.0, 0.3, 0.7])) == pytest.approx(0.7)
    assert endpoint(run_of(100, [0.5, 0.3]), "diverged") == 0
    assert np.isnan(endpoint(run_of(100, [0.5])[:0], "running")), "only begun"


def study_frames(gain: dict[str, float], turns: float = 1.5, start: float = 0.4) -> Frames:
    ends = {(arm, seed): 0.6 + gain.get(arm, 0) + 0.001 * (n + 1) * (-1) ** seed for n, arm in enumerate(ARMS)
            for seed in range(8)}
    return frames_of({key: run_of(225, [start, end, end], turns) for key, end in ends.items()})


def test_an_arm_that_is_better_on_every_seed_is_said_so():
    said = rule.verdict(study_frames({"gspo-token": 0.2, "gspo": 0.1}))
    assert said[0].startswith("grpo-replay − grpo: no difference that matters (")
    assert said[1].startswith("gspo − grpo: the first is better")
    assert said[2].startswith("gspo-token − gspo: the first is better")
    assert [line.partition(":")[0] for line in said[3:]] == ["exploratory"] * 3


def test_no_second_turns_or_no_gain_make_the_study_void():
    assert "void: 5% of the conversations" in rule.verdict(study_frames({}, turns=1.05))[0]
    assert "void: GRPO does not end above its cold start" in rule.verdict(study_frames({}, start=0.9))[0]
    with pytest.raises(RunError, match="runs of gspo-token, too"):
        rule.verdict(frames_of({(arm, 0): run_of(225, [0.1, 0.2]) for arm in ARMS if arm != "gspo-token"}))
