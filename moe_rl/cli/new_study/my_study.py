"""Does a clip of my own learn as GRPO does, and does replaying the routes of responses change that?"""

from moe_rl.config import Arm, ColdStart, Optimizer, RunConfig
from moe_rl.registry import Component
from moe_rl.study import Study

grpo = Arm(name="grpo")
mine = Arm(name="mine", loss=Component("my_study_parts:clipped", bound=0.2))
replayed = Arm(
    name="mine-replayed", loss=Component("my_study_parts:clipped", bound=0.2), routes="my_study_parts:responses"
)

study = Study(
    # Required: what is asked, what is expected, what is compared, and the settings that all runs share.
    name="my_study",
    question="Does a loss of my own learn as GRPO does, and does replay change that?",
    hypothesis="The loss is GRPO's with one bound, so it learns alike; replay of few updates changes little.",
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
        cold_start=ColdStart(target=0.5),  # supervised until half of the answers are right; 0: none, for a checkpoint
    ),
    # The rest has defaults; these are the ones to think about before looking at a result.
    seeds=(0, 1, 2),
    own_cold_starts=True,  # each seed starts from weights of its own: an interval is then about starts, too
    endpoint="reward, second half",
    comparisons=(("mine", "grpo"), ("mine-replayed", "mine")),
    decision_rule="A contrast counts when its 95 % interval, Holm-adjusted over both, leaves out 0.",
    seconds_per_step=0.4,  # of one core, for the estimate of --dry-run
)
