"""24 runs of three steps, of real models, on a task that random weights get partly right: no cold start."""

from moe_rl.config import Arm, ColdStart, Measure, RunConfig
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
        task="tests.even_task:EvenCharacters",
        cold_start=ColdStart(target=0.0),
        measure=Measure(probe=4),
        steps=3,
        save_every=3,
        prompts_per_step=2,
        group_size=4,
        mini_batches=2,
        max_new_tokens=6,
        eval_every=100,
        eval_prompts=4,
    ),
)
