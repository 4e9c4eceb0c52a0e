"""24 short runs of real models, which share one cold start of some seconds."""

from moe_rl.config import Arm, ColdStart, Measure, ModelConfig, RunConfig
from moe_rl.registry import Component
from moe_rl.study import Study

GRPO = Arm(name="grpo")
study = Study(
    name="slurm",
    question="Does a cluster change a number?",
    hypothesis="No.",
    arms=(GRPO, Arm(name="grpo-replay", routes="old_policy"), "gspo"),
    seeds=tuple(range(8)),
    figures=(),
    base=RunConfig(
        arm=GRPO,
        task=Component("running_sums", digits=4, modulus=3, partial=True),
        model=ModelConfig(overrides={"hidden_size": 32, "num_hidden_layers": 2}),
        cold_start=ColdStart(target=0.02, max_steps=300, batch_size=16, lr=1e-2),
        measure=Measure(responses=4),
        steps=6,
        save_every=2,
        prompts_per_step=2,
        group_size=4,
        mini_batches=2,
        max_new_tokens=5,
        eval_every=100,
        eval_prompts=4,
    ),
)
