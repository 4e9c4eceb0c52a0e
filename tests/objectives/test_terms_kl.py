"""Every estimator of a KL: its value and gradient by loops, against TRL and open-instruct, and where it goes wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import objective_of, policy_loss
from moe_rl.objectives.terms import TERMS, kl
from moe_rl.registry import Component, lookup, needs_of
from tests.objectives import peers
from tests.objectives.examples import TIGHT, case, inputs
from tests.objectives.test_aggregate import PPO, assert_equal, of, rows

TOKENS = {  # value and derivative by log π, of d = log π − log q
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    "abs": (lambda d: abs(d), lambda d: float(np.sign(d))),
    "k1+": (lambda d: d, lambda d: d),
    "k3+": (lambda d: math.exp(-d) - 1 + d, lambda d: d),
}


def by_loops(new, other, old, mask, coef, estimator, ratio=False, clamp=math.inf):
    """Value and gradient, token by token: mean over live sequences of means over tokens."""
    value, gradient = 0.0, np.zeros(new.shape)
    live = [i for i in range(len(mask)) if mask[i].any()]
    for i in live:
        tokens = np.flatnonzero(mask[i])
        for t in tokens:
            d = new[i, t] - other[i, t]
            k, slope = (f(d) for f in TOKENS[estimator])
            if abs(k) > clamp:
                k, slope = math.copysign(clamp, k), slope if "+" in estimator else 0.0
            if ratio:
                r = math.exp(new[i, t] - old[i, t])
                k, slope = r * k, r * (k + slope)
            weight = coef / len(live) / len(tokens)
            value += weight * k
            gradient[i, t] = weight * slope
    return value, gradient


def found(x, **options):
    """Value and gradient of the term."""
    x = replace(x, logprobs=x.logprobs.detach().requires_grad_())
    term = kl(x, coef=0.3, **options)
    term.backward()
    return term.item(), x.logprobs.grad.numpy()


@pytest.fixture
def drawn():
    new, old, advantages, mask = case()
    mask[0, 4] = False  # a hole
    reference = np.where(mask, old + np.random.default_rng(3).normal(size=old.shape), math.nan)
    reference[1, 3] = new[1, 3]  # agrees
    return (
        new,
        old,
        reference,
        mask,
        inputs(new, np.where(mask, old, math.nan), advantages, mask, ref_logprobs=reference),
    )


@pytest.mark.parametrize("clamp", [math.inf, 0.4])
@pytest.mark.parametrize("ratio", [False, True])
@pytest.mark.parametrize("against", ["reference", "old"])
@pytest.mark.parametrize("estimator", TOKENS)
def test_value_and_gradient_are_those_of_the_equation(drawn, estimator, against, ratio, clamp):
    new, old, reference, mask, x = drawn
    other = reference if against == "reference" else old
    value, gradient = found(x, estimator=estimator, against=against, ratio=ratio, clamp=clamp)
    expected = by_loops(new, other, old, mask, 0.3, estimator, ratio, clamp)
    np.testing.assert_allclose(value, expected[0], **TIGHT)
    np.testing.assert_allclose(gradient, expected[1], **TIGHT)


def test_by_default_it_is_what_it_was_to_the_last_bit(drawn):
    *_, x = drawn
    d = torch.where(x.mask, x.ref_logprobs - x.logprobs, 0)
    for dtype in (torch.float32, torch.float64):
        weights, e = x.weights.to(dtype), d.to(dtype)
        ours = kl(replace(x, weights=weights, logprobs=-e, ref_logprobs=torch.zeros_like(e)), coef=0.3)
        assert torch.equal(ours, 0.3 * (weights * (torch.expm1(e) - e)).sum())


def test_against_the_old_policy_nobody_needs_a_reference():
    for options, expected in ({}, {"reference"}), ({"against": "old"}, set()):
        assert needs_of(lookup("term", Component("kl", coef=1.0, **options), TERMS)) == expected
    objective = objective_of(Arm(name="a", terms=(Component("kl", coef=1.0, against="old"),)))
    assert objective.needs == frozenset()
    assert objective.of(inputs(*case())).metrics["term_kl"] > 0


def test_against_the_old_policy_both_sides_are_of_the_ratios_routes():
    """log π_θ is −7 under the gradient's routes and −1 under the ratio's, log π_old −1: no KL, gradient −e = 0."""
    x = inputs(
        torch.tensor([[-7.0]]).double(),
        torch.tensor([[-1.0]]).double(),
        torch.ones(1).double(),
        torch.ones(1, 1, dtype=torch.bool),
        ratio_logprobs=torch.tensor([[-1.0]]).double(),
    )
    for estimator in ("k2", "k3", "abs"):
        value, gradient = found(x, estimator=estimator, against="old")
        assert value == 0 and gradient.item() == 0


def test_where_the_policies_agree_it_is_zero_and_an_on_policy_ratio_adds_its_value_to_the_gradient(drawn):
    new, old, _, mask, x = drawn
    same = replace(x, ref_logprobs=x.logprobs)
    for estimator in TOKENS:
        assert found(same, estimator=estimator)[0] == 0
    on_policy = replace(x, old_logprobs=x.logprobs)
    plain, weighed = found(on_policy), found(on_policy, ratio=True)
    assert weighed[0] == pytest.approx(plain[0], rel=1e-12)
    k = by_loops(new, on_policy.ref_logprobs.numpy(), new, mask, 0.3, "k3", ratio=True)[1]
    np.testing.assert_allclose(weighed[1], k, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [-1e4, -800.0, 800.0, 1e4])
def test_tokens_far_apart_give_no_nan(gap, dtype):
    """Inside a clamp, and with a ratio that overflows."""
    one = torch.ones(1, 1, dtype=torch.bool)
    for against, ratio in (("reference", False), ("old", False), ("reference", True), ("old", True)):
        x = inputs(
            torch.tensor([[gap]], dtype=dtype),
            torch.zeros(1, 1, dtype=dtype),
            torch.ones(1, dtype=dtype),
            one,
            ref_logprobs=torch.tensor([[gap if ratio else 0.0]], dtype=dtype),
        )
        value, gradient = found(x, against=against, ratio=ratio, clamp=10.0)
        assert not math.isnan(value) and not np.isnan(gradient).any()
        if not ratio:
            assert value == pytest.approx(3.0) and gradient.item() == 0


def test_it_does_not_depend_on_the_cut(drawn):
    *_, x = drawn
    for options in ({"estimator": "k3+"}, {"ratio": True}, {"against": "old", "clamp": 0.2}):
        parts = sum(kl(rows(x, r), coef=0.3, **options).item() for r in (slice(2), slice(2, 6)))
        assert parts == pytest.approx(found(x, **options)[0], rel=1e-12)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"estimator": "k4"}, "estimator='k4'"),
        ({"estimator": "k2+"}, "estimator='k2\\+'"),
        ({"against": "engine"}, "against='engine'"),
        ({"clamp": 0.0}, "clamp=0.0"),
    ],
)
def test_a_kl_that_means_nothing_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        objective_of(Arm(name="a", terms=(Component("kl", coef=0.1, **options),)))


# ---------------------------------------------------------------------- other frameworks
TRL = {"trl/grpo.kl": False, "trl/grpo.kl.bias_corrected": True}
OPEN_INSTRUCT = {
    "k1": {"estimator": "k1"},
    "k2": {"estimator": "k2"},
    "k3": {},
    "ratio_k1": {"estimator": "k1", "ratio": True},
}


@pytest.mark.parametrize("name", peers.CASES)
@pytest.mark.parametrize("key", TRL)
def test_the_kl_of_trl(key, name):
    """Where a ratio is e²¹, r·k and r·k′ cancel to 1e-16 of 1e9: both gradients are rounded there."""
    within = 1e-7 if key.endswith("corrected") and "extreme" in name else 1e-12
    arm = Arm(
        name="a",
        loss=PPO,
        aggregate=Component("seq_mean_token_mean", rows="all"),
        terms=(Component("kl", coef=0.05, ratio=TRL[key]),),
    )
    assert_equal(of(name, arm), peers.expected(name, key), within)


@pytest.mark.parametrize("name", peers.CASES)
@pytest.mark.parametrize("key", OPEN_INSTRUCT)
def test_the_kl_of_open_instruct(key, name):
    arm = Arm(name="a", loss=PPO, aggregate="token_mean", terms=(Component("kl", coef=0.05, **OPEN_INSTRUCT[key]),))
    assert_equal(of(name, arm), peers.expected(name, f"openinstruct/kl.{key}"))


def test_at_sequence_level_trl_weighs_its_kl_by_the_sequences_ratio_and_we_by_the_tokens():
    arm = Arm(
        name="a", loss=Component("gspo", clip_low=0.02, clip_high=0.03), terms=(Component("kl", coef=0.05, ratio=True),)
    )
    ours, theirs = of("main-wide-0", arm), peers.expected("main-wide-0", "trl/grpo.sequence.kl.bias_corrected")
    assert ours[0] != pytest.approx(theirs[0], rel=1e-3)


def test_prime_rls_penalty_is_twice_k2_against_the_engine():
    """kl_tau · (log r)², without the ½: k2 with twice the coefficient, π_old being the engine's."""
    x = peers.case("main-narrow-0")
    term = Arm(
        name="a", loss=PPO, aggregate="token_mean", terms=(Component("kl", coef=2e-3, estimator="k2", against="old"),)
    )
    given = dict(
        logprobs=torch.tensor(x["logprobs"]),
        old_logprobs=torch.tensor(x["rollout_logprobs"]),
        advantages=torch.tensor(x["advantages"]),
        mask=torch.tensor(x["mask"]),
    )
    found = policy_loss(term, **given).metrics["term_kl"]
    d = (x["logprobs"] - x["rollout_logprobs"])[x["mask"]]
    assert found == pytest.approx(1e-3 * (d**2).mean(), rel=1e-12)
