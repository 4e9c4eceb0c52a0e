"""Do routes change more in deeper models: at one learning rate, and where a step moves the policy equally far?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from base import BASE, DIFFERS, grpo, gspo_short, layers, replay  # noqa: E402
from contrasts import Condition, Form, Outcome, Rule, Within, judged_by, spoken  # noqa: E402

from moe_rl.storage.frames import Frames  # noqa: E402
from moe_rl.study import Study  # noqa: E402

DEPTHS = (2, 6, 12, 24)
MATCHED = {2: 3.9e-4, 6: 2e-4, 12: 2e-4, 24: 1.5e-4}
"""Layers → the rate at which the pilot finds the KL that 6 layers have at 2e-4, to two digits."""
SEEDS = tuple(range(4000, 4008))


def at(depth: int, rate: float) -> Condition:
    """The condition of a depth and a rate."""
    return Condition(f"layers={depth},rate={rate:g}")


EQUAL_RATE = {depth: at(depth, 2e-4) for depth in DEPTHS}
EQUAL_KL = {depth: at(depth, rate) for depth, rate in MATCHED.items()}
ARMS = ("grpo", "grpo-replay", "gspo_short")
STEP, UPDATE, KL = "log slots changed by a step", "log slots changed by an update", "log KL"


def slope(places: dict[int, Condition], arm: str) -> Form:
    """The least-squares slope over depths, per doubling of the number of layers."""
    x = np.log2([*places])
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    forms = [weight * here[arm] for weight, here in zip(weights.tolist(), places.values(), strict=True)]
    return sum(forms, start=Form({}))


def per_kl(name: str) -> str:
    """The endpoint less half of the log of the KL: the log of the slots divided by √KL."""
    return f"{name}, less half the log KL"


def with_logs(frames: Frames) -> Frames:
    """The tables with the endpoints as columns of `runs`, natural logs of means over steps 11 to 20: of the slots that
    a step changes, of those that an update changes, of the KL, and of the slots less half of that of the KL."""
    keys = ["condition", "arm", "seed"]
    steps, updates = (
        frames[table].query("step > 10").groupby(keys).mean(numeric_only=True) for table in ("steps", "updates")
    )
    values = {STEP: steps["expert_change_rate"], UPDATE: updates["expert_change_rate"], KL: steps["token_kl_k3"]}
    logs = np.log(pd.DataFrame(values))
    for name in (STEP, UPDATE):
        logs[per_kl(name)] = logs[name] - logs[KL] / 2
    return Frames(frames.runs.merge(logs.reset_index(), on=keys), frames.tables)


RULES = {
    "equal rate": Rule(STEP, UPDATE, {"equal rate": {"slope, equal rate": slope(EQUAL_RATE, "grpo")}}, margin=0.08),
    "equal KL": Rule(
        per_kl(STEP),
        per_kl(UPDATE),
        {"equal KL": {"slope, equal KL": slope(EQUAL_KL, "grpo")}},
        gates=tuple(
            Within(EQUAL_KL[d]["grpo"] - EQUAL_KL[6]["grpo"], KL, -np.log(1.5), np.log(1.5)) for d in (2, 12, 24)
        ),
        margin=0.08,
    ),
}
TITLES = [f"log slope per doubling of the depth, slots changed by {what}" for what in ("a step", "an update")]
CORRECTED = "no correction, since each has one contrast"

study = Study(
    name="depth",
    question="Does a step change more of the expert slots in a deeper model: at one learning rate, and at rates at "
    "which it moves the policy equally far?",
    hypothesis="At one rate the share of changed slots grows with the depth, by about .17 in its log per doubling, as "
    "on three other seeds. At equal KL it does not: the slope is within ±.08.",
    arms=(grpo, replay, gspo_short),
    base=BASE.replace(steps=20, save_every=20, eval_every=10, **{"measure.detail_every": 5}),
    seeds=SEEDS,
    own_cold_starts=True,
    conditions={
        **{here.name: {**layers(depth), "optimizer.lr": 2e-4} for depth, here in EQUAL_RATE.items()},
        **{
            EQUAL_KL[depth].name: {**layers(depth), "optimizer.lr": rate, "arms": ("grpo", "grpo-replay")}
            for depth, rate in MATCHED.items()
            if rate != 2e-4
        },
        at(48, 2e-4).name: {**layers(48), "optimizer.lr": 2e-4, "arms": ("grpo",), "seeds": SEEDS[:3]},
    },
    figures=(),
    endpoint="expert_change_rate",
    metrics=("token_kl_k3", "token_ess", "token_log_ratio_var"),
    verdict="study.py:verdict",
    decision_rule="Unconstrained routing of response tokens. Primary endpoint: the log of the share of expert slots "
    "that a step of eight updates changes, mean of steps 11 to 20. Secondary: the same of an update, steps 15 and 20. "
    "Two contrasts of GRPO (RULES), each by itself: the least-squares slope over 2, 6, 12 and 24 layers per doubling "
    "of the depth, by seed; at 2e-4, and at the rates at which the pilot finds the KL of 6 layers at 2e-4. There half "
    "of the log of the KL (k3, same steps) is taken off, which corrects what is left of its differences. Exact "
    "two-sided sign flips over seeds at 5 %. An effect: decided in the primary endpoint, and the secondary not decided "
    "with the other sign. Else no difference that matters, if the 90 % interval (Student's t) lies within ±.08: a "
    "factor of 1.33 from 2 to 24 layers, and half of what three other seeds have at one rate. Else undecided. Gates of "
    "the contrast at equal KL: at 2, 12 and 24 layers the KL is that of 6 layers within a factor of 1.5 (geometric "
    "mean over seeds). 48 layers, and R2 and GSPO, are exploratory. Stopping: 8 seeds (3 at 48 layers), 20 steps.",
    differs_from_paper=DIFFERS.replace("0.7 M parameters (6 layers", "0.3 to 5.4 M parameters (2 to 48 layers"),
    caution="one width, 20 steps, one task; whether changes harm is not its question.",
    cost="131 runs of 20 steps; warm-ups of 8 seeds in 4 depths come on top.",
    seconds_per_step=1.0,
    seconds_of_warm_up=90,
)


def judged(frames: Frames) -> list[tuple[Outcome, str]]:
    """The contrasts with the rule's words."""
    return judged_by(RULES)(with_logs(frames))


def verdict(frames: Frames) -> list[str]:
    """The gates and the contrasts in words."""
    return spoken(judged_by(RULES), *RULES.values())(with_logs(frames))
