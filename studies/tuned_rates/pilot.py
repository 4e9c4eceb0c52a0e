"""The pilot of tuned_rates: which learning rate and which clip range is best for each method?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, DIFFERS, ENDPOINT, SECONDARY, grpo, gspo_short, lagged, replay, with_clip  # noqa: E402

from moe_rl.study import Study  # noqa: E402

RATES = (5e-5, 1e-4, 2e-4)
LAGS = (0, 2)
VARIANTS = {
    "grpo": (with_clip("grpo", 0.1, "grpo-narrow"), grpo, with_clip("grpo", 0.4, "grpo-wide")),
    "grpo-replay": (replay,),
    "gspo": (with_clip("gspo_short", 0.005, "gspo-narrow"), gspo_short, with_clip("gspo_short", 0.02, "gspo-wide")),
}
"""Method → its arms, of which the best one represents it."""


def condition(lag: int, rate: float) -> str:
    """The name of a condition."""
    return f"lag={lag},rate={rate:g}"


study = Study(
    name="tuned_rates_pilot",
    question="Which learning rate and which clip range is best for GRPO, for GRPO with replay (R2) and for GSPO, with "
    "fresh rollouts and with rollouts two steps old?",
    hypothesis="With old rollouts every method is best at 1e-4, and GRPO's default clip is its best.",
    arms=tuple(arm for variants in VARIANTS.values() for arm in variants),
    base=BASE,
    seeds=tuple(range(3000, 3004)),
    own_cold_starts=True,
    conditions={condition(lag, rate): {**lagged(lag), "optimizer.lr": rate} for lag in LAGS for rate in RATES},
    figures=(),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    metrics=("token_ess", "token_kl_k3"),
    decision_rule="It chooses, and decides nothing. Of each method, at each lag by itself: the arm and the rate with "
    "the highest mean over seeds of the primary endpoint (sampled exact match on 256 held-out prompts, mean of the "
    "evaluations after steps 30, 35, 40, 45 and 50). Where the best rate of a method is the lowest or the highest of "
    "the grid, the grid is extended by a factor of two at that end, for that method at that lag, with the same seeds, "
    "until it is not; where the best clip range is at an end, likewise, once. A tie within 0.002 goes to the lower "
    "rate. Stopping: 4 seeds, 50 steps. 8 were declared at first. This was changed for its cost, before any outcome "
    "was looked at. A diverged run matches nothing from there on. tuned_rates compares the chosen arms on other seeds.",
    differs_from_paper=DIFFERS + " Lags are in steps of 8 updates, and fixed; one engine in the policy's numerics.",
    caution="four seeds choose a rate; they do not show that one method is better than another.",
    cost="168 runs of 50 steps; warm-ups of 4 seeds come on top.",
    seconds_per_step=0.55,
)
