"""Does what is known of one answer hold for conversations, and what do advantages per turn add?"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, EARLIER, SECONDARY, grpo, gspo_short, replay  # noqa: E402

from moe_rl.config import Arm  # noqa: E402
from moe_rl.registry import Component  # noqa: E402
from moe_rl.storage.frames import Frames  # noqa: E402
from moe_rl.study import Study  # noqa: E402

DIGITS = 8
ONE_TURN = DIGITS + 1
"""Tokens of an answer, its end included."""
gspo_token = Arm(name="gspo-token", loss=Component("gspo_token", clip_low=0.01, clip_high=0.013), advantage="by_turn")
grpo_turn = Arm(name="grpo-turn", advantage="by_turn")

study = Study(
    name="many_turns",
    question="In conversations of two turns, at equal tokens: does Routing Replay help GRPO, is GSPO better than GRPO, "
    "and do advantages per turn (GSPO-token) add to GSPO?",
    hypothesis="Where routes are quiet neither replay nor GSPO changes much, as with one turn. Advantages per turn do "
    "help: a right correction is compared with other corrections, while the one advantage of a conversation punishes "
    "it for not having been right at once.",
    arms=(grpo, replay, gspo_short, gspo_token, grpo_turn),
    base=BASE.replace(task=Component("corrected_sums", digits=DIGITS, spoiled=0.75), max_new_tokens=2 * ONE_TURN + 2),
    seeds=(*range(400, 407), 408),
    own_cold_starts=True,
    figures=("learning",),
    endpoint="many_turns.study:held_out_at_equal_tokens",
    further_endpoints=(SECONDARY,),
    metrics=("turns", "response_tokens", "environment_tokens"),
    comparisons=(("grpo-replay", "grpo"), ("gspo_short", "grpo"), ("gspo-token", "gspo_short")),
    decision_rule="Endpoint: greedy reward on 256 held-out prompts (1 for an answer that is right at once, .5 for one "
    "right after the correction), over the tokens that the policy had sampled per rollout by then: the mean of the "
    f"straight lines between evaluations from {50 * ONE_TURN // 2} to {50 * ONE_TURN} tokens, which every run of full "
    "answers reaches; one that does not stays at its last value, a diverged one at 0. The three contrasts: two-sided "
    "sign flips over 8 seeds, Holm at 5 %. A 95 % interval within ±.02 is 'no difference that matters'. Exploratory: "
    "grpo-turn − grpo, and gspo-token − gspo minus that, with 95 % intervals. Machinery: GRPO must end above its cold "
    "start, and in the first step of every run at least one conversation in five must have a second turn, or the study "
    "is void. Stopping: 8 seeds, 50 steps. Seed 408 takes the place of 407, whose cold start, before any arm, does not "
    "reach the target in 3,000 steps.",
    differs_from_paper=EARLIER.replace(
        "13 response tokens", "9 or 18 response tokens in one or two turns, 2 of the checker between them"
    )
    + " GSPO (2507.18071) proposes GSPO-token for many turns and shows no run of it; its advantages per turn are those "
    "of `by_turn`, since the paper names none.",
    caution="one learning rate, one task, one size; GSPO's range was chosen for 13 tokens and one turn.",
    cost="Cold starts come on top: one to two minutes of one core per seed.",
    seconds_per_step=0.9,
)
TOKENS = study.base.steps * ONE_TURN
"""Per rollout of a step, up to which arms are compared."""


def held_out_at_equal_tokens(run: Frames) -> float:
    """Mean greedy reward on held-out prompts over the second half of TOKENS, which the policy sampled per rollout."""
    steps = run["steps"].sort_values("step")
    tokens = steps["response_tokens"].fillna(0).cumsum()
    measured = steps["eval_reward_greedy"].notna()
    x, y = tokens[measured].to_numpy(dtype=float), steps.loc[measured, "eval_reward_greedy"].to_numpy(dtype=float)
    if not measured.any():  # a run that has only begun
        return float("nan")
    if run.runs["state"].iloc[0] == "diverged":
        x, y = np.append(x, tokens.iloc[-1]), np.append(y, 0.0)
    at = np.linspace(TOKENS / 2, TOKENS, 1001)
    return float(np.interp(at, x, y).mean())
