"""Arms to objectives: presets, a user's own parts, what is refused, and the ratio under routes of its own."""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import AdvantageInputs, LossInputs, LossOutput, advantage_of, objective_of, policy_loss
from moe_rl.objectives.advantages import group
from moe_rl.objectives.compose import Objective
from moe_rl.objectives.losses import LOSSES, grpo, gspo
from moe_rl.objectives.weights import seq_mean_token_mean
from moe_rl.registry import Component, needs
from tests import oracle
from tests.objectives.examples import TIGHT, case, inputs, ranged, rewarded
from tests.policies.test_hf import make_batch

MINE = f"{__name__}:my_loss"


def my_loss(x: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    return grpo(x, clip_low=clip_low, clip_high=clip_high)


@needs("reference")
def my_term(x: LossInputs, *, coef: float = 1.0) -> torch.Tensor:
    return coef * (x.weights * x.mask).sum()


def my_aggregate(mask: torch.Tensor) -> torch.Tensor:
    return mask.double() / mask.sum()


def my_advantage(x: AdvantageInputs, *, shift: float = 0.0) -> torch.Tensor:
    return x.values - shift


def test_an_arm_names_its_objective():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kl = objective_of(Arm(name="a", loss="gspo", terms=(Component("kl", coef=0.1),)))
        assert kl.loss is gspo and kl.terms["kl"].keywords == {"coef": 0.1} and set(kl.terms) == {"kl"}
        plain = objective_of(Arm(name="a"))
        assert plain.loss is grpo and plain.aggregate is seq_mean_token_mean
        assert plain.corrections == () and plain.terms == {}
        narrow = objective_of(Arm(name="a", loss=Component("grpo", clip_low=0.1, clip_high=0.2)))
        assert narrow.loss.func is grpo and narrow.loss.keywords == {"clip_low": 0.1, "clip_high": 0.2}
        own = objective_of(Arm(name="a", loss=Component(MINE, clip_low=0.1, clip_high=0.2)))
    assert own.loss.func.__name__ == "my_loss" and own.loss.keywords == {"clip_low": 0.1, "clip_high": 0.2}
    assert advantage_of(Arm(name="a")).steps == (("group", group),)


@pytest.mark.parametrize("name, low, high", [("grpo", 0.2, 0.27), ("gspo", 3e-4, 4e-4), ("gspo_token", 3e-4, 4e-4)])
def test_the_range_of_a_loss_is_the_papers_unless_the_arm_has_one(name, low, high):
    parameters = inspect.signature(LOSSES[name]).parameters
    assert (parameters["clip_low"].default, parameters["clip_high"].default) == (low, high)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("gpro", "'gpro'.*grpo"),
        (Component("no_such_module_here:loss", clip_low=0.1, clip_high=0.1), "no module 'no_such_module_here'"),
        (
            Component("math:no_such_loss", clip_low=0.1, clip_high=0.1),
            "'no_such_loss'",
        ),
        (MINE, "needs clip_low, clip_high"),
        (Component(MINE, clip_low=0.1), "needs clip_high"),
        (Component("grpo", clip_low=-0.1, clip_high=0.1), "clip_low=-0.1"),
        (Component("grpo", cliphigh=0.1), "'cliphigh'.*clip_high"),
        (Component("crossed", weigh="tokens"), "weigh='tokens'"),
    ],
)
def test_a_loss_that_cannot_be_used_is_one_clear_error(loss, message):
    with pytest.raises(ConfigError, match=message):
        objective_of(Arm(name="a", loss=loss))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"aggregate": "token_mean_"}, "'token_mean_'.*token_mean"),
        ({"corrections": ("trunc",)}, "'trunc'.*truncated"),
        ({"terms": (Component("kll", coef=1.0),)}, "'kll'.*kl"),
        ({"terms": ("kl",)}, "the term 'kl' needs coef"),
        ({"terms": (Component("kl", coef=1.0), Component("kl", coef=2.0))}, "a term twice: kl, kl"),
    ],
)
def test_another_part_that_cannot_be_used_is_too(parts, message):
    with pytest.raises(ConfigError, match=message):
        objective_of(Arm(name="a", **parts))


def test_an_advantage_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="'groups'.*group"):
        advantage_of(Arm(name="a", advantage="groups"))


def test_every_part_may_be_a_users_own():
    """A token mean: 4 response tokens of 2 responses weigh 1/4 each; the term adds 0.5 · Σ weights = 0.5."""
    arm = Arm(
        name="a",
        loss=Component(MINE, clip_low=9.0, clip_high=9.0),
        aggregate=f"{__name__}:my_aggregate",
        terms=(Component(f"{__name__}:my_term", coef=0.5),),
        advantage=Component(f"{__name__}:my_advantage", shift=0.25),
    )
    mask = torch.tensor([[True, True, True], [True, False, False]])
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    output = policy_loss(
        arm.replace(advantage=()), logprobs=zeros, old_logprobs=zeros, advantages=torch.tensor([1.0, 3.0]), mask=mask
    )
    assert output.loss.item() == pytest.approx(-(3 * 1 + 3) / 4 + 0.5) and output.metrics == {"term_my_term": 0.5}
    assert objective_of(arm).needs == {"reference"}
    assert advantage_of(arm)(rewarded([1.0], [0]))[:, 0].tolist() == [0.75]


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token"])
def test_the_loss_of_somebody_elses_loop_is_the_oracles(name):
    new, old, advantages, mask = case()
    logprobs = torch.tensor(new, requires_grad=True)
    tensors = dict(old_logprobs=torch.tensor(old), advantages=torch.tensor(advantages), mask=torch.tensor(mask))
    for arm in (
        Component(name, clip_low=0.05, clip_high=0.06),
        Arm(name="a", loss=Component(name, clip_low=0.05, clip_high=0.06)),
    ):
        output = policy_loss(arm, logprobs=logprobs, **tensors)
        gradient = torch.autograd.grad(output.loss, logprobs)[0]
        loss, expected, clipped = getattr(oracle, name)(new, old, advantages, mask, 0.05, 0.06)
        np.testing.assert_allclose(output.loss.item(), loss, **TIGHT)
        np.testing.assert_allclose(gradient.numpy(), expected, **TIGHT)
        np.testing.assert_array_equal(output.clipped_by.numpy(), clipped)


def test_parts_of_a_mini_batch_given_their_weights_add_up():
    new, old, advantages, mask = (torch.tensor(x) for x in case())
    weights = objective_of(Arm(name="a")).aggregate(mask)
    whole = policy_loss("grpo", logprobs=new, old_logprobs=old, advantages=advantages, mask=mask).loss
    parts = [
        policy_loss(
            "grpo", logprobs=new[r], old_logprobs=old[r], advantages=advantages[r], mask=mask[r], weights=weights[r]
        ).loss
        for r in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(sum(parts), whole, **TIGHT)


def test_a_mini_batch_is_weighed_once_and_its_rows_keep_their_weights():
    batch = make_batch()
    objective = objective_of(Arm(name="a"))
    weighed = objective.attach_weights(batch)
    assert torch.equal(weighed.weights, seq_mean_token_mean(batch.response_mask))
    assert weighed.weights.dtype == torch.float64 and weighed.weights.sum().item() == pytest.approx(1)
    rows = torch.tensor([5, 0, 7])
    part = weighed.rows(rows)
    assert torch.equal(part.weights, weighed.weights[rows][:, : part.tokens.shape[1]])


# ---------------------------------------------------------------------- the ratio under routes of its own
def test_a_ratio_has_the_value_of_its_own_routes_and_the_gradient_of_the_gradients():
    """By hand: log π_θ is −7 under the gradient's routes, −1 + log 2 under the ratio's, log π_old −1: the ratio is 2,
    and d loss / d log π_θ, which only the gradient's routes have, −2 · A."""
    logprobs = torch.tensor([[0.0, -7.0]], dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor([[0.0, -1.0 + math.log(2)]], dtype=torch.float64, requires_grad=False)
    x = inputs(
        logprobs,
        torch.tensor([[5.0, -1.0]]).double(),
        torch.ones(1).double(),
        torch.tensor([[False, True]]),
        ratio_logprobs=ratio,
    )
    np.testing.assert_allclose(x.log_ratio.detach(), [[0, math.log(2)]], **TIGHT)
    output = grpo(x, clip_low=0.9, clip_high=1.5)
    output.loss.backward()
    np.testing.assert_allclose(output.loss.item(), -2, **TIGHT)
    np.testing.assert_allclose(logprobs.grad, [[0, -2]], **TIGHT)
    clipped = grpo(replace(x, logprobs=logprobs.detach().requires_grad_()), clip_low=0.2, clip_high=0.27)
    assert clipped.clipped_by.tolist() == [[0, 1]] and clipped.loss.item() == pytest.approx(-1.27)


@pytest.mark.parametrize("name", LOSSES)
def test_the_same_routes_for_both_are_no_routes_of_its_own(name):
    new, old, advantages, mask = (torch.tensor(x) for x in case())
    found = []
    for further in ({}, {"ratio_logprobs": new.clone()}):
        x = inputs(new.clone().requires_grad_(), old, advantages, mask, rollout_logprobs=old, **further)
        output = LOSSES[name](x, **ranged(LOSSES[name]))
        found.append((output.loss, torch.autograd.grad(output.loss, x.logprobs)[0], output.clipped_by))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


def takes_a_column(x: LossInputs) -> LossOutput:
    return replace(grpo(x), metrics={"loss": 5.0})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": f"{__name__}:takes_a_column"}, "metrics loss"),
        ({"loss": Component("grpo", clip_low="0.2")}, "clip_low='0.2'"),
        ({"terms": (Component("kl", coef="0.2"),)}, "coef='0.2'"),
        ({"corrections": ("truncated", "truncated")}, "a correction twice"),
    ],
)
def test_parts_that_would_go_wrong_silently_or_late_are_refused_at_once(settings, message):
    with pytest.raises(ConfigError, match=message):
        objective_of(Arm(name="a", **settings))


def test_the_ratio_of_routes_of_its_own_is_exact():
    x = torch.tensor([[-17.0]], requires_grad=True)
    ones = torch.ones(1, 1)
    inputs = LossInputs(
        logprobs=x, old_logprobs=-1 - 1e-4 * ones, ratio_logprobs=-ones, mask=ones.bool(), advantages=ones, weights=ones
    )
    assert inputs.log_ratio.item() == (-ones - (-1 - 1e-4 * ones)).item()


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"loss": torch.zeros(1, 1)}, r"loss of shape \(1, 1\)"),
        ({"log_ratio": torch.zeros(1)}, r"log_ratio of shape \(1,\)"),
        ({"clipped_by": torch.zeros(3, dtype=torch.int8)}, r"clipped_by of shape \(3,\)"),
    ],
)
def test_a_loss_of_another_shape_is_told_which(monkeypatch, changed, said):
    output = grpo(
        inputs(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1, dtype=torch.bool)),
        clip_low=0.2,
        clip_high=0.2,
    )
    vars(output).update(changed)  # past the check of types, which is there in tests alone
    monkeypatch.setitem(LOSSES, "grpo", lambda x: output)
    with pytest.raises(ConfigError, match=said):
        objective_of(Arm(name="a"))


def first_token(x: LossInputs) -> LossOutput:
    output = grpo(x)
    vars(output).update(log_ratio=x.log_ratio[:, :1])  # past the check of types, which is there in tests alone
    return output


def test_a_loss_of_the_right_shape_for_one_token_is_told_the_shape_of_a_batch():
    mask, zeros = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"log_ratio of shape \(2, 1\).*\(2, 3\)"):
        policy_loss(
            f"{__name__}:first_token",
            logprobs=zeros.clone().requires_grad_(),
            old_logprobs=zeros,
            advantages=torch.ones(2),
            mask=mask,
        )


def returns_a_number(x):
    return -(x.weights * x.logprobs).sum()


def misspells(x):
    return x.old_logprob


def reads_the_policy(x):
    return x.logprobs.exp()


def test_a_log_ratio_may_keep_its_graph():
    def own(x):
        return LossOutput(-(x.weights * x.log_ratio).sum(), x.log_ratio, torch.zeros_like(x.mask, dtype=torch.int8))

    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    x = LossInputs(
        logprobs=zeros.clone().requires_grad_(), old_logprobs=zeros, mask=mask, advantages=zeros, weights=zeros
    )
    found = Objective(own, seq_mean_token_mean).of(x)
    with pytest.raises(ConfigError, match="the loss .* has no gradient"):
        Objective(lambda x: replace(own(x), loss=own(x).loss.detach()), seq_mean_token_mean).of(x)
    assert found.loss.requires_grad and not found.log_ratio.requires_grad
    with torch.no_grad():
        assert not Objective(own, seq_mean_token_mean).of(x).loss.requires_grad, "computed to be logged"
    still = Objective(
        lambda x: replace(own(x), loss=torch.zeros(())), seq_mean_token_mean, terms={"own": lambda x: own(x).loss}
    )
    assert still.of(x).loss.requires_grad, "the gradient of a term is enough"


@pytest.mark.parametrize(
    "loss, said",
    [
        (Component("grpo", clip_low=None), r"grpo\(clip_low=None"),
        (Component("cispo", clip_high=None), r"cispo\(clip_high=None"),
    ],
)
def test_an_option_of_another_type_is_refused_whatever_it_raises(loss, said):
    with pytest.raises(ConfigError, match=said):
        objective_of(Arm(name="a", loss=loss))


@pytest.mark.parametrize(
    "parts",
    [
        {"corrections": (Component("opsm", delta=math.nan),)},
        {"terms": (Component("kl", coef=math.nan),)},
        {"loss": Component("clip_cov", low=math.nan)},
    ],
)
def test_an_option_that_is_no_number_is_refused(parts):
    with pytest.raises(ConfigError, match="=nan"):
        objective_of(Arm(name="a", **parts))


def test_a_loop_of_ones_own_is_told_what_would_be_passed_over():
    zeros, mask = torch.zeros(4, 3), torch.ones(4, 3, dtype=torch.bool)
    given = dict(logprobs=zeros, old_logprobs=zeros, mask=mask, rollout_logprobs=zeros)
    for advantages in (torch.ones(1), torch.ones(3)):
        with pytest.raises(ConfigError, match=rf"advantages have shape \({len(advantages)},\)"):
            inspect.unwrap(policy_loss)("grpo", advantages=advantages, **given)
    arm = Arm(name="a", filters=(Component("masked", high=2.0),))
    assert policy_loss(arm, advantages=torch.ones(4), **given).loss == -1
    with pytest.raises(ConfigError, match="filters"):
        policy_loss(arm, advantages=torch.ones(4), weights=zeros.double(), **given)


def test_tokens_that_a_correction_weighs_are_counted():
    zeros, mask = torch.zeros(2, 3), torch.tensor([[True, True, False], [True, True, True]])
    policy = {"old_logprobs": zeros - 1, "logprobs": (zeros - 1).requires_grad_(), "mask": mask}
    engine = torch.tensor([[-1.0, -1.1, -9.0], [-1.0, -1.0 - 1e-8, -0.9]])
    for text, acted in (("tis", 2), ("tis+finished", 3), ("grpo+opsm(delta=9.0)", 0)):
        found = policy_loss(
            text,
            **policy,
            advantages=torch.ones(2),
            rollout_logprobs=engine,
            finished=torch.tensor([[True, True, True], [True, True, False]]),
        )
        assert found.metrics["corrected_tokens"] == acted, text
    assert "corrected_tokens" not in policy_loss("grpo", **policy, advantages=torch.ones(2)).metrics
