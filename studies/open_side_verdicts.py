"""What the declared rule of open_side says, from its tables."""

from __future__ import annotations

from pathlib import Path

from open_side import study
from volatility_dial_verdicts import ENDPOINTS, WITHIN, decide, effects

from moe_rl.results.stats import interval, paired
from moe_rl.results.summary import metric, per_run
from moe_rl.runs.frames import Frames, load_study

DECIDED, EXPLORED = study.contrasts[:2], study.contrasts[2]
NAMES = [" − ".join(pair) for pair in DECIDED]


def main() -> None:
    frames = load_study(Path(__file__).parent / "results" / study.name)
    names = (*ENDPOINTS, "entropy", "token_ess", "grad_norm")
    tables = {name: per_run(frames, metric(name)).unstack(0) for name in names}
    decide(NAMES, {name: [paired(tables[name][a].to_dict(), tables[name][b].to_dict()) for a, b in DECIDED]
                   for name in ENDPOINTS})
    start = frames["steps"].query("step == 0").pivot(index="seed", columns="arm", values="eval_exact_greedy")
    for name, table in tables.items():
        a, b = EXPLORED
        print(f"{name}: " + ", ".join(f"{arm.name} {interval(table[arm.name])}" for arm in study.arms)
              + f"; {a} − {b} {interval(table[a] - table[b])}")
    gained = tables[ENDPOINTS[1]] - start
    print("greedy exact match, second half − cold start: "
          + ", ".join(f"{arm.name} {interval(gained[arm.name])}" for arm in study.arms))
    print(verdict(frames)[-1])


def verdict(frames: Frames) -> list[str]:
    """The two contrasts decided together, and whether the bound is shown to be as good as replay."""
    tables = {name: per_run(frames, metric(name)).unstack(0) for name in ENDPOINTS}
    tests = {name: [paired(table[a].to_dict(), table[b].to_dict()) for a, b in DECIDED]
             for name, table in tables.items()}
    lines = [f"{name}: {said}" for name, (said, _) in effects(NAMES, tests).items()]
    a, b = EXPLORED
    gap = interval(tables[ENDPOINTS[0]][a] - tables[ENDPOINTS[0]][b], 0.9)
    equal = gap.low >= -WITHIN and gap.high <= WITHIN
    said = "equivalent" if equal else "not shown to be equivalent"
    return [*lines, f"exploratory: {a} − {b} {gap} (90 %): {said} within ±{WITHIN:g}"]
