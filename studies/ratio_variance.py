"""How much of the log-ratios' variance goes with route changes, and does it scale as a flip model says?"""

from small import BASE, DIFFERS, SECONDS, grpo

from moe_rl.study import Study

study = Study(
    name="ratio_variance",
    question="On tokens about to be trained on, how much of the variance of log-ratios, and of the exact KL to the old "
    "policy, is associated with changes of routes?",
    hypothesis="Most of it: replaying the old policy's routes removes it (GSPO, arXiv 2507.18071, section 5.3: routing "
    "changes make token-level ratios fluctuate drastically). At a fixed point and direction, flips grow with the step "
    "and what is left under replay with its square.",
    arms=(grpo,),
    base=BASE.replace(steps=30),
    seeds=(30, 31, 32, 33),
    own_cold_starts=True,
    factors={"optimizer.lr": (2e-4, 4e-4, 5.66e-4)},
    figures=("expert_change", "ratio_spread"),
    endpoint="token_log_ratio_var",
    decision_rule="Removed variance: 1 − Σ R² / Σ D² over all tokens of a learning rate and mini-batch index, 4 seeds "
    "× 30 steps, about 25,000; and the same of the exact KL. The intervals that decide are 95 % Student t over the 4 "
    "seeds' own shares; beside them a 95 % percentile bootstrap by prompt, seeds fixed. Reproduced at a learning rate "
    "if both intervals at the eighth mini-batch lie above one half; not reproduced if both lie below it; else "
    "undetermined. With them: the share of Σ D² in the top 0.1 % of tokens (a lower bound: at most one token per "
    "prompt and mini-batch is known). Scaling law: log-log slopes over α in [1e-3, 1] per run, averaged over the "
    "learning rates of a seed, Student t over 4 seeds: reproduced if the interval of expert_change_rate's slope lies "
    "within "
    "[0.8, 1.2] and of Σ R²'s within [1.8, 2.2]. Stopping: 12 runs of 30 steps.",
    differs_from_paper=DIFFERS,
    caution="'associated': replay also holds back what smooth changes would have done through other experts.",
    cost="Cold starts come on top: about 30 s of one core per seed. A step costs twice as much as elsewhere.",
    seconds_per_step=2 * SECONDS,
    trainer="ratio_variance_trainer:execute",
)
