"""What the studies share: the model, the task, arms, router noise, and a run of 50 steps."""

from moe_rl.config import Arm, ColdStart, Measure, Optimizer, RunConfig
from moe_rl.objectives.methods import arm
from moe_rl.registry import Component

grpo = arm("grpo")
replay = arm("grpo+old_policy+name=grpo-replay")
gspo_short = arm("gspo_short")
"""Its clip range, 0.01/0.013, is for 13 tokens: over them the log of the sequence ratio
spreads wider than over the paper's thousands."""
dual = arm("dual_clip(clip_high=0.27)+name=dual-clip")
"""With GRPO's upper range: only the bound at negative advantages differs from GRPO."""
ENDPOINT, SECONDARY = "sampled exact match, second half", "greedy exact match, second half"

BASE = RunConfig(
    arm=grpo,
    task=Component("running_sums", digits=12),
    steps=50,
    prompts_per_step=16,
    group_size=8,
    mini_batches=8,
    max_new_tokens=13,
    optimizer=Optimizer(lr=2e-4, warmup=40),
    cold_start=ColdStart(target=0.35),
    measure=Measure(responses=16),
    eval_every=5,
    eval_prompts=256,
    save_every=50,
)
"""0.7 M parameters: 6 layers, hidden 64, 16 experts, top-2; 128 rollouts and 8 updates per step; gradient clip 1. The
learning rate rises over the first five steps, while the moments of AdamW are young."""

DIFFERS = (
    "0.7 M parameters (6 layers, 16 experts, top-2) instead of 30 B (48 layers, 128, top-8); running sums modulo 10 "
    "instead of mathematics and code; 13 response tokens; 8 mini-batches of 16 responses per step instead of 4; 50 "
    "steps after a supervised warm-up."
)
EARLIER = (
    "0.7 M parameters (6 layers, 16 experts, top-2) instead of 30 B (48 layers, 128, top-8); running sums modulo 10 "
    "instead of mathematics and code; 13 response tokens; 8 mini-batches of 16 responses per step instead of 4; GSPO's "
    "clip range chosen for short responses; several cold starts where the paper shows one run."
)
"""How the studies up to ratio_gradient differ from the paper."""
SIXTY = {"steps": 60, "save_every": 60}


def noise(target: str, sigma: float) -> str:
    """The name of a condition with router noise, which figures are drawn against."""
    return f"router_noise.target={target},router_noise.scale={sigma:g}"


def crossed(weight: str, clip: str) -> Arm:
    """Tokens weighted by one ratio, and clipped by another, each `token`, `sequence` or, as a weight, `none`."""
    low, high = {"token": (0.2, 0.27), "sequence": (0.01, 0.013)}[clip]
    return Arm(
        name=f"{weight}-{clip}",
        loss=Component("crossed", weigh=weight, clip=clip, clip_low=low, clip_high=high),
    )


def layers(number: int) -> dict:
    """The settings of the embedded model with another number of layers: 0.11 M parameters each."""
    return {"model.overrides": {"num_hidden_layers": number}}


MIDDLE = {
    "model.overrides": {
        "num_hidden_layers": 12,
        "hidden_size": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "head_dim": 32,
        "initializer_range": 128**-0.5,
    }
}
"""10 M parameters: 12 layers, hidden 128, 32 experts, top-4. LARGE: 30 M: 24 layers, 64 experts, top-8."""
LARGE = {
    "model.overrides": MIDDLE["model.overrides"]
    | {"num_hidden_layers": 24, "num_local_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 48}
}


def with_clip(method: str, low: float, name: str) -> Arm:
    """A method with another clip range: `high` is to `low` as in the default of the method."""
    high = {"grpo": 0.27 / 0.2, "gspo_short": 0.013 / 0.01}[method] * low
    return arm(f"{method}(clip_low={low:g},clip_high={high:g})+name={name}")


def lagged(lag: int) -> dict:
    """The settings of rollouts that are `lag` steps of eight updates old."""
    return {"batches": Component("lagged", lag=lag)} if lag else {}
