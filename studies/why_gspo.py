"""What is it about GSPO: how it weighs tokens, or what it clips? Weight × clip, and four rival explanations."""

from small import BASE, DIFFERS, GSPO_CLIP, SECONDS, grpo, gspo

from moe_rl.config import Arm, Measure
from moe_rl.registry import Component
from moe_rl.study import Study

TOKEN_CLIP = {"clip_low": 0.2, "clip_high": 0.27}


def cell(weight: str, clip: str) -> Arm:
    """One cell of the table; the range is that of the ratio which is clipped."""
    ranges = {"token": TOKEN_CLIP, "sequence": GSPO_CLIP, "none": {"clip_low": 9.0, "clip_high": 9.0}}
    return Arm(name=f"{weight}-{clip}", loss=Component("crossed", weigh=weight, clip=clip, **ranges[clip]))


rivals = tuple(
    Arm(name=name.replace("_", "-"), loss=Component(f"why_gspo_losses:{name}", **TOKEN_CLIP))
    for name in ("dual_clip", "shrunk", "random_mask")
)

study = Study(
    name="why_gspo",
    question="Is GSPO's effect one of weights (equal within a sequence) or of clipping (whole sequences)?",
    hypothesis="The weight: sequence-token earns more than GRPO and than token-sequence.",
    arms=(
        grpo, cell("token", "sequence"), cell("token", "none"),
        cell("sequence", "token"), gspo, cell("sequence", "none"),
        cell("none", "token"), cell("none", "sequence"), cell("none", "none"),
        *rivals,
    ),  # fmt: skip
    base=BASE.replace(**{"optimizer.lr": 5.66e-4, "steps": 60, "measure": Measure(responses=8, detail_every=60)}),
    seeds=(40, 41, 42, 43, 44, 45, 46, 47),
    own_cold_starts=True,
    figures=("learning", "clipping"),
    comparisons=(
        ("sequence-token", "grpo"), ("token-sequence", "grpo"), ("sequence-token", "token-sequence"), ("gspo", "grpo"),
    ),  # fmt: skip
    decision_rule="Endpoint: mean reward over steps 31–60. Four contrasts, two-sided sign flips over 8 seeds, Holm at "
    "5 %. 'Weight' if sequence-token is decided above grpo and above token-sequence; 'clipping' if token-sequence is "
    "decided above grpo and above sequence-token; 'both' if both are decided above grpo and neither above the other; "
    "'reversed' if gspo is decided below grpo; all else: undetermined at n = 8. Rivals (dual clip; log-ratios shrunk "
    "to the variance that replay left in a pilot; responses dropped at random, as often as GSPO clipped there) and all "
    "other cells are exploratory. Stopping: 8 seeds × 12 arms × 60 steps; a diverged run has reward 0 from there on.",
    verdict="verdicts:why_gspo",
    differs_from_paper=DIFFERS,
    caution="one learning rate, where arms were expected to differ by pilots with other seeds.",
    cost="Cold starts come on top: about 30 s of one core per seed.",
    seconds_per_step=SECONDS,
)
