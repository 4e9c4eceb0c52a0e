"""How old may rollouts be? A lag between the weights that sample and those that train, crossed with arms and seeds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, EARLIER, ENDPOINT, SECONDARY, grpo, gspo_short, replay  # noqa: E402
from contrasts import Both, Condition  # noqa: E402

from moe_rl.objectives.methods import arm  # noqa: E402
from moe_rl.registry import Component  # noqa: E402
from moe_rl.study import Study  # noqa: E402

LAGS = (0, 1, 2, 4, 8)
r3, tis, m2po, sat_r3 = (
    arm(f"{spelling}+name={name}")
    for spelling, name in (("r3", "grpo-r3"), ("tis", "grpo-tis"), ("m2po", "m2po"), ("sat+rollout", "sat-r3"))
)

study = Study(
    name="lag",
    question="Does GRPO suffer from rollouts that are up to 8 steps old, and do replay (R2, R3), GSPO, truncation or "
    "methods made for stale data take the harm away?",
    hypothesis="It does, more with every step, and those that correct for the weights that sampled lose less; with R3, "
    "SAT is flat to a lag of 8 (its claim, arXiv 2607.18722); gradients of stale data align (arXiv 2603.01501).",
    arms=(grpo, replay, r3, gspo_short, tis, m2po, sat_r3),
    base=BASE.replace(**{"measure.gradient_cosine": True}),
    seeds=tuple(range(400, 408)),
    own_cold_starts=True,
    conditions={f"lag={lag}": {"batches": Component("lagged", lag=lag)} for lag in LAGS},
    figures=("against:lag",),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    comparisons=tuple((a.name, "grpo") for a in (replay, r3, gspo_short, tis, m2po, sat_r3)),
    verdict="study.py:verdict",
    decision_rule="Endpoints: sampled and greedy exact match on 256 held-out prompts, each the mean of the "
    "evaluations after steps 30, 35, 40, 45, 50, of the weights of then; rewards of training are of weights that are "
    "as much older as the lag, so none is an endpoint. An effect counts only if both are decided with one sign. Harm: "
    "GRPO at lag 8 − GRPO at lag 0, two-sided sign flips over 8 seeds at 5 %. Cures: the six other arms − GRPO at lag "
    "8, sign flips, Holm at 5 % over the six, each endpoint by itself. Flatness of each arm, in the first endpoint: "
    "flat if the 90 % interval of lag 8 − lag 0 lies within ±.03; falling if the 95 % interval of its slope over lags "
    "(least squares per seed) lies below 0; both may be said, and else neither is shown. Alignment: the slope over "
    "lags of GRPO's mean grad_cosine over the second half, 95 %: above 0 reproduced, below reversed, else "
    "undetermined. Machinery: at lag 0, where what samples is what trains, TIS and M2PO are GRPO, and R3 is R2: their "
    "rewards are equal over the first three steps, or the study is void; so it is if an arm does not end above its "
    "cold start there in greedy exact match. Exploratory: lags 1, 2 and 4, and the rows by lag. Stopping: 8 seeds, 50 "
    "steps; a diverged run matches nothing from there on.",
    differs_from_paper=EARLIER + " Lags are in steps of 8 updates, and fixed; one engine in the policy's numerics, so "
    "that log π_old − log π_engine is staleness alone.",
    caution="one learning rate, one task, one size, and 50 steps, so that 8 are a sixth of training; the first steps "
    "of every run are fresher than the lag.",
    cost="Cold starts come on top: about 30 s of one core per seed. At lag 8 eight batches more are sampled.",
    seconds_per_step=0.75,
)

OLDEST, FRESH = (Condition(f"lag={lag}") for lag in (max(LAGS), min(LAGS)))
RULE = Both(
    (study.endpoint, *study.further_endpoints),
    {
        "lag 8": {f"{a} − {b}": OLDEST[a] - OLDEST[b] for a, b in study.comparisons},
        "harm": {"grpo, lag 8 − lag 0": OLDEST["grpo"] - FRESH["grpo"]},
    },
)
verdict = RULE.verdict
CORRECTED = "the 6 comparisons of an endpoint"
