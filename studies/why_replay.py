"""Replay taken apart: the routes of the ratio × the routes of the gradient."""

from small import BASE, DIFFERS, SECONDS, grpo
from small import replay as both

from moe_rl.config import Arm
from moe_rl.study import Study

of_ratio = Arm(name="replay-of-ratio", ratio_routes="old_policy")
of_gradient = Arm(name="replay-of-gradient", routes="old_policy", ratio_routes="live")

study = Study(
    name="why_replay",
    question="Does Routing Replay act through the importance ratio, or through the experts that are trained?",
    hypothesis="Through the ratio: replay of the ratio alone does what replay does (GSPO, arXiv 2507.18071, section "
    "5.3).",
    arms=(grpo, of_ratio, of_gradient, both),
    base=BASE.replace(**{"optimizer.lr": 5.66e-4, "steps": 60}),
    seeds=(40, 41, 42, 43, 44, 45, 46, 47),
    own_cold_starts=True,
    figures=("learning", "clipping", "expert_change"),
    comparisons=(("replay-of-ratio", "grpo"), ("replay-of-gradient", "grpo"), ("grpo-replay", "grpo")),
    decision_rule="Endpoint: mean reward over steps 31–60. Three contrasts, two-sided sign flips over 8 seeds, Holm "
    "at 5 %. If grpo-replay − grpo is undecided, there is no effect to explain: undetermined at n = 8. Else the "
    "mechanism is the ratio, the gradient, or both: whichever of the two has a decided difference of the same sign; if "
    "neither has, undetermined. Stopping: 8 seeds × 4 arms × 60 steps; a diverged run has reward 0 from there on.",
    verdict="verdicts:why_replay",
    differs_from_paper=DIFFERS,
    caution="one learning rate; grpo and its cold starts are those of why_gspo.",
    cost="Cold starts are those of why_gspo. Split arms take two more forwards per update.",
    seconds_per_step=SECONDS,
)
