"""Forwards that fit: rows by a budget of tokens, logits piece by piece; neither changes what comes out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_rl.config import Arm
from moe_rl.models import vocabulary
from moe_rl.models.vocabulary import head_is_apart
from moe_rl.objectives import objective_of
from moe_rl.policies import hf
from moe_rl.policies.hf import cut
from moe_rl.registry import Component
from moe_rl.rollouts.batches import collate
from moe_rl.types import Prompt, Rollout
from tests.conftest import FAMILIES, SMALL, build
from tests.policies.test_hf import GRPO, make_batch, part_of, policy_of

CLOSE = {"atol": 2e-6, "rtol": 1e-5}


def test_a_budget_puts_long_rows_first_and_fills_forwards_up_by_hand():
    lengths = [4, 9, 2, 3, 9, 1]
    rollouts = [Rollout(Prompt("", tokens=(3,)), (4,) * (n - 1), torch.zeros(n - 1), "", True) for n in lengths]
    batch = collate(rollouts, [0] * 6, [0.0] * 6, 0)
    assert [rows.tolist() for rows in cut(batch, 64, 12)] == [[1], [4], [0, 3, 2], [5]]
    assert [rows.tolist() for rows in cut(batch, 2, 12)] == [[1], [4], [0, 3], [2, 5]]
    assert [rows.tolist() for rows in cut(batch, 64, 5)] == [[1], [4], [0], [3], [2, 5]], "too long goes alone"
    assert cut(batch, 4) == [slice(0, 4), slice(4, 8)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_of_tokens_changes_nothing_but_the_order_of_additions(family):
    batch, model = make_batch(), build(family)
    plain, budgeted = policy_of(model), policy_of(model, micro_batch_tokens=20)
    old, new = plain.score(batch, scores=True), budgeted.score(batch, scores=True)
    torch.testing.assert_close(new.logprobs, old.logprobs, **CLOSE)
    torch.testing.assert_close(new.entropy, old.entropy, **CLOSE)
    known = old.routes.known
    torch.testing.assert_close(new.scores.gates[known], old.scores.gates[known], **CLOSE)
    assert new.routes == old.routes and torch.equal(new.scores.ids[known], old.scores.ids[known])
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    shuffled = budgeted.score(batch.rows(order))
    torch.testing.assert_close(shuffled.logprobs, old.logprobs[order], **CLOSE)
    part = part_of(batch, old, old.routes)
    torch.testing.assert_close(budgeted.gradient(part, GRPO), plain.gradient(part, GRPO), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_piece_by_piece_give_the_same_log_probs_entropy_and_gradient(family, entropy, monkeypatch):
    batch, model = make_batch(), build(family)
    objective = objective_of(Arm(name="a", terms=(Component("entropy", coef=0.1),) if entropy else ()))
    policy = policy_of(model, temperature=0.7)
    old = policy.score(batch)
    part = replace(part_of(batch, old), weights=GRPO.attach_weights(part_of(batch, old)).weights)
    gradient = policy.gradient(part, objective)
    monkeypatch.setattr(hf, "LOGITS", 200)
    monkeypatch.setattr(vocabulary, "LOGITS", 200)
    head, seen = model.get_output_embeddings(), []
    forward = head.forward

    def watched(states):
        seen.append(len(states) * 48)
        return forward(states)

    head.forward = watched
    new, again = policy.score(batch), policy.gradient(part, objective)
    assert max(seen) <= 200 and len(seen) > 30 and head.forward is watched
    torch.testing.assert_close(new.logprobs, old.logprobs, **CLOSE)
    torch.testing.assert_close(new.entropy, old.entropy, **CLOSE)
    assert new.routes == old.routes
    torch.testing.assert_close(again, gradient, atol=1e-6, rtol=1e-4)


def test_a_family_that_scales_its_logits_makes_them_all_at_once(monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("granitemoe", **SMALL, num_local_experts=4, num_experts_per_tok=2, logits_scaling=8.0)
    model, batch = AutoModelForCausalLM.from_config(config).eval(), make_batch()
    assert not head_is_apart(model) and head_is_apart(build("qwen3_moe"))
    old = policy_of(model).score(batch)
    monkeypatch.setattr(hf, "LOGITS", 200)
    assert torch.equal(policy_of(model).score(batch).logprobs, old.logprobs)
