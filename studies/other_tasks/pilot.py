"""The pilot of other_tasks: which learning rate is best for each method on two other tasks, with old rollouts?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, DIFFERS, ENDPOINT, SECONDARY, grpo, lagged, with_clip  # noqa: E402

from moe_rl.objectives.methods import arm  # noqa: E402
from moe_rl.registry import Component  # noqa: E402
from moe_rl.study import Study  # noqa: E402

RATES = (5e-5, 1e-4, 2e-4)
TASKS = {
    "spell_backward": {"task": "reasoning_gym:spell_backward"},
    "digits=48": {"task": Component("running_sums", digits=48), "max_new_tokens": 49},
}
tis = arm("tis+name=grpo-tis")
narrow, wide = with_clip("gspo_short", 0.005, "gspo-narrow"), with_clip("gspo_short", 0.01, "gspo-wide")

study = Study(
    name="other_tasks_pilot",
    question="On words spelled backward, and on running sums of 48 digits, with rollouts two steps old: which learning "
    "rate is best for GRPO, for GSPO with two clip ranges, and for TIS?",
    hypothesis="The best rates are those of running sums of 12 digits or half of them.",
    arms=(grpo, narrow, wide, tis),
    base=BASE.replace(**lagged(2)),
    seeds=tuple(range(3700, 3704)),
    own_cold_starts=True,
    conditions={
        f"{task},rate={rate:g}": {**settings, "optimizer.lr": rate}
        for task, settings in TASKS.items()
        for rate in RATES
    },
    figures=(),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    metrics=("token_ess", "token_kl_k3"),
    decision_rule="It chooses, and decides nothing. Of each arm, on each task by itself: the rate with the highest "
    "mean over seeds of the primary endpoint (sampled exact match on 256 held-out prompts, mean of the evaluations "
    "after steps 30, 35, 40, 45 and 50). Where that is the lowest or the highest of the grid, the grid is extended by "
    "a factor of two at that end, with the same seeds, until it is not. A tie within 0.002 goes to the lower rate. "
    "Stopping: 4 seeds, 50 steps; a diverged run matches nothing from there on. other_tasks compares on other seeds.",
    differs_from_paper=DIFFERS.replace("13 response tokens", "up to 13 or 49 response tokens") + " The lag is two "
    "steps of 8 updates, and fixed.",
    caution="four seeds choose a rate; they do not show that one method is better than another.",
    cost="96 runs of 50 steps; warm-ups of 4 seeds on 2 tasks come on top.",
    seconds_per_step=1.1,
)
