"""Is a dense model of equal active size stable up to a higher learning rate than the MoE? GRPO, as in learning_rates.

Pilots, seed 100, rewards of steps 36–40 of the dense model: .62 at 5.66e-4, .21 at 8e-4, .00 at 1.13e-3.
After the declaration, and before its runs, a check of the machinery took two steps of seeds 0 and 1 by mistake, where
seed 100 was meant; rewards of both were seen, and nothing but this paragraph was changed.
"""

from small import BASE, DIFFERS, grpo

from moe_rl.study import Study

DENSE = {"model.overrides": {"num_local_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 64}}
"""One expert as wide as the two of 32 that a token of the MoE uses: a softmax over one is 1, so its router does nothing
and learns nothing. 73,728 weights of experts act on a token in either model."""
RATES = (2e-4, 4e-4, 5.66e-4, 8e-4, 1.13e-3)
"""Those of learning_rates without 2.83e-4. There GRPO's MoE is best at 2e-4 and has lost half between 4e-4 and 8e-4 on
all four seeds, so that it has the same endpoint on these."""
AGAIN = (4e-4, 5.66e-4)
"""Rates at which the MoE is run again by today's code: those between which it loses half on three of its four seeds."""


def cell(model: str, rate: float) -> str:
    """The name of a model at a learning rate."""
    return f"model={model},optimizer.lr={rate:g}"


study = Study(
    name="dense",
    question="Does GRPO train a dense model of equal active size up to a higher learning rate than the MoE?",
    hypothesis="It does: that activated experts are volatile gives MoE models stability challenges which dense ones "
    "do not have (GSPO, arXiv 2507.18071, section 5.3).",
    arms=(grpo,),
    base=BASE,
    seeds=(0, 1, 2, 3),
    own_cold_starts=True,
    cells={cell("dense", rate): DENSE | {"optimizer.lr": rate} for rate in RATES}
    | {cell("moe", rate): {"optimizer.lr": rate} for rate in AGAIN},
    figures=(),
    decision_rule="Endpoint as in learning_rates: the learning rate at which the mean reward of steps 51–100 falls "
    "below half of the curve's own best, log-linearly interpolated; the ratio dense / MoE, paired by seed, which is "
    "of prompts and noise, with a 95 % Student t interval of logs. The MoE's runs are the GRPO ones that are stored "
    "in learning_rates, of older code, same seeds and rates. Since the code has changed, its ratio is taken a second "
    "time with the MoE's rewards at 4e-4 and 5.66e-4 from runs made again. Both intervals above 1: reproduced; both "
    "below: reversed; else undetermined at n = 4. A curve that never falls is censored at 1.13e-3 and counts there; "
    "their number is reported. Machinery: in the dense model no expert slot changes and replay leaves no gap, and at "
    "2e-4 it ends above its cold start in greedy exact match, or the study is void. Exploratory: reward by rate, "
    "collapses, greedy exact match, the MoE's rewards again − stored, reward at equal functional step. Stopping: 4 "
    "seeds × (5 dense + 2 MoE) × 100 steps, looked at when all have ended; a diverged run has reward 0 from there on.",
    verdict="dense_verdicts:verdict",
    differs_from_paper=DIFFERS + " The paper shows no dense run; its remark is about training that does not converge.",
    caution="four seeds, one task, one size. The two models differ in more than routing: the MoE has four times the "
    "weights, cold starts are of each model's own, and a gate of about one half scales each expert of the MoE, so that "
    "one rate moves the dense expert's output further, which is against the hypothesis.",
    cost="Cold starts come on top, of two models: about 10 s of one core each per seed.",
    seconds_per_step=0.5,
)
