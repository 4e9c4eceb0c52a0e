"""What an arm minimises, made of components: ratio level × clipping rule, aggregation, corrections, terms, advantages;
and methods by name. Loaded when it is asked for: naming an arm needs no torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_rl.objectives.advantages import Advantage, AdvantageInputs, advantage_of
    from moe_rl.objectives.compose import Objective, compute_advantages, correction_weights, objective_of, policy_loss
    from moe_rl.objectives.losses import CorrectionInputs, LossInputs, LossOutput

HOMES = {"Advantage": "advantages", "AdvantageInputs": "advantages", "advantage_of": "advantages",
         "compute_advantages": "compose", "correction_weights": "compose",
         "Objective": "compose", "objective_of": "compose", "policy_loss": "compose",
         "CorrectionInputs": "losses", "LossInputs": "losses", "LossOutput": "losses"}
__all__ = ["Advantage", "AdvantageInputs", "CorrectionInputs", "LossInputs", "LossOutput", "Objective", "advantage_of",
           "compute_advantages", "correction_weights", "objective_of", "policy_loss"]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"moe_rl.objectives.{HOMES[name]}"), name)
