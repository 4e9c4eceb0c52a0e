"""The figure of deep."""

from __future__ import annotations

from deep.study import RULES
from matplotlib.figure import Figure
from tuned_rates.figure import draw_rules

from moe_rl.storage.frames import Frames


def draw(frames: Frames) -> Figure:
    """Every planned difference at both rates, in both endpoints."""
    return draw_rules(frames, RULES.values(), "Do replay or GSPO help in a model of 24 layers, with fresh rollouts?")
