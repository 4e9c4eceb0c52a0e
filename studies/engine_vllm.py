"""The mismatch of a real engine: vLLM in bfloat16 samples, the policy trains in float32. Exploratory, one seed.

The settings are those of `engine_mismatch` but for what vLLM asks for: heads of 32 (its attention on CPUs takes no
narrower ones), so a cold start of its own; details at every fifth step. It needs an environment with vLLM.
"""

from dataclasses import replace

from engine_mismatch import grpo, r3
from engine_mismatch import study as mismatch

from moe_rl.config import Measure, ModelConfig
from moe_rl.registry import Component

study = replace(
    mismatch,
    name="engine_vllm",
    question="How far are the routes and log-probs of vLLM in bfloat16 from the float32 trainer's at equal weights, "
    "and what does replaying its routes (R3) remove?",
    hypothesis="None: a measurement. The dial of engine_mismatch was set by pilots without vLLM; this says where on "
    "that dial a real engine is.",
    arms=(grpo, r3),
    base=mismatch.base.replace(
        engine=Component("vllm", dtype="bfloat16", max_tokens=64),
        model=ModelConfig(overrides={"head_dim": 32}),
        measure=Measure(detail_every=5),
        steps=30,
        eval_every=15,
        save_every=10,
    ),
    seeds=(1,),
    comparisons=(),
    figures=("engine_mismatch", "engine_over_steps", "learning"),
    decision_rule="None: exploratory. Reported are set change, tokens with a change, KL k3, F(2), KL natural and "
    "replayed, and the noise floor, as means over the run.",
    differs_from_paper="vLLM 0.30.0 on a CPU; 0.8 M parameters, 6 layers, 16 experts; running sums modulo 10; 13 "
    "response tokens. In production both sides usually compute in bfloat16, here the trainer computes in float32.",
    caution="exploratory: one seed and one cold start; the rewards of two runs say nothing about the arms.",
    cost="The cold start comes on top, about half a minute of one core, and starting vLLM, about as much per run.",
    seconds_per_step=1.5,
)
