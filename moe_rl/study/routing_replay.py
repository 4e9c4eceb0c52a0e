"""GRPO, GRPO with Routing Replay, and GSPO on a small Mixture-of-Experts model: the comparison of the GSPO paper."""

from moe_rl.config import Arm, ColdStart, Optimizer, RunConfig
from moe_rl.lookup import Use
from moe_rl.study import Study

grpo = Arm(name="grpo", loss="grpo")
replay = Arm(name="grpo-replay", loss="grpo", routes="old_policy")
gspo = Arm(name="gspo", loss=Use("gspo", clip_low=0.01, clip_high=0.013))
# The paper's 3e-4/4e-4 is for responses of thousands of tokens. The log of the sequence ratio is a mean over tokens, so
# over our 13 tokens it spreads wider by the square root of the ratio of lengths: the paper's range would clip nearly
# half of everything from the second mini-batch on. This range keeps the paper's asymmetry (4 : 3).

study = Study(
    name="routing_replay",
    question="Does replaying the old policy's experts, or clipping whole sequences, stabilise RL on an MoE model?",
    hypothesis="GSPO learns where GRPO does not; replay narrows the gap (GSPO, arXiv 2507.18071, Fig. 1 and 3).",
    arms=(grpo, replay, gspo),
    base=RunConfig(
        arm=grpo,
        task=Use("running_sums", digits=12),
        steps=100,
        prompts_per_step=32,
        group_size=8,
        mini_batches=8,
        max_new_tokens=13,
        optimizer=Optimizer(lr=8e-4),
        # Chosen in pilots, whose seeds (10, 11) are not those below, because the arms differ there. At 2e-4 all three
        # learn alike, and at 4e-4 nearly so: a comparison at one learning rate is one of learning rates as well.
        cold_start=ColdStart(target=0.35),
    ),
    seeds=(0, 1, 2),
    figures=("learning", "clipping", "expert_change", "ratio_spread", "variance_shares"),
    decision_rule="None: this study shows what the measurements look like. A claim needs more cold starts and seeds, "
    "and a rule fixed beforehand.",
    differs_from_paper="0.7 M parameters instead of 30 B; running sums modulo 10 instead of mathematics and code; 13 "
    "response tokens; 8 mini-batches per step instead of 4; GSPO's clip range chosen for short responses; three seeds "
    "where the paper shows one run.",
    caution="three seeds of one cold start are a demonstration, not evidence: they say nothing about other starts, "
    "tasks, sizes or learning rates, and no p-value of three pairs can be below 0.25.",
    cost="The cold start comes on top: about a minute of one core, once.",
    seconds_per_step=0.8,
)
