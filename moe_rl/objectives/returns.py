"""Rewards of responses → advantages of their tokens: returns to go, and what a critic makes of them."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.lookup import needs
from moe_rl.objectives.base import Earned, Values


def turn_rewards(x: Earned) -> Values:
    """r_t: what each turn earned, at its last token; for `returns` and `gae`, which else have one reward, at the end of
    the response. One turn: the same as without. The first step, since it is of the rewards as they were given."""
    untouched(x, "turn_rewards")
    return x.turn_rewards


def returns(x: Earned, *, gamma: float = 1.0) -> Values:
    """G_t = r_t + γ·G_t′, t′ the next response token: the return to go; a reward per row is its last token's.

    REINFORCE++, arXiv 2501.03262; GAE (arXiv 1506.02438) with λ = 1 and no critic. Holes in the mask are stepped over.
    """
    if not 0 <= gamma <= 1:
        raise ConfigError(f"returns(gamma={gamma:g}): a discount is from 0 to 1")
    return _estimated(x, torch.zeros_like(x.mask, dtype=torch.float64), gamma, 1.0)


@needs("values")
def gae(x: Earned, *, gamma: float = 1.0, lam: float = 1.0) -> Values:
    """A_t = δ_t + γλ·A_t′, δ_t = r_t + γ·V_t′ − V_t, t′ the next response token: generalised advantage estimation.

    arXiv 1506.02438, eq. 16. V_t is the critic's before token t, and 0 after the last one, be the response finished or
    cut off; the critic learns A + V_old. Defaults are verl's; 1707.06347 has γ .99 and λ .95, ROLL λ .95. Holes in the
    mask are stepped over, as in verl, not in ROLL and slime. A reward per row is its last token's. λ = 0: δ; λ = 1:
    `returns` − V; V = 0: `returns` with γλ for γ.
    """
    for name, share in (("gamma", gamma), ("lam", lam)):
        if not 0 <= share <= 1:
            raise ConfigError(f"gae({name}={share:g}): a discount is from 0 to 1")
    if x.state_values is None:
        raise ConfigError("gae compares returns with the values of a critic, and the batch has none: a run has a "
                          "critic with critic.lr above 0; `returns` needs none")
    return _estimated(x, x.state_values.double(), gamma, lam)


def _estimated(x: Earned, v: Float[Tensor, "batch time"], gamma: float, lam: float) -> Float[Tensor, "batch time"]:
    """A_t = r_t + γ·V_t′ − V_t + γλ·A_t′, over response tokens."""
    rewards = (x.values if x.values.dim() == 2 else on_last(x.values, x.mask)).double()
    found, later, next_v = torch.zeros_like(rewards), rewards.new_zeros(len(rewards)), rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = x.mask[:, t]
        later = torch.where(here, rewards[:, t] + gamma * next_v - v[:, t] + gamma * lam * later, later)
        next_v = torch.where(here, v[:, t], next_v)
        found[:, t] = torch.where(here, later, 0)
    return found.to(x.values.dtype)


def untouched(x: Earned, step: str) -> None:
    """Raise ConfigError where a step before has made something else of the rewards."""
    if x.values is not x.rewards:
        raise ConfigError(f"the advantage {step} reads the rewards of turns, and a step before it changed those of "
                          "rows, which would be lost: put it first")


def on_last(rewards: Float[Tensor, " batch"], mask: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """Each row's reward at its last response token, 0 elsewhere."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, rewards[:, None], 0)


def value_loss(
    values: Float[Tensor, "batch time"],
    *,
    old_values: Float[Tensor, "batch time"],
    returns: Float[Tensor, "batch time"],
    weights: Float[Tensor, "batch time"],
    clip: float = math.inf,
) -> Float[Tensor, ""]:
    """½ Σ W · max((V − R)², (clip(V, V_old ± clip) − R)²), to be minimised; only `values` has a gradient.

    PPO's critic as its authors' code has it; 1707.06347, eq. 9, has the square alone. clip is 0.5 in verl, 0.2 in
    slime. W is the arm's aggregation, over the whole mini-batch, so that parts of it add up. The gradient W·(V − R) is
    gone where V is beyond the range and the clipped error is the larger one. clip = ∞: half the squared error.
    """
    near = values.clamp(old_values - clip, old_values + clip)
    error, clipped = (values - returns) ** 2, (near - returns) ** 2
    worst = torch.where(clipped > error, clipped, error)  # at a tie the gradient is kept
    return (weights * torch.where(weights != 0, worst, 0)).sum() / 2
