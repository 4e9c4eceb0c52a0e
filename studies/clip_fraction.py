"""How much of the tokens does each objective clip, by mini-batch index and over both kinds of clip range (Fig. 2)?"""

from small import BASE, DIFFERS, SECONDS, grpo, gspo

from moe_rl.registry import Component
from moe_rl.study import Study

grpo_middle = grpo.replace(name="grpo-middle", loss=Component("grpo", clip_low=0.01, clip_high=0.013))
grpo_narrow = grpo.replace(name="grpo-narrow", loss=Component("grpo", clip_low=0.001, clip_high=0.0013))
gspo_wide = gspo.replace(name="gspo-wide", loss=Component("gspo", clip_low=0.15, clip_high=0.2))
gspo_middle = gspo.replace(name="gspo-middle", loss=Component("gspo", clip_low=0.05, clip_high=0.065))
# By the quantiles of the pilot at this learning rate, roughly 2, 6 and 25 % of the tokens lie beyond GRPO's three
# ranges, and about as many of the sequences beyond GSPO's, so that the two grids span equal fractions.

study = Study(
    name="clip_fraction",
    question="Does GSPO clip two orders of magnitude more tokens than GRPO, whatever the clip ranges?",
    hypothesis="At ranges in the paper's proportion GSPO clips at least ten times as many tokens as GRPO; where "
    "ranges are chosen for equal fractions it does not (GSPO, arXiv 2507.18071, Fig. 2: 0.15 against "
    "0.0013, 'adjusting the clipping ranges does not alter the disparity').",
    arms=(grpo, grpo_middle, grpo_narrow, gspo_wide, gspo_middle, gspo),
    base=BASE,
    seeds=(0, 1, 2),
    own_cold_starts=True,
    figures=("clipping", "learning"),
    endpoint="clip_tokens",
    comparisons=(("gspo", "grpo"), ("gspo-wide", "grpo-narrow")),
    decision_rule="Endpoint: share of response tokens with an advantage that lose their gradient, mean over steps "
    "51–100 (all mini-batches, of which the first never clips). Reproduced if in both contrasts GSPO's share is at "
    "least ten times GRPO's on every seed; not reproduced if the second contrast has the other sign on every seed; "
    "else undetermined. Reward is reported beside it: whatever the fractions, which ranges learn. Stopping: 3 seeds × "
    "6 arms × 100 steps.",
    verdict="verdicts:clip_fraction",
    differs_from_paper=DIFFERS,
    caution="a clip fraction is an outcome, not a calibration target: it depends on the learning rate, the length of "
    "responses and the mini-batch index.",
    cost="Cold starts are those of learning_rates.",
    seconds_per_step=SECONDS,
)
