"""What harms at a lag of two steps: stale samples, or ratios that spread? Does replay help where the ratio sees it?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, DIFFERS, ENDPOINT, SECONDARY, grpo, gspo_short, lagged, replay  # noqa: E402
from contrasts import Condition, Form, Gains, Rule, judged_by, spoken  # noqa: E402

from moe_rl.objectives.methods import arm  # noqa: E402
from moe_rl.study import Study  # noqa: E402

LAG = 2
RATES = (1e-4, 2e-4)
tis = arm("tis+name=grpo-tis")
gspo_tis = arm("gspo_short+truncated(cap=2.0)+name=gspo-tis")
anchor = arm("engine_anchor+name=grpo-anchor")
anchor_r3 = arm("engine_anchor+rollout+name=grpo-anchor-r3")
METHODS = (replay, gspo_short, tis, gspo_tis, anchor, anchor_r3)

tuned, high = (Condition(f"rate={rate:g}") for rate in RATES)


def family(condition: Condition, rate: str) -> dict[str, Form]:
    """The planned contrasts at one rate."""
    pairs = [(a.name, "grpo") for a in METHODS]
    pairs += [("grpo-anchor-r3", "grpo-anchor"), ("gspo-tis", "grpo-tis"), ("grpo-anchor", "gspo_short")]
    return {f"{a} − {b}, {rate}": condition[a] - condition[b] for a, b in pairs}


RULES = {
    tuned.name: Rule(ENDPOINT, SECONDARY, {tuned.name: family(tuned, "1e-4")}, gates=(Gains(tuned["grpo"]),)),
    high.name: Rule(ENDPOINT, SECONDARY, {high.name: family(high, "2e-4")}, gates=(Gains(high["grpo-anchor"]),)),
    "between rates": Rule(
        ENDPOINT,
        SECONDARY,
        {
            "between rates": {
                "grpo, 1e-4 − 2e-4": tuned["grpo"] - high["grpo"],
                "grpo-anchor at 2e-4 − grpo at 1e-4": high["grpo-anchor"] - tuned["grpo"],
                "gspo_short at 2e-4 − grpo at 1e-4": high["gspo_short"] - tuned["grpo"],
            }
        },
        gates=(Gains(tuned["grpo"]),),
    ),
}

CORRECTED = "Holm over the nine comparisons of a rate, and over the three between rates"

study = Study(
    name="stale_or_spread",
    question="With rollouts two steps old: does a method gain by correcting for the policy that sampled (TIS, a ratio "
    "against the engine), or by narrowing what the ratio spreads (GSPO, replay)? Does replay (R3) help where the ratio "
    "is against the engine, so that it sees the lag?",
    hypothesis="At 2e-4 TIS and the ratio against the engine gain over GRPO as much as GSPO does, within .02; R2 does "
    "not. R3 adds less than .02 to the ratio against the engine, and GSPO less than .02 to TIS. At 1e-4 no method is "
    "above GRPO by .02.",
    arms=(grpo, *METHODS),
    base=BASE.replace(**lagged(LAG)),
    seeds=tuple(range(3200, 3216)),
    own_cold_starts=True,
    conditions={condition.name: {"optimizer.lr": rate} for condition, rate in zip((tuned, high), RATES, strict=True)},
    figures=(),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    metrics=("token_ess", "token_kl_k3"),
    verdict="study.py:verdict",
    decision_rule="Primary endpoint: sampled exact match on 256 held-out prompts, mean of the evaluations after steps "
    "30, 35, 40, 45 and 50. Secondary: greedy exact match, likewise. The contrasts stand in this file (RULES): nine "
    "within each rate, three between rates; exact two-sided sign flips over seeds, Holm at 5 % within each of the "
    "three families. An effect: decided in the primary endpoint, and the secondary not decided (5 %, not adjusted) "
    "with the other sign. Else no difference that matters, if the 90 % interval (Student's t) lies within ±.02. Else "
    "undecided. Gates, in greedy match, mean over seeds: at 1e-4 GRPO ends above its start. At 2e-4 the ratio against "
    "the engine does; GRPO is expected to end below its start there, so what is above it there loses less. Where a "
    "gate fails, nothing is concluded from that family. 'Stale samples' is said if both TIS and the ratio against the "
    "engine are effects above 0 at 2e-4 and GSPO + TIS − TIS is no effect above 0; 'spread ratios' if GSPO is an "
    "effect above 0 and both are not; else both, or neither, as the effects say. Stopping: 16 seeds, 50 steps; a "
    "diverged run matches nothing from there on.",
    differs_from_paper=DIFFERS + " The lag is two steps of 8 updates, and fixed; one engine in the policy's numerics, "
    "so that π_old/π_engine is staleness alone.",
    caution="one lag, two rates, one task, one size and 50 steps. TIS is truncated at 2.",
    cost="224 runs of 50 steps; warm-ups of 16 seeds come on top.",
    seconds_per_step=0.55,
)


judged = judged_by(RULES)
verdict = spoken(judged, *RULES.values())
