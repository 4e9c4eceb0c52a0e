"""Ratios that spread by themselves: rollouts one and two steps old, without any noise. Does replay help there?"""

from small import BASE, DIFFERS, grpo, gspo, replay
from volatility_dial import WARMED_UP
from why_gspo import cell

from moe_rl.registry import Component
from moe_rl.study import Study

LAGS = (0, 1, 2)
RATE = WARMED_UP["optimizer.lr"]
HALF = "rate=half,"
MARGIN = 0.02
weight, clip, no_weight = cell("sequence", "token"), cell("token", "sequence"), cell("none", "token")


def lagged(lag: int) -> dict:
    """The settings of a lag."""
    return {"batches": Component("lagged", lag=lag)}


study = Study(
    name="lag_natural",
    question="Where token ratios spread without injected noise, because rollouts are one or two steps old: does "
    "Routing Replay (R2) help GRPO, does GSPO, and is what helps GSPO's sequence-level weight or its clip?",
    hypothesis="Replay restores the ratios (token ESS) and changes exact match by less than .02. GSPO is better than "
    "GRPO and than replay, by its sequence-level weight.",
    arms=(grpo, replay, gspo, weight, clip, no_weight),
    base=BASE.replace(**WARMED_UP),
    seeds=tuple(range(1000, 1032)),
    own_cold_starts=True,
    cells={f"lag={lag}": lagged(lag) for lag in LAGS} | {
        f"{HALF}lag={lag}": {**lagged(lag), "optimizer.lr": RATE / 2, "arms": ("grpo",)} for lag in LAGS},
    figures=(),
    endpoint="sampled exact match, second half",
    further_endpoints=("greedy exact match, second half",),
    metrics=("token_ess",),
    comparisons=tuple((a.name, "grpo") for a in (replay, gspo, weight, clip, no_weight)) + (("gspo", "grpo-replay"),),
    decision_rule="Primary endpoint: sampled exact match on 256 held-out prompts, mean of the evaluations after steps "
    "30, 35, 40, 45 and 50. Secondary: greedy exact match, likewise. Every value is the mean of lags 1 and 2 of one "
    "seed. Gate: token ESS of the step, mean over steps 26–50 and seeds at lag 2, is at most .90 in GRPO and at least "
    ".95 in GRPO + R2; if it is not, replay does not restore the ratios here, and nothing is concluded about it. "
    "Planned comparisons: R2, GSPO, sequence weight × token clip, token weight × sequence clip, no weight × token clip "
    "and GRPO at half the rate, each − GRPO, and GSPO − R2; two-sided sign flips over seeds, Holm at 5 % over the "
    "seven in the primary endpoint. An effect: decided in the primary endpoint, and the secondary not decided (5 %, "
    "not adjusted) with the other sign. Else no difference that matters, if the 90 % interval lies within ±.02. Else "
    "undecided. 'The weight' if sequence weight × token clip is an effect above 0 and token weight × sequence clip is "
    "not; 'the clip' the other way round; 'both' if both are. Stopping: 32 seeds, 50 steps; a diverged run matches "
    "nothing from there on. Lag 0 and the single lags are exploratory.",
    verdict="lag_natural_verdicts:verdict",
    differs_from_paper=DIFFERS + " Lags are in steps of 8 updates, and fixed; one engine in the policy's numerics.",
    caution="one learning rate, one task, one size and 50 steps. A lag makes samples stale beside spreading ratios.",
    cost="Cold starts come on top: about 30 s of one core per seed. 672 runs of about 28 CPU-seconds: 5.3 CPU-hours.",
    seconds_per_step=0.55,
)
