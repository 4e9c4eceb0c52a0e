"""In a model of 24 layers, with fresh rollouts: do replay (R2) or GSPO help GRPO at the best rate, and at twice it?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, DIFFERS, ENDPOINT, SECONDARY, grpo, gspo_short, layers, replay  # noqa: E402
from contrasts import Condition, Gains, Rule, judged_by, spoken  # noqa: E402

from moe_rl.study import Study  # noqa: E402

SEEDS = tuple(range(3900, 3924))
best, double = Condition("rate=0.0001"), Condition("rate=0.0002")


def rule_of(here: Condition, rate: str) -> Rule:
    """Three contrasts of one rate, with a family of their own."""
    pairs = (("grpo-replay", "grpo"), ("gspo_short", "grpo"), ("gspo_short", "grpo-replay"))
    forms = {f"{a} − {b}, {rate}": here[a] - here[b] for a, b in pairs}
    return Rule(ENDPOINT, SECONDARY, {rate: forms}, gates=(Gains(here["grpo"]),))


RULES = {here.name: rule_of(here, rate) for here, rate in ((best, "1e-4"), (double, "2e-4"))}
CORRECTED = "Holm over the three comparisons of a rate"

study = Study(
    name="deep",
    question="In a model of 24 layers, with fresh rollouts: do R2 or GSPO help GRPO at the learning rate that is best "
    "for each of them, and at twice that rate?",
    hypothesis="At 1e-4 neither R2 nor GSPO differs from GRPO by .02 or more. At 2e-4 R2 is below GRPO, as on the four "
    "seeds of the pilot (−.07), and GSPO does not differ from it by .02 or more.",
    arms=(grpo, replay, gspo_short),
    base=BASE.replace(**layers(24)),
    seeds=SEEDS,
    own_cold_starts=True,
    conditions={best.name: {"optimizer.lr": 1e-4}, double.name: {"optimizer.lr": 2e-4, "seeds": SEEDS[:12]}},
    figures=(),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    metrics=("token_ess", "token_kl_k3", "expert_change_rate"),
    verdict="study.py:verdict",
    decision_rule="Primary endpoint: sampled exact match on 256 held-out prompts, mean of the evaluations after steps "
    "30, 35, 40, 45 and 50. Secondary: greedy exact match, likewise. The rate of 1e-4 is what the pilot chose for all "
    "three methods on four other seeds. The contrasts stand in this file (RULES): three within each rate; exact "
    "two-sided sign flips over seeds, Holm at 5 % within each rate. An effect: decided in the primary endpoint, and "
    "the secondary not decided (5 %, not adjusted) with the other sign. Else no difference that matters, if the 90 % "
    "interval (Student's t) lies within ±.02. Else undecided. Gate: at each rate GRPO ends above its start in greedy "
    "match (mean over seeds); where it fails, nothing is concluded of that rate. Stopping: 50 steps, 24 seeds at 1e-4 "
    "and the first 12 of them at 2e-4; a diverged run matches nothing from there on. Outcomes are looked at when all "
    "runs are there.",
    differs_from_paper=DIFFERS.replace("0.7 M parameters (6 layers", "2.7 M parameters (24 layers"),
    caution="clip ranges are the methods' defaults. Four pilot seeds chose the rate, from steps of a factor of two. "
    "One task, one size and 50 steps; the lag is 0.",
    cost="108 runs of 50 steps; warm-ups of 24 seeds come on top.",
    seconds_per_step=2.3,
    seconds_of_warm_up=180,
)


judged = judged_by(RULES)
verdict = spoken(judged, *RULES.values())
