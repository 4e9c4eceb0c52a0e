"""The route sources of `placebos`: doses of replay, and flips where the old policy's margins are smallest."""

from functools import partial

from moe_rl.routing.sources import false_flips, random_share

quarter, half, three_quarters = (partial(random_share, share=share) for share in (0.25, 0.5, 0.75))
flips = partial(false_flips, share=0.05)
"""About the share of expert slots that changes in one step in the pilot of `small` at 4e-4 (5.3 %)."""
