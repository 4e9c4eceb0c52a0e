"""The two environments that come with the package, three steps each, from a cold start that takes seconds.

torchrun --nproc-per-node 2 -m moe_rl run tests/objectives/conversations_study.py --policy 'megatron(ep=2)'
"""

from moe_rl.config import Arm, ColdStart, Measure
from moe_rl.registry import Component
from moe_rl.study import Study
from tests.objectives.megatron_study import study as methods

arm = Arm(
    name="token", loss=Component("gspo_token", clip_low=0.01, clip_high=0.013), advantage="by_turn", routes="rollout"
)
CELLS = {
    "corrected_sums": {"task": Component("corrected_sums", digits=3, modulus=5), "max_new_tokens": 10},
}

study = Study(
    name="conversations",
    question="Does Megatron-core train on conversations as the Hugging Face policy does?",
    hypothesis="Yes, to float rounding.",
    arms=(arm,),
    conditions=CELLS,
    seeds=(0,),
    figures=(),
    base=methods.base.replace(
        arm=arm,
        cold_start=ColdStart(target=0.1, batch_size=32, max_steps=1000),
        steps=3,
        prompts_per_step=4,
        group_size=8,
        stop=(),
        eval_every=3,
        eval_prompts=8,
        measure=Measure(responses=4, detail_every=3),
    ),
)
