"""When does routing volatility hurt, and what cures it? Volatility as an assigned dose, crossed with arms and seeds."""

from small import BASE, DIFFERS, grpo, gspo, replay

from moe_rl.study import Study

WARMED_UP = {"optimizer.lr": 2e-4, "optimizer.warmup": 40, "steps": 50, "eval_every": 5, "eval_prompts": 256,
             "save_every": 50}
"""The rate at which all arms gain in `learning_rates`, and a warm-up over the first five steps, while the moments of
AdamW are young: without it the first step alone costs a third of the reward."""
SIGMAS = (0.4, 1.0, 2.0)


def noise(form: str, sigma: float) -> str:
    """The name of a cell, which figures are drawn against."""
    return f"router_noise.target={form},router_noise.scale={sigma:g}"


study = Study(
    name="volatility_dial",
    question="Does routing volatility by itself harm GRPO, and do Routing Replay or GSPO take the harm away?",
    hypothesis="It does, and both do: replay keeps the routes, and GSPO's sequence ratios average over their noise "
    "(GSPO, arXiv 2507.18071, sections 3 and 5.3).",
    arms=(grpo, replay, gspo),
    base=BASE.replace(**WARMED_UP),
    seeds=tuple(range(200, 216)),
    own_cold_starts=True,
    cells={
        noise("weights", 0): {},
        **{noise("weights", s): {"router_noise.scale": s} for s in SIGMAS},
        # Under replay the form `choice` moves nothing: its runs are those of σ = 0, so one dose shows it.
        **{
            noise("choice", s): {"router_noise.scale": s, "router_noise.target": "choice"}
            | ({} if s == max(SIGMAS) else {"arms": ("grpo", "gspo")})
            for s in SIGMAS
        },
    },
    figures=(
        "against:router_noise.scale",
        "against:router_noise.scale:greedy exact match, second half",
        "against:router_noise.scale:token_ess",
        "against:router_noise.scale:entropy",
        "learning",
    ),
    further_endpoints=("greedy exact match, second half",),
    comparisons=(("grpo-replay", "grpo"), ("gspo", "grpo")),
    decision_rule="Endpoints: mean reward over steps 26–50, and greedy exact match on 256 held-out prompts, mean of "
    "the evaluations after steps 30, 35, 40, 45, 50. An effect counts only if both are decided with the same sign: "
    "two-sided sign flips over 16 seeds, Holm at 5 % over the two contrasts at σ = 2 of each form, each endpoint by "
    "itself. Co-headline: at σ = .4, a dose nearer to published volatility, the 90 % interval of a difference in "
    "reward within ±.02 is 'equivalent', else 'not shown to be'. Harm of volatility: the same two endpoints, GRPO at σ "
    "= 2 − GRPO at σ = 0, sign flips at 5 % for each form. Exploratory: slopes over σ, with 95 % intervals; entropy, "
    "since reward also rises by sharpening. Machinery: in the form choice, runs with replay at σ = 2 are those at σ = "
    "0 bit for bit, or the study is void. Every arm at σ = 0 must end above its cold start in greedy exact match, or "
    "the learning rate damages the model and the study is void. Stopping: 16 seeds, 50 steps; a diverged run has "
    "reward 0 from there on.",
    verdict="volatility_dial_verdicts:verdict",
    differs_from_paper=DIFFERS + " Volatility is injected: a random direction for every router's weights, the same "
    "within a step and for all arms of a seed, that grows from update to update.",
    caution="one learning rate, one task, one size; the direction is random, not the optimizer's, and doses move far "
    "more slots than any report of production training.",
    cost="Cold starts come on top: about 30 s of one core per seed.",
    seconds_per_step=0.7,
)
