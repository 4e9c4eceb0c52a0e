"""What the declared rule of lag says of tables whose answer is known; and that every arm of it fits where it runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from lag import LAGS, study
from lag_verdicts import ARMS, verdict

from moe_rl.errors import RunError
from moe_rl.registry import Component
from moe_rl.storage.frames import Frames


def tables(fall: float, spared: tuple[str, ...] = (), gain: float = 0.1, cosine: float = 0.0,
           apart: tuple[str, ...] = (), lags: tuple[int, ...] = LAGS) -> Frames:
    """Eight seeds; every step of lag costs `fall` of reward and of exact match in all arms but the `spared`."""
    rng, runs, steps = np.random.default_rng(0), [], []
    for lag in lags:
        for arm in ARMS:
            for seed in range(8):
                level = 0.6 - fall * lag * (arm not in spared) + seed / 1000 + rng.normal(0, 0.001)
                key = {"arm": arm, "factors": f"lag={lag}", "seed": seed}
                runs.append({**key, "state": "finished", "step": 8, "steps": 8})
                evaluated = ("eval_exact_greedy", "eval_exact_sampled")
                steps += [{**key, "step": t, "grad_cosine": 0.1 + cosine * lag + rng.normal(0, 0.001),
                           "reward": (0.3 + (arm in apart) / 100 if t <= 3 else level) if t else np.nan,
                           **dict.fromkeys(evaluated, level if t else 0.6 - gain)} for t in range(9)]
    return Frames(pd.DataFrame(runs), {"steps": pd.DataFrame(steps)})


def test_a_fall_that_some_arms_are_spared_is_said_so():
    said = verdict(tables(0.02, spared=("sat-r3", "grpo-r3"), cosine=0.05))
    assert not any("void" in line for line in said)
    assert any(line.startswith("a lag of 8 harms GRPO (sampled exact match, second half -0.16") for line in said)
    for arm in ARMS[1:]:
        (line,) = [line for line in said if line.startswith(f"lag 8: {arm} − grpo")]
        assert (", an effect" in line) == (arm in ("sat-r3", "grpo-r3"))
    for arm in ARMS:
        (line,) = [line for line in said if line.startswith(f"{arm}: ")]
        assert line.startswith(f"{arm}: flat" if arm in ("sat-r3", "grpo-r3") else f"{arm}: falling (lag 8 − lag 0")
    assert said[-1].startswith("stale gradients align: reproduced (cosine per step of lag 0.0")


def test_where_nothing_happens_nothing_is_decided():
    said = verdict(tables(0.0))
    assert any("is not shown to harm GRPO" in line for line in said)
    assert sum("no effect by the rule" in line for line in said) == 6
    assert sum(": flat" in line for line in said) == 7
    assert "align: undetermined at n = 8" in said[-1]


def test_machinery_makes_the_study_void():
    assert [line for line in verdict(tables(0.0, apart=("m2po", "grpo-r3"))) if "void" in line] == [
        "void: m2po and grpo are not one algorithm at lag 0",
        "void: grpo-r3 and grpo-replay are not one algorithm at lag 0"]
    damaged = [line for line in verdict(tables(0.0, gain=-0.2)) if "void" in line]
    assert [line.split(" does")[0] for line in damaged] == [f"void: {arm}" for arm in ARMS]


def test_a_rule_without_its_runs_is_no_verdict():
    with pytest.raises(RunError, match="needs runs of grpo, .*sat-r3 at lag 8"):
        verdict(tables(0.0, lags=(0, 1, 2, 4)))


def test_every_run_of_the_study_can_run_within_its_budget():
    from moe_rl.build import check

    planned = study.runs(Path("runs"))
    assert len(planned) == 7 * 5 * 8 and study.seconds_per_step * study.base.steps <= 45
    oldest = Component("lagged", lag=8)
    checked = {p.config.arm.name: check(p.config) for p in planned
               if p.config.seed == 400 and p.config.batches == oldest}
    assert [*checked] == ARMS and not any(checked.values()), {key: texts for key, texts in checked.items() if texts}
