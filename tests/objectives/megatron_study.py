"""Methods that have every part between them, two steps each.

torchrun --nproc-per-node 2 -m moe_rl run tests/objectives/megatron_study.py --policy 'megatron(ep=2)'
"""

from moe_rl.config import ModelConfig, Optimizer
from moe_rl.objectives.methods import arm, methods
from moe_rl.registry import Component
from moe_rl.study import Study
from tests.objectives.test_methods_training import TINY

NOT_ON_MEGATRON = {"rspo", "router_kl", "z_loss", "load_balance", "recall", "soft", "gae"}
"""Parts that the policy of Megatron-core refuses."""


def named(made):
    """The names of an arm's parts."""
    several = (*made.corrections, *made.filters, *made.terms, *made.advantage)
    return {Component.of(part).name for part in (made.loss, made.aggregate, made.routes, *several)} | {made.anchor}


def covering():
    """Methods, each of which has a part that none before it has."""
    seen, found = set(), []
    for name in methods():
        new = named(arm(name)) - seen
        if new and not named(arm(name)) & NOT_ON_MEGATRON:
            seen |= new
            found.append(name)
    return tuple(found)


study = Study(
    name="methods",
    question="Does Megatron-core train every method as the Hugging Face policy does?",
    hypothesis="Yes, to float rounding.",
    arms=covering(),
    seeds=(0,),
    figures=(),
    base=TINY.replace(
        model=ModelConfig(overrides={"num_hidden_layers": 2, "num_local_experts": 8, "pad_token_id": None}),
        optimizer=Optimizer(lr=1e-3),
        micro_batch=3,
    ),
)
