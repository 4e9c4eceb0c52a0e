"""What an arm minimises, made of parts: ratio level × trust region, aggregation, corrections, terms, advantages."""

from moe_rl.objectives.advantages import Advantage, Earned, advantage_of
from moe_rl.objectives.base import LossInputs, LossOutput
from moe_rl.objectives.compose import Objective, objective_of, policy_loss

__all__ = ["Advantage", "Earned", "LossInputs", "LossOutput", "Objective", "advantage_of", "objective_of",
           "policy_loss"]
