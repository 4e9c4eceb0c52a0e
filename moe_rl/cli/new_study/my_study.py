"""Does my clipping rule learn as GRPO does, and does replay at response tokens change that?"""

from moe_rl.config import Arm, ColdStart, Optimizer, RunConfig
from moe_rl.registry import Component
from moe_rl.study import Study

grpo = Arm(name="grpo")
mine = Arm(name="mine", loss=Component("my_study_parts:clipped", bound=0.2))
replayed = Arm(
    name="mine-replayed", loss=Component("my_study_parts:clipped", bound=0.2), routes="my_study_parts:responses"
)

study = Study(
    # Required: the question, the expected answer, the arms, and the settings of all runs.
    name="my_study",
    question="Does my loss learn as GRPO does, and does replay change that?",
    hypothesis="The loss is GRPO with one bound, so both learn alike. Replay changes little in few updates.",
    arms=(grpo, mine, replayed),
    base=RunConfig(
        arm=grpo,
        task=Component("my_study_parts:Largest", digits=5),
        steps=40,
        prompts_per_step=16,
        group_size=8,
        mini_batches=4,
        max_new_tokens=2,
        eval_prompts=64,
        optimizer=Optimizer(lr=4e-4),
        cold_start=ColdStart(target=0.5),  # supervised until half of the answers are right; 0: no warm-up
    ),
    # Optional. Decide on these before you look at a result.
    seeds=(0, 1, 2, 3),  # fewer than four have no interval
    own_cold_starts=True,  # each seed has its own initial weights: intervals include that variation
    endpoint="reward, second half",
    comparisons=(("mine", "grpo"), ("mine-replayed", "mine")),
    decision_rule="A comparison counts if its 95 % interval, Holm-adjusted over both, excludes 0.",
    seconds_per_step=0.4,  # on one core, and of each seed's warm-up: for the estimate of --dry-run
    seconds_of_warm_up=20,
)
