"""Rewards of a step's rollouts → advantages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_rl.errors import RunError

EQUAL = 1e-6
"""Rewards of a group that lie this close together are equal up to rounding (rewards are in [0, 1])."""


def group(rewards: Float[Tensor, " batch"], prompt: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """(r_i - mean) / std over the rows of equal `prompt`; no unit.

    GSPO, arXiv 2507.18071, eq. 7. The paper does not say which deviation its std is; this is the sample one (n - 1), as
    in verl and TRL, so that advantages compare with theirs (the population one would be larger by sqrt(n/(n-1)),
    7 % for groups of 8). No epsilon is added, as in eq. 7: none is needed, since the advantage is exactly 0 in a group
    of one and in a group whose rewards differ by at most `EQUAL`. verl adds 1e-6 and TRL 1e-4, which also shrinks the
    advantages of groups with nearly equal rewards.

    The value of a row does not depend on the order of rows, to the last bit. Raises RunError for a reward that is not
    finite.
    """
    if not bool(torch.isfinite(rewards).all()):
        row = int((~torch.isfinite(rewards)).nonzero()[0])
        raise RunError(
            f"the reward of row {row} is {rewards[row].item()}, which would make the advantages of its whole group and "
            "then the weights NaN: make the task's reward return a number in [0, 1]"
        )
    advantages = torch.zeros_like(rewards)
    for one in prompt.unique():
        rows = prompt == one
        values = rewards[rows].double().sort().values  # sorted: floating-point sums depend on the order
        if len(values) > 1 and values[-1] - values[0] > EQUAL:
            advantages[rows] = ((rewards[rows].double() - values.mean()) / values.std()).to(rewards.dtype)
    return advantages


ADVANTAGES: dict[str, Callable[..., Float[Tensor, "batch ..."]]] = {"group": group}
"""Functions of rewards [batch] and the index of each row's prompt [batch]; they give an advantage per row, or [batch,
time] where one per token is meant."""
