"""Is it routing at all? The arms where routes cannot change, or routers do not learn, and under other optimizers."""

from small import BASE, DIFFERS, SECONDS, grpo, gspo, replay

from moe_rl.registry import Component
from moe_rl.study import Study

study = Study(
    name="controls",
    question="Do the arms still differ where routing cannot change, and do they differ under another optimizer?",
    hypothesis="Where routes cannot change replay does nothing, while GSPO still differs from GRPO.",
    arms=(grpo, replay, gspo),
    base=BASE.replace(**{"optimizer.lr": 5.66e-4, "steps": 60}),
    seeds=(40, 41, 42),
    own_cold_starts=True,
    cells={
        "moe": {},
        # Two experts, both always chosen: of the same active size as the MoE, with gates but without a choice.
        "no-choice": {"model.overrides": {"num_local_experts": 2}},
        "frozen-router": {"optimizer.router_lr_scale": 0.0},
        "router-lr-x10": {"optimizer.router_lr_scale": 10.0},
        "no-gradient-clip": {"optimizer.grad_clip": 0.0},
        "gradient-clip-0.3": {"optimizer.grad_clip": 0.3},
        "warm-up": {"optimizer.warmup": 160},
        "sgd": {"optimizer.name": "sgd", "optimizer.lr": 0.1},
        "variable-length": {"task": Component("running_sums", digits=12, min_digits=4)},
    },
    figures=(),
    comparisons=(("grpo-replay", "grpo"), ("gspo", "grpo")),
    decision_rule="Endpoint: mean reward over steps 31–60. Machinery: in no-choice the rewards of GRPO with and "
    "without replay are equal over the first three steps (later, rounding may part them), or the study is void. All "
    "else is exploratory: differences with 95 % Student t intervals over 3 seeds, cell by cell. Stopping: 3 seeds × 27 "
    "runs × 60 steps; a diverged run has reward 0 from there on.",
    differs_from_paper=DIFFERS,
    caution="exploratory; cells have one learning rate each, which is not tuned to them (SGD's least of all); cold "
    "starts of the first cell are those of why_gspo.",
    cost="Cold starts come on top for two further models or tasks: about 30 s of one core per seed and cell.",
    seconds_per_step=SECONDS,
)
