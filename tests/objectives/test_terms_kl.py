"""Every estimator of a KL: its value and gradient by loops, against TRL and open-instruct, and where it goes wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import objective_of
from moe_rl.objectives.terms import TERMS, entropy, kl
from moe_rl.registry import Component, lookup, needs_of
from tests.conftest import build, perturb
from tests.objectives import peers
from tests.objectives.examples import TIGHT, case, inputs
from tests.objectives.test_aggregate import PPO, assert_equal, of
from tests.policies.test_hf import make_batch, policy_of

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


BOTH = (Component("kl", coef=0.3), Component("entropy", coef=0.02))


def test_an_entropy_bonus_lowers_the_loss_by_the_mean_over_sequences_of_the_mean_over_tokens():
    """Entropies 1, 3 and 4 nats in responses of two tokens and of one: 0.1 · (2 + 4) / 2; its gradient is −0.1 · W."""
    found = torch.tensor([[math.nan, 1.0, 3.0], [math.nan, 4.0, 7.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False, True, True], [False, True, False]])
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    term = entropy(inputs(zeros, zeros, torch.zeros(2), mask, entropy=found), coef=0.1)
    term.backward()
    assert term.item() == pytest.approx(-0.3, abs=1e-12)
    np.testing.assert_allclose(found.grad, [[0, -0.025, -0.025], [0, -0.05, 0]], **TIGHT)


@pytest.mark.parametrize("term, lacking", [("kl", "ref_logprobs"), ("entropy", "entropy of every token")])
def test_a_term_without_what_it_compares_with_is_an_error(term, lacking):
    with pytest.raises(ConfigError, match=lacking):
        TERMS[term](replace(inputs(*case()), entropy=None), coef=0.1)


@pytest.mark.parametrize("micro_batch", [1, 5, 64])
def test_what_an_update_reports_of_its_terms_adds_up_over_micro_batches(micro_batch):
    """By hand over the whole mini-batch, from what the policy scores before the step."""
    batch = make_batch()
    policy = policy_of(build("qwen3_moe"), micro_batch=micro_batch)
    reference = policy.score(batch)
    perturb(policy.model)
    scored, mask = policy.score(batch), batch.response_mask
    objective = objective_of(Arm(name="a", terms=BOTH))
    part = objective.attach_weights(replace(batch, old_logprobs=scored.logprobs, ref_logprobs=reference.logprobs))
    metrics = policy.update(part, objective).metrics
    d = (reference.logprobs - scored.logprobs).double()
    per_response = ((d.exp() - 1 - d) * mask).sum(1) / mask.sum(1)
    assert metrics.keys() == {"term_kl", "term_entropy"}
    assert metrics["term_kl"] == pytest.approx(0.3 * per_response.mean().item(), rel=1e-4)
    mean_entropy = ((scored.entropy * mask).sum(1) / mask.sum(1)).mean().item()
    assert metrics["term_entropy"] == pytest.approx(-0.02 * mean_entropy, rel=1e-5)
    assert metrics["term_kl"] > 1e-5
