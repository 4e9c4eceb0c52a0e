"""The endpoint of many_turns, worked by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from many_turns.study import TOKENS, held_out_at_equal_tokens

from moe_rl.storage.frames import Frames


def run_of(tokens: float, rewards: list[float], turns: float = 1.5) -> pd.DataFrame:
    """Steps with an evaluation each: `tokens` per rollout and step."""
    return pd.DataFrame(
        {
            "step": range(len(rewards)),
            "response_tokens": [np.nan, *[tokens] * (len(rewards) - 1)],
            "eval_reward_greedy": rewards,
            "turns": [np.nan, *[turns] * (len(rewards) - 1)],
        }
    )


def frames_of(runs: dict[tuple[str, int], pd.DataFrame], state: str = "finished") -> Frames:
    keys = [{"arm": arm, "condition": "base", "seed": seed} for arm, seed in runs]
    steps = pd.concat([frame.assign(**key) for key, frame in zip(keys, runs.values(), strict=True)])
    return Frames(pd.DataFrame([key | {"state": state, "step": 2, "steps": 50} for key in keys]), {"steps": steps})


def endpoint(frame: pd.DataFrame, state: str = "finished") -> float:
    return held_out_at_equal_tokens(frames_of({("grpo", 0): frame}, state).run("grpo", 0))


def test_the_endpoint_is_at_equal_tokens_not_at_equal_steps():
    """450 tokens: from 225 on. A run of 450 per step is in its first step there; one of 225 in its second;
    one that ends before stays; a diverged one is at 0."""
    assert TOKENS == 450
    assert endpoint(run_of(450, [0.0, 0.8, 0.1])) == pytest.approx(0.6, abs=1e-6)
    assert endpoint(run_of(225, [0.0, 0.4, 0.8])) == pytest.approx(0.6, abs=1e-6)
    assert endpoint(run_of(100, [0.0, 0.3, 0.7])) == pytest.approx(0.7)
    assert endpoint(run_of(100, [0.5, 0.3]), "diverged") == 0
    assert np.isnan(endpoint(run_of(100, [0.5])[:0], "running")), "only begun"
