"""GRPO, GRPO with Routing Replay, and GSPO on a small Mixture-of-Experts model: the comparison of the GSPO paper."""

from moe_rl.config import Arm, ColdStart, Measure, Optimizer, RunConfig
from moe_rl.registry import Component
from moe_rl.study import Study

grpo = Arm(name="grpo", loss="grpo")
replay = Arm(name="grpo-replay", loss="grpo", routes="old_policy")
# The paper's 3e-4/4e-4 is for responses of thousands of tokens: over our 13 tokens the sequence ratio spreads wider by
# the square root of the ratio of lengths. `gspo_short` is GSPO with a range for such responses.

study = Study(
    name="routing_replay",
    question="Does replaying the old policy's experts, or clipping whole sequences, stabilise RL on an MoE model, "
    "with fresh rollouts and with rollouts two steps old?",
    hypothesis="With fresh rollouts the arms do not differ. With old rollouts token ratios spread, and GRPO gains less "
    "than replay and GSPO (GSPO, arXiv 2507.18071, Fig. 1 and 3).",
    arms=(grpo, replay, "gspo_short"),
    base=RunConfig(
        arm=grpo,
        task=Component("running_sums", digits=12),
        steps=32,
        prompts_per_step=16,
        group_size=8,
        mini_batches=8,
        max_new_tokens=13,
        # A rate at which all arms gain, and a warm-up over five steps, while AdamW's moments are young: without it the
        # first step alone costs a third of the reward. From 4e-4 on arms differ, but fall below the cold start.
        optimizer=Optimizer(lr=2e-4, warmup=40),
        cold_start=ColdStart(target=0.35),
        measure=Measure(responses=16),
        eval_every=8,
        save_every=16,
    ),
    seeds=(0, 1, 2),
    # The lag of rollouts, in steps of 8 updates. With a lag of 2 token ratios spread without any noise.
    conditions={"lag=0": {}, "lag=2": {"batches": Component("lagged", lag=2)}},
    figures=("learning", "clipping", "expert_change", "ratio_spread", "variance_shares"),
    endpoint="sampled exact match, second half",
    further_endpoints=("greedy exact match, second half",),
    decision_rule="None: this study shows what the measurements look like. A claim needs more initial models and "
    "seeds, and a rule fixed in advance; lag_natural has both.",
    differs_from_paper="0.7 M parameters instead of 30 B; running sums modulo 10 instead of mathematics and code; 13 "
    "response tokens; 8 mini-batches per step instead of 4; GSPO's clip range chosen for short responses; several "
    "seeds where the paper shows one run.",
    caution="all seeds share one initial model, so this is a demonstration, not evidence.",
    seconds_per_step=0.55,
    seconds_of_warm_up=30,
)
