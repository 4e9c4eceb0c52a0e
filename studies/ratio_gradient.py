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

from router_noise_low import SIXTY
from router_noise_low import dual as dual_clip
from small import BASE, DIFFERS, SECONDS, grpo, gspo
from why_gspo import cell

from moe_rl.config import Arm
from moe_rl.registry import Component
from moe_rl.study import Study

CLIP = 0.0006
SIGMAS = (0.4, 1.0)
MOVED = ("ratio", "gradient", "both")
MARGIN = 0.02
NONE = "router_noise.scale=0"
no_ratio = cell("none", "token")
matched = Arm(name="grpo-clip-matched", loss=Component("grpo", clip_low=CLIP, clip_high=CLIP))


def moved(part: str, sigma: float) -> str:
    """The name of the cell in which noise of this scale is applied to this part."""
    return f"router_noise.applied_to={part},router_noise.scale={sigma:g}"


study = Study(
    name="ratio_gradient",
    question="Do the harms of a moved ratio and of a moved gradient add up in GRPO, does GSPO protect from a moved "
    "ratio, and does GRPO with as many clipped tokens as GSPO do the same?",
    hypothesis="They do not add up: both together harm less than the sum. GSPO is harmed less by a moved ratio, and "
    "clipping as many tokens does not replace it.",
    arms=(grpo, gspo, dual_clip, no_ratio, matched),
    base=BASE.replace(**SIXTY),
    seeds=tuple(range(1200, 1224)),
    own_cold_starts=True,
    cells={NONE: {}} | {moved(part, sigma): {"router_noise.scale": sigma, "router_noise.applied_to": part}
                        for sigma in SIGMAS for part in MOVED},
    figures=(),
    endpoint="sampled exact match, second half",
    further_endpoints=("greedy exact match, second half",),
    metrics=("token_ess", "token_kl_k3"),
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
    verdict="ratio_gradient_verdicts:verdict",
    differs_from_paper=DIFFERS + " Volatility is injected, as in volatility_dial.",
    caution="a ratio of one network with the gradient of another occurs in no trainer, so each alone is a tool, and "
    "no regime. Clipped shares are matched without noise. Noise far above published sizes; one learning rate, one "
    "task.",
    cost="Cold starts come on top: about 30 s of one core per seed. 840 runs of 60 steps: 8.4 CPU-hours.",
    seconds_per_step=SECONDS,
)
