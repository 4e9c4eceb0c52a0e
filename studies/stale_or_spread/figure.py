"""The figure of stale_or_spread."""

from __future__ import annotations

from matplotlib.figure import Figure
from stale_or_spread.study import RULES
from tuned_rates.figure import draw_rules

from moe_rl.storage.frames import Frames


def draw(frames: Frames) -> Figure:
    """Every planned difference, in both endpoints."""
    return draw_rules(frames, RULES.values(), "Rollouts two steps old: what helps at each rate?")
