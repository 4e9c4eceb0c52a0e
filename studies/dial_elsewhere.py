"""Is what `volatility_dial` found so at other rates, with fewer updates, on another task and another model?"""

from small import grpo, gspo, replay
from volatility_dial import SIGMAS
from volatility_dial import study as router_noise

from moe_rl.study import Study

SIGMA = max(SIGMAS)
PLACES = {
    "lr=1e-4": {"optimizer.lr": 1e-4},
    "lr=4e-4": {"optimizer.lr": 4e-4},
    "N=4": {"mini_batches": 4, "optimizer.warmup": 20},
    "spell_backward": {"task": "reasoning_gym:spell_backward"},
    "olmoe": {"model.name": "olmoe-tiny"},
}
"""What differs from volatility_dial. N = 4 is the paper's number of updates per batch, with twice the rows in each;
olmoe-tiny chooses 4 of 16 experts and does not renormalise their gates."""

study = Study(
    name="dial_elsewhere",
    question="Does volatility as a dose harm GRPO, and do replay and GSPO help, at other learning rates, with the "
    "paper's four updates, on another task and in another model?",
    hypothesis="As in volatility_dial: it harms, replay gives some of the reward back, GSPO the greedy answer.",
    arms=(grpo, replay, gspo),
    base=router_noise.base,
    seeds=(500, 501, 502, 503),
    own_cold_starts=True,
    cells={f"{place},sigma={s:g}": settings | ({"router_noise.scale": s} if s else {"arms": ("grpo",)})
           for place, settings in PLACES.items() for s in (0.0, SIGMA)},
    figures=(),
    further_endpoints=router_noise.further_endpoints,
    comparisons=(("grpo-replay", "grpo"), ("gspo", "grpo")),
    decision_rule="Exploratory: differences with 95 % intervals over 4 seeds, place by place, of volatility_dial's two "
    "endpoints: GRPO at σ = 2 − GRPO at σ = 0, and at σ = 2 replay − GRPO and GSPO − GRPO. A place where GRPO at σ = 0 "
    "does not end above its cold start in greedy exact match says nothing. Stopping: 4 seeds, 50 steps; a diverged run "
    "has reward 0 from there on.",
    verdict="dial_elsewhere_verdicts:verdict",
    differs_from_paper=router_noise.differs_from_paper,
    caution="four seeds; no setting was tuned to its place.",
    cost="Cold starts come on top, for three kinds of model and task.",
    seconds_per_step=0.7,
)
