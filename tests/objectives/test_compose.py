"""Arms to objectives: presets, a user's own parts, what is refused, and the ratio under routes of its own."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import AdvantageInputs, LossInputs, LossOutput, advantage_of, objective_of, policy_loss
from moe_rl.objectives.compose import Objective
from moe_rl.objectives.losses import LOSSES, grpo
from moe_rl.objectives.methods import arm
from moe_rl.objectives.weights import seq_mean_token_mean
from moe_rl.registry import Component, needs
from tests.objectives.examples import TIGHT, advantages_of, case, inputs, ranged, rewarded

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
    assert advantages_of(rewarded([1.0], [0]), *arm.advantage)[:, 0].tolist() == [0.75]


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


OUT_OF_RANGE = """
    grpo(clip_low=-0.1) grpo(clip_high=-0.1) grpo(dual=0.9) grpo(cap=0.5) grpo(log_clamp=0.0) grpo(level=turn)
    gspo(clip_low=-0.1) gspo_token(clip_high=-0.1) gmpo(level=token) gmpo(clip_low=-1.0) gmpo(clip_high=-1.0)
    sapo(tau_pos=0.0) sapo(tau_neg=0.0) sapo(level=turn) loss=crossed(weigh=tokens) loss=crossed(clip_low=-1.0)
    cispo(mask=both) cispo(clip_high=-1.0) minirl(clip_low=-0.1) loss=band(low=1.1) loss=band(high=0.9) dppo(kind=js)
    dppo(low=-0.1) dppo(cap=0.5) ipo(threshold=-0.1) cppo(last=0) a3po(high=0) a3po(clip_low=-1) topr(level=turn)
    vespo(k_neg=-1.0) clip_cov(share=1.5) clip_cov(clip_low=-0.1) kl_cov(share=-0.1) kl_cov(coef=-1.0) sat(base=gmpo)
    sat(quantile=1.1) sat(exponent=0.0) high_entropy(share=0) high_entropy(share=1.5) rspo(floor=1.5) rspo(base=gpro)
    rspo(base=sat) rspo(options={clip:0.2}) grpo+kl(coef=nan) grpo+kl(coef=1,estimator=k4) grpo+kl(coef=1,estimator=k2+)
    grpo+kl(coef=1,against=engine) grpo+kl(coef=1,clamp=0.0) grpo+load_balance(coef=1,routes=old)
    grpo+aggregate=seq_mean_token_mean(rows=some) grpo+aggregate=seq_mean_token_sum_norm(horizon=0)
    grpo+aggregate=seq_mean_token_sum_norm(horizon=inf) grpo+truncated(cap=-1.0) grpo+truncated(level=max)
    grpo+truncated(cap=1,low=2) grpo+masked(high=2.0,low=-1.0) grpo+masked(high=2,low=3)
    grpo+rejected(high=2.0,statistic=k1) grpo+m2po(threshold=-0.1) grpo+vaco(bound=-1.0)
    grpo+opsm(delta=1,against=reference) grpo+group+clipped(at=0.0) grpo+advantage=overlong(limit=3,buffer=4)
    grpo+normalized(center=prompt) grpo+normalized(eps=-1.0) grpo+advantage=returns(gamma=1.1)
    grpo+group+whitened(eps=-1.0) grpo+advantage=by_turn(gamma=2) grpo+advantage=by_turn(among=turns)
    ppo+advantage=gae(gamma=-0.1) ppo+advantage=gae(lam=1.1) ppo+advantage=gae(critic_lr=0)
    ppo+advantage=gae(value_clip=0) ppo+advantage=gae(lam=true)
    grpo+kl_penalty(coef=0.1,estimator=k3+)+advantage=returns
"""


@pytest.mark.parametrize("text", OUT_OF_RANGE.split())
def test_an_option_out_of_its_range_is_refused_before_a_run(text):
    option, value = re.findall(r"(\w+)[=:]([^=:]+?)[)}]*$", text)[0]
    with pytest.raises(ConfigError, match=rf"(?i)\b{option}\b|{re.escape(value)}"):
        objective_of(arm(text)), advantage_of(arm(text))


def takes_a_column(x: LossInputs) -> LossOutput:
    return replace(grpo(x), metrics={"loss": 5.0})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": f"{__name__}:takes_a_column"}, "metrics loss"),
        ({"terms": (Component("kl", coef=1.0), Component("kl", coef=2.0))}, "a term twice: kl, kl"),
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
