"""The route sources of `placebos`: doses of replay, and flips where the old policy's margins are smallest."""

from functools import partial

from moe_rl.routing.sources import false_flips, random_share

quarter, half, three_quarters = (partial(random_share, share=share) for share in (0.25, 0.5, 0.75))
flips = partial(false_flips, share=0.18)
"""About the share of routers whose set changes in one step at this learning rate: 8 % at 2e-4 and 14 % at 4e-4 in
`expert_volatility`, carried on to 5.66e-4."""
