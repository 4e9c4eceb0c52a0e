"""What the declared rule of lag says, from its tables."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from lag import LAGS, study
from per_seed import slopes
from volatility_dial_verdicts import after_start, effects

from moe_rl.errors import RunError
from moe_rl.results.stats import Interval, Paired, interval, paired
from moe_rl.results.summary import metric, per_run
from moe_rl.storage.frames import Frames

ENDPOINTS = (study.endpoint, *study.further_endpoints)
ARMS = [arm.name for arm in study.arms]
ONE_AT_LAG_0 = (("grpo-tis", "grpo"), ("m2po", "grpo"), ("grpo-r3", "grpo-replay"))
WITHIN = 0.03
"""Differences of exact match that count as none."""


def verdict(frames: Frames) -> list[str]:
    """What the rule says: void or not, harm, cures, flatness, alignment."""
    values = {name: by_lag(frames, name) for name in (*ENDPOINTS, "grad_cosine")}
    first, last = min(LAGS), max(LAGS)
    lines = [f"void: {a} and {b} are not one algorithm at lag 0" for a, b in ONE_AT_LAG_0 if not same(frames, a, b)]
    for arm in ARMS:
        if (gain := after_start(frames, arm, cell(0))).mean <= 0:
            lines.append(f"void: {arm} does not end above its cold start at lag 0, gained {gain}")
    tests = [paired(*(values[name][lag]["grpo"].to_dict() for lag in (last, first))) for name in ENDPOINTS]
    signs = {int(np.sign(t.difference.mean)) if t.p <= 0.05 else 0 for t in tests}
    says = "harms" if signs == {-1} else "helps" if signs == {1} else "is not shown to harm"
    lines.append(f"a lag of {last} {says} GRPO ({study.endpoint} {tests[0].difference})")
    found = {name: cures(values[name]) for name in ENDPOINTS}
    decided = effects([*found[ENDPOINTS[0]]], {name: [*tests.values()] for name, tests in found.items()})
    for name, (said, _) in decided.items():
        lines.append(f"lag {last}: {name}, {said} ({found[ENDPOINTS[0]][name].difference})")
    main = values[study.endpoint]
    for arm in ARMS:
        gap, fall = interval(main[last][arm] - main[first][arm], 0.9), slope(main, arm)
        flat = gap.low >= -WITHIN and gap.high <= WITHIN
        found = ["flat"] * flat + ["falling"] * (fall.high < 0) or ["neither flat nor falling is shown"]
        lines.append(f"{arm}: {', '.join(found)} (lag {last} − lag {first} {gap}, 90 %; per step of lag {fall})")
    aligned = slope(values["grad_cosine"], "grpo")
    word = "reproduced" if aligned.low > 0 else "reversed" if aligned.high < 0 else f"undetermined at n = {aligned.n}"
    return [*lines, f"stale gradients align: {word} (cosine per step of lag {aligned})"]


def cell(lag: int) -> str:
    """The combination of factors of a lag."""
    return f"lag={lag}"


def by_lag(frames: Frames, name: str) -> dict[int, pd.DataFrame]:
    """Lag → seed × arm. Raises RunError where a run of the rule is missing."""
    found = {}
    for lag in LAGS:
        found[lag] = per_run(frames.cell(cell(lag)), metric(name)).unstack(0) if cell(lag) in frames.cells else {}
        if missing := [arm for arm in ARMS if arm not in found[lag]]:
            raise RunError(f"the rule needs runs of {', '.join(missing)} at lag {lag}, which are not there")
    return found


def same(frames: Frames, a: str, b: str) -> bool:
    """Whether two arms have equal rewards over the first three steps without a lag."""
    steps = frames.cell(cell(0))["steps"].query("0 < step <= 3")
    rewards = steps.pivot(index=["seed", "step"], columns="arm", values="reward")[[a, b]].dropna()
    return bool((rewards[a] == rewards[b]).all())


def cures(by: Mapping[int, pd.DataFrame]) -> dict[str, Paired]:
    """The declared contrasts at the largest lag, by name."""
    table = by[max(LAGS)]
    return {f"{a} − {b}": paired(table[a].to_dict(), table[b].to_dict()) for a, b in study.comparisons}


def slope(by: Mapping[int, pd.DataFrame], arm: str) -> Interval:
    """Least squares per seed, per step of lag."""
    table = pd.DataFrame({lag: by[lag][arm] for lag in LAGS}).dropna()
    return interval(slopes(table, LAGS))
