"""Truncated importance sampling against the engine: by hand, and as a weight on the objective's tokens alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import CorrectionInputs, correction_weights, objective_of
from moe_rl.objectives.weights import cis, truncated
from moe_rl.registry import Component, needs
from tests.objectives.examples import case, inputs
from tests.policies.test_hf import make_batch

WIDE = Component("grpo", clip_low=9.0, clip_high=9.0)


@pytest.fixture
def parts():
    batch = make_batch()
    generator = torch.Generator().manual_seed(0)

    def draw():
        return torch.where(batch.response_mask, -torch.rand(batch.tokens.shape, generator=generator), 0.0)

    return replace(batch, rollout_logprobs=draw(), old_logprobs=draw()), draw().requires_grad_()


def test_terms_keep_the_weights_that_a_correction_takes_from_the_loss(parts):
    """The engine was 1/3 as sure of every token: the loss counts half as much under a cap of 1/2, its KL in full."""
    batch, logprobs = parts
    batch = replace(batch, rollout_logprobs=batch.old_logprobs - math.log(3), ref_logprobs=batch.old_logprobs + 1)
    found = {}
    for corrections in ((), (Component("truncated", cap=0.5),)):
        for terms in ((), (Component("kl", coef=0.7),)):
            objective = objective_of(Arm(name="a", loss=WIDE, corrections=corrections, terms=terms))
            out = objective(objective.attach_weights(batch), logprobs, torch.zeros_like(logprobs))
            found[bool(corrections), bool(terms)] = out.loss.item()
    assert found[True, False] == pytest.approx(found[False, False] / 2, rel=1e-6)
    assert found[True, True] - found[True, False] == pytest.approx(found[False, True] - found[False, False], rel=1e-5)


def test_with_routes_of_its_own_for_the_ratio_a_token_still_weighs_what_the_old_policy_and_the_engine_say():
    """π_old / π_engine = 3/2 whatever the ratio's and the gradient's routes make of π_θ: loss −(3/2 · 2), gradient
    the same, since the ratio is 2 and A = 1."""

    def row(*values):
        return torch.tensor([values], dtype=torch.float64)

    logprobs = row(0.0, -7.0).requires_grad_()
    x = inputs(
        logprobs,
        row(0.0, -1.0),
        row(1.0, 1.0),
        torch.tensor([[False, True]]),
        rollout_logprobs=row(0.0, -1.0 - math.log(1.5)),
        ratio_logprobs=row(0.0, -1.0 + math.log(2)),
    )
    output = objective_of(Arm(name="a", loss=WIDE, corrections=(Component("truncated", cap=2.0),))).of(x)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-3.0, rel=1e-12)
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -3.0], rel=1e-12)


def test_without_the_engines_log_probs_there_is_nothing_to_weigh():
    with pytest.raises(ConfigError, match="rollout_logprobs"):
        truncated(inputs(*case()))


def per_row(x):
    return torch.ones(len(x.mask))


@needs("policy")
def waiting(x):
    return (x.log_ratio < 0.5).float()


@needs("engine")
def compares(x):
    return torch.ones_like(x.old_logprobs)


def nan_outside(x):
    return torch.where(x.mask, 1.0, math.nan)


@pytest.mark.parametrize("level", ["token", "product"])
def test_where_filters_leave_nothing_a_normalised_weight_is_no_nan(level):
    batch = make_batch()
    batch = replace(batch, old_logprobs=batch.rollout_logprobs, finished=torch.zeros(len(batch), dtype=torch.bool))
    arm = Arm(
        name="a", filters=("finished",), corrections=(Component("truncated", level=level, batch_normalized=True),)
    )
    objective = objective_of(arm)
    part = objective.attach_weights(batch)
    assert objective(part, batch.rollout_logprobs, 0 * batch.rollout_logprobs).loss.item() == 0


def test_what_a_correction_says_of_padding_reaches_no_loss():
    batch = make_batch()
    batch = replace(batch, old_logprobs=batch.rollout_logprobs, advantages=batch.response_mask.float())
    plain, own = objective_of(Arm(name="a")), objective_of(Arm(name="a", corrections=(f"{__name__}:nan_outside",)))
    logprobs = batch.rollout_logprobs
    one, other = (o(o.attach_weights(batch), logprobs, 0 * logprobs).loss for o in (plain, own))
    assert torch.equal(one, other) and one != 0


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"filters": ("waiting",)}, "waiting.*reads π_θ"),
        ({"corrections": ("per_row",)}, r"shape \(1,\)"),
        ({"corrections": ("compares",), "anchor": "engine"}, "every weight of "),
    ],
)
def test_ones_own_correction_that_means_nothing_is_refused(settings, message):
    settings = {k: tuple(f"{__name__}:{n}" for n in v) if isinstance(v, tuple) else v for k, v in settings.items()}
    with pytest.raises(ConfigError, match=message):
        objective_of(Arm(name="a", **settings))


def test_the_cap_of_cis_falls_as_the_trainer_grows_certain():
    """1 + 2.3 · (1 − π_old): 2.15 at π_old = 1/2; 1 + 2.3 · 0.005 at 1, where 1 − π_old is below the floor; ρ = 1.2."""
    old, engine = torch.tensor([[0.5, 0.5, 1.0, 0.6]]).log(), torch.tensor([[0.1, 0.4, 0.5, 0.5]]).log()
    mask = torch.ones_like(old, dtype=torch.bool)
    x = CorrectionInputs(old_logprobs=old, rollout_logprobs=engine, mask=mask, advantages=torch.zeros_like(old))
    assert cis(x)[0].tolist() == pytest.approx([2.15, 1.25, 1.0115, 1.2], rel=1e-6)
    torch.testing.assert_close(cis(x, lam=math.inf), truncated(x, cap=math.inf))
    torch.testing.assert_close(cis(x, lam=1.5, floor=1.0), truncated(x, cap=2.5))


def test_carm_takes_out_a_response_whose_log_ratios_cancel_in_the_mean():
    """log ρ of ±0.1: their mean is 0, which geo_rs keeps, and their mean size 0.1."""
    old, engine = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.1, -0.9]])
    inputs = {"old_logprobs": old, "rollout_logprobs": engine, "mask": old < 0, "advantages": torch.zeros_like(old)}
    assert correction_weights("carm", **inputs).tolist() == [[0, 0]]
    assert correction_weights("geo_rs", **inputs).tolist() == [[1, 1]]
