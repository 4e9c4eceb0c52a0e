"""Every random stream of a run, derived from (run seed, purpose, position): any step can be drawn again on its own."""

from __future__ import annotations

import numpy as np

PROMPTS, NOISE, SPLIT, HELD_OUT = 1, 2, 3, 4


def derive(*position: int) -> int:
    """A 63-bit seed for a stream; positions that differ anywhere give independent streams (NumPy's SeedSequence)."""
    return int(np.random.SeedSequence(position).generate_state(1, np.uint64)[0] >> 1)
