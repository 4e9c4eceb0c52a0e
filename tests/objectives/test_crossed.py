"""GRPO and GSPO taken apart: `crossed`, against the two themselves and numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from moe_rl.errors import ConfigError
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


@pytest.mark.parametrize("weigh", ["token", "sequence", "none"])
@pytest.mark.parametrize("clip", ["token", "sequence", "none"])
def test_a_token_weighs_what_its_row_says_and_is_clipped_by_what_its_column_says(weigh, clip):
    """One response of two tokens, ratios 2 and 1/2, so that the sequence's is 1; A = 1, and 1/2 per token."""
    logprobs = torch.tensor([[2.0, 0.5]], dtype=torch.float64).log().requires_grad_()
    one = inputs(logprobs, torch.zeros(1, 2).double(), torch.ones(1).double(), torch.ones(1, 2).bool())
    weights = {"token": [2.0, 0.5], "sequence": [1.0, 1.0], "none": [1.0, 1.0]}[weigh]
    kept = [0.0, 1.0] if clip == "token" else [1.0, 1.0]
    _, found = gradient(crossed, one, weigh=weigh, clip=clip, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(found, -torch.tensor([[w * k / 2 for w, k in zip(weights, kept, strict=True)]]).double())


@pytest.mark.parametrize("wrong", [{"weigh": "tokens"}, {"clip": "response"}])
def test_a_level_that_is_none_is_refused_with_the_choices(wrong, example):
    with pytest.raises(ConfigError, match="each is one of token, sequence, none"):
        crossed(example, **wrong)
