"""What share of the activated experts changes? Every definition, and what it depends on, one thing at a time."""

from small import BASE, DIFFERS, SECONDS, grpo

from moe_rl.config import Measure
from moe_rl.study import Study


def model(**overrides):
    return {"model.overrides": overrides}


study = Study(
    name="expert_volatility",
    question="What share of the experts that a token activates changes in one update, in one step, and on what does "
    "that depend?",
    hypothesis="Roughly 10 % per update under some definition (GSPO, arXiv 2507.18071, section 5.3), more with the "
    "learning rate, with depth and with updates per step, and far above the noise floor.",
    arms=(grpo,),
    base=BASE.replace(**{"optimizer.lr": 2e-4}, measure=Measure(responses=32, detail_every=5), steps=40, eval_every=20),
    seeds=(20, 21, 22, 23),
    own_cold_starts=True,
    cells={
        "base": {},
        "lr=5e-5": {"optimizer.lr": 5e-5},
        "lr=1e-4": {"optimizer.lr": 1e-4},
        "lr=4e-4": {"optimizer.lr": 4e-4},
        "updates=2": {"mini_batches": 2},
        "updates=4": {"mini_batches": 4},
        "layers=3": model(num_hidden_layers=3),
        "layers=12": model(num_hidden_layers=12),
        "experts=8": model(num_local_experts=8),
        "experts=32": model(num_local_experts=32),
        # With one expert and renormalised gates the gate is 1 and the router has no gradient: k is swept without.
        "k=1,raw-gates": model(num_experts_per_tok=1, norm_topk_prob=False),
        "k=2,raw-gates": model(num_experts_per_tok=2, norm_topk_prob=False),
        "k=4,raw-gates": model(num_experts_per_tok=4, norm_topk_prob=False),
    },
    figures=("learning", "expert_change"),
    endpoint="expert_change_rate",
    decision_rule="Endpoint: share of expert slots that change over one step (all its updates), response tokens, mean "
    "over steps 21–40. Reproduced if in the base cell the 95 % Student t interval over 4 seeds of any_change_rate, "
    "expert_change_rate or any_layer_change, per update or per step, contains 10 %; which ones do is the answer. "
    "Trends are "
    "reported as ratios to the base cell with intervals, paired by seed. Stopping: 4 seeds × 13 cells × 40 steps.",
    verdict="verdicts:expert_volatility",
    differs_from_paper=DIFFERS,
    caution="small models with few, large experts; a random initialisation and a short cold start, not pretraining.",
    cost="Cold starts come on top for eight more models: about 30 s of one core per seed and model, 60 with 12 layers.",
    seconds_per_step=SECONDS,
)
