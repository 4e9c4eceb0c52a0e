"""Losses against numbers worked by hand and against `oracle.py` (to 1e-12), and their invariances."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from moe_rl.errors import ConfigError
from moe_rl.objectives import LossInputs
from moe_rl.objectives.losses import LOSSES, gmpo, gspo
from tests.objectives.examples import TIGHT, inputs

NAMES = ["grpo", "gspo", "gspo_token"]


def ours(name, new, old, advantages, mask, low=None, high=None, **more):
    """(loss, gradient, output) of our loss on NumPy input, with its own range where none is given."""
    logprobs = torch.tensor(new, requires_grad=True)
    bounds = {} if low is None else {"clip_low": low, "clip_high": high}
    output = LOSSES[name](inputs(logprobs, old, advantages, mask, **more), **bounds)
    output.loss.backward()
    return output.loss.item(), logprobs.grad.numpy(), output


@pytest.mark.parametrize("name", NAMES)
def test_both_bounds_clip_only_the_side_their_advantage_pushes_to(name):
    """Ratios 2, 2, 1/2, 1/2 under advantages +, -, +, -, clipped to [0.8, 1.3]: worked by hand."""
    log2 = math.log(2)
    new = np.array([[0, log2], [0, log2], [0, -log2], [0, -log2]])
    mask = np.array([[False, True]] * 4)
    loss, gradient, output = ours(name, new, np.zeros((4, 2)), np.array([1.0, -1.0, 1.0, -1.0]), mask, 0.2, 0.3)
    assert output.clipped_by[:, 1].tolist() == [1, 0, 0, -1]
    np.testing.assert_allclose(loss, -(1.3 - 2 + 0.5 - 0.8) / 4, **TIGHT)
    np.testing.assert_allclose(gradient[:, 1], [0, 2 / 4, -0.5 / 4, 0], **TIGHT)
    np.testing.assert_allclose(output.log_ratio[:, 1], [log2, log2, -log2, -log2], **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_a_ratio_on_its_bound_keeps_its_gradient(name, dtype):
    """exp(log 2) is exactly 2 and exp(log 1/2) exactly 1/2, so these are ties; so is a ratio of 1 with range (0, 0)."""
    log2 = math.log(2)
    for log_ratio, advantage, low, high in [(log2, 1.0, 0.5, 1.0), (-log2, -1.0, 0.5, 1.0), (0.0, 1.0, 0.0, 0.0)]:
        logprobs = torch.tensor([[0.0, log_ratio]], dtype=dtype, requires_grad=True)
        mask = torch.tensor([[False, True]])
        x = inputs(logprobs, torch.zeros(1, 2, dtype=dtype), torch.tensor([advantage]), mask)
        output = LOSSES[name](x, clip_low=low, clip_high=high)
        output.loss.backward()
        ratio = logprobs.detach()[0, 1].exp()
        assert ratio.item() in (1 + high, 1 - low)
        assert output.clipped_by.tolist() == [[0, 0]]
        assert logprobs.grad[0].tolist() == [0.0, -advantage * ratio.item()]


@pytest.mark.parametrize("loss", [gspo, gmpo])
def test_a_loss_of_sequences_refuses_advantages_that_differ_within_a_response(loss):
    mask = torch.tensor([[False, True, True], [True, True, False]])
    differ = torch.tensor([[9.0, 1.0, 1.0], [2.0, 2.5, 9.0]])
    with pytest.raises(ConfigError, match="gspo_token"):
        loss(inputs(torch.zeros(2, 3), torch.zeros(2, 3), differ, mask))
    loss(inputs(torch.zeros(1, 3), torch.zeros(1, 3), differ.masked_fill(~mask, math.nan)[:1], mask[:1]))


def test_shapes_that_would_broadcast_are_refused():
    x, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    make = inspect.unwrap(LossInputs.__init__)  # without the tests' shape checker
    for wrong in (
        {"old_logprobs": torch.zeros(2, 1)},
        {"advantages": torch.zeros(2, 1)},
        {"weights": torch.ones(2)},
        {"ref_logprobs": torch.zeros(1, 2)},
        {"entropy": torch.zeros(2, 3)},
    ):
        shapes = {"logprobs": x, "old_logprobs": x, "advantages": x, "weights": x, "mask": mask} | wrong
        with pytest.raises(ConfigError, match="one shape"):
            make(object.__new__(LossInputs), **shapes)
