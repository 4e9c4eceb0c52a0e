"""The pilot of depth: at which learning rate does a step move the policy in every depth as far as at 6 layers?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, DIFFERS, grpo, layers  # noqa: E402

from moe_rl.study import Study  # noqa: E402

DEPTHS = (2, 6, 12, 24)
RATES = (5e-5, 1e-4, 2e-4, 4e-4)

study = Study(
    name="depth_pilot",
    question="How does the KL of a step depend on the learning rate in models of 2, 6, 12 and 24 layers?",
    hypothesis="It grows with the rate in every depth, and with the depth at every rate.",
    arms=(grpo,),
    base=BASE.replace(steps=20, save_every=20, **{"measure.detail_every": 5}),
    seeds=(3400, 3401, 3402),
    own_cold_starts=True,
    conditions={
        f"layers={depth},rate={rate:g}": {**layers(depth), "optimizer.lr": rate} for depth in DEPTHS for rate in RATES
    },
    figures=(),
    endpoint="token_kl_k3",
    metrics=("expert slots changed", "token_ess"),
    decision_rule="It chooses, and decides nothing. For each depth: log KL (token_kl_k3, mean of steps 11 to 20), mean "
    "over seeds, is interpolated linearly in log rate; the rate at which it is that of 6 layers at 2e-4 is used in "
    "depth. Where that lies outside the grid, the grid is extended by a factor of two. Stopping: 3 seeds, 20 steps.",
    differs_from_paper=DIFFERS,
    caution="three seeds.",
    cost="48 runs of 20 steps; warm-ups of 3 seeds in 4 depths come on top.",
    seconds_per_step=1.1,
)
