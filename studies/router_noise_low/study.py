"""From which size on does router noise harm, and does it matter that it is in the routers? Small noise, and as much KL
from noise on all other weights.

Scales of the noise beside the routers are from pilots on seeds 110 to 112, which take part in no study. GRPO's KL there
is that of the noise in the routers within about 10 %. At .05 and .1 the match is rough: KL differs between seeds from
.010 to .014, as without noise.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, EARLIER, ENDPOINT, SECONDARY, SIXTY, dual, grpo, gspo_short, noise, replay  # noqa: E402
from contrasts import LEVEL, NOTHING, VOID, Condition, Form, Gains, Outcome, Rule, median_kl, spoken  # noqa: E402

from moe_rl.results.stats import holm  # noqa: E402
from moe_rl.storage.frames import Frames  # noqa: E402
from moe_rl.study import Study  # noqa: E402

BESIDE = {0.05: 0.025, 0.1: 0.055, 0.2: 0.095, 0.4: 0.15, 0.7: 0.23}
"""Scale of the noise in routers → of the noise on all other weights that gives about the same KL."""
ROUTERS = {scale: noise("weights", scale) for scale in BESIDE}
OTHERS = {scale: noise("other_weights", beside) for scale, beside in BESIDE.items()}
NONE = noise("weights", 0)
"""Names of conditions, by the scale in the routers."""

study = Study(
    name="router_noise_low",
    question="From which KL to the old policy on does noise in the routers harm an arm, and does noise beside the "
    "routers of the same KL harm as much?",
    hypothesis="No arm is harmed at KL below .05, and noise beside the routers harms as much as noise in them.",
    arms=(grpo, replay, gspo_short, dual),
    base=BASE.replace(**SIXTY),
    seeds=tuple(range(1100, 1124)),
    own_cold_starts=True,
    conditions={NONE: {}}
    | {name: {"router_noise.scale": scale} for scale, name in ROUTERS.items()}
    | {
        name: {"router_noise.scale": BESIDE[scale], "router_noise.target": "other_weights"}
        for scale, name in OTHERS.items()
    },
    figures=(),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    metrics=("token_kl_k3",),
    verdict="study.py:verdict",
    decision_rule="Primary endpoint: sampled exact match on 256 held-out prompts, mean of the evaluations after steps"
    " 35, 40, 45, 50, 55 and 60. Secondary: greedy exact match, likewise. Gates: GRPO without noise ends above its "
    "cold start in the secondary endpoint, or the study is void; and at every scale GRPO's KL (k3, second half, "
    "median over seeds) beside the routers is within a quarter of that in the routers, or nothing is concluded about "
    "routing. Harm: an arm with noise in the routers − the same arm without noise, paired by seed, two-sided sign "
    "flips. Fixed sequence in every arm: σ = .7, .4, .2, .1, .05. It goes on below a harm: a difference below 0 that "
    "is decided at 5 % / m in the primary endpoint, where the secondary is not decided (5 %, not adjusted) above 0. "
    "It stops at the first scale without one, and scales below that are not tested. Holm over arms: m is 4, less one "
    "for every arm that is harmed at all five scales, and at least 1. An arm's lowest decided noise is the last harm "
    "of its sequence. For all other scales: no difference that matters, if the 90 % interval lies within ±.02; else "
    "undecided. Routing: for every arm and seed the least-squares slope of (noise in routers − noise beside them), "
    "over the log10 of KL at the five scales. KL of a scale: GRPO's, as in the gate, geometric mean of both places. "
    "Slopes by sign flips over seeds, Holm at 5 % over the four arms; the secondary endpoint as above. Below 0, in an"
    " arm that is harmed at σ = .7: the harm is specific to routing. Above 0: noise beside the routers harms more. "
    "Else: no difference that matters, if the 90 % interval of the slope lies within ±.02 for ten times the KL; else "
    "undecided. The two families are decided at 5 % each. Stopping: 24 seeds, 60 steps; a diverged run matches "
    "nothing from there on. Differences at single scales, and harm beside the routers, are exploratory.",
    differs_from_paper=EARLIER + " Volatility is injected, as in volatility_dial.",
    caution="without any noise KL is about .011, above published KL between engine and trainer (1.5e-3). A slope is "
    "no level: a difference between places that is equal at all scales has slope 0. One learning rate, one task.",
    cost="Cold starts come on top: about 30 s of one core per seed. 1056 runs of 60 steps: 10.6 CPU-hours.",
    seconds_per_step=0.6,
)


# ---------------------------------------------------------------------- planned contrasts
ARMS = [arm.name for arm in study.arms]
SCALES = sorted(ROUTERS, reverse=True)
"""Of the noise in the routers, in the order of the fixed sequence."""
MATCHED = 0.25
"""The gate: by what share KL beside the routers may differ from that in them."""


def harm(arm: str, scale: float, places: dict[float, str] = ROUTERS) -> Form:
    """An arm with noise of a scale − without noise."""
    return Condition(places[scale])[arm] - Condition(NONE)[arm]


RULE = Rule(
    ENDPOINT,
    SECONDARY,
    {arm: {f"{arm}, σ = {scale:g} − no noise": harm(arm, scale) for scale in SCALES} for arm in ARMS},
    gates=(Gains(Condition(NONE)["grpo"]),),
    bootstrap=True,
)
CORRECTED = (
    "the fixed sequence of each arm and Holm over arms; of slopes, after Holm over the 4 arms. Slopes are for ten "
    "times the KL"
)


def judged(frames: Frames) -> list[tuple[Outcome, str]]:
    """What the rule says of every harm, and of every slope."""
    harms, slopes = in_sequence(RULE.outcomes(frames)), slope_rule(frames).outcomes(frames)["slopes"]
    every = [*(one for chain in harms.values() for one in chain), *slopes]
    if not RULE.passed(frames):
        return [(one, VOID) for one in every]
    unmatched = any(abs(beside / inside - 1) > MATCHED for inside, beside in medians(frames).values())
    harmed = [chain[0].sign < 0 for chain in harms.values()]
    return [
        *((one, "harm" if one.sign < 0 else otherwise(one)) for chain in harms.values() for one in chain),
        *((one, NOTHING if unmatched else of_a_slope(one, worst)) for one, worst in zip(slopes, harmed, strict=True)),
    ]


verdict = spoken(judged, RULE)


def otherwise(one: Outcome) -> str:
    """The words of the rule where nothing else holds."""
    return "no difference that matters" if one.equivalent else "undecided"


def of_a_slope(slope: Outcome, harmed: bool) -> str:
    """What a slope of (in routers − beside) means, of an arm that the largest noise in the routers harms or not."""
    if slope.sign < 0 and harmed:
        return "the harm is specific to routing"
    return "noise beside the routers harms more" if slope.sign > 0 else otherwise(slope)


def in_sequence(found: Mapping[str, Sequence[Outcome]]) -> dict[str, list[Outcome]]:
    """The same outcomes with p-values adjusted by the fixed sequence of every arm, and Holm over arms: an arm that is
    harmed at all scales passes its share on. What the sequence does not reach has p = 1."""
    largest = [max(map(p_of_harm, chain)) for chain in found.values()]
    harmed = sum(p <= LEVEL for p in holm(largest))
    arms, adjusted = max(len(found) - harmed, 1), {}
    for arm, chain in found.items():
        adjusted[arm], tested = [], True
        for one in chain:
            now = replace(one, adjusted=min(1.0, arms * one.primary.p) if tested else 1.0)
            adjusted[arm].append(now)
            tested = tested and now.sign < 0
    return adjusted


def p_of_harm(one: Outcome) -> float:
    """The p-value of a difference below 0 that the secondary endpoint does not oppose; 1 for any other."""
    return one.primary.p if replace(one, adjusted=0.0).sign < 0 else 1.0


def slope_rule(frames: Frames) -> Rule:
    """Per arm: the least-squares slope of (noise in routers − noise beside them) over log10 KL, as measured."""
    along = np.array([np.log10(both).mean() for both in medians(frames).values()])
    along -= along.mean()
    forms = {}
    for arm in ARMS:
        gaps = [harm(arm, scale) - harm(arm, scale, OTHERS) for scale in SCALES]
        terms = [weight * gap for weight, gap in zip(along / (along @ along), gaps, strict=True)]
        forms[f"{arm}, slope of in routers − beside"] = sum(terms[1:], terms[0])
    return Rule(ENDPOINT, SECONDARY, {"slopes": forms}, bootstrap=True)


def medians(frames: Frames) -> dict[float, tuple[float, float]]:
    """Scale → GRPO's KL with noise in the routers, and beside them."""
    return {scale: (median_kl(frames, ROUTERS[scale]), median_kl(frames, OTHERS[scale])) for scale in SCALES}
