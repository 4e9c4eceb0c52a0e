"""Losses against numbers worked by hand and against `oracle.py` (to 1e-12), and their invariances."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from moe_rl.errors import ConfigError
from moe_rl.objectives import LossInputs
from moe_rl.objectives.losses import LOSSES, grpo, gspo
from moe_rl.objectives.weights import seq_mean_token_mean
from moe_rl.registry import Component, lookup
from tests import oracle
from tests.objectives.examples import TIGHT, case, inputs, ranged

NAMES = ["grpo", "gspo", "gspo_token"]


def ours(name, new, old, advantages, mask, low=None, high=None, **more):
    """(loss, gradient, output) of our loss on NumPy input, with its own range where none is given."""
    logprobs = torch.tensor(new, requires_grad=True)
    bounds = {} if low is None else {"clip_low": low, "clip_high": high}
    output = LOSSES[name](inputs(logprobs, old, advantages, mask, **more), **bounds)
    output.loss.backward()
    return output.loss.item(), logprobs.grad.numpy(), output


def test_the_oracle_s_gradients_are_those_of_its_values():
    new, old, advantages, mask = case()
    for name in ("grpo", "gspo"):
        function = getattr(oracle, name)
        differences = oracle.central_differences(lambda x, f=function: f(x, old, advantages, mask, 0.1, 0.15)[0], new)
        np.testing.assert_allclose(function(new, old, advantages, mask, 0.1, 0.15)[1], differences, rtol=0, atol=1e-9)
    differences = oracle.central_differences(
        lambda x: oracle.gspo_token(x, old, advantages, mask, 0.1, 0.15, stopped=new)[0], new
    )
    gradient = oracle.gspo_token(new, old, advantages, mask, 0.1, 0.15)[1]
    np.testing.assert_allclose(gradient, differences, rtol=0, atol=1e-9)


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


def test_the_tie_convention_is_that_of_torch_minimum_and_of_a_clamp_that_keeps_gradients_on_its_bounds():
    """As torch.clamp did before torch 2.15."""
    new, old, advantages, mask = (torch.tensor(x) for x in case(1))
    new[0, 1:5] = old[0, 1:5]  # ratio 1, with the range (0, 0.15): on the lower bound
    for a in (advantages, -advantages):
        logprobs = new.clone().requires_grad_()
        ratio = (logprobs - old).exp()
        inside = (ratio >= 1.0) & (ratio <= 1.15)
        clamped = torch.where(inside, ratio, ratio.detach().clamp(1.0, 1.15))
        branches = torch.minimum(ratio * a[:, None], clamped * a[:, None])
        expected = torch.autograd.grad(-(seq_mean_token_mean(mask) * branches).sum(), logprobs)[0]
        output = grpo(inputs(logprobs, old, a, mask), clip_low=0.0, clip_high=0.15)
        torch.testing.assert_close(torch.autograd.grad(output.loss, logprobs)[0], expected, **TIGHT)


@pytest.mark.parametrize("name", ["grpo", "gspo_token"])
def test_advantages_and_weights_in_the_padding_change_nothing(name):
    new, old, _, mask = case()
    advantages = np.random.default_rng(0).normal(size=mask.shape)
    loss, gradient, _ = ours(name, new, old, advantages, mask, 0.1, 0.15)
    weights = seq_mean_token_mean(torch.tensor(mask)).masked_fill(~torch.tensor(mask), 7.0)
    junk = np.where(mask, advantages, np.nan)
    padded_loss, padded_gradient, _ = ours(name, new, old, junk, mask, 0.1, 0.15, weights=weights)
    np.testing.assert_allclose(padded_loss, loss, **TIGHT)
    np.testing.assert_allclose(padded_gradient, gradient, **TIGHT)


def test_gspo_token_is_gspo_when_a_sequence_has_one_advantage():
    new, old, advantages, mask = case()
    loss, gradient, output = ours("gspo", new, old, advantages, mask, 0.1, 0.15)
    for a in (advantages, np.repeat(advantages[:, None], 9, 1)):
        other_loss, other_gradient, other = ours("gspo_token", new, old, a, mask, 0.1, 0.15)
        np.testing.assert_allclose(other_loss, loss, **TIGHT)
        np.testing.assert_allclose(other_gradient, gradient, **TIGHT)
        assert torch.equal(other.clipped_by, output.clipped_by)
        torch.testing.assert_close(other.log_ratio, output.log_ratio, **TIGHT)


def test_log_ratios_are_not_clamped():
    """A ratio of e^30 under a negative advantage counts in full: min() does not bound it."""
    new, mask = np.array([[0.0, 30.0]]), np.array([[False, True]])
    loss, gradient, output = ours("grpo", new, np.zeros((1, 2)), np.array([-1.0]), mask, 0.2, 0.27)
    assert loss == pytest.approx(math.exp(30), rel=1e-12) and gradient[0, 1] == pytest.approx(math.exp(30), rel=1e-12)
    assert output.log_ratio[0, 1] == 30


def test_a_clipped_ratio_that_overflows_does_not_poison_the_gradient():
    logprobs = torch.tensor([[0.0, 200.0]], requires_grad=True)
    output = grpo(inputs(logprobs, torch.zeros(1, 2), torch.ones(1), torch.tensor([[False, True]])))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.27) and logprobs.grad.tolist() == [[0.0, 0.0]]


def test_gspo_refuses_advantages_that_differ_within_a_response_and_names_the_loss_that_takes_them():
    mask = torch.tensor([[False, True, True], [True, True, False]])
    differ = torch.tensor([[9.0, 1.0, 1.0], [2.0, 2.5, 9.0]])
    with pytest.raises(ConfigError, match="gspo_token"):
        gspo(inputs(torch.zeros(2, 3), torch.zeros(2, 3), differ, mask))
    gspo(inputs(torch.zeros(1, 3), torch.zeros(1, 3), differ.masked_fill(~mask, math.nan)[:1], mask[:1]))


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


@pytest.mark.parametrize("bounds", [(-0.1, 0.1), (0.1, -0.1), (math.nan, 0.1)])
@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if ranged(loss)])
def test_a_range_that_is_none_is_refused(name, bounds):
    with pytest.raises(ConfigError, match="clip_"):
        lookup("loss", Component(name, clip_low=bounds[0], clip_high=bounds[1]), LOSSES)
