"""The figure of engine_gap."""

from __future__ import annotations

from engine_gap.study import RULE
from matplotlib.figure import Figure
from tuned_rates.figure import draw_rules

from moe_rl.storage.frames import Frames


def draw(frames: Frames) -> Figure:
    """Every planned difference, in both endpoints."""
    return draw_rules(frames, [RULE], "Does an engine in bfloat16 harm GRPO, and does a cure help?")
