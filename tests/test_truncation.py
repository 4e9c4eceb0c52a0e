"""Truncated importance sampling against the engine: by hand, and as a weight on the objective's tokens alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.losses import grpo_loss, objective_of, sequence_mean_weights, truncated_weights
from tests.policies.test_hf import make_batch


def test_weights_by_hand():
    mask = torch.tensor([[False, True, True, True]])
    old = torch.tensor([[9.0, -1.0, -1.0, -1.0]])
    engine = torch.tensor([[0.0, -1.0 - math.log(1.5), -1.0 - math.log(3), -1.0 + math.log(4)]])
    torch.testing.assert_close(truncated_weights(old, engine, mask, 2.0), torch.tensor([[1.0, 1.5, 2.0, 0.25]]))


@pytest.fixture
def parts():
    batch = make_batch()
    generator = torch.Generator().manual_seed(0)

    def draw():
        return torch.where(batch.response_mask, -torch.rand(batch.tokens.shape, generator=generator), 0.0)

    return replace(batch, rollout_logprobs=draw()), draw().requires_grad_(), draw()


def test_each_tokens_gradient_is_scaled_by_its_weight(parts):
    batch, logprobs, old = parts
    weights = sequence_mean_weights(batch.response_mask)
    gradients = []
    for truncation in (0.0, 1.2):
        objective = objective_of(Arm(name="a", clip=(9.0, 9.0), truncation=truncation))
        out = objective(logprobs, torch.zeros_like(logprobs), old, batch, weights)
        gradients.append(torch.autograd.grad(out.loss, logprobs)[0])
    expected = truncated_weights(old, batch.rollout_logprobs, batch.response_mask, 1.2)
    assert (expected == 1.2).any() and (expected[batch.response_mask] < 1).any()
    torch.testing.assert_close(gradients[1], gradients[0] * expected)


def test_an_engine_that_agrees_changes_nothing(parts):
    batch, logprobs, old = parts
    batch, weights = replace(batch, rollout_logprobs=old), sequence_mean_weights(batch.response_mask)
    out = objective_of(Arm(name="a", truncation=2.0))(logprobs, torch.zeros_like(logprobs), old, batch, weights)
    plain = grpo_loss(logprobs, old, batch.advantages, batch.response_mask, clip_low=0.2, clip_high=0.27)
    assert torch.equal(out.loss, plain.loss)


@pytest.mark.parametrize(("settings", "message"), [({"anchor": "engine"}, "every weight is 1"), ({}, "positive")])
def test_truncation_that_means_nothing_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        objective_of(Arm(name="a", truncation=2.0 if settings else -1.0, **settings))
