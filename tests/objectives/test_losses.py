"""Losses against numbers worked by hand and against `oracle.py` (to 1e-12), and their invariances."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.errors import ConfigError
from moe_rl.objectives import LossInputs
from moe_rl.objectives.losses import LOSSES, grpo, gspo
from moe_rl.objectives.weights import seq_mean_token_mean
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


def agree(name, new, old, advantages, mask, low, high):
    loss, gradient, output = ours(name, new, old, advantages, mask, low, high)
    expected_loss, expected_gradient, expected_clipped = getattr(oracle, name)(new, old, advantages, mask, low, high)
    np.testing.assert_allclose(loss, expected_loss, **TIGHT)
    np.testing.assert_allclose(gradient, expected_gradient, **TIGHT)
    np.testing.assert_array_equal(output.clipped_by.numpy(), expected_clipped)
    return output


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", NAMES)
def test_value_gradient_and_clipped_tokens_agree_with_the_oracle(name, seed):
    agree(name, *case(seed), 0.1, 0.15)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["grpo", "gspo_token"])
def test_advantages_per_token_agree_with_the_oracle(name, seed):
    new, old, _, mask = case(seed)
    agree(name, new, old, np.random.default_rng(seed).normal(size=mask.shape), mask, 0.1, 0.15)


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


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing_whatever_it_holds(name):
    new, old, advantages, mask = case()
    loss, gradient, _ = ours(name, new, old, advantages, mask, 0.1, 0.15)
    junk = [np.where(mask, x, np.nan) for x in (new, old)]
    wide = [np.pad(x, ((0, 0), (2, 4)), constant_values=np.inf) for x in junk]
    wide_mask = np.pad(mask, ((0, 0), (2, 4)))
    padded_loss, padded_gradient, output = ours(name, *wide, advantages, wide_mask, 0.1, 0.15)
    np.testing.assert_allclose(padded_loss, loss, **TIGHT)
    np.testing.assert_allclose(padded_gradient[:, 2:-4], gradient, **TIGHT)
    assert not padded_gradient[~wide_mask].any() and not output.log_ratio[~torch.tensor(wide_mask)].any()


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


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_sequences_changes_nothing(name):
    batch = case()
    order = [3, 0, 5, 2, 4, 1]
    loss, gradient, _ = ours(name, *batch, 0.1, 0.15)
    other_loss, other_gradient, _ = ours(name, *(x[order] for x in batch), 0.1, 0.15)
    np.testing.assert_allclose(other_loss, loss, **TIGHT)
    np.testing.assert_allclose(other_gradient, gradient[order], **TIGHT)


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5], [4], [2, 3]])
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_of_any_sizes_add_up_to_the_mini_batch(name, cuts):
    batch = case()
    weights = seq_mean_token_mean(torch.tensor(batch[3]))
    whole_loss, whole_gradient, _ = ours(name, *batch, 0.1, 0.15)
    parts = []
    for rows in np.split(np.arange(6), cuts):
        parts.append(ours(name, *(x[rows] for x in batch), 0.1, 0.15, weights=weights[rows]))
    np.testing.assert_allclose(sum(loss for loss, _, _ in parts), whole_loss, **TIGHT)
    np.testing.assert_allclose(np.concatenate([g for _, g, _ in parts]), whole_gradient, **TIGHT)


def test_weights_are_one_over_sequences_times_length():
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    expected = [[0, 1 / 8, 1 / 8, 1 / 8, 1 / 8], [0, 0, 1 / 4, 1 / 4, 0], [0, 0, 0, 0, 0]]
    assert seq_mean_token_mean(mask).tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_response_counts_nowhere(name):
    batch = case()
    rest = [0, 1, 3, 4, 5]  # row 2 is empty
    loss, gradient, _ = ours(name, *batch, 0.1, 0.15)
    rest_loss, rest_gradient, _ = ours(name, *(x[rest] for x in batch), 0.1, 0.15)
    np.testing.assert_allclose(loss, rest_loss, **TIGHT)
    np.testing.assert_allclose(gradient[rest], rest_gradient, **TIGHT)
    assert not gradient[2].any()
    nothing = [x[[2]] for x in batch]
    assert ours(name, *nothing, 0.1, 0.15)[0] == 0


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_of_one_token_is_grpo(name):
    new, old, advantages, _ = case()
    mask = np.zeros(new.shape, dtype=bool)
    mask[:, 4] = True
    loss, gradient, output = ours("grpo", new, old, advantages, mask, 0.1, 0.15)
    other_loss, other_gradient, other = ours(name, new, old, advantages, mask, 0.1, 0.15)
    np.testing.assert_allclose(other_loss, loss, **TIGHT)
    np.testing.assert_allclose(other_gradient, gradient, **TIGHT)
    assert torch.equal(other.clipped_by, output.clipped_by)


def test_gspo_token_is_gspo_when_a_sequence_has_one_advantage():
    new, old, advantages, mask = case()
    loss, gradient, output = ours("gspo", new, old, advantages, mask, 0.1, 0.15)
    for a in (advantages, np.repeat(advantages[:, None], 9, 1)):
        other_loss, other_gradient, other = ours("gspo_token", new, old, a, mask, 0.1, 0.15)
        np.testing.assert_allclose(other_loss, loss, **TIGHT)
        np.testing.assert_allclose(other_gradient, gradient, **TIGHT)
        assert torch.equal(other.clipped_by, output.clipped_by)
        torch.testing.assert_close(other.log_ratio, output.log_ratio, **TIGHT)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_all_losses_are_the_policy_gradient(name):
    _, old, advantages, mask = case()
    loss, gradient, output = ours(name, old, old, advantages, mask)
    weights = seq_mean_token_mean(torch.tensor(mask)).numpy()
    np.testing.assert_allclose(gradient, -weights * advantages[:, None], **TIGHT)
    np.testing.assert_allclose(loss, -(weights * advantages[:, None]).sum(), **TIGHT)
    assert not output.log_ratio.any() and not output.clipped_by.any()


@pytest.mark.parametrize("name", NAMES)
def test_old_logprobs_and_advantages_receive_no_gradient(name):
    new, old, advantages, mask = (torch.tensor(x) for x in case())
    for x in (new, old, advantages):
        x.requires_grad_()
    output = LOSSES[name](inputs(new, old, advantages, mask), clip_low=0.1, clip_high=0.15)
    output.loss.backward()
    assert old.grad is None and advantages.grad is None and new.grad.any()
    assert not output.log_ratio.requires_grad


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


def test_an_infinite_range_never_clips():
    new, old, advantages, mask = case(spread=3.0)
    _, _, output = ours("grpo", new, old, advantages, mask, math.inf, math.inf)
    assert not output.clipped_by.any()


def test_gspo_refuses_advantages_that_differ_within_a_response_and_names_the_loss_that_takes_them():
    mask = torch.tensor([[False, True, True], [True, True, False]])
    differ = torch.tensor([[9.0, 1.0, 1.0], [2.0, 2.5, 9.0]])
    with pytest.raises(ConfigError, match="differ within a sequence.*gspo_token"):
        gspo(inputs(torch.zeros(2, 3), torch.zeros(2, 3), differ, mask))
    gspo(inputs(torch.zeros(1, 3), torch.zeros(1, 3), differ.masked_fill(~mask, math.nan)[:1], mask[:1]))


def test_shapes_that_would_broadcast_are_refused():
    x, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    make = inspect.unwrap(LossInputs.__init__)  # without the tests' shape checker
    for wrong in (
        {"old_logprobs": torch.zeros(2, 1)}, {"advantages": torch.zeros(2, 1)}, {"weights": torch.ones(2)},
        {"ref_logprobs": torch.zeros(1, 2)}, {"entropy": torch.zeros(2, 3)},
    ):  # fmt: skip
        shapes = {"logprobs": x, "old_logprobs": x, "advantages": x, "weights": x, "mask": mask} | wrong
        with pytest.raises(ConfigError, match="one shape"):
            make(object.__new__(LossInputs), **shapes)


@pytest.mark.parametrize("bounds", [(-0.1, 0.1), (0.1, -0.1), (math.nan, 0.1)])
@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if ranged(loss)])
def test_a_range_that_is_none_is_refused(name, bounds):
    x = inputs(*case())
    with pytest.raises(ConfigError, match="must be at least 0"):
        LOSSES[name](replace(x, rollout_logprobs=x.old_logprobs), clip_low=bounds[0], clip_high=bounds[1])
