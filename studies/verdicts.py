"""What the declared rules say, from tables: the functions that the studies name as their `verdict`.

Each goes from the study's frames to a sentence per question; `moe-rl report --trust` and `answers.py` show them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from per_seed import slopes

from moe_rl.errors import RunError
from moe_rl.results.stats import Interval, interval
from moe_rl.results.summary import MAIN, Comparison, against, compare, half_lost_points, metric, per_run
from moe_rl.storage.frames import Frames


def confirmation(frames: Frames) -> list[str]:
    """Three contrasts of the reward, Holm at 5 %."""
    words = {("gspo", "grpo-replay"): ("GSPO better", "GSPO worse")}
    found = comparisons(frames, [("grpo-replay", "grpo"), ("gspo", "grpo"), ("gspo", "grpo-replay")])
    return [_said(c, *words.get((c.a, c.b), ("reproduced", "reversed")), within=0.05) for c in found]


def engine_mismatch(frames: Frames) -> list[str]:
    """Five contrasts of the reward, Holm at 5 %, and whether replaying the engine's routes removes the gap."""
    found = comparisons(frames, [("grpo-r3", "grpo"), ("grpo-r2", "grpo"), ("grpo-tis", "grpo"), ("gspo", "grpo"),
                               ("gspo-engine", "gspo")])
    steps = frames["steps"][frames["steps"]["arm"] == "grpo"].groupby("seed")
    natural, replayed, floor = (steps[name].mean() for name in ("engine_kl_k3_natural", "engine_kl_k3_replayed",
                                                                "noise_floor_kl_k3"))
    holds = int(((natural > 100 * floor) & (natural > 10 * replayed)).sum())
    lines = [_said(c, "the arms differ, the first earns more", "the arms differ, the first earns less", within=0.05,
                   equal="they do not differ here by an amount that matters", undecided="undecided") for c in found]
    return [*lines, f"(1) {'holds' if holds == len(natural) else 'does not hold'}: on {holds} of {len(natural)} seeds"]


def why_replay(frames: Frames) -> list[str]:
    """Whether there is an effect of replay, and whether it is of the ratio or of the gradient."""
    both, ratio, gradient = (sign(c) for c in comparisons(frames, [
        ("grpo-replay", "grpo"), ("replay-of-ratio", "grpo"), ("replay-of-gradient", "grpo")]))
    if not both:
        return [f"undetermined at n = {_seeds(frames)}: no effect of replay was found that could be explained"]
    mechanisms = [name for name, s in (("the ratio", ratio), ("the gradient", gradient)) if s == both]
    return [f"the mechanism is {' and '.join(mechanisms)}" if mechanisms else "the mechanism is undetermined"]


def why_gspo(frames: Frames) -> list[str]:
    """Weight, clipping, both, reversed, or undetermined."""
    weight, clip, between, whole = (sign(c) for c in comparisons(frames, [
        ("sequence-token", "grpo"), ("token-sequence", "grpo"), ("sequence-token", "token-sequence"),
        ("gspo", "grpo")]))
    if whole < 0:
        return ["reversed: GSPO earns less than GRPO"]
    if weight > 0 and between > 0:
        return ["weight: sequence weights with token clipping are decided above GRPO and above the reverse"]
    if clip > 0 and between < 0:
        return ["clipping: sequence clipping with token weights is decided above GRPO and above the reverse"]
    return ["both" if weight > 0 and clip > 0 and not between else f"undetermined at n = {_seeds(frames)}"]


def clip_fraction(frames: Frames) -> list[str]:
    """Ten times the clipped share on every seed, in both contrasts."""
    shares = per_run(frames, metric("clip_tokens")).unstack(0)
    first, second = shares["gspo"] / shares["grpo"], shares["gspo-wide"] / shares["grpo-narrow"]
    if (first >= 10).all() and (second >= 10).all():
        verdict = "reproduced"
    else:
        verdict = "not reproduced" if (second < 1).all() else f"undetermined at n = {len(shares)}"
    same, apart = (f"{times.min():.3g} to {times.max():.3g} times" for times in (first, second))
    return [f"{verdict}: GSPO clips {same} as much as GRPO; its widest range {apart} as much as GRPO's narrowest"]


def learning_rates(frames: Frames) -> list[str]:
    """Shifts of the learning rate at which half is lost, 95 % for three together."""
    pairs = [("grpo-replay", "grpo"), ("gspo", "grpo"), ("gspo", "grpo-replay")]
    (found,) = half_lost_points(frames, "optimizer.lr", MAIN, pairs)
    return [f"{a} / {b}: {_side(s.ratio, 1)} ({s.ratio}, {s.censored} of {s.ratio.n} censored)"
            for (a, b), s in found.shifts.items()]


def placebos(frames: Frames) -> list[str]:
    """The slope of the reward over the dose of replay."""
    values = per_run(frames, MAIN).unstack(0)[["grpo", "replay-25", "replay-50", "replay-75", "grpo-replay"]]
    slope = interval(slopes(values.dropna(), (0, 0.25, 0.5, 0.75, 1)))
    return [f"replay by dose: {_side(slope, 0, 'it helps', 'it harms')} (slope {slope})"]


def staleness(frames: Frames) -> list[str]:
    """The slopes of the differences over log2 N, 97.5 %; void where one algorithm is not one at N = 1."""
    steps = frames.cell("N=1")["steps"]
    one = steps[steps["step"] > 0].pivot(index=["seed", "step"], columns="arm", values="reward")
    same = one["grpo"].equals(one["grpo-replay"].rename("grpo"))
    early = one[one.index.get_level_values("step") <= 3]
    if not same or (early["grpo"] != early["gspo"]).any():
        return ["void: at N = 1, where all arms are one algorithm, their rewards are not equal"]
    values, found = against(frames, "N", MAIN).pivot(index="seed", columns=["arm", "x"], values="value"), []
    for arm in ("grpo-replay", "gspo"):
        gap = (values[arm] - values["grpo"]).dropna()
        slope = interval(slopes(gap, np.log2(gap.columns.to_numpy(dtype=float))), 0.975)
        found.append(f"{arm} − grpo over log2 N: {_side(slope, 0)} (slope {slope}, 97.5 %)")
    return found


def expert_volatility(frames: Frames) -> list[str]:
    """Which definitions put 10 % into their interval, per update or per step, in the base cell."""
    base, names, hits = frames.cell("base"), ("any_change_rate", "expert_change_rate", "any_layer_change"), []
    updates = base["updates"][base["updates"]["step"] > 20]
    for name in names:
        measured = {"per step": interval(per_run(base, metric(name)))}
        if name in updates:
            measured["per update"] = interval(updates.groupby("seed")[name].mean().dropna())
        hits += [f"{name} {when} ({i})" for when, i in measured.items() if i.low <= 0.1 <= i.high]
    return [f"reproduced by {', '.join(hits)}" if hits else "not reproduced: no interval of the base cell holds 10 %"]


# ---------------------------------------------------------------------- what rules are made of
def comparisons(frames: Frames, pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    """The comparisons of the reward, Holm over them. Raises RunError where an arm has no runs."""
    found = compare(frames, [], pairs)
    if missing := {pair for pair in pairs} - {(c.a, c.b) for c in found}:
        raise RunError(f"no seed has both arms of {', '.join(f'{a} − {b}' for a, b in sorted(missing))}")
    return found


def sign(c: Comparison) -> int:
    """Of a difference that is decided at 5 % after Holm; 0 of one that is not."""
    return int(np.sign(c.result.difference.mean)) if c.p_holm <= 0.05 else 0


def _said(c: Comparison, above: str, below: str, *, within: float, equal: str = "no difference that matters",
          undecided: str = "") -> str:
    d = c.result.difference
    small = -within <= d.low and d.high <= within
    words = {1: above, -1: below, 0: equal if small else undecided or f"undetermined at n = {c.result.n}"}
    return f"{c.a} − {c.b}: {words[sign(c)]} ({d}, Holm p {c.p_holm:.2g})"


def _side(i: Interval, of: float, above: str = "reproduced", below: str = "reversed") -> str:
    return above if i.low > of else below if i.high < of else f"undetermined at n = {i.n}"


def _seeds(frames: Frames) -> int:
    return int(frames.runs["seed"].nunique())
