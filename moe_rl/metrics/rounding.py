"""Rounding: how far it moves the results of two equal computations, and numbers printed without its traces."""

from __future__ import annotations

import math

SUMMED = 2.0**-23
"""Machine epsilon of float32, in which sums of products of narrower numbers are taken."""
IN_A_LAYER = 8
"""Successive roundings in a decoder layer: two norms, four projections, two residual sums."""


def rounding(eps: float, layers: int, magnitude: float) -> float:
    """How far a number may be from the same number with other orders of summation, in its own unit: machine epsilon ×
    depth × magnitude. `eps` is that of the dtype of weights and activations, `layers` the decoder layers before it.

    Depth is the number of successive roundings, in the layers and in the head. In a dtype as wide as that of the sums
    each differs by at most eps × magnitude. In a narrower one two sums differ by SUMMED × magnitude, which rounding to
    eps shows in a share SUMMED / eps of cases: a root mean square of √(eps × SUMMED) × magnitude.
    """
    return math.sqrt(eps * min(eps, SUMMED)) * (IN_A_LAYER * layers + 1) * magnitude


def number(value: float, form: str) -> str:
    """A number in the format `form`, without a minus before a zero, from its first 12 digits: later ones depend on the
    processor, and would decide how 0.125 is rounded to two digits."""
    sign = "+" if form.startswith("+") else ""
    return format(float(f"{value:.12g}"), f"{sign}z{form.removeprefix('+')}")
