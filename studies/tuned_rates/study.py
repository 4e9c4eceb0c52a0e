"""Do replay (R2) or GSPO help GRPO when every method has its own best learning rate and clip range?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, DIFFERS, ENDPOINT, SECONDARY, lagged, replay, with_clip  # noqa: E402
from contrasts import Condition, Gains, Rule, judged_by, spoken  # noqa: E402

from moe_rl.study import Study  # noqa: E402

narrow, wide = with_clip("grpo", 0.1, "grpo-narrow"), with_clip("grpo", 0.4, "grpo-wide")
gspo_wide = with_clip("gspo_short", 0.02, "gspo-wide")
CHOSEN = {0: (2e-4, narrow), 2: (1e-4, wide)}
"""Lag → the rate that was best for every method there, and the GRPO of the best clip range."""


def condition(lag: int) -> Condition:
    """The condition of a lag, at its rate."""
    return Condition(f"lag={lag},rate={CHOSEN[lag][0]:g}")


def rule_of(lag: int) -> Rule:
    """Three contrasts of one lag, with a family of their own."""
    here, grpo = condition(lag), CHOSEN[lag][1].name
    forms = {
        f"{a} − {b}, lag {lag}": here[a] - here[b]
        for a, b in ((replay.name, grpo), (gspo_wide.name, grpo), (gspo_wide.name, replay.name))
    }
    return Rule(ENDPOINT, SECONDARY, {f"lag {lag}": forms}, gates=(Gains(here[grpo]),))


RULES = {lag: rule_of(lag) for lag in CHOSEN}
CORRECTED = "Holm over the three comparisons of a lag"

study = Study(
    name="tuned_rates",
    question="When GRPO, GRPO with replay (R2) and GSPO each have their own best learning rate and clip range, does R2 "
    "or GSPO help, with fresh rollouts and with rollouts two steps old?",
    hypothesis="At neither lag does R2 or GSPO differ from GRPO by .02 or more.",
    arms=(narrow, wide, replay, gspo_wide),
    base=BASE,
    seeds=tuple(range(3100, 3124)),
    own_cold_starts=True,
    conditions={
        condition(lag).name: {
            **lagged(lag),
            "optimizer.lr": rate,
            "arms": (grpo.name, replay.name, gspo_wide.name),
        }
        for lag, (rate, grpo) in CHOSEN.items()
    },
    figures=(),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    metrics=("token_ess", "token_kl_k3"),
    verdict="study.py:verdict",
    decision_rule="Primary endpoint: sampled exact match on 256 held-out prompts, mean of the evaluations after steps "
    "30, 35, 40, 45 and 50. Secondary: greedy exact match, likewise. Rates and clip ranges are those that the pilot "
    "chose on other seeds. The contrasts stand in this file (RULES): three within each lag; exact two-sided sign "
    "flips over seeds, Holm at 5 % within each lag. An effect: decided in the primary endpoint, and the secondary not "
    "decided (5 %, not adjusted) with the other sign. Else no difference that matters, if the 90 % interval "
    "(Student's t) lies within ±.02. Else undecided. Gate: at each lag GRPO ends above its start in greedy match "
    "(mean over seeds); where it fails, nothing is concluded of that lag. Stopping: 24 seeds, 50 steps; a diverged "
    "run matches nothing from there on. Outcomes are looked at when all runs are there.",
    differs_from_paper=DIFFERS + " Lags are in steps of 8 updates, and fixed; one engine in the policy's numerics.",
    caution="four pilot seeds chose rates and clip ranges, from steps of a factor of two. R2 has GRPO's default clip "
    "range. One task, one size and 50 steps.",
    cost="144 runs of 50 steps; warm-ups of 24 seeds come on top.",
    seconds_per_step=0.55,
)


judged = judged_by(RULES)
verdict = spoken(judged, *RULES.values())
