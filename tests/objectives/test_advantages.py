"""Group-relative advantages: numbers worked by hand, exact zeros, and invariance to the order of rows."""

import math

import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import RunError
from moe_rl.objectives import advantage_of
from tests.objectives.examples import rewarded


def group_advantages(rewards, group):
    """One per row, of an arm that names no other step."""
    return advantage_of(Arm(name="a"))(rewarded(rewards, group, dtype=rewards.dtype))[:, 0]


def test_advantages_are_deviations_over_the_sample_standard_deviation():
    """{0, 1, 1, 0}: mean 1/2, sample variance 1/3. {1, 2, 3}: mean 2, sample std 1."""
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    group = torch.tensor([7, 7, 7, 7, 2, 2, 2])
    h = math.sqrt(3) / 2
    expected = torch.tensor([-h, h, h, -h, -1.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(rewards, group), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("rewards", [[0.0] * 3, [1.0] * 3, [0.3, 0.1 + 0.2, 0.3], [0.1, 0.1 + 1e-8, 0.1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_equal_rewards_have_exactly_zero_advantage(rewards, dtype):
    assert group_advantages(torch.tensor(rewards, dtype=dtype), torch.zeros(3, dtype=torch.long)).tolist() == [0.0] * 3


def test_a_small_but_real_difference_is_not_damped():
    a = group_advantages(torch.tensor([0.5, 0.501], dtype=torch.float64), torch.tensor([0, 0]))
    assert a.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-12)


def test_a_group_of_one_has_zero_advantage():
    assert group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 1])).tolist() == [0.0, 0.0]


def test_the_order_of_rows_changes_no_bit():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(64, generator=generator, dtype=torch.float64)
    group = torch.randint(0, 9, (64,), generator=generator)
    expected = group_advantages(rewards, group)
    for _ in range(20):
        order = torch.randperm(64, generator=generator)
        assert torch.equal(group_advantages(rewards[order], group[order]), expected[order])


def test_an_empty_batch_has_no_advantages():
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_an_error(value):
    with pytest.raises(RunError, match="reward of row 1"):
        group_advantages(torch.tensor([0.0, value]), torch.tensor([0, 0]))
