"""The pilot of deep: which learning rate is best for each method in a model of 24 layers with fresh rollouts?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, DIFFERS, ENDPOINT, SECONDARY, grpo, gspo_short, layers, replay  # noqa: E402

from moe_rl.study import Study  # noqa: E402

RATES = (5e-5, 1e-4, 2e-4)

study = Study(
    name="deep_pilot",
    question="In a model of 24 layers, with fresh rollouts: which learning rate is best for GRPO, for GRPO with replay "
    "(R2) and for GSPO?",
    hypothesis="Every method is best at 1e-4, as at 6 layers with old rollouts, or at 5e-5.",
    arms=(grpo, replay, gspo_short),
    base=BASE.replace(**layers(24)),
    seeds=tuple(range(3300, 3304)),
    own_cold_starts=True,
    conditions={f"rate={rate:g}": {"optimizer.lr": rate} for rate in RATES},
    figures=(),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    metrics=("token_ess", "token_kl_k3"),
    decision_rule="It chooses, and decides nothing. Of each method the rate with the highest mean over seeds of the "
    "primary endpoint (sampled exact match on 256 held-out prompts, mean of the evaluations after steps 30, 35, 40, 45 "
    "and 50). Where that is the lowest or the highest of the grid, the grid is extended by a factor of two at that "
    "end, with the same seeds, until it is not. A tie within 0.002 goes to the lower rate. Stopping: 4 seeds, 50 "
    "steps; a diverged run matches nothing from there on. deep compares the methods on other seeds.",
    differs_from_paper=DIFFERS.replace("0.7 M parameters (6 layers", "2.7 M parameters (24 layers"),
    caution="four seeds choose a rate; they do not show that one method is better than another.",
    cost="36 runs of 50 steps; warm-ups of 4 seeds come on top.",
    seconds_per_step=2.3,
)
