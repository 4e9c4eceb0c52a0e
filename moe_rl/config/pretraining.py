"""How a model is pretrained, as data, and when that is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_rl.config.parts import ModelConfig
from moe_rl.config.tree import replaced
from moe_rl.registry import Part, Use

Row = dict[str, float]
"""A measurement on held-out prompts: `models.supervised.measure`."""


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Supervised training from nothing until loss and load have settled: `moe-rl pretrain`."""

    task: Part = Use("running_sums")
    """What it learns: answers of these prompts. Usually a `mixture`."""
    model: ModelConfig = ModelConfig()
    seed: int = 0
    """Initial weights and order of examples."""
    batch_size: int = 64
    micro_batch: int = 64
    """Most rows in one forward, over which the load is balanced."""
    lr: float = 2e-3
    warmup: int = 100
    """Steps over which the learning rate rises; then it is constant, until all goals are met or steps run out."""
    load_balance: float = 0.01
    """Switch's loss per site (arXiv 2101.03961, eq. 4), over real tokens, prompts included."""
    max_steps: int = 5000
    """Of the constant rate. A fifth of the steps taken follows, over which the rate falls to 0."""
    every: int = 100
    """Steps between measurements on held-out prompts, after each of which a killed pretraining goes on."""
    held_out: int = 256
    """Prompts kept out: those that a run with as many `eval_prompts` evaluates on, or begins with."""
    patience: int = 5
    least_gain: float = 0.02
    """The loss is flat when its best of the last `patience` measurements is not this share below the best before."""
    least_entropy: float = 0.95
    """Goal of the least even site: −Σ f log f / log E of the share of slots that each expert fills."""
    most_violation: float = 1.0
    """Goal of the least even site: max f / mean f − 1. No expert may be dead (f below a hundredth of a fair share)."""

    def replace(self, **changes: Any) -> Pretraining:
        """A copy with changes; dotted keys reach inside."""
        return replaced(self, changes)

    def goals(self, rows: list[Row]) -> dict[str, bool]:
        """Which are met after these measurements: `flat`, `balanced`."""
        losses, last = [row["loss"] for row in rows], rows[-1]
        before, lately = losses[: -self.patience], losses[-self.patience :]
        return {
            "flat": bool(before) and min(lately) > (1 - self.least_gain) * min(before),
            "balanced": (last["load_entropy"] >= self.least_entropy and not last["load_dead_experts"]
                         and last["load_max_violation"] < self.most_violation),
        }
