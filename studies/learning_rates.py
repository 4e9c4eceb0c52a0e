"""Reward against learning rate: does GSPO, or Routing Replay, widen the band in which training is stable?"""

from small import BASE, DIFFERS, SECONDS, grpo, gspo, gspo_replay, replay

from moe_rl.study import Study

study = Study(
    name="learning_rates",
    question="Up to which learning rate does each arm learn, and do the arms differ at their own best one?",
    hypothesis="GSPO loses half of its reward at a higher learning rate than GRPO, and GRPO with Routing Replay at a "
    "higher one than GRPO without (GSPO, arXiv 2507.18071, Fig. 1 and 3: GRPO without replay does not converge).",
    arms=(grpo, replay, gspo, gspo_replay),
    base=BASE,
    seeds=(0, 1, 2, 3),
    own_cold_starts=True,
    factors={"optimizer.lr": (2e-4, 2.83e-4, 4e-4, 5.66e-4, 8e-4, 1.13e-3)},
    figures=("against:optimizer.lr", "against:optimizer.lr:expert slots changed"),
    comparisons=(("grpo-replay", "grpo"), ("gspo", "grpo"), ("gspo", "grpo-replay")),
    decision_rule="Endpoint: mean reward over steps 51–100. (1) Primary, for the three contrasts: the shift of log2 of "
    "the learning rate at which a curve falls below half of its own best, log-linearly interpolated, paired by seed; "
    "95 % Student t intervals at the Bonferroni level for three (98.3 %). Above 0: reproduced; below: reversed; else "
    "undetermined at n = 4. A curve that never falls is censored at 1.13e-3 and counts there; their number is "
    "reported. (2) The difference at each arm's own best learning rate, which is chosen on the three other seeds: "
    "exploratory, as are all single learning rates. Stopping: 4 seeds × 24 cells × 100 steps, looked at when all have "
    "ended; a diverged run has reward 0 from there on.",
    verdict="verdicts:learning_rates",
    differs_from_paper=DIFFERS,
    caution="four seeds, one task, one size; the interval is over cold starts and rollouts together.",
    cost="Cold starts come on top: about 30 s of one core per seed.",
    seconds_per_step=SECONDS,
)
