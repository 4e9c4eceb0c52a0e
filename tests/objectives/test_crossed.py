"""GRPO and GSPO taken apart: `crossed`, against the two themselves and numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from moe_rl.objectives.losses import crossed, grpo, gspo
from tests.objectives.examples import inputs


@pytest.fixture
def example():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(12, 7, generator=generator, dtype=torch.float64)
    old = logprobs + 0.3 * torch.randn(12, 7, generator=generator, dtype=torch.float64)
    mask = torch.arange(7) < torch.arange(12)[:, None] % 7 + 1
    return inputs(logprobs.requires_grad_(), old, torch.randn(12, generator=generator, dtype=torch.float64), mask)


def gradient(loss, x, **options):
    output = loss(x, **options)
    return output, torch.autograd.grad(output.loss, x.logprobs)[0]


@pytest.mark.parametrize("level, whole, low, high", [("token", grpo, 0.2, 0.27), ("sequence", gspo, 0.05, 0.07)])
def test_the_diagonal_is_grpo_and_gspo(level, whole, low, high, example):
    a, mine = gradient(crossed, example, weigh=level, clip=level, clip_low=low, clip_high=high)
    b, theirs = gradient(whole, example, clip_low=low, clip_high=high)
    torch.testing.assert_close(mine, theirs)
    assert torch.equal(a.clipped_by, b.clipped_by) and a.clipped_by.any()
    torch.testing.assert_close(a.log_ratio, b.log_ratio)


RATIOS = {
    "token": [2.0, 0.0, 0.5, 4.0],
    "sequence": [4 ** (1 / 3)] * 4,
    "segment": [2.0, 0.0, 2**0.5, 2**0.5],
    "product": [4.0] * 4,
    "none": [1.0] * 4,
}
"""Of one response of three tokens, ratios 2, 1/2 and 4, the first a turn of its own."""


@pytest.mark.parametrize("weigh", RATIOS)
@pytest.mark.parametrize("clip", RATIOS)
@pytest.mark.parametrize("high", [0.2, 0.5, 2.5, 9.0])
def test_a_token_weighs_what_its_row_says_and_is_clipped_by_what_its_column_says(weigh, clip, high):
    """A = 1, and 1/3 per token."""
    mask = torch.tensor([[True, False, True, True]])
    logprobs = torch.tensor([[2.0, 7.0, 0.5, 4.0]], dtype=torch.float64).log().requires_grad_()
    one = inputs(logprobs, torch.zeros(1, 4).double(), torch.ones(1).double(), mask)
    output, found = gradient(crossed, one, weigh=weigh, clip=clip, clip_low=0.2, clip_high=high)
    bounded, weight = (torch.tensor([RATIOS[level]], dtype=torch.float64) for level in (clip, weigh))
    lost = mask & (bounded > 1 + high)
    torch.testing.assert_close(found, -weight * (mask & ~lost) / 3, rtol=0, atol=1e-12)
    assert torch.equal(output.clipped_by != 0, lost)
    torch.testing.assert_close(output.log_ratio.exp()[mask], weight[mask], rtol=1e-12, atol=0)
