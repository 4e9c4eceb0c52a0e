"""When does routing volatility hurt, and what cures it? Volatility as an assigned dose, crossed with arms and seeds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, EARLIER, SECONDARY, grpo, gspo_short, noise, replay  # noqa: E402
from contrasts import Both, Condition  # noqa: E402

from moe_rl.study import Study  # noqa: E402

SIGMAS = (0.4, 1.0, 2.0)

study = Study(
    name="volatility_dial",
    question="Does routing volatility by itself harm GRPO, and do Routing Replay or GSPO take the harm away?",
    hypothesis="It does, and both do: replay keeps the routes, and GSPO's sequence ratios average over their noise "
    "(GSPO, arXiv 2507.18071, sections 3 and 5.3).",
    arms=(grpo, replay, gspo_short),
    base=BASE,
    seeds=tuple(range(200, 216)),
    own_cold_starts=True,
    conditions={
        noise("weights", 0): {},
        **{noise("weights", s): {"router_noise.scale": s} for s in SIGMAS},
        # Under replay the form `choice` moves nothing: its runs are those of σ = 0, so one dose shows it.
        **{
            noise("choice", s): {"router_noise.scale": s, "router_noise.target": "choice"}
            | ({} if s == max(SIGMAS) else {"arms": ("grpo", "gspo_short")})
            for s in SIGMAS
        },
    },
    figures=(),
    further_endpoints=(SECONDARY,),
    comparisons=(("grpo-replay", "grpo"), ("gspo_short", "grpo")),
    verdict="study.py:verdict",
    decision_rule="Endpoints: mean reward over steps 26–50, and greedy exact match on 256 held-out prompts, mean of "
    "the evaluations after steps 30, 35, 40, 45, 50. An effect counts only if both are decided with the same sign: "
    "two-sided sign flips over 16 seeds, Holm at 5 % over the two contrasts at σ = 2 of each form, each endpoint by "
    "itself. Co-headline: at σ = .4, a dose nearer to published volatility, the 90 % interval of a difference in "
    "reward within ±.02 is 'equivalent', else 'not shown to be'. Harm of volatility: the same two endpoints, GRPO at σ "
    "= 2 − GRPO at σ = 0, sign flips at 5 % for each form. Exploratory: slopes over σ, with 95 % intervals; entropy, "
    "since reward also rises by sharpening. Machinery: in the form choice, runs with replay at σ = 2 are those at σ = "
    "0 bit for bit, or the study is void. Every arm at σ = 0 must end above its cold start in greedy exact match, or "
    "the learning rate damages the model and the study is void. Stopping: 16 seeds, 50 steps; a diverged run has "
    "reward 0 from there on.",
    differs_from_paper=EARLIER + " Volatility is injected: a random direction for every router's weights, the same "
    "within a step and for all arms of a seed, that grows from update to update.",
    caution="one learning rate, one task, one size; the direction is random, not the optimizer's, and doses move far "
    "more slots than any report of production training.",
    cost="Cold starts come on top: about 30 s of one core per seed.",
    seconds_per_step=0.7,
)

FORMS = ("weights", "choice")
"""Gates and sets move; sets alone move."""
SMALL, LARGE = min(SIGMAS), max(SIGMAS)
LARGEST = {form: Condition(noise(form, LARGE)) for form in FORMS}
STILL = Condition(noise("weights", 0))
"""Replay under the form choice is replay without noise, bit for bit, so both forms have all arms at the largest σ."""
RULE = Both(
    (study.endpoint, *study.further_endpoints),
    {form: {f"{a} − {b}": at[a] - at[b] for a, b in study.comparisons} for form, at in LARGEST.items()}
    | {f"{form}, harm": {f"grpo, σ = {LARGE:g} − 0": at["grpo"] - STILL["grpo"]} for form, at in LARGEST.items()},
)
verdict = RULE.verdict
CORRECTED = "the 2 comparisons of a form and endpoint"
