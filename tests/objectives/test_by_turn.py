"""Advantages of turns, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import advantage_of, objective_of
from moe_rl.registry import Component
from tests.objectives.examples import advantages_of, rewarded

TURN = torch.tensor([[0, 1, 1, 0, 0, 2], [0, 1, 1, 1, 0, 0], [0, 1, 0, 2, 2, 0], [0, 1, 1, 0, 2, 0]])
"""0: prompt, environment, padding."""
REWARDS = torch.tensor([[0, 0, 0, 0, 0, 0.5], [0, 0, 0, 1.0, 0, 0], [0, 0, 0, 0, 0.0, 0], [0, 0, 0.2, 0, 0.8, 0]])


def batch(turn=TURN, rewards=REWARDS, prompt=(0, 0, 0, 1), turns=True):
    further = {"turn": turn, "turn_rewards": rewards} if turns else {}
    return rewarded(rewards.sum(1), prompt, turn > 0, **further)


def of(*steps, b=None):
    return advantages_of(b or batch(), *steps)


def rows(*values):
    """What each row's turns get, at its tokens."""
    table = torch.tensor([(0.0, *v, *[0.0] * (2 - len(v))) for v in values])
    return table.gather(1, TURN)


S = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # G1 = .5, 1, 0: mean .5, deviation .5; G2 = .5, 0: mean .25, deviation .5/√2. The other prompt has none.
        ({}, rows((0, S), (1,), (-1, -S), (0, 0))),
        ({"scale": "none"}, rows((0, 0.25), (0.5,), (-0.5, -0.25), (0, 0))),
        # γ = .5: G1 = .25, 1, 0, mean 5/12; γ = 0: 0, 1, 0, mean 1/3.
        ({"gamma": 0.5, "scale": "none"}, rows((-1 / 6, 0.25), (7 / 12,), (-5 / 12, -0.25), (0, 0))),
        ({"gamma": 0.0, "scale": "none"}, rows((-1 / 3, 0.25), (2 / 3,), (-1 / 3, -0.25), (0, 0))),
        # All five turns: .5, .5, 1, 0, 0: mean .4; of the other prompt G = 1, .8: mean .9.
        ({"among": "group", "scale": "none"}, rows((0.1, 0.1), (0.6,), (-0.4, -0.4), (0.1, -0.1))),
        (
            {"among": "group"},
            rows(*((torch.tensor(v) / math.sqrt(0.175)).tolist() for v in ((0.1, 0.1), (0.6,), (-0.4, -0.4))), (S, -S)),
        ),
    ],
)
def test_a_turn_is_compared_with_turns_by_what_it_and_later_ones_earned(options, expected):
    torch.testing.assert_close(of(Component("by_turn", **options)), expected)


def test_rows_in_another_order_get_the_same_bits():
    order = torch.tensor([2, 3, 0, 1])
    b = batch(TURN[order], REWARDS[order], tuple(torch.tensor((0, 0, 0, 1))[order].tolist()))
    assert torch.equal(of("by_turn", b=b), of("by_turn")[order])


def test_one_turn_is_the_group():
    one = (TURN == 1).long()
    last = (one > 0) & (one.cumsum(1) == one.sum(1, keepdim=True))
    b = batch(one, torch.where(last, torch.tensor([[0.1], [0.9], [0.4], [1.0]]), 0), turns=False)
    assert torch.equal(of("by_turn", b=b), of("group", b=b)) and of("group", b=b).any()


def test_discounted_returns_of_rewards_per_turn():
    """γ per token: of row 0, .5 at its third own token; the environment's are stepped over. Without `turn_rewards` the
    whole reward is at the end."""
    found = of("turn_rewards", Component("returns", gamma=0.5))
    torch.testing.assert_close(found[0], torch.tensor([0, 0.125, 0.25, 0, 0, 0.5]))
    torch.testing.assert_close(found[3], torch.tensor([0, 0.3, 0.6, 0, 0.8, 0]))
    torch.testing.assert_close(of(Component("returns", gamma=0.5))[3], torch.tensor([0, 0.25, 0.5, 0, 1.0, 0]))


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ((Component("clipped", at=1), "by_turn"), "Put by_turn first"),
        (("turn_rewards",), "cannot come before"),
        (("turn_rewards", "group"), "cannot come before"),
        (("by_turn", "returns"), "cannot come before"),
    ],
)
def test_steps_that_would_lose_what_turns_earned_are_refused(steps, says):
    with pytest.raises(ConfigError, match=says):
        of(*steps)


KL = Component("kl_penalty", coef=0.1)


@pytest.mark.parametrize("loss", ["gspo", "gmpo"])
@pytest.mark.parametrize(
    "steps",
    [
        ("by_turn",),
        (Component("by_turn", gamma=0.0, scale="none"), "whitened"),
        ("turn_rewards", "returns"),
        (Component("returns", gamma=0.9),),
        ("turn_rewards", "gae"),
        ("gae",),
        (KL, "returns"),
        (KL, "returns", "whitened"),
    ],
    ids=lambda steps: "+".join(map(str, steps)),
)
def test_a_loss_with_one_advantage_per_sequence_refuses_others_when_the_arm_is_made(loss, steps):
    with pytest.raises(ConfigError, match="gspo_token"):
        objective_of(Arm(name="a", loss=loss, advantage=steps))
    for other in ("grpo", "gspo_token", "sapo"):
        assert objective_of(Arm(name="a", loss=other, advantage=steps))


@pytest.mark.parametrize(
    "steps",
    [
        ("group",),
        ("group", "whitened"),
        (Component("normalized", center="running"),),
        (Component("overlong", limit=9, buffer=3), "opo"),
        (Component("kl_penalty", coef=0.1, per_token=False), "group"),
        ("returns",),
    ],
    ids=lambda steps: "+".join(map(str, steps)),
)
def test_it_takes_those_that_are_one_per_sequence(steps):
    made = Arm(name="a", loss="gspo", advantage=steps)
    assert objective_of(made) and not advantage_of(made).per_token and not advantage_of(made).memory
