"""A demonstration of strong router noise on three seeds: what `make study` ran before it compared old rollouts."""

import dataclasses

from moe_rl.study.routing_replay import study as default

study = dataclasses.replace(
    default,
    name="router_noise_demo",
    question="Does replaying the old policy's experts, or clipping whole sequences, stabilise RL on an MoE model, "
    "without and with router noise?",
    hypothesis="Without router noise the arms do not differ. With router noise GRPO loses reward, and replay and GSPO "
    "lose less (GSPO, arXiv 2507.18071, Fig. 1 and 3).",
    base=default.base.replace(steps=40, eval_every=10, save_every=20),
    cells={
        "quiet": {},
        # Noise in the routers of the network that is trained on, drawn anew for every step and growing within it. σ = 2
        # from pilots on seeds 100 to 103, where replay earned more than GRPO on all four and no run collapsed.
        "volatile": {"router_noise.scale": 2.0},
    },
    endpoint="reward, second half",
    decision_rule="None: this study shows what the measurements look like. A claim needs more initial models and "
    "seeds, and a rule fixed in advance; volatility_dial has both.",
    differs_from_paper=default.differs_from_paper + " Router noise instead of natural routing changes.",
    caution=default.caution + " Router noise of σ = 2 is far stronger than what is reported of large models.",
    file=None,
)
