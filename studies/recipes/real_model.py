"""How many experts change per update of a pretrained MoE? A small study whose tables others can add to."""

from moe_rl.config import ColdStart, Measure, ModelConfig, Optimizer, RunConfig
from moe_rl.objectives.methods import arm
from moe_rl.registry import Component
from moe_rl.study import Study

study = Study(
    name="real_model",
    question="Which share of the top-k expert slots does one step of RL change in a pretrained MoE?",
    hypothesis="Less than 1 % of the slots, and some slot of 10 % of the tokens, at a learning rate of 1e-6.",
    arms=("grpo", "grpo+old_policy+name=grpo-replay", "gspo"),
    base=RunConfig(
        arm=arm("grpo"),
        task=Component("jsonl:gsm8k.jsonl", match="math"),
        model=ModelConfig(name="allenai/OLMoE-1B-7B-0924-Instruct", device="cuda", dtype="bfloat16"),
        policy=Component("hf", compile="inductor"),
        engine=Component("hf", max_rows=256),
        optimizer=Optimizer(lr=1e-6, betas=(0.9, 0.95)),
        cold_start=ColdStart(target=0.0),
        measure=Measure(responses=32, detail_every=5),
        steps=20,
        prompts_per_step=16,
        group_size=8,
        mini_batches=4,
        micro_batch_tokens=8192,
        activation_checkpointing=True,
        max_new_tokens=256,
        eval_every=20,
        eval_prompts=128,
    ),
    seeds=(0, 1, 2),
    figures=("expert_change", "ratio_spread", "variance_shares"),
    endpoint="token_ess",
    metrics=("expert_change_rate", "any_layer_change", "token_log_ratio_var"),
    comparisons=(("grpo-replay", "grpo"), ("gspo", "grpo")),
    caution="20 steps show how far routing moves, not what helps in the long run.",
    cost="9 runs of 20 steps.",
)
