"""What the declared rule of many_turns says, from its tables, and its endpoint."""

from __future__ import annotations

import numpy as np
from many_turns import ONE_TURN, study

from moe_rl.errors import RunError
from moe_rl.results.stats import Interval, holm, interval, paired
from moe_rl.results.summary import metric, per_run
from moe_rl.storage.frames import Frames

TOKENS = study.base.steps * ONE_TURN
"""Per rollout of a step, up to which arms are compared."""
WITHIN = 0.02


def held_out_at_equal_tokens(run: Frames) -> float:
    """Mean greedy reward on held-out prompts over the second half of TOKENS, which the policy sampled per rollout."""
    steps = run["steps"].sort_values("step")
    tokens = steps["response_tokens"].fillna(0).cumsum()
    measured = steps["eval_reward_greedy"].notna()
    x, y = tokens[measured].to_numpy(dtype=float), steps.loc[measured, "eval_reward_greedy"].to_numpy(dtype=float)
    if not measured.any():  # a run that has only begun
        return float("nan")
    if run.runs["state"].iloc[0] == "diverged":
        x, y = np.append(x, tokens.iloc[-1]), np.append(y, 0.0)
    at = np.linspace(TOKENS / 2, TOKENS, 1001)
    return float(np.interp(at, x, y).mean())


def verdict(frames: Frames) -> list[str]:
    """Void or not, the three contrasts, and what is exploratory."""
    values = per_run(frames, metric(study.endpoint)).unstack(0)
    if missing := {arm.name for arm in study.arms} - set(values):
        raise RunError(f"the rule needs runs of {', '.join(sorted(missing))}, too")
    steps = frames["steps"]
    start = steps[(steps["step"] == 0) & (steps["arm"] == "grpo")].set_index("seed")["eval_reward_greedy"]
    lines, gain = [], interval((values["grpo"] - start).dropna())
    if gain.mean <= 0:
        lines.append(f"void: GRPO does not end above its cold start, gained {gain}")
    if (fewest := steps.loc[steps["step"] == 1, "turns"].min()) < 1.2:
        lines.append(f"void: {fewest - 1:.0%} of the conversations of a first step had a second turn")
    tests = [paired(values[a].to_dict(), values[b].to_dict()) for a, b in study.comparisons]
    for (a, b), test, p in zip(study.comparisons, tests, holm([t.p for t in tests]), strict=True):
        lines.append(f"{a} − {b}: {_said(test.difference, p)} ({test.difference}, Holm p {p:.2g})")
    turns = {loss: (values[a] - values[b]).dropna() for loss, a, b in (
        ("GRPO", "grpo-turn", "grpo"), ("GSPO", "gspo-token", "gspo"))}
    lines += [f"exploratory: advantages per turn, {loss}: {interval(gap)}" for loss, gap in turns.items()]
    return [*lines, f"exploratory: more in GSPO than in GRPO: {interval((turns['GSPO'] - turns['GRPO']).dropna())}"]


def _said(gap: Interval, p: float) -> str:
    if p <= 0.05:
        return "the first is better" if gap.mean > 0 else "the first is worse"
    return "no difference that matters" if gap.low >= -WITHIN and gap.high <= WITHIN else f"undetermined at n = {gap.n}"
