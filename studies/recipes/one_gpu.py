"""A small pretrained MoE on one GPU: GRPO, with replay, and GSPO on word problems."""

from moe_rl.config import ColdStart, Measure, ModelConfig, Optimizer, RunConfig
from moe_rl.objectives.methods import arm
from moe_rl.registry import Component
from moe_rl.study import Study

study = Study(
    name="one_gpu",
    question="Does routing replay, or GSPO, help GRPO on a pretrained MoE of about one billion parameters?",
    hypothesis="No: at this rate and with fresh rollouts the three arms learn alike.",
    arms=("grpo", "grpo+old_policy+name=grpo-replay", "gspo"),
    base=RunConfig(
        arm=arm("grpo"),
        task=Component("jsonl:gsm8k.jsonl", match="math"),
        model=ModelConfig(name="ibm-granite/granite-3.0-1b-a400m-instruct", device="cuda", dtype="bfloat16"),
        policy=Component("hf", compile="inductor"),
        engine=Component("hf", max_rows=256),
        optimizer=Optimizer(lr=1e-6, betas=(0.9, 0.95)),
        cold_start=ColdStart(target=0.0),
        measure=Measure(responses=16, rollouts=4),
        steps=100,
        prompts_per_step=32,
        group_size=8,
        mini_batches=4,
        micro_batch_tokens=16384,
        activation_checkpointing=True,
        max_new_tokens=512,
        eval_every=20,
        eval_prompts=256,
    ),
    seeds=(0, 1, 2),
    endpoint="greedy exact match, second half",
    comparisons=(("grpo-replay", "grpo"), ("gspo", "grpo")),
    caution="three seeds decide nothing: they show whether a difference is large.",
    cost="9 runs of 100 steps.",
)
