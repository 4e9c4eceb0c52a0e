"""What an arm minimises, made of components: ratio level × clipping rule, aggregation, corrections, terms, advantages;
and methods by name. Modules are loaded on first use: naming an arm needs no torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_rl.objectives.advantages import Advantage, AdvantageInputs, advantage_of
    from moe_rl.objectives.compose import Objective, compute_advantages, correction_weights, objective_of, policy_loss
    from moe_rl.objectives.losses import CorrectionInputs, LossInputs, LossOutput

MODULES = {
    "advantages": ("Advantage", "AdvantageInputs", "advantage_of"),
    "compose": ("Objective", "compute_advantages", "correction_weights", "objective_of", "policy_loss"),
    "losses": ("CorrectionInputs", "LossInputs", "LossOutput"),
}
__all__ = [
    "Advantage",
    "AdvantageInputs",
    "CorrectionInputs",
    "LossInputs",
    "LossOutput",
    "Objective",
    "advantage_of",
    "compute_advantages",
    "correction_weights",
    "objective_of",
    "policy_loss",
]


def __getattr__(name: str) -> Any:
    for module, names in MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"moe_rl.objectives.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
