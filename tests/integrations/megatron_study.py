"""A small study without a cold start: GRPO with replay, three steps, on a task that random weights get partly right.

torchrun --nproc-per-node 2 -m moe_rl run tests/integrations/megatron_study.py --policy 'megatron(ep=2)'
"""

from moe_rl.config import Arm, ColdStart, Measure, ModelConfig, Optimizer, RunConfig
from moe_rl.registry import Component
from moe_rl.study import Study

replay = Arm(name="replay", loss="grpo", routes="old_policy")
parts = Arm(  # what else a loss can be made of: a reference policy, a gradient of the entropy, factors on the weights
    name="parts",
    routes="old_policy",
    corrections=("truncated",),
    terms=(Component("kl", coef=0.1), Component("entropy", coef=0.01)),
)
study = Study(
    name="megatron",
    question="Does Megatron-core train as the Hugging Face policy does?",
    hypothesis="Yes, to float rounding.",
    arms=(replay,),
    seeds=(0,),
    base=RunConfig(
        arm=replay,
        task="tests.even_task:EvenCharacters",
        # Random weights sample the padding token now and then. Transformers gives it no gradient as an input, if the
        # configuration names it; Megatron-core does.
        model=ModelConfig(overrides={"num_hidden_layers": 4, "num_local_experts": 8, "pad_token_id": None}),
        cold_start=ColdStart(target=0.0),
        optimizer=Optimizer(lr=1e-3),
        measure=Measure(responses=8, detail_every=2),
        steps=3,
        prompts_per_step=4,
        group_size=4,
        mini_batches=3,
        micro_batch=3,
        max_new_tokens=6,
        eval_every=3,
        eval_prompts=8,
        hf_checkpoints=(1, 3),
    ),
)
short = study.base.replace(
    arm=parts,
    measure=Measure(responses=4, detail_every=10),
    steps=2,
    mini_batches=2,
    eval_prompts=4,
    hf_checkpoints=(),
)
"""On four ranks, in every layout: two steps, since the second meets the moments and pushed weights of the first."""
