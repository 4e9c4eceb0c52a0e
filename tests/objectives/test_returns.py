"""GAE and the value loss: by hand, by a loop, by another framework's numbers, and where they must be something else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import advantage_of
from moe_rl.objectives.advantages import value_loss
from moe_rl.objectives.weights import seq_mean_token_mean, token_mean
from moe_rl.registry import Component
from tests.objectives.examples import rewarded
from tests.objectives.test_steps import MASK, PROMPT, REWARDS, made, tight

RNG = np.random.default_rng(3)
VALUES = np.where(MASK, RNG.normal(size=MASK.shape), 0)
HOLES = np.array([[0, 1, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0], [0, 1, 0, 1, 0, 1, 1], [0] * 7], dtype=bool)
PEERS = Path(__file__).with_name("peers_critic.npz")
"""OpenRLHF's value loss and its gradient; provenance beside them."""


def given(*steps, rewards=REWARDS, mask=MASK, values=VALUES, **further):
    """Advantages and returns."""
    prompt = PROMPT if rewards is REWARDS else [0] * len(rewards)
    batch = rewarded(rewards, prompt, mask, torch.float64, values=values, **further)
    batch = advantage_of(Arm(name="a", advantage=steps)).attach_advantages(batch)
    return batch.advantages.numpy(), batch.returns.numpy()


def looped(rewards, values, mask, gamma, lam):
    """Σ_l (γλ)^l δ over the response tokens of each row, from the definition, not backwards."""
    found = np.zeros(mask.shape)
    for i in range(len(mask)):
        at = np.flatnonzero(mask[i])
        v = [*values[i, at], 0.0]
        delta = [rewards[i, t] + gamma * v[n + 1] - v[n] for n, t in enumerate(at)]
        for n, t in enumerate(at):
            found[i, t] = sum((gamma * lam) ** (m - n) * delta[m] for m in range(n, len(at)))
    return found


def on_last(rewards, mask):
    """Per token, from one per row."""
    found = np.zeros(mask.shape)
    for i, reward in enumerate(rewards):
        found[i, np.flatnonzero(mask[i])[-1:]] = reward
    return found


# ---------------------------------------------------------------------- advantages
def test_gae_by_hand():
    """γ = ½, λ = ½, a hole before the last token: δ = ½·4 − 2, ½·8 − 4, 1 − 8, and from the end A = δ + ¼ A′."""
    mask = np.array([[0, 1, 1, 0, 1]], dtype=bool)
    advantages, returns = given(
        Component("gae", gamma=0.5, lam=0.5), rewards=[1.0], mask=mask, values=[[9.0, 2.0, 4.0, 9.0, 8.0]]
    )
    assert advantages.tolist() == [[0, -7 / 16, -7 / 4, 0, -7]]
    assert returns.tolist() == [[0, 2 - 7 / 16, 4 - 7 / 4, 0, 1]]


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (0.0, 0.7)])
@pytest.mark.parametrize("mask", [MASK, HOLES], ids=["whole", "holes"])
def test_gae_by_a_loop(mask, gamma, lam):
    rewards = RNG.normal(size=len(mask))
    values = RNG.normal(size=mask.shape)  # outside of the response, too: it must not leak
    advantages, returns = given(Component("gae", gamma=gamma, lam=lam), rewards=rewards, mask=mask, values=values)
    expected = looped(on_last(rewards, mask), values, mask, gamma, lam)
    tight(advantages, expected)
    tight(returns, np.where(mask, expected + values, 0))


def test_rewards_per_token_are_those_of_kl_penalty():
    policies = {name: np.where(MASK, -RNG.exponential(size=MASK.shape), 0) for name in ("old_logprobs", "ref_logprobs")}
    penalty = Component("kl_penalty", coef=0.3)
    advantages, returns = given(penalty, Component("gae", gamma=0.9, lam=0.8), **policies)
    rewards = on_last(REWARDS, MASK) - 0.3 * np.where(MASK, policies["old_logprobs"] - policies["ref_logprobs"], 0)
    tight(advantages, looped(rewards, VALUES, MASK, 0.9, 0.8))
    tight(returns, advantages + VALUES)


def test_the_critic_learns_what_gae_gave_whatever_becomes_of_the_advantages():
    plain, returns = given(Component("gae", lam=0.5))
    whitened, same = given(Component("gae", lam=0.5), "whitened", Component("clipped", at=1.0))
    np.testing.assert_array_equal(returns, same)
    of_tokens = plain[MASK]
    tight(whitened[MASK], np.clip((of_tokens - of_tokens.mean()) / np.sqrt(of_tokens.var(ddof=1) + 1e-8), -1, 1))
    scaled, of_scaled = given(Component("normalized", center="none", scale="batch"), Component("gae", lam=0.5))
    tight(of_scaled, scaled + VALUES)


def test_gae_asks_for_values_and_nothing_else_has_returns():
    assert advantage_of(Arm(name="a", advantage="gae")).needs == {"values"}
    with pytest.raises(ConfigError, match="gae"):
        made("gae")
    batch = rewarded(REWARDS, PROMPT, MASK, values=VALUES.astype(np.float32))
    assert advantage_of(Arm(name="a", advantage="returns")).attach_advantages(batch).returns is None


# ---------------------------------------------------------------------- value loss
def loss_of(values, old, returns, mask, clip=math.inf, aggregate=token_mean):
    """Value and gradient."""
    values = torch.tensor(values, requires_grad=True)
    loss = value_loss(
        values,
        old_values=torch.as_tensor(old),
        returns=torch.as_tensor(returns),
        weights=aggregate(torch.as_tensor(mask)),
        clip=clip,
    )
    loss.backward()
    return loss.item(), values.grad.numpy()


def expected_loss(values, old, returns, mask, clip, weights):
    """Token by token, with its gradient."""
    loss, gradient = 0.0, np.zeros(mask.shape)
    for i, t in zip(*np.nonzero(mask), strict=True):
        v, near, goal = values[i, t], min(max(values[i, t], old[i, t] - clip), old[i, t] + clip), returns[i, t]
        loss += weights[i, t] * max((v - goal) ** 2, (near - goal) ** 2) / 2
        if (near - goal) ** 2 <= (v - goal) ** 2:
            gradient[i, t] = weights[i, t] * (v - goal)
    return loss, gradient


@pytest.mark.parametrize("clip", [0.0, 0.2, 0.5, math.inf])
@pytest.mark.parametrize("aggregate", [token_mean, seq_mean_token_mean])
@pytest.mark.parametrize("mask", [MASK, HOLES], ids=["whole", "holes"])
def test_the_value_loss_by_a_loop(mask, aggregate, clip):
    values, old, returns = RNG.normal(size=(3, *mask.shape))
    weights = aggregate(torch.tensor(mask)).numpy()
    loss, gradient = loss_of(values, old, returns, mask, clip, aggregate)
    want, slope = expected_loss(values, old, returns, mask, clip, weights)
    tight(loss, want)
    tight(gradient, slope)
    assert math.isinf(clip) or (slope[mask] == 0).any() and (slope[mask] != 0).any()
    parts = [
        value_loss(
            torch.tensor(values[cut]),
            old_values=torch.tensor(old[cut]),
            clip=clip,
            returns=torch.tensor(returns[cut]),
            weights=torch.tensor(weights[cut]),
        ).item()
        for cut in (slice(0, 3), slice(3, None))
    ]
    tight(sum(parts), want)


def test_the_value_loss_at_its_bounds():
    """One token each, W = ¼, V_old = 0, ε = ½: inside; exactly on the bound; beyond it with the clipped error larger,
    whose gradient is gone, and beyond it with the other larger."""
    values, returns = np.array([[0.25, 0.5, 1.0, 1.0]]), np.array([[1.0, 1.0, 2.0, 0.0]])
    mask = np.ones((1, 4), dtype=bool)
    loss, gradient = loss_of(values, np.zeros((1, 4)), returns, mask, clip=0.5)
    assert loss == (0.75**2 + 0.5**2 + 1.5**2 + 1.0**2) / 8
    assert gradient.tolist() == [[-0.75 / 4, -0.5 / 4, 0, 1 / 4]]
    assert loss_of(values, np.zeros((1, 4)), returns, mask)[0] == (0.75**2 + 0.5**2 + 1 + 1) / 8, "half the square"
    tie = loss_of([[1.0]], [[0.0]], [[0.75]], mask[:, :1], clip=0.5)
    assert tie == (0.25**2 / 2, [[0.25]]), "both errors are equal: the gradient stays"


def test_what_stands_in_padding_does_not_leak_and_no_token_is_no_loss():
    values, returns = np.full((2, 3), 1e300), np.full((2, 3), -1e300)
    mask = np.zeros((2, 3), dtype=bool)
    loss, gradient = loss_of(values, values, returns, mask, clip=0.1)
    assert loss == 0 and not gradient.any()


with np.load(PEERS) as file:
    ARRAYS = dict(file)
PROVENANCE = json.loads(str(ARRAYS.pop("provenance")))


@pytest.mark.parametrize("case", PROVENANCE["cases"])
def test_gae_and_the_value_loss_are_openrlhfs(case):
    """Its mean over tokens is token_mean; its returns are those of GAE with γ = λ = 1."""
    x = {name: ARRAYS[f"{case}/{name}"] for name in ("mask", "rewards", "values", "new_values", "loss", "grad")}
    _, returns = given("gae", rewards=x["rewards"], mask=x["mask"], values=x["values"])
    loss, gradient = loss_of(x["new_values"], x["values"], returns, x["mask"], PROVENANCE["options"]["clip_eps"])
    tight(loss, x["loss"])
    tight(gradient, x["grad"])
    assert (gradient[x["mask"]] == 0).any(), "some are clipped"
