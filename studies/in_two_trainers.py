"""GRPO, GRPO with Routing Replay and GSPO, declared once and run twice: by our trainer, and by verl on CPUs.

The learning rate is that of the studies at 2e-4. It was chosen before either trainer ran at it. A pilot at 4e-4, with
fewer rollouts in a step, lost its reward in verl.

    moe-rl run studies/in_two_trainers.py --set hf_checkpoints=0
    moe-rl run studies/in_two_trainers.py --trainer verl --set cold_start.target=0 --set model.name=START --set engine=…

START is a copy of the folder `checkpoints/step=000000` of a run of the first line. verl asks its tokenizer for
`<|im_end|>`: add `"unk_token": "<|pad|>"` to its `tokenizer_config.json`. A control has
`trainer="in_two_trainers_split:execute"`. It was added when both trainers had been seen, to find the cause of their
difference. The results are in archive/in_two_trainers.md.
"""

from small import BASE, DIFFERS, grpo, gspo, replay

from moe_rl.config import Measure, Optimizer
from moe_rl.study.declaration import Study

study = Study(
    name="in_two_trainers",
    question="Do verl and our trainer measure the same expert change and the same spread of ratios in the same arms?",
    hypothesis="None: a measurement. Both trainers have the same start, prompts and settings, and sample on their own.",
    arms=(grpo, replay, gspo),
    base=BASE.replace(
        optimizer=Optimizer(lr=2e-4),
        steps=20,
        prompts_per_step=8,
        mini_batches=4,
        measure=Measure(responses=16, detail_every=1),
        eval_every=20,
        eval_prompts=64,
        save_every=20,
    ),
    seeds=(0,),
    own_cold_starts=True,
    figures=("learning", "expert_change"),
    decision_rule="None: exploratory. Reported are expert change and effective sample size by update in both trainers, "
    "and the causes of their differences.",
    differs_from_paper=DIFFERS + " Here 4 mini-batches of 16 responses, as in the paper, and 20 steps.",
    caution="exploratory: one seed; the rewards of two runs say nothing about the arms, nor about the trainers.",
    cost="A cold start of half a minute comes on top. verl takes about 10 seconds for a step on two cores.",
    seconds_per_step=0.5,
)
