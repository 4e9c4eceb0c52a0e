"""The controls of `engine_mismatch`: the same runs, sampled by the policy's own module. Exploratory."""

from dataclasses import replace

from engine_mismatch import grpo, gspo
from engine_mismatch import study as mismatch

from moe_rl.registry import Component

study = replace(
    mismatch,
    name="engine_match",
    question="What do the arms of engine_mismatch learn when engine and policy are the same?",
    hypothesis="None: a reference for engine_mismatch, seed by seed.",
    arms=(grpo, gspo),
    base=mismatch.base.replace(engine=Component("hf")),
    comparisons=(("gspo", "grpo"),),
    figures=("engine_mismatch", "learning"),
    decision_rule="None: exploratory. The difference to the same arm of engine_mismatch is reported with its interval.",
    caution="exploratory: a reference for engine_mismatch.",
)
