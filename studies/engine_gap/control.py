"""The control of engine_gap: does GSPO gain as much where engine and trainer agree?"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import gspo_short  # noqa: E402
from engine_gap.study import exact  # noqa: E402
from engine_gap.study import study as gap  # noqa: E402

study = dataclasses.replace(
    gap,
    name="engine_gap_control",
    question="Does GSPO gain over GRPO as much where the engine samples in float32?",
    hypothesis="It does: what GSPO gains with the engine in bfloat16 repairs no gap.",
    arms=(gspo_short,),
    conditions={exact.name: {}},
    verdict="",
    decision_rule="Written after the outcomes of engine_gap, and before these runs. With the GRPO of engine_gap on the "
    "same 24 seeds: GSPO − GRPO in float32, and how much more that difference is in bfloat16; means with 95 % "
    "intervals (Student's t), in sampled and greedy exact match. Exploratory.",
    cost="24 runs of 60 steps; the warm-ups are those of engine_gap.",
)
