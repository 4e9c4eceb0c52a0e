"""The pilot of larger: which learning rate is best for each method at 10 M parameters?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, DIFFERS, ENDPOINT, MIDDLE, SECONDARY, grpo, gspo_short, lagged, replay  # noqa: E402

from moe_rl.study import Study  # noqa: E402

RATES = (5e-5, 1e-4, 2e-4)
LAGS = (0, 2)

study = Study(
    name="larger_pilot",
    question="At 10 M parameters (12 layers, 32 experts, top-4): which learning rate is best for GRPO, for GRPO with "
    "replay (R2) and for GSPO, with fresh rollouts and with rollouts two steps old?",
    hypothesis="The best rates are those of 0.7 M parameters or half of them.",
    arms=(grpo, replay, gspo_short),
    base=BASE.replace(**MIDDLE),
    seeds=tuple(range(3600, 3604)),
    own_cold_starts=True,
    conditions={f"lag={lag},rate={rate:g}": {**lagged(lag), "optimizer.lr": rate} for lag in LAGS for rate in RATES},
    figures=(),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    metrics=("token_ess", "token_kl_k3"),
    decision_rule="It chooses, and decides nothing. Of each method, at each lag by itself: the rate with the highest "
    "mean over seeds of the primary endpoint (sampled exact match on 256 held-out prompts, mean of the evaluations "
    "after steps 30, 35, 40, 45 and 50). Where that is the lowest or the highest of the grid, the grid is extended by "
    "a factor of two at that end, with the same seeds, until it is not. A tie within 0.002 goes to the lower rate. "
    "Stopping: 4 seeds, 50 steps; a diverged run matches nothing from there on. larger compares on other seeds.",
    differs_from_paper=DIFFERS.replace("0.7 M parameters (6 layers, 16", "10 M parameters (12 layers, 32").replace(
        "top-2", "top-4"
    ),
    caution="four seeds choose a rate; they do not show that one method is better than another.",
    cost="72 runs of 50 steps; warm-ups of 4 seeds come on top.",
    seconds_per_step=2.2,
)
