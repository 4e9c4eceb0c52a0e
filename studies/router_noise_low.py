"""From which size on does router noise harm, and does it matter that it is in the routers? Small noise, and as much KL
from noise on all other weights.

Scales of the noise beside the routers are from pilots on seeds 110 to 112, which take part in no study. GRPO's KL there
is that of the noise in the routers within about 10 %. At .05 and .1 the match is rough: KL differs between seeds from
.010 to .014, as without noise.
"""

from small import BASE, DIFFERS, SECONDS, grpo, gspo, replay
from volatility_dial import WARMED_UP, noise

from moe_rl.objectives.methods import arm
from moe_rl.study import Study

BESIDE = {0.05: 0.025, 0.1: 0.055, 0.2: 0.095, 0.4: 0.15, 0.7: 0.23}
"""Scale of the noise in routers → of the noise on all other weights that gives about the same KL."""
SIXTY = {**WARMED_UP, "steps": 60, "save_every": 60}
MARGIN = 0.02
dual = arm("dual_clip(clip_high=0.27)+name=dual-clip")
"""With GRPO's upper range: only the bound at negative advantages differs from GRPO."""
ROUTERS = {scale: noise("weights", scale) for scale in BESIDE}
OTHERS = {scale: noise("other_weights", beside) for scale, beside in BESIDE.items()}
NONE = noise("weights", 0)
"""Names of cells, by the scale in the routers."""

study = Study(
    name="router_noise_low",
    question="From which KL to the old policy on does noise in the routers harm an arm, and does noise beside the "
    "routers of the same KL harm as much?",
    hypothesis="No arm is harmed at KL below .05, and noise beside the routers harms as much as noise in them.",
    arms=(grpo, replay, gspo, dual),
    base=BASE.replace(**SIXTY),
    seeds=tuple(range(1100, 1124)),
    own_cold_starts=True,
    cells={NONE: {}}
    | {name: {"router_noise.scale": scale} for scale, name in ROUTERS.items()}
    | {name: {"router_noise.scale": BESIDE[scale], "router_noise.target": "other_weights"}
       for scale, name in OTHERS.items()},
    figures=(),
    endpoint="sampled exact match, second half",
    further_endpoints=("greedy exact match, second half",),
    metrics=("token_kl_k3",),
    decision_rule="Primary endpoint: sampled exact match on 256 held-out prompts, mean of the evaluations after steps"
    " 35, 40, 45, 50, 55 and 60. Secondary: greedy exact match, likewise. Gates: GRPO without noise ends above its "
    "cold start in the secondary endpoint, or the study is void; and at every scale GRPO's KL (k3, second half, "
    "median over seeds) beside the routers is within a quarter of that in the routers, or nothing is concluded about "
    "routing. Harm: an arm with noise in the routers − the same arm without noise, paired by seed, two-sided sign "
    "flips. Fixed sequence in every arm: σ = .7, .4, .2, .1, .05. It goes on below a harm: a difference below 0 that "
    "is decided at 5 % / m in the primary endpoint, where the secondary is not decided (5 %, not adjusted) above 0. "
    "It stops at the first scale without one, and scales below that are not tested. Holm over arms: m is 4, less one "
    "for every arm that is harmed at all five scales, and at least 1. An arm's lowest decided noise is the last harm "
    "of its sequence. For all other scales: no difference that matters, if the 90 % interval lies within ±.02; else "
    "undecided. Routing: for every arm and seed the least-squares slope of (noise in routers − noise beside them), "
    "over the log10 of KL at the five scales. KL of a scale: GRPO's, as in the gate, geometric mean of both places. "
    "Slopes by sign flips over seeds, Holm at 5 % over the four arms; the secondary endpoint as above. Below 0, in an"
    " arm that is harmed at σ = .7: the harm is specific to routing. Above 0: noise beside the routers harms more. "
    "Else: no difference that matters, if the 90 % interval of the slope lies within ±.02 for ten times the KL; else "
    "undecided. The two families are decided at 5 % each. Stopping: 24 seeds, 60 steps; a diverged run matches "
    "nothing from there on. Differences at single scales, and harm beside the routers, are exploratory.",
    verdict="router_noise_low_verdicts:verdict",
    differs_from_paper=DIFFERS + " Volatility is injected, as in volatility_dial.",
    caution="without any noise KL is about .011, above published KL between engine and trainer (1.5e-3). A slope is "
    "no level: a difference between places that is equal at all scales has slope 0. One learning rate, one task.",
    cost="Cold starts come on top: about 30 s of one core per seed. 1056 runs of 60 steps: 10.6 CPU-hours.",
    seconds_per_step=SECONDS,
)
