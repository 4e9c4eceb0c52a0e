"""Has a pretrained, fine-grained MoE a natural regime in which replay has something to remove? The gate, on pilots.

The policy is `qwen3_moe-fine-pretrained`, which comes with the package: 12 layers of 64 narrow experts, top-8, routers
whose load has settled (docs/checkpoints.md). It adds 48 digits modulo 10, right in 99.6 % of held-out prompts, and by
their positions: of 49 to 56 digits none is right, after 200 steps of a cold start on 56 neither. So the task is another
addition of as many digits, and its cold start slow: at the default rate success jumps from below 35 to 81 %.
"""

from small import BASE, grpo, replay

from moe_rl.registry import Component
from moe_rl.study import Study

STEPS, UPDATES = 16, 8
FRESH = {"prompts_per_step": 2, "mini_batches": 1, "steps": STEPS * UPDATES, "eval_every": STEPS * UPDATES // 2,
         "save_every": STEPS * UPDATES, "arms": ("grpo",)}
"""As many updates of as many responses, each on fresh ones of the policy itself."""
SETTINGS = {
    "lr=2e-4": {"optimizer.lr": 2e-4},
    "lr=4e-4": {"optimizer.lr": 4e-4},
    "lr=8e-4": {"optimizer.lr": 8e-4},
    "lr=4e-4,routers-x10": {"optimizer.lr": 4e-4, "optimizer.router_lr_scale": 10.0},
}

study = Study(
    name="regime_gate",
    question="Is there a setting in which a pretrained fine-grained MoE trains on-policy and, after eight updates on "
    "one batch, has ratios that its routes have spread and replay would keep?",
    hypothesis="None: many small experts change often and move little (a pilot of such a shape had an ESS of .997).",
    arms=(grpo, replay),
    base=BASE.replace(**{
        "model.name": "qwen3_moe-fine-pretrained", "task": Component("running_sums", digits=48, modulus=7),
        "max_new_tokens": 49, "mini_batches": UPDATES, "steps": STEPS, "eval_every": STEPS // 2, "eval_prompts": 128,
        "save_every": STEPS, "optimizer.warmup": 40, "cold_start.lr": 2e-4,
    }),
    seeds=(100, 101),
    own_cold_starts=True,
    cells={f"{setting},{kind}": values | more for setting, values in SETTINGS.items()
           for kind, more in (("N=8", {}), ("fresh", FRESH))},
    figures=(),
    decision_rule="Of every setting, on both pilot seeds: token ESS of the eighth update's mini-batch (784 "
    "tokens), mean over steps 9–16, is at most .9 for GRPO and at least .98 for GRPO with replay at N = 8; and "
    "on-policy training, as many updates of 16 responses that are each drawn anew, does not collapse and ends with at "
    "least its cold start's greedy exact match on 128 held-out prompts. A setting that has all of it on both seeds "
    "passes, and the first one that does is the regime of a study with 3 arms and 8 new seeds. If none passes, that is "
    "the answer, with the numbers. Stopping: 24 runs of 128 updates.",
    verdict="regime_gate_verdicts:verdict",
    differs_from_paper="3.8 M parameters (12 layers, 64 experts, top-8) instead of 30 B (48 layers, 128, top-8); "
    "running sums modulo 7; 49 response tokens; 8 mini-batches of 16 responses per step instead of 4.",
    caution="two pilot seeds that take part in no other study, one checkpoint, one task.",
    cost="Cold starts come on top: the checkpoint is trained on to a success rate of 35 %.",
    seconds_per_step=2.5,
)
