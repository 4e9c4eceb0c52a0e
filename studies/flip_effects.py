"""What does one flip do? The effect of a single swap of experts, and a law for the spread of log-ratios it makes."""

from small import BASE, grpo

from moe_rl.config import Measure
from moe_rl.registry import Component
from moe_rl.study import Study

WITHIN = 2.0
"""The factor within which the law is to predict."""


def model(**overrides):
    return {"model.overrides": overrides}


study = Study(
    name="flip_effects",
    question="By how much does the swap of one expert change log-probs, on what does that depend, and does it say how "
    "far the route changes of a real step spread the log-ratios?",
    hypothesis="δ² of a swap is c · x², x the gate moved times the relative distance of the two experts' outputs, with "
    "a c that depends on the depth of the site, not on the shape of the model; flips per token times E[δ²] of swaps at "
    "flipping margins is the mean square of J, the natural minus the replayed log-ratio. GSPO (arXiv 2507.18071, "
    "section 5.3) says that 10 % changed experts make token ratios fluctuate drastically: by this law that follows "
    "only where x is large.",
    arms=(grpo,),
    base=BASE.replace(
        **{"optimizer.lr": 2e-4, "max_new_tokens": 7}, task=Component("running_sums", digits=6),
        measure=Measure(responses=16, detail_every=100), steps=4, eval_every=4, save_every=4, eval_prompts=32,
    ),
    seeds=(400, 401, 402, 403),
    own_cold_starts=True,
    cells={
        "base": {},
        # As many active parameters as the base.
        "experts=64,k=8,width=8": model(num_local_experts=64, num_experts_per_tok=8, moe_intermediate_size=8),
        "layers=3": model(num_hidden_layers=3),
        "k=4": model(num_experts_per_tok=4),
        # With one expert and normalised gates the gate is 1 and the router has no gradient.
        "k=1,raw-gates": model(num_experts_per_tok=1, norm_topk_prob=False),
        "experts=64": model(num_local_experts=64),
        "layers=12": model(num_hidden_layers=12),
    },
    figures=("expert_change",),
    endpoint="expert_change_rate",
    decision_rule="After 4 steps, θ; one more step of 8 updates, θ + u; about 5,000 response tokens sampled from θ. "
    "Law: slots changed by u per response token, site by site and prompt tokens included, times E[δ²] of a flip there, "
    "δ² summed over the response; E is over swaps weakest chosen → runner-up made at θ, weighed by Q(margin / σ), σ "
    "such that it flips as many slots as u did. Its ratio to the measured mean J², geometric mean over seeds with 95 % "
    "Student t of logs: the law holds in a cell if the interval lies within a factor 2 of 1, fails if it lies outside, "
    "and else the mean decides, and is said to be all there is. The law holds if it does in every cell; else the text "
    "says where it fails, and from single flips at θ + u whether squares fail to add up (flips are not independent) or "
    "E[δ²] is off. Transport: the same with c · E[x²] in place of E[δ²], for each third of the depth, c the geometric "
    "mean over the other cells and their seeds. Slope: log mean δ² over log x (bins of an octave, sites apart), 2 if "
    "its interval over seeds lies within [1.6, 2.4]. Machinery: self-replay without a swap changes no log-prob at all; "
    "the noise of other rows and forwards is below 1e-4 nats. All else, α = 1/8 and what the law says of 48 layers "
    "among it, is exploratory. Stopping: cell by cell in this order, seeds 400 to 402 each, then seed 403 likewise; "
    "the clock or 25 CPU-minutes ends it, whatever the numbers say, and a cell with fewer than 3 seeds is left out.",
    differs_from_paper="0.4 to 3 M parameters; running sums of 6 digits (the other studies: 12), 7 response tokens; 8 "
    "mini-batches of 16 responses; the fifth step after a cold start, without warm-up; normalised gates.",
    caution="Δ log-prob of one task's tokens: c says how sharply these are decided. J² sits in few tokens.",
    cost="Cold starts come on top: 8 to 30 s of one core per seed and cell. Measuring takes about 6 s per run.",
    seconds_per_step=2.0,
    trainer="flip_effects_trainer:execute",
)
