"""Every random stream of a run, derived from (run seed, purpose, position): any step can be drawn again on its own."""

from __future__ import annotations

import numpy as np

PROMPTS, NOISE, SPLIT, HELD_OUT, DIAL, LAG = 1, 2, 3, 4, 5, 6


def derive(a: int, b: int, c: int, *further: int) -> int:
    """A 63-bit seed for a stream; positions that differ anywhere give independent streams (NumPy's SeedSequence).

    A position is three numbers, or five and more, each below 2^32: SeedSequence fills up to four with zeros and cuts
    larger ones, so that others could meet. Raises ValueError for those.
    """
    position = (a, b, c, *further)
    if len(position) == 4 or not all(0 <= number < 2**32 for number in position):
        raise ValueError(f"the position {position} needs three numbers, or five and more, each from 0 to 2^32 - 1")
    return int(np.random.SeedSequence(position).generate_state(1, np.uint64)[0]) >> 1
