"""Rounding: how far it moves the results of two equal computations, and numbers printed without its traces.

The order of a sum depends on the processor, the shape of the batch and the kernel, so its last bits do too.
"""

from __future__ import annotations

import math

SUMMED = 2.0**-23
"""Machine epsilon of float32, in which sums of products of narrower numbers are taken."""
IN_A_LAYER = 8
"""Roundings one after another in a decoder layer: two norms, the projections into and out of attention and experts, two
residual sums."""


def rounding(eps: float, layers: int, magnitude: float) -> float:
    """How far a number may be from the same number with other orders of summation, in its own unit: machine epsilon ×
    depth × magnitude. `eps` is that of the dtype of weights and activations, `layers` the decoder layers before it.

    Depth is the number of roundings one after another, those of the layers and that of the head. In a dtype as wide as
    that of the sums, every rounding differs by at most eps × magnitude. In a narrower one two sums differ by SUMMED ×
    magnitude, which two roundings to eps tell apart in a share SUMMED / eps of cases, then by eps × magnitude: a root
    mean square of √(eps × SUMMED) × magnitude.
    """
    return math.sqrt(eps * min(eps, SUMMED)) * (IN_A_LAYER * layers + 1) * magnitude


def number(value: float, form: str) -> str:
    """A number as the format `form` has it, without a minus before a zero, and from its first 12 digits: what follows
    those depends on the processor, and would decide on which side 0.125 is rounded to two digits."""
    sign = "+" if form.startswith("+") else ""
    return format(float(f"{value:.12g}"), f"{sign}z{form.removeprefix('+')}")
