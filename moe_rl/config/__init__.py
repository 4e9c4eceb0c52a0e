"""What a run is, as data; nothing here imports torch."""

from moe_rl.config.parts import ColdStart, Critic, Dial, EngineConfig, Measure, ModelConfig, Optimizer, Parallel
from moe_rl.config.run import Arm, RunConfig

__all__ = ["Arm", "ColdStart", "Critic", "Dial", "EngineConfig", "Measure", "ModelConfig", "Optimizer", "Parallel",
           "RunConfig"]
