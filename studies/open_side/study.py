"""Does a bound on PPO's open side take the harm of volatility away? What `stabilisers` made a hypothesis, on new seeds.

Where an advantage is negative, PPO's clip bounds no ratio that grows.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, EARLIER, SECONDARY, grpo, replay  # noqa: E402
from contrasts import Both, Condition  # noqa: E402

from moe_rl.config import Arm  # noqa: E402
from moe_rl.registry import Component  # noqa: E402
from moe_rl.study import Study  # noqa: E402

BOUND = Component("grpo", dual=3.0)
"""GRPO's own ranges and, alone, the bound of the dual clip (arXiv 1912.09729)."""
bounded = Arm(name="grpo-bounded", loss=BOUND)
bounded_replay = Arm(name="grpo-bounded-replay", loss=BOUND, routes="old_policy")

study = Study(
    name="open_side",
    question="Does bounding the ratio where advantages are negative take the harm of volatility away, and does it add "
    "anything to replay?",
    hypothesis="It does, as much as replay, and adds nothing to it: the harm is done by tokens whose ratio has grown "
    "far under a negative advantage, and replay keeps ratios from it.",
    arms=(grpo, bounded, replay, bounded_replay),
    base=BASE.replace(**{"router_noise.scale": 2.0}),
    seeds=tuple(range(500, 512)),
    own_cold_starts=True,
    figures=(),
    further_endpoints=(SECONDARY,),
    comparisons=(("grpo-bounded", "grpo"), ("grpo-bounded-replay", "grpo-replay"), ("grpo-bounded", "grpo-replay")),
    verdict="study.py:verdict",
    decision_rule="Endpoints and what counts as an effect are those of volatility_dial, at σ = 2 of its form weights: "
    "reward over steps 26–50 and greedy exact match of the five evaluations there, both decided with one sign, "
    "two-sided sign flips over 12 seeds, Holm at 5 % over two contrasts, each endpoint by itself: bounded − GRPO, and "
    "bounded replay − replay. Bounded − replay is exploratory: 'equivalent' if its 90 % interval of reward is within "
    "±.02, else 'not shown to be'. Exploratory too: gradient norms. Machinery: with mini_batches=1, where no ratio "
    "leaves 1, arms are equal bit for bit (a test). Stopping: 12 seeds, 50 steps; a diverged run has reward 0 from "
    "there on.",
    differs_from_paper=EARLIER + " Volatility is injected, as in volatility_dial.",
    caution="one dose, far above published volatility; one learning rate, one task, one size.",
    cost="Cold starts come on top: about 30 s of one core per seed.",
    seconds_per_step=0.7,
)

NOISY = Condition("base")
RULE = Both(
    (study.endpoint, *study.further_endpoints),
    {"σ = 2": {f"{a} − {b}": NOISY[a] - NOISY[b] for a, b in study.comparisons[:2]}},
)
verdict = RULE.verdict
CORRECTED = "the 2 comparisons of an endpoint"
