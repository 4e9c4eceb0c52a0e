"""How many updates may a batch of rollouts serve, at equal samples, updates and mini-batches?"""

from small import BASE, DIFFERS, SECONDS, grpo, gspo, replay

from moe_rl.study import Study

UPDATES = 480

study = Study(
    name="staleness",
    question="Does what replay and GSPO do depend on the number N of updates per batch of rollouts?",
    hypothesis="At N = 1 all arms are one algorithm. With N the reward falls, and replay and GSPO gain on GRPO "
    "(arXiv 2512.01374: replay and clipping only matter for N >= 2).",
    arms=(grpo, replay, gspo),
    base=BASE,
    seeds=(20, 21, 22, 23),
    own_cold_starts=True,
    cells={
        f"N={n}": {"mini_batches": n, "prompts_per_step": 2 * n, "steps": UPDATES // n, "eval_every": UPDATES // n // 2}
        for n in (1, 2, 4, 8)
    },
    figures=("against:N", "against:N:expert slots changed"),
    comparisons=(("grpo-replay", "grpo"), ("gspo", "grpo")),
    decision_rule="Machinery: at N = 1 the rewards of GRPO with and without replay are equal at every step, and those "
    "of GSPO (whose gradient is rounded otherwise) over the first three steps, or the study is void. "
    "Endpoint: mean reward over the second half, of 480 updates on 7,680 responses each. Primary: the slope of "
    "replay − GRPO and of GSPO − GRPO over log2 N (least squares per seed, N = 1 … 8), 97.5 % Student t over 4 seeds. "
    "Above 0: reproduced; below: reversed; else undetermined at n = 4. Single N are exploratory. Stopping: 4 seeds × "
    "12 cells; a diverged run has reward 0 from there on.",
    verdict="verdicts:staleness",
    differs_from_paper=DIFFERS,
    caution="N and the size of a step's batch go together here: mini-batches are of 16 responses throughout, of 2 "
    "prompts at N = 1 and of about 10 of 16 at N = 8.",
    cost="Cold starts come on top: about 30 s of one core per seed.",
    seconds_per_step=SECONDS,
)
