"""What the declared rule of regime_gate says, from its tables: printed by `answers.py`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from per_seed import stored
from regime_gate import SETTINGS, STEPS, UPDATES, study

from moe_rl.errors import RunError
from moe_rl.results.summary import outcomes
from moe_rl.storage.frames import Frames

FOLDER = Path(__file__).parent / "results" / study.name
LIVE, REPLAYED = 0.9, 0.98
"""ESS at most of GRPO, and at least of GRPO with replay."""
GREEDY = "eval_exact_greedy"


def main() -> None:
    frames = stored(study.name)
    for setting in SETTINGS:
        table = measured(frames, setting)
        print(f"{setting}, seeds {' / '.join(map(str, study.seeds))}:")
        for name, row in table.iterrows():
            print(f"  {name}: " + " / ".join(f"{value:.3g}" for value in row))


def verdict(frames: Frames) -> list[str]:
    """Per setting which conditions hold on both seeds, and which setting passes."""
    lines, passed = [], []
    for setting in SETTINGS:
        table = measured(frames, setting)
        holds = {
            f"live ESS ≤ {LIVE:g}": table.loc["live ESS"] <= LIVE,
            f"replayed ESS ≥ {REPLAYED:g}": table.loc["replayed ESS"] >= REPLAYED,
            "on-policy stable": (table.loc["fresh, collapses"] == 0)
            & (table.loc["fresh, greedy at the end"] >= table.loc["greedy at the start"]),
        }
        lines.append(f"{setting}: " + "; ".join(f"{what} on {on.sum()} of {len(on)}" for what, on in holds.items()))
        if all(on.all() for on in holds.values()):
            passed.append(setting)
    return [*lines, f"the gate is passed by {passed[0]}" if passed else "no setting passes the gate"]


def measured(frames: Frames, setting: str) -> pd.DataFrame:
    """Quantity × seed: of the last mini-batches of steps in the second half, and of training on fresh rollouts."""
    for cell in (f"{setting},N=8", f"{setting},fresh"):
        if cell not in frames.cells:
            raise RunError(f"the rule needs runs of {cell}")
    stale, fresh = frames.cell(f"{setting},N=8"), frames.cell(f"{setting},fresh")
    rows: dict[str, pd.Series] = {}
    updates, steps = stale["updates"], stale["steps"]
    last = updates[updates["update"] == UPDATES]
    for table, column, name in ((last, "token_ess", "ESS"), (last, "token_log_ratio_var", "variance of log-ratios"),
                                (steps, "expert_change_rate", "slots changed in a step"), (steps, "reward", "reward"),
                                (steps, "entropy", "entropy"),
                                (steps, "zero_variance_groups", "groups without signal")):
        late = table["step"] > STEPS // 2
        for arm, said in (("grpo", "live"), ("grpo-replay", "replayed")):
            means = [table[half & (table["arm"] == arm)].groupby("seed")[column].mean() for half in (late, ~late)]
            rows |= {f"{said} {name}": means[0], f"{said} {name}, first half": means[1]}
    greedy = steps[steps["arm"] == "grpo"].groupby("seed")[GREEDY]
    rows["greedy at the start"] = greedy.first()
    rows["live, greedy at the end"] = greedy.last()
    rows["fresh, greedy at the end"] = fresh["steps"].groupby("seed")[GREEDY].last()
    fates = outcomes(fresh)
    rows["fresh, collapses"] = (fates["fate"] != "stable").groupby(fates["seed"]).sum()
    return pd.DataFrame(rows).T
