"""Ratio × gradient: do the harms of a moved ratio and of a moved gradient add up, and is GSPO a cure of the ratio or a
training on fewer tokens?

CLIP is from pilots without noise on seeds 113 and 114, which take part in no study. Clipped tokens, mean of 60 steps:

| seed | GSPO | GRPO, .0005 | .001 | .005 | .01 | .02 | .04 |
|---|---|---|---|---|---|---|---|
| 113 | .177 | .200 | .146 | .069 | .050 | .038 | .030 |
| 114 | .176 | .186 | .130 | .063 | .048 | .038 | .027 |

GRPO clips as much as GSPO at .00066 and .00055, interpolated between logarithms, and at .0006 for the means. The ranges
planned first, from .005 on, clip too little. In steps 31 to 60 GRPO clips less than over all steps (.16 at .0005), and
GSPO as much (.18).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, EARLIER, ENDPOINT, SECONDARY, SIXTY, crossed, dual, grpo, gspo_short  # noqa: E402
from contrasts import NOTHING, VOID, Condition, Form, Gains, Outcome, Rule, spoken, values_of  # noqa: E402

from moe_rl.config import Arm  # noqa: E402
from moe_rl.registry import Component  # noqa: E402
from moe_rl.storage.frames import Frames  # noqa: E402
from moe_rl.study import Study  # noqa: E402

CLIP = 0.0006
SIGMAS = (0.4, 1.0)
MOVED = ("ratio", "gradient", "both")
NONE = "router_noise.scale=0"
no_ratio = crossed("none", "token")
matched = Arm(name="grpo-clip-matched", loss=Component("grpo", clip_low=CLIP, clip_high=CLIP))


def moved(part: str, sigma: float) -> str:
    """The name of the condition in which noise of this scale is applied to this part."""
    return f"router_noise.applied_to={part},router_noise.scale={sigma:g}"


study = Study(
    name="ratio_gradient",
    question="Do the harms of a moved ratio and of a moved gradient add up in GRPO, does GSPO protect from a moved "
    "ratio, and does GRPO with as many clipped tokens as GSPO do the same?",
    hypothesis="They do not add up: both together harm less than the sum. GSPO is harmed less by a moved ratio, and "
    "clipping as many tokens does not replace it.",
    arms=(grpo, gspo_short, dual, no_ratio, matched),
    base=BASE.replace(**SIXTY),
    seeds=tuple(range(1200, 1224)),
    own_cold_starts=True,
    conditions={NONE: {}}
    | {
        moved(part, sigma): {"router_noise.scale": sigma, "router_noise.applied_to": part}
        for sigma in SIGMAS
        for part in MOVED
    },
    figures=(),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    metrics=("token_ess", "token_kl_k3"),
    verdict="study.py:verdict",
    decision_rule="Primary endpoint: sampled exact match on 256 held-out prompts, mean of the evaluations after steps"
    " 35, 40, 45, 50, 55 and 60. Secondary: greedy exact match, likewise. Harm: an arm with router noise − the same "
    "arm without; below 0, it is harmed. Every value is the mean of σ = .4 and 1 of one seed. Three planned "
    "comparisons, two-sided sign flips over seeds, Holm at 5 % over the three in the primary endpoint. (1) "
    "Interaction: GRPO's harm where both are moved − its harm of the ratio − its harm of the gradient, against 0. "
    "Above 0: both together harm less than the sum. (2) Protection: harm of the ratio in GRPO − in GSPO. Below 0: "
    "GSPO is harmed less. (3) GSPO − clip-matched GRPO where the ratio is moved. An effect: decided in the primary "
    "endpoint, and the secondary not decided (5 %, not adjusted) with the other sign. Else no difference that "
    "matters, if the 90 % interval lies within ±.02: in (1) the harms add up, in (2) GSPO protects from nothing. Else"
    " undecided. In (3) the interval comes first: within ±.02, clip-matched GRPO closes GSPO's gap, decided or not. "
    "Gates: GRPO without noise ends above its cold start in the secondary endpoint, or the study is void. (3) is "
    "about a gap only if GSPO − GRPO, where the ratio is moved, is an effect above 0 by the same rule (a family of "
    "its own); and only if, without noise, clip-matched GRPO clips between two thirds and one and a half of GSPO's "
    "share of tokens (mean of all steps and seeds). Stopping: 24 seeds, 60 steps; a diverged run matches nothing from"
    " there on. Single σ, other arms, and whether GSPO protects more from a moved ratio than from a moved gradient "
    "are exploratory.",
    differs_from_paper=EARLIER + " Volatility is injected, as in volatility_dial.",
    caution="a ratio of one network with the gradient of another occurs in no trainer, so each alone is a tool, and "
    "no regime. Clipped shares are matched without noise. Noise far above published sizes; one learning rate, one "
    "task.",
    cost="Cold starts come on top: about 30 s of one core per seed. 840 runs of 60 steps: 8.4 CPU-hours.",
    seconds_per_step=0.6,
)


# ---------------------------------------------------------------------- planned contrasts
QUIET = Condition(NONE)
INTERACTION, PROTECTION = "grpo, harm of both − of ratio − of gradient", "harm of the ratio, grpo − gspo_short"
CLOSED, GAP = f"gspo_short − {matched.name}, ratio moved", "gspo_short − grpo, ratio moved"
MEANS = {
    INTERACTION: {
        1: "both together harm less than the sum",
        -1: "both together harm more than the sum",
        0: "the two harms add up",
    },
    PROTECTION: {1: "GSPO is harmed more", -1: "GSPO is harmed less", 0: "GSPO protects from nothing"},
    CLOSED: {1: "it does not close GSPO's gap", -1: "it is better than GSPO", 0: "it closes GSPO's gap"},
}
"""What an effect above or below 0, and no difference that matters (0), stand for."""
SHARES = (2 / 3, 3 / 2)
"""The gate: clipped tokens of clip-matched GRPO without noise, as a multiple of GSPO's."""
CORRECTED = "Holm over the 3 comparisons"


def noisy(arm: str, part: str) -> Form:
    """An arm with noise applied to a part: the mean of both σ."""
    first, second = (Condition(moved(part, sigma))[arm] for sigma in SIGMAS)
    return (first + second) / 2


def harm(arm: str, part: str) -> Form:
    """An arm with noise applied to a part − without noise."""
    return noisy(arm, part) - QUIET[arm]


RULE = Rule(
    ENDPOINT,
    SECONDARY,
    {
        "planned": {
            INTERACTION: harm("grpo", "both") - harm("grpo", "ratio") - harm("grpo", "gradient"),
            PROTECTION: harm("grpo", "ratio") - harm("gspo_short", "ratio"),
            CLOSED: noisy("gspo_short", "ratio") - noisy(matched.name, "ratio"),
        },
        "gate": {GAP: noisy("gspo_short", "ratio") - noisy("grpo", "ratio")},
    },
    gates=(Gains(QUIET["grpo"]),),
    bootstrap=True,
)


def judged(frames: Frames) -> list[tuple[Outcome, str]]:
    """The planned comparisons with what each of them means."""
    interaction, protection, closed = found = RULE.outcomes(frames)["planned"]
    if not RULE.passed(frames):
        return [(one, VOID) for one in found]
    return [*((one, meaning(one)) for one in (interaction, protection)), (closed, of_the_gap(frames, closed))]


verdict = spoken(judged, RULE)


def meaning(one: Outcome) -> str:
    """What an outcome stands for; `undecided` where it is opposed or undecided."""
    return MEANS[one.name][one.sign] if one.sign or one.said == "no difference that matters" else "undecided"


def of_the_gap(frames: Frames, one: Outcome) -> str:
    """What the third comparison means, where its gates are passed."""
    (gap,) = RULE.outcomes(frames)["gate"]
    if gap.sign <= 0:
        return f"{NOTHING}, GSPO has no gap to GRPO"
    clipped = values_of(frames, NONE, "clip_tokens_mean").mean()
    if not SHARES[0] <= clipped[matched.name] / clipped["gspo_short"] <= SHARES[1]:
        return f"{NOTHING}, clipped shares are not matched"
    return MEANS[CLOSED][0] if one.equivalent else meaning(one)
