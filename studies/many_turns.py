"""Does what is known of one answer hold for conversations, and what do advantages per turn add?"""

from small import BASE, DIFFERS, GSPO_CLIP, grpo, gspo, replay
from volatility_dial import WARMED_UP

from moe_rl.config import Arm
from moe_rl.registry import Component
from moe_rl.study import Study

DIGITS = 8
ONE_TURN = DIGITS + 1
"""Tokens of an answer, its end included."""
gspo_token = Arm(name="gspo-token", loss=Component("gspo_token", **GSPO_CLIP), advantage="by_turn")
grpo_turn = Arm(name="grpo-turn", advantage="by_turn")

study = Study(
    name="many_turns",
    question="In conversations of two turns, at equal tokens: does Routing Replay help GRPO, is GSPO better than GRPO, "
    "and do advantages per turn (GSPO-token) add to GSPO?",
    hypothesis="Where routes are quiet neither replay nor GSPO changes much, as with one turn. Advantages per turn do "
    "help: a right correction is compared with other corrections, while the one advantage of a conversation punishes "
    "it for not having been right at once.",
    arms=(grpo, replay, gspo, gspo_token, grpo_turn),
    base=BASE.replace(
        task=Component("corrected_sums", digits=DIGITS, spoiled=0.75), max_new_tokens=2 * ONE_TURN + 2, **WARMED_UP),
    seeds=(*range(400, 407), 408),
    own_cold_starts=True,
    figures=("learning", "clipping"),
    endpoint="many_turns_verdicts:held_out_at_equal_tokens",
    further_endpoints=("greedy exact match, second half",),
    metrics=("turns", "response_tokens", "environment_tokens"),
    comparisons=(("grpo-replay", "grpo"), ("gspo", "grpo"), ("gspo-token", "gspo")),
    decision_rule="Endpoint: greedy reward on 256 held-out prompts (1 for an answer that is right at once, .5 for one "
    "right after the correction), over the tokens that the policy had sampled per rollout by then: the mean of the "
    f"straight lines between evaluations from {50 * ONE_TURN // 2} to {50 * ONE_TURN} tokens, which every run of full "
    "answers reaches; one that does not stays at its last value, a diverged one at 0. The three contrasts: two-sided "
    "sign flips over 8 seeds, Holm at 5 %. A 95 % interval within ±.02 is 'no difference that matters'. Exploratory: "
    "grpo-turn − grpo, and gspo-token − gspo minus that, with 95 % intervals. Machinery: GRPO must end above its cold "
    "start, and in the first step of every run at least one conversation in five must have a second turn, or the study "
    "is void. Stopping: 8 seeds, 50 steps. Seed 408 takes the place of 407, whose cold start, before any arm, does not "
    "reach the target in 3,000 steps.",
    verdict="many_turns_verdicts:verdict",
    differs_from_paper=DIFFERS.replace("13 response tokens", "9 or 18 response tokens in one or two turns, 2 of the "
                                       "checker between them")
    + " GSPO (2507.18071) proposes GSPO-token for many turns and shows no run of it; its advantages per turn are those "
    "of `by_turn`, since the paper names none.",
    caution="one learning rate, one task, one size; GSPO's range was chosen for 13 tokens and one turn.",
    cost="Cold starts come on top: one to two minutes of one core per seed.",
    seconds_per_step=0.9,
)
