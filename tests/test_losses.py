"""Objectives against numbers worked by hand and against `oracle.py` (to 1e-12), and their invariances."""

import inspect
import math
import warnings

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.losses import (
    CLIP_PRESETS,
    LOSSES,
    Objective,
    entropy_term,
    grpo_loss,
    gspo_loss,
    gspo_token_loss,
    kl_term,
    objective_of,
    sequence_mean_weights,
)
from moe_rl.types import Batch
from tests import oracle

TIGHT = dict(rtol=0, atol=1e-12)
NAMES = ["grpo", "gspo", "gspo_token"]


def case(seed=0, spread=0.3):
    """Six float64 sequences of unequal length, prompts of unequal length, one empty response, both signs and a zero."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((6, 9), dtype=bool)
    for i, (start, stop) in enumerate([(1, 9), (3, 5), (4, 4), (2, 3), (1, 7), (2, 8)]):
        mask[i, start:stop] = True
    old = -rng.exponential(size=mask.shape)
    new = old + spread * rng.normal(size=mask.shape) + spread * rng.normal(size=(6, 1))
    return new, old, np.array([1.3, -0.7, 0.9, -1.1, 0.0, 0.4]), mask


def ours(name, new, old, advantages, mask, low, high, **more):
    """(loss, gradient, output) of our loss on NumPy input."""
    logprobs = torch.tensor(new, requires_grad=True)
    tensors = [torch.tensor(x) for x in (old, advantages, mask)]
    output = LOSSES[name](logprobs, *tensors, clip_low=low, clip_high=high, **more)
    output.loss.backward()
    return output.loss.item(), logprobs.grad.numpy(), output


def agree(name, new, old, advantages, mask, low, high):
    loss, gradient, output = ours(name, new, old, advantages, mask, low, high)
    expected_loss, expected_gradient, expected_lost = getattr(oracle, name)(new, old, advantages, mask, low, high)
    np.testing.assert_allclose(loss, expected_loss, **TIGHT)
    np.testing.assert_allclose(gradient, expected_gradient, **TIGHT)
    np.testing.assert_array_equal(output.lost.numpy(), expected_lost)
    return output


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", NAMES)
def test_value_gradient_and_lost_tokens_agree_with_the_oracle(name, seed):
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
    assert output.lost[:, 1].tolist() == [1, 0, 0, -1]
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
        output = LOSSES[name](
            logprobs, torch.zeros(1, 2, dtype=dtype), torch.tensor([advantage]), mask, clip_low=low, clip_high=high
        )
        output.loss.backward()
        ratio = logprobs.detach()[0, 1].exp()
        assert ratio.item() in (1 + high, 1 - low)
        assert output.lost.tolist() == [[0, 0]]
        assert logprobs.grad[0].tolist() == [0.0, -advantage * ratio.item()]


def test_the_tie_convention_is_that_of_torch_minimum_and_clamp():
    new, old, advantages, mask = (torch.tensor(x) for x in case(1))
    new[0, 1:5] = old[0, 1:5]  # ratio 1, with the range (0, 0.15): on the lower bound
    for a in (advantages, -advantages):
        logprobs = new.clone().requires_grad_()
        ratio = (logprobs - old).exp()
        branches = torch.minimum(ratio * a[:, None], ratio.clamp(1.0, 1.15) * a[:, None])
        expected = torch.autograd.grad(-(sequence_mean_weights(mask) * branches).sum(), logprobs)[0]
        output = grpo_loss(logprobs, old, a, mask, clip_low=0.0, clip_high=0.15)
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
    weights = sequence_mean_weights(torch.tensor(mask)).masked_fill(~torch.tensor(mask), 7.0)
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
    weights = sequence_mean_weights(torch.tensor(batch[3]))
    whole_loss, whole_gradient, _ = ours(name, *batch, 0.1, 0.15)
    parts = []
    for rows in np.split(np.arange(6), cuts):
        parts.append(ours(name, *(x[rows] for x in batch), 0.1, 0.15, weights=weights[rows]))
    np.testing.assert_allclose(sum(loss for loss, _, _ in parts), whole_loss, **TIGHT)
    np.testing.assert_allclose(np.concatenate([g for _, g, _ in parts]), whole_gradient, **TIGHT)


def test_weights_are_one_over_sequences_times_length():
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    expected = [[0, 1 / 8, 1 / 8, 1 / 8, 1 / 8], [0, 0, 1 / 4, 1 / 4, 0], [0, 0, 0, 0, 0]]
    assert sequence_mean_weights(mask).tolist() == expected


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
    assert torch.equal(other.lost, output.lost)


def test_gspo_token_is_gspo_when_a_sequence_has_one_advantage():
    new, old, advantages, mask = case()
    loss, gradient, output = ours("gspo", new, old, advantages, mask, 0.1, 0.15)
    for a in (advantages, np.repeat(advantages[:, None], 9, 1)):
        other_loss, other_gradient, other = ours("gspo_token", new, old, a, mask, 0.1, 0.15)
        np.testing.assert_allclose(other_loss, loss, **TIGHT)
        np.testing.assert_allclose(other_gradient, gradient, **TIGHT)
        assert torch.equal(other.lost, output.lost)
        torch.testing.assert_close(other.log_ratio, output.log_ratio, **TIGHT)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_all_losses_are_the_policy_gradient(name):
    _, old, advantages, mask = case()
    loss, gradient, output = ours(name, old, old, advantages, mask, *CLIP_PRESETS[name])
    weights = sequence_mean_weights(torch.tensor(mask)).numpy()
    np.testing.assert_allclose(gradient, -weights * advantages[:, None], **TIGHT)
    np.testing.assert_allclose(loss, -(weights * advantages[:, None]).sum(), **TIGHT)
    assert not output.log_ratio.any() and not output.lost.any()


@pytest.mark.parametrize("name", NAMES)
def test_old_logprobs_and_advantages_receive_no_gradient(name):
    new, old, advantages, mask = (torch.tensor(x) for x in case())
    for x in (new, old, advantages):
        x.requires_grad_()
    output = LOSSES[name](new, old, advantages, mask, clip_low=0.1, clip_high=0.15)
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
    output = grpo_loss(
        logprobs, torch.zeros(1, 2), torch.ones(1), torch.tensor([[False, True]]), clip_low=0.2, clip_high=0.27
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.27) and logprobs.grad.tolist() == [[0.0, 0.0]]


def test_an_infinite_range_never_clips():
    new, old, advantages, mask = case(spread=3.0)
    _, _, output = ours("grpo", new, old, advantages, mask, math.inf, math.inf)
    assert not output.lost.any()


def test_gspo_refuses_advantages_per_token_and_names_the_loss_that_takes_them():
    with pytest.raises(ConfigError, match=r"\(2, 3\).*gspo_token"):
        gspo_loss(*[torch.zeros(2, 3)] * 3, torch.ones(2, 3, dtype=torch.bool), clip_low=0.1, clip_high=0.1)


def test_shapes_that_would_broadcast_are_refused():
    x, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    clip = dict(clip_low=0.1, clip_high=0.1)
    grpo, gspo_token = inspect.unwrap(grpo_loss), inspect.unwrap(gspo_token_loss)  # without the tests' shape checker
    with pytest.raises(ConfigError, match="one shape"):
        grpo(x, torch.zeros(2, 1), torch.zeros(2), mask, **clip)
    with pytest.raises(ConfigError, match="do not fit"):
        gspo_token(x, x, torch.zeros(2, 1), mask, **clip)
    with pytest.raises(ConfigError, match="do not fit"):
        grpo(x, x, torch.zeros(2), mask, **clip, weights=torch.ones(2))
    with pytest.raises(ConfigError, match="clip range"):
        grpo(x, x, torch.zeros(2), mask, clip_low=-0.1, clip_high=0.1)


def test_k3_is_the_schulman_estimate_with_gradient_one_minus_the_ratio():
    """d = log 2: k3 = 2 - 1 - log 2, gradient 1 - 2; d = 0: 0 and 0."""
    logprobs = torch.tensor([[9.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[math.nan, -1 + math.log(2), -1.0]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True]])
    term = kl_term(logprobs, reference, mask, sequence_mean_weights(mask))
    term.backward()
    assert term.item() == pytest.approx((1 - math.log(2)) / 2, abs=1e-12)
    np.testing.assert_allclose(logprobs.grad, [[0, -0.5, 0]], **TIGHT)


def batch_of(new, advantages, mask, ref=None):
    rows = len(mask)
    return Batch(
        tokens=torch.zeros(mask.shape, dtype=torch.long), attention_mask=torch.ones_like(mask), response_mask=mask,
        prompt_index=torch.zeros(rows, dtype=torch.long), rollout_logprobs=torch.zeros(mask.shape),
        rewards=torch.zeros(rows), advantages=advantages, finished=torch.ones(rows, dtype=torch.bool), ref_logprobs=ref,
    )  # fmt: skip


def test_an_objective_is_policy_loss_plus_kl_minus_entropy():
    new, old, advantages, mask = (torch.tensor(x) for x in case())
    entropy = new.abs()
    weights = sequence_mean_weights(mask)
    objective = Objective(gspo_loss, 0.1, 0.15, kl=0.3, entropy=0.02)
    output = objective(new, entropy, old, batch_of(new, advantages, mask, ref=old), weights)
    bare = gspo_loss(new, old, advantages, mask, clip_low=0.1, clip_high=0.15)
    expected = bare.loss + 0.3 * kl_term(new, old, mask, weights) - 0.02 * entropy_term(entropy, mask, weights)
    torch.testing.assert_close(output.loss, expected, **TIGHT)
    assert torch.equal(output.lost, bare.lost) and torch.equal(output.log_ratio, bare.log_ratio)
    assert entropy_term(entropy, mask, weights).item() == pytest.approx((weights * entropy).sum().item())


def test_a_kl_coefficient_without_reference_is_an_error():
    new, old, advantages, mask = (torch.tensor(x) for x in case())
    with pytest.raises(ConfigError, match="ref_logprobs"):
        Objective(grpo_loss, 0.2, 0.27, kl=0.1)(
            new, new, old, batch_of(new, advantages, mask), sequence_mean_weights(mask)
        )


def my_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, weights=None):
    return grpo_loss(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, weights=weights)


def test_an_arm_names_its_objective():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert objective_of(Arm(name="a", loss="gspo", kl=0.1)) == Objective(gspo_loss, 3e-4, 4e-4, kl=0.1)
        assert objective_of(Arm(name="a")) == Objective(grpo_loss, 0.2, 0.27)
        assert objective_of(Arm(name="a", clip=(0.1, 0.2), entropy=0.5)) == Objective(grpo_loss, 0.1, 0.2, entropy=0.5)
        own = objective_of(Arm(name="a", loss=f"{__name__}:my_loss", clip=(0.1, 0.2)))
    assert own.policy.__name__ == "my_loss" and (own.clip_low, own.clip_high) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("loss", "clip", "message"),
    [
        ("gpro", None, "unknown loss 'gpro'.*grpo, gspo, gspo_token.*pkg.module:function"),
        ("no_such_module_here:loss", (0.1, 0.1), "cannot be imported"),
        ("math:no_such_loss", (0.1, 0.1), "no function 'no_such_loss'"),
        ("math:exp", None, "no preset"),
        ("grpo", (-0.1, 0.1), "no range"),
    ],
)
def test_a_loss_that_cannot_be_used_is_one_clear_error(loss, clip, message):
    with pytest.raises(ConfigError, match=message):
        objective_of(Arm(name="a", loss=loss, clip=clip))


@pytest.mark.parametrize("loss", ["gspo", "gspo_token"])
def test_a_sequence_level_loss_warns_about_a_range_that_never_clips(loss):
    with pytest.warns(UserWarning, match="never clips the sequence-level ratio"):
        objective_of(Arm(name="a", loss=loss, clip=(0.2, 0.27)))
