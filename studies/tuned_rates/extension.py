"""The pilot of tuned_rates, where the best rate or clip range was at an end of its grid: one value further."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import lagged, with_clip  # noqa: E402
from tuned_rates.pilot import study as pilot  # noqa: E402

from moe_rl.study import Study  # noqa: E402

narrower = with_clip("grpo", 0.05, "grpo-narrower")
widest = with_clip("grpo", 0.8, "grpo-widest")
gspo_widest = with_clip("gspo_short", 0.04, "gspo-widest")
arms = {arm.name: arm for arm in (*pilot.arms, narrower, widest, gspo_widest)}
FURTHER = {
    (0, 4e-4): ("grpo-narrow", "grpo-replay", "gspo-wide"),
    (0, 2e-4): ("grpo-narrower", "gspo-widest"),
    (2, 1e-4): ("grpo-widest", "gspo-widest"),
}
"""(lag, rate) → arms: from the best point of each method, one step along each axis at whose end it was."""

study = Study(
    name="tuned_rates_extension",
    question=pilot.question,
    hypothesis="No value beyond the pilot's grid is better than its best one.",
    arms=tuple(arms[name] for name in dict.fromkeys(name for names in FURTHER.values() for name in names)),
    base=pilot.base,
    seeds=pilot.seeds,
    own_cold_starts=True,
    conditions={
        f"lag={lag},rate={rate:g}": {**lagged(lag), "optimizer.lr": rate, "arms": names}
        for (lag, rate), names in FURTHER.items()
    },
    figures=(),
    endpoint=pilot.endpoint,
    further_endpoints=pilot.further_endpoints,
    metrics=pilot.metrics,
    decision_rule=pilot.decision_rule,
    differs_from_paper=pilot.differs_from_paper,
    caution=pilot.caution,
    cost="28 runs of 50 steps.",
    seconds_per_step=0.55,
)
