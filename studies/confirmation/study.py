"""Does the order of the arms hold on seeds nobody has seen, and for longer? At one learning rate chosen beforehand."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, EARLIER, grpo, gspo_short, replay  # noqa: E402

from moe_rl.config import Optimizer  # noqa: E402
from moe_rl.study import Study  # noqa: E402

LEARNING_RATE = 4e-4
"""By rule: the largest of `learning_rates` at which the mean over its seeds of GRPO's reward, steps 51–100, is at least
half of GRPO's best. It is .71 here, .82 at 2e-4 and .21 at 5.66e-4. The largest that passes has passed with some
luck: GRPO may do worse here."""

study = Study(
    name="confirmation",
    question="At a learning rate near the end of GRPO's range, do Routing Replay or GSPO keep training from collapse?",
    hypothesis="GRPO with Routing Replay and GSPO earn more than GRPO and collapse later (GSPO, arXiv 2507.18071, "
    "Fig. 1 and 3).",
    arms=(grpo, replay, gspo_short),
    base=BASE.replace(
        optimizer=Optimizer(lr=LEARNING_RATE), steps=300, eval_every=100, eval_prompts=128, save_every=100
    ),
    seeds=tuple(range(50, 66)),
    own_cold_starts=True,
    figures=("learning",),
    comparisons=(("grpo-replay", "grpo"), ("gspo_short", "grpo"), ("gspo_short", "grpo-replay")),
    decision_rule="Endpoint: mean reward over steps 151–300. Three contrasts, two-sided sign flips over 16 seeds, Holm "
    "at 5 %: decided above 0 in favour of the first arm is 'reproduced', below 0 'reversed' (for gspo − grpo-replay, "
    "on which the paper is silent, 'GSPO better' or 'worse'); undecided with a 95 % interval within ±.05 is 'no "
    "difference that matters', else 'undetermined at n = 16'. Second: time to collapse (EMA10 of the reward below half "
    "of its best so far for 20 steps), Kaplan–Meier curves and unadjusted log-rank tests. Stopping: 16 seeds × 3 arms "
    "× 300 steps; a diverged run has reward 0 from there on.",
    differs_from_paper=EARLIER,
    caution="one learning rate, one task, one size.",
    cost="Cold starts come on top: about 30 s of one core per seed.",
    seconds_per_step=0.6,
)
