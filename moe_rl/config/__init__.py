"""What a run is, as data; nothing here imports torch."""

from moe_rl.config.run import Arm, ColdStart, EngineConfig, Measure, ModelConfig, Optimizer, Parallel, RunConfig

__all__ = ["Arm", "ColdStart", "EngineConfig", "Measure", "ModelConfig", "Optimizer", "Parallel", "RunConfig"]
