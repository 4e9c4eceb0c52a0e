"""Ratios that spread by themselves: rollouts one and two steps old, without any noise. Does replay help there?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, EARLIER, ENDPOINT, SECONDARY, crossed, grpo, gspo_short, replay  # noqa: E402
from contrasts import NOTHING, Condition, Form, Outcome, Rule, Within, spoken  # noqa: E402

from moe_rl.registry import Component  # noqa: E402
from moe_rl.storage.frames import Frames  # noqa: E402
from moe_rl.study import Study  # noqa: E402

LAGS = (0, 1, 2)
HALF = "rate=half,"
weight, clip, no_weight = crossed("sequence", "token"), crossed("token", "sequence"), crossed("none", "token")


def lagged(lag: int) -> dict:
    """The settings of a lag."""
    return {"batches": Component("lagged", lag=lag)}


study = Study(
    name="lag_natural",
    question="Where token ratios spread without injected noise, because rollouts are one or two steps old: does "
    "Routing Replay (R2) help GRPO, does GSPO, and is what helps GSPO's sequence-level weight or its clip?",
    hypothesis="Replay restores the ratios (token ESS) and changes exact match by less than .02. GSPO is better than "
    "GRPO and than replay, by its sequence-level weight.",
    arms=(grpo, replay, gspo_short, weight, clip, no_weight),
    base=BASE,
    seeds=tuple(range(1000, 1032)),
    own_cold_starts=True,
    conditions={f"lag={lag}": lagged(lag) for lag in LAGS}
    | {f"{HALF}lag={lag}": {**lagged(lag), "optimizer.lr": BASE.optimizer.lr / 2, "arms": ("grpo",)} for lag in LAGS},
    figures=(),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    metrics=("token_ess",),
    comparisons=tuple((a.name, "grpo") for a in (replay, gspo_short, weight, clip, no_weight))
    + (("gspo_short", "grpo-replay"),),
    verdict="study.py:verdict",
    decision_rule="Primary endpoint: sampled exact match on 256 held-out prompts, mean of the evaluations after steps "
    "30, 35, 40, 45 and 50. Secondary: greedy exact match, likewise. Every value is the mean of lags 1 and 2 of one "
    "seed. Gate: token ESS of the step, mean over steps 26–50 and seeds at lag 2, is at most .90 in GRPO and at least "
    ".95 in GRPO + R2; if it is not, replay does not restore the ratios here, and nothing is concluded about it. "
    "Planned comparisons: R2, GSPO, sequence weight × token clip, token weight × sequence clip, no weight × token clip "
    "and GRPO at half the rate, each − GRPO, and GSPO − R2; two-sided sign flips over seeds, Holm at 5 % over the "
    "seven in the primary endpoint. An effect: decided in the primary endpoint, and the secondary not decided (5 %, "
    "not adjusted) with the other sign. Else no difference that matters, if the 90 % interval lies within ±.02. Else "
    "undecided. 'The weight' if sequence weight × token clip is an effect above 0 and token weight × sequence clip is "
    "not; 'the clip' the other way round; 'both' if both are. Stopping: 32 seeds, 50 steps; a diverged run matches "
    "nothing from there on. Lag 0 and the single lags are exploratory.",
    differs_from_paper=EARLIER + " Lags are in steps of 8 updates, and fixed; one engine in the policy's numerics.",
    caution="one learning rate, one task, one size and 50 steps. A lag makes samples stale beside spreading ratios.",
    cost="Cold starts come on top: about 30 s of one core per seed. 672 runs of about 28 CPU-seconds: 5.3 CPU-hours.",
    seconds_per_step=0.55,
)


# ---------------------------------------------------------------------- planned contrasts
HALF_RATE = "grpo, half the rate"
COUNTED = [lag for lag in LAGS if lag]
OLDEST = Condition(f"lag={max(LAGS)}")


def old(arm: str) -> Form:
    """An arm with old rollouts: the mean of lags 1 and 2."""
    before, name = (HALF, "grpo") if arm == HALF_RATE else ("", arm)
    first, second = (Condition(f"{before}lag={lag}")[name] for lag in COUNTED)
    return (first + second) / 2


PAIRS = (*study.comparisons[:-1], (HALF_RATE, "grpo"), study.comparisons[-1])
RULE = Rule(
    ENDPOINT,
    SECONDARY,
    {"old rollouts": {f"{a} − {b}": old(a) - old(b) for a, b in PAIRS}},
    gates=(Within(OLDEST["grpo"], "token_ess", 0.0, 0.90), Within(OLDEST["grpo-replay"], "token_ess", 0.95, 1.0)),
    bootstrap=True,
)
CORRECTED = "Holm over the 7 comparisons"


def judged(frames: Frames) -> list[tuple[Outcome, str]]:
    """The planned comparisons with the rule's words. A failed gate leaves nothing to conclude about replay."""
    passed = RULE.passed(frames)
    return [
        (one, one.said.partition(":")[0] if passed or "grpo-replay" not in one.name else NOTHING)
        for one in RULE.outcomes(frames)["old rollouts"]
    ]


verdict = spoken(judged, RULE)
