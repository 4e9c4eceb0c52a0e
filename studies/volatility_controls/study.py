"""What does the harm in `volatility_dial`, and what do its cures act on? Controls at its largest dose, on its seeds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import EARLIER, grpo, gspo_short, noise, replay  # noqa: E402
from contrasts import Both, Condition  # noqa: E402
from volatility_dial.study import SIGMAS  # noqa: E402
from volatility_dial.study import study as router_noise  # noqa: E402

from moe_rl.config import Arm  # noqa: E402
from moe_rl.registry import Component  # noqa: E402
from moe_rl.study import Study  # noqa: E402

SIGMA = max(SIGMAS)
TWIN_SIGMA, BESIDE_SIGMA = 5.5, 0.46
"""Doses at which GRPO's mean KL to π_old is that of the MoE at SIGMA, .73 by k3 and .82 by k1. From pilots of 25 steps,
seeds 100 and 101, which take part in no study; k3 and k1: twin .24 and .23 at σ = 2, .60 and .59 at 4, .78 and .84 at
6; beside .04 and .03 at σ = .1, .12 and .13 at .2, .57 and .58 at .4."""
TWIN = {"model.overrides": {"num_local_experts": 2}}
"""Two experts, both always chosen: of the MoE's active size, with gates but without a choice."""

wrong = Arm(name="grpo-wrong-replay", loss="grpo", routes=Component("under_noise", sigma=SIGMA))


def moved(arms: tuple[str, ...] = ("grpo", "grpo-replay"), **settings: object) -> dict[str, object]:
    """A condition under the dial, for two arms of its own."""
    return {"router_noise.scale": SIGMA, "arms": arms, **settings}


RATIO_LEVELS = ("grpo", "gspo_short")
CONTRASTS = (
    ("applied_to=ratio", "gspo_short", "grpo"),
    ("applied_to=gradient", "gspo_short", "grpo"),
    ("twin", "gspo_short", "grpo"),
    ("beside", "grpo-replay", "grpo"),
    ("last-step", "grpo-replay", "grpo"),
    ("no-gradient-clip", "grpo-replay", "grpo"),
    ("wrong-replay", "grpo-wrong-replay", "grpo"),
)
"""(condition, arm, minus arm), decided together. GRPO of the last one is that of volatility_dial at SIGMA."""

study = Study(
    name="volatility_controls",
    question="Does injected volatility harm through the ratio or through the gradient, through sets or through gates, "
    "and do replay and GSPO cure what they are said to cure?",
    hypothesis="GSPO cures a noisy ratio, not a gradient taken at another network; replay helps only where routers "
    "move, and needs π_old's own routes: constant routes that are wrong are no cure.",
    arms=(grpo, replay, gspo_short, wrong),
    base=router_noise.base,
    seeds=router_noise.seeds,
    own_cold_starts=True,
    conditions={
        "applied_to=ratio": moved(RATIO_LEVELS, **{"router_noise.applied_to": "ratio"}),
        "applied_to=gradient": moved(RATIO_LEVELS, **{"router_noise.applied_to": "gradient"}),
        "twin-still": {"arms": RATIO_LEVELS, **TWIN},
        "twin": moved(RATIO_LEVELS, **TWIN) | {"router_noise.scale": TWIN_SIGMA},
        "beside": moved(**{"router_noise.target": "other_weights"}) | {"router_noise.scale": BESIDE_SIGMA},
        "last-step": moved(**{"router_noise.direction": "last_step"}),
        "no-gradient-clip": moved(**{"optimizer.grad_clip": 0.0}),
        "wrong-replay": moved(("grpo-wrong-replay",)),
    },
    figures=(),
    further_endpoints=router_noise.further_endpoints,
    comparisons=(("grpo-replay", "grpo"), ("gspo_short", "grpo")),
    decision_rule="Endpoints, and what counts as an effect, are those of volatility_dial: both must be decided with "
    "the same sign, two-sided sign flips over 16 seeds, Holm at 5 % over the seven contrasts, each endpoint by itself: "
    "GSPO − GRPO where the dose acts on the ratio alone, on the gradient alone, and in the twin; replay − GRPO where "
    "other weights move, where routers go on along their own last step, and without gradient clipping; wrong replay − "
    "GRPO. Harm, likewise with Holm over three: GRPO with the dose on the ratio alone, and on the gradient alone, − "
    "GRPO without a dose; GRPO in the twin − in the twin without a dose. Runs of GRPO without a control are those of "
    "volatility_dial, paired by seed: cold start, prompts and directions are shared. Matching: GRPO's mean token KL "
    "(k3), second half, in twin and beside, within a quarter of the MoE's, or the text says that the doses are not "
    "matched. Machinery: in the wrong replay's first mini-batch ratios are 1 within 1e-4. Stopping: 16 seeds, 50 "
    "steps; a diverged run has reward 0 from there on.",
    differs_from_paper=EARLIER + " Volatility is injected, as in volatility_dial.",
    caution="one dose, one learning rate, one task, one size; runs of GRPO without a control are those of "
    "volatility_dial, so the two studies are not independent.",
    cost="Cold starts come on top for the twin alone: about 30 s of one core per seed.",
    seconds_per_step=0.7,
)

QUIET, NOISY = Condition("none"), Condition("noisy")
"""GRPO of volatility_dial without noise and at SIGMA, whose runs are joined to those of this study."""
OTHER_RUNS = {noise("weights", 0): QUIET.name, noise("weights", SIGMA): NOISY.name}
RULE = Both(
    (study.endpoint, *study.further_endpoints),
    {
        "contrasts": {
            f"{a} − {b}, {name}": Condition(name)[a] - (NOISY if name == "wrong-replay" else Condition(name))[b]
            for name, a, b in CONTRASTS
        },
        "harm": {
            f"grpo, {there.name} − {here.name}": there["grpo"] - here["grpo"]
            for there, here in (
                (Condition("applied_to=ratio"), QUIET),
                (Condition("applied_to=gradient"), QUIET),
                (Condition("twin"), Condition("twin-still")),
            )
        },
    },
)
CORRECTED = "the 7 contrasts, or the 3 harms, of an endpoint"
