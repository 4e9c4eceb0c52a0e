"""The rivals of GSPO's explanation, against numbers worked by hand; `crossed` is tested in tests/objectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import why_gspo_losses as losses

from moe_rl.objectives.losses import grpo
from tests.objectives.examples import inputs


@pytest.fixture
def example():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(12, 7, generator=generator, dtype=torch.float64)
    old = logprobs + 0.3 * torch.randn(12, 7, generator=generator, dtype=torch.float64)
    mask = torch.arange(7) < torch.arange(12)[:, None] % 7 + 1
    return logprobs.requires_grad_(), old, torch.randn(12, generator=generator, dtype=torch.float64), mask


def gradient(loss, x, clip):
    output = loss(x, clip_low=clip[0], clip_high=clip[1])
    return output, torch.autograd.grad(output.loss, x.logprobs)[0]


def test_dual_clip_is_grpo_but_for_large_ratios_at_negative_advantages():
    ratios = torch.tensor([[2.9, 3.1], [2.9, 3.1]], dtype=torch.float64)
    one = inputs(ratios.log().requires_grad_(), torch.zeros(2, 2).double(), torch.tensor([-1.0, 1.0]).double(),
                 torch.ones(2, 2).bool())  # fmt: skip
    output, found = gradient(losses.dual_clip, one, (0.2, 5.0))
    torch.testing.assert_close(found, torch.tensor([[2.9, 0.0], [-2.9, -3.1]]).double() / 4)
    assert output.clipped_by.tolist() == [[0, 1], [0, 0]]


def test_shrunk_ratios_are_a_power_of_the_ratios():
    one = inputs(torch.tensor([[3.0]]).double().log().requires_grad_(), torch.zeros(1, 1).double(),
                 torch.ones(1).double(), torch.ones(1, 1).bool())  # fmt: skip
    _, found = gradient(losses.shrunk, one, (0.2, 5.0))
    torch.testing.assert_close(found, -torch.tensor([[3.0**0.56]]).double())


def test_random_masks_drop_whole_responses_at_their_rate_and_none_where_ratios_are_one(example):
    logprobs, *rest = (x.repeat(200, *[1] * (x.dim() - 1)) for x in example)
    x = inputs(logprobs.detach().requires_grad_(), *rest)
    _, found = gradient(losses.random_mask, x, (9.0, 9e9))
    whole = gradient(grpo, x, (9.0, 9e9))[1]
    kept = (found != 0).any(1)
    assert abs(1 - kept.double().mean() - losses.DROPPED) < 0.04
    assert torch.equal(found[kept], whole[kept])
    output, found = gradient(losses.random_mask, replace(x, old_logprobs=x.logprobs.detach()), (9.0, 9e9))
    assert not output.clipped_by.any() and (found != 0).any(1).all()
