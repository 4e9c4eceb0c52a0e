"""Qwen3-30B-A3B on one node of eight GPUs: FSDP2 on seven of them, and a vLLM server on the last."""

from moe_rl.config import ColdStart, Measure, ModelConfig, Optimizer, RunConfig
from moe_rl.objectives.methods import arm
from moe_rl.registry import Component
from moe_rl.study import Study

study = Study(
    name="one_node",
    question="Which of replay of the engine's routing, replay of the old policy's and GSPO helps GRPO at 30 B?",
    hypothesis="None: with fresh rollouts and a learning rate of 1e-6 the four arms learn alike.",
    arms=("grpo", "grpo+rollout+name=grpo-r3", "grpo+old_policy+name=grpo-replay", "gspo"),
    base=RunConfig(
        arm=arm("grpo"),
        task=Component("jsonl:math.jsonl", match="math"),
        model=ModelConfig(name="Qwen/Qwen3-30B-A3B", device="cuda", dtype="float32"),
        policy=Component("fsdp", compute_dtype="bfloat16"),
        engine=Component("server", url="http://127.0.0.1:8000", concurrency=256),
        optimizer=Optimizer(lr=1e-6, betas=(0.9, 0.95)),
        cold_start=ColdStart(target=0.0),
        measure=Measure(responses=16, rollouts=4),
        steps=100,
        prompts_per_step=64,
        group_size=8,
        mini_batches=4,
        micro_batch_tokens=16384,
        activation_checkpointing=True,
        max_new_tokens=4096,
        eval_every=20,
        eval_prompts=128,
    ),
    seeds=(0,),
    endpoint="greedy exact match, second half",
    comparisons=(("grpo-r3", "grpo"), ("grpo-replay", "grpo"), ("gspo", "grpo")),
    caution="one seed decides nothing.",
    cost="4 runs of 100 steps.",
)
