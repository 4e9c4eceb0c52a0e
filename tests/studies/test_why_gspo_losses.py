"""The objectives that take GRPO and GSPO apart, against the two themselves and numbers worked by hand."""

from __future__ import annotations

import pytest
import torch
import why_gspo_losses as losses

from moe_rl.losses import grpo_loss, gspo_loss


@pytest.fixture
def example():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(12, 7, generator=generator, dtype=torch.float64)
    old = logprobs + 0.3 * torch.randn(12, 7, generator=generator, dtype=torch.float64)
    mask = torch.arange(7) < torch.arange(12)[:, None] % 7 + 1
    return logprobs.requires_grad_(), old, torch.randn(12, generator=generator, dtype=torch.float64), mask


def gradient(loss, example, clip):
    logprobs, *rest = example
    output = loss(logprobs, *rest, clip_low=clip[0], clip_high=clip[1])
    return output, torch.autograd.grad(output.loss, logprobs)[0]


@pytest.mark.parametrize("mine, whole, clip", [
    (losses.token_token, grpo_loss, (0.2, 0.27)), (losses.sequence_sequence, gspo_loss, (0.05, 0.07)),
])  # fmt: skip
def test_the_diagonal_is_grpo_and_gspo(mine, whole, clip, example):
    (a, mine_gradient), (b, theirs) = (gradient(loss, example, clip) for loss in (mine, whole))
    torch.testing.assert_close(mine_gradient, theirs)
    assert torch.equal(a.lost, b.lost) and a.lost.any()
    torch.testing.assert_close(a.log_ratio, b.log_ratio)


@pytest.mark.parametrize("weight", ["token", "sequence", "none"])
@pytest.mark.parametrize("clip", ["token", "sequence", "none"])
def test_a_token_weighs_what_its_row_says_and_is_clipped_by_what_its_column_says(weight, clip, example):
    """One response of two tokens, ratios 2 and 1/2, so that the sequence's is 1; A = 1, and 1/2 per token."""
    logprobs = torch.tensor([[2.0, 0.5]], dtype=torch.float64).log().requires_grad_()
    one = (logprobs, torch.zeros(1, 2).double(), torch.ones(1).double(), torch.ones(1, 2).bool())
    weights = {"token": [2.0, 0.5], "sequence": [1.0, 1.0], "none": [1.0, 1.0]}[weight]
    kept = [0.0, 1.0] if clip == "token" else [1.0, 1.0]
    _, found = gradient(getattr(losses, f"{weight}_{clip}"), one, (0.2, 0.2))
    torch.testing.assert_close(found, -torch.tensor([[w * k / 2 for w, k in zip(weights, kept, strict=True)]]).double())


def test_dual_clip_is_grpo_but_for_large_ratios_at_negative_advantages():
    ratios = torch.tensor([[2.9, 3.1], [2.9, 3.1]], dtype=torch.float64)
    one = (ratios.log().requires_grad_(), torch.zeros(2, 2).double(), torch.tensor([-1.0, 1.0]).double(),
           torch.ones(2, 2).bool())  # fmt: skip
    output, found = gradient(losses.dual_clip, one, (0.2, 5.0))
    torch.testing.assert_close(found, torch.tensor([[2.9, 0.0], [-2.9, -3.1]]).double() / 4)
    assert output.lost.tolist() == [[0, 1], [0, 0]]


def test_shrunk_ratios_are_a_power_of_the_ratios():
    one = (torch.tensor([[3.0]]).double().log().requires_grad_(), torch.zeros(1, 1).double(), torch.ones(1).double(),
           torch.ones(1, 1).bool())  # fmt: skip
    _, found = gradient(losses.shrunk, one, (0.2, 5.0))
    torch.testing.assert_close(found, -torch.tensor([[3.0**0.56]]).double())


def test_random_masks_drop_whole_responses_at_their_rate_and_none_where_ratios_are_one(example):
    logprobs, old, advantages, mask = (x.repeat(200, *[1] * (x.dim() - 1)) for x in example)
    logprobs = logprobs.detach().requires_grad_()
    _, found = gradient(losses.random_mask, (logprobs, old, advantages, mask), (9.0, 9e9))
    whole = gradient(grpo_loss, (logprobs, old, advantages, mask), (9.0, 9e9))[1]
    kept = (found != 0).any(1)
    assert abs(1 - kept.double().mean() - losses.DROPPED) < 0.04
    assert torch.equal(found[kept], whole[kept])
    output, found = gradient(losses.random_mask, (logprobs, logprobs.detach(), advantages, mask), (9.0, 9e9))
    assert not output.lost.any() and (found != 0).any(1).all()
