"""What the declared rule of open_side says, from its tables."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from open_side import study
from per_seed import differences, stored
from volatility_dial_verdicts import ENDPOINTS, after_start, decide, effects, equivalent

from moe_rl.results.stats import Paired, interval, paired
from moe_rl.results.summary import metric, per_run
from moe_rl.storage.frames import Frames

DECIDED, EXPLORED = study.comparisons[:2], study.comparisons[2]
NAMES = [" − ".join(pair) for pair in DECIDED]


def main() -> None:
    frames = stored(study.name)
    names = (*ENDPOINTS, "entropy", "token_ess", "grad_norm")
    tables = {name: per_run(frames, metric(name)).unstack(0) for name in names}
    decide(NAMES, tests(tables))
    a, b = EXPLORED
    for name, table in tables.items():
        print(f"{name}: " + ", ".join(f"{arm.name} {interval(table[arm.name])}" for arm in study.arms)
              + f"; {a} − {b} {differences(table, a, b)}")
    updates = frames["updates"]
    late = updates[updates["step"] > study.base.steps // 2].groupby(["arm", "seed"])
    norms = late["grad_norm"]
    for what, per in (("median gradient norm of an update", norms.median()),
                      ("updates whose norm is above 1, and is clipped to it", norms.agg(lambda x: (x > 1).mean()))):
        print(f"{what}: " + ", ".join(f"{arm.name} {interval(per[arm.name])}" for arm in study.arms))
    for name in ("token_ess", "token_log_ratio_var"):
        table = per_run(frames, metric(name)).unstack(0)
        print(f"{name}, grpo-bounded − grpo: {differences(table, 'grpo-bounded', 'grpo')}")
    print(f"first updates, largest difference of gradient norms between arms: {first_apart(updates):g}")
    (only,) = frames.cells
    print("greedy exact match, second half − cold start: "
          + ", ".join(f"{arm.name} {after_start(frames, arm.name, only)}" for arm in study.arms))
    print(verdict(frames)[-1])


def first_apart(updates: pd.DataFrame) -> float:
    """By how much gradient norms of arms differ in the first update, where no ratio has left 1 and no dose is."""
    first = updates[(updates["step"] == 1) & (updates["update"] == 1)]
    first = first.pivot(index="seed", columns="arm", values="grad_norm")
    return float((first.max(axis=1) - first.min(axis=1)).max())


def tests(tables: Mapping[str, pd.DataFrame]) -> dict[str, list[Paired]]:
    """Of each endpoint the tests of the contrasts that are decided."""
    return {name: [paired(tables[name][a].to_dict(), tables[name][b].to_dict()) for a, b in DECIDED]
            for name in ENDPOINTS}


def verdict(frames: Frames) -> list[str]:
    """Void or not, the two contrasts decided together, and whether the bound is shown to be as good as replay."""
    tables = {name: per_run(frames, metric(name)).unstack(0) for name in ENDPOINTS}
    apart = first_apart(frames["updates"])
    lines = [] if apart == 0 else [f"void: gradient norms of first updates are {apart:g} apart"]
    lines += [f"{name}: {said}" for name, (said, _) in effects(NAMES, tests(tables)).items()]
    a, b = EXPLORED
    said, gap = equivalent(tables[ENDPOINTS[0]], a, b)
    return [*lines, f"exploratory: {a} − {b} {gap} (90 %): {said}"]
