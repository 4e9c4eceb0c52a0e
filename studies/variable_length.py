"""Responses of 5 to 13 tokens, at a rate that does not end every run: what `controls` could not tell."""

from small import BASE, DIFFERS, SECONDS, grpo, gspo, replay

from moe_rl.registry import Component
from moe_rl.study import Study

study = Study(
    name="variable_length",
    question="Do the arms differ where responses differ in length?",
    hypothesis="As with a fixed length at this rate, they do not.",
    arms=(grpo, replay, gspo),
    base=BASE.replace(task=Component("running_sums", digits=12, min_digits=4), steps=60, **{"optimizer.lr": 2e-4}),
    seeds=(40, 41, 42),
    own_cold_starts=True,
    figures=("learning", "clipping"),
    comparisons=(("grpo-replay", "grpo"), ("gspo", "grpo")),
    decision_rule="Endpoint: mean reward over steps 31–60; exploratory: differences with 95 % Student t intervals over "
    "3 seeds. Declared after `controls`, in which all runs of this task collapsed at 5.66e-4. Stopping: 3 seeds × 3 "
    "arms × 60 steps; a diverged run has reward 0 from there on.",
    differs_from_paper=DIFFERS.replace("13 response tokens", "5 to 13 response tokens"),
    caution="exploratory; the cold starts of controls, whose runs at another rate have been seen.",
    cost="Cold starts are those of controls.",
    seconds_per_step=SECONDS,
)
