"""Who broke the log-probs: `diagnose(rollouts, model)`."""

from moe_rl.analysis.diagnose.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
