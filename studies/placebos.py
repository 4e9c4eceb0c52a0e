"""Placebos and doses: what replay does when only part of it, or something else, is replayed."""

from small import BASE, DIFFERS, SECONDS, grpo, replay

from moe_rl.config import Arm
from moe_rl.registry import Component
from moe_rl.study import Study

noises = tuple(
    Arm(name=f"replay-{share}", routes=Component("random_share", share=share / 100)) for share in (25, 50, 75)
)
flips = Arm(name="false-flips", routes=Component("false_flips", share=0.18))
"""About the share of routers whose set changes in one step at this learning rate: 8 % at 2e-4 and 14 % at 4e-4 in
`expert_volatility`, carried on to 5.66e-4."""
shuffled = Arm(name="shuffled", routes="shuffled")

study = Study(
    name="placebos",
    question="Is what Routing Replay does a matter of the old policy's own routes, and does it come by dose?",
    hypothesis="The effect of replay grows with the share of (token, layer) pairs replayed; false flips and routes of "
    "other prompts do harm.",
    arms=(grpo, *noises, replay, flips, shuffled),
    base=BASE.replace(**{"optimizer.lr": 5.66e-4, "steps": 60}),
    seeds=(40, 41, 42, 43),
    own_cold_starts=True,
    figures=("learning", "expert_change", "ratio_spread"),
    comparisons=(("grpo-replay", "grpo"), ("false-flips", "grpo-replay")),
    decision_rule="Endpoint: mean reward over steps 31–60. Primary: the slope of reward over the dose 0, ¼, ½, ¾, 1 "
    "(least squares per seed), 95 % Student t over 4 seeds: above 0, replay helps by dose; below, it harms by dose; "
    "else undetermined at n = 4. Placebos are exploratory (with 4 seeds no p of a pair is below 0.12). Stopping: 4 "
    "seeds × 7 arms × 60 steps; a diverged run has reward 0 from there on.",
    verdict="verdicts:placebos",
    differs_from_paper=DIFFERS,
    caution="one learning rate; grpo and its cold starts are those of why_gspo.",
    cost="Cold starts are those of why_gspo.",
    seconds_per_step=SECONDS,
)
