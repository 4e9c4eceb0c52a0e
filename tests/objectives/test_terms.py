"""Terms of an objective by hand, and how they add up."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import objective_of
from moe_rl.objectives.losses import gspo
from moe_rl.objectives.terms import TERMS, entropy, kl
from moe_rl.registry import Component, needs_of
from tests.conftest import build, perturb
from tests.objectives.examples import TIGHT, case, inputs
from tests.policies.test_hf import make_batch, policy_of

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


def test_an_objective_is_policy_loss_plus_kl_minus_entropy():
    new, old, advantages, mask = (torch.tensor(x) for x in case())
    x = inputs(new, old, advantages, mask, ref_logprobs=old, entropy=new.abs())
    objective = objective_of(Arm(name="a", loss=Component("gspo", clip_low=0.01, clip_high=0.015), terms=BOTH))
    output, bare = objective.of(x), gspo(x, clip_low=0.01, clip_high=0.015)
    d = (old - new)[mask]
    k3, mean_entropy = ((w * v).sum() for w, v in ((x.weights[mask], d.exp() - 1 - d), (x.weights, new.abs())))
    torch.testing.assert_close(output.loss, bare.loss + 0.3 * k3 - 0.02 * mean_entropy, **TIGHT)
    assert torch.equal(output.clipped_by, bare.clipped_by) and torch.equal(output.log_ratio, bare.log_ratio)
    assert output.metrics == pytest.approx({"term_kl": 0.3 * k3.item(), "term_entropy": -0.02 * mean_entropy.item()})


@pytest.mark.parametrize("term, lacking", [("kl", "ref_logprobs"), ("entropy", "entropy of every token")])
def test_a_term_without_what_it_compares_with_is_an_error(term, lacking):
    with pytest.raises(ConfigError, match=lacking):
        TERMS[term](replace(inputs(*case()), entropy=None), coef=0.1)


def test_terms_say_what_they_need_so_that_nobody_else_pays_for_it():
    assert needs_of(kl) == {"reference"} and needs_of(entropy) == {"entropy"}
    assert objective_of(Arm(name="a", terms=BOTH)).needs == {"reference", "entropy"}
    assert objective_of(Arm(name="a")).needs == frozenset()


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
