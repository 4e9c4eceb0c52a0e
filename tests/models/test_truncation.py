"""Truncated sampling: by hand, against a loop in Python, and as engine and policy agree on it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.build import check
from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.models.vocabulary import entropy_of, kept
from moe_rl.objectives import objective_of
from moe_rl.policies import hf
from moe_rl.rollouts.batches import collate
from moe_rl.rollouts.hf import HFEngine
from moe_rl.types import Batch, KeptTokens, Sampling
from tests.policies.test_hf import policy_of
from tests.rollouts import test_hf
from tests.rollouts.test_hf import PROMPTS, make_model, prompts
from tests.test_trainer import ARMS, TINY, carry_out

model, tokenizer = test_hf.model, test_hf.tokenizer  # fixtures
FOUR = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
TRUNCATIONS = [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.8, "top_k": 6, "min_p": 0.05}]


def test_equal_and_impossible_and_broken_tokens():
    assert kept(torch.zeros(1, 5), top_k=2)[0].tolist() == [True, True, False, False, False]
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [math.nan, 0.0, 0.0]])
    assert kept(logits, top_p=0.9).tolist() == [[True, False, True], [False, False, False]]


def test_log_probs_and_entropy_over_the_kept_set_by_hand():
    one = KeptTokens(torch.tensor([0, 2]).int(), torch.tensor([2]).int())
    log_p = one.only(FOUR).log_softmax(-1)
    assert log_p[0].tolist() == pytest.approx([math.log(4 / 7), -math.inf, math.log(3 / 7), -math.inf])
    by_hand = -(4 / 7 * math.log(4 / 7) + 3 / 7 * math.log(3 / 7))
    assert entropy_of(log_p, True).item() == pytest.approx(by_hand)
    logits = FOUR.clone().requires_grad_()
    entropy_of(one.only(logits).log_softmax(-1), True).sum().backward()
    assert logits.grad[0, [1, 3]].tolist() == [0, 0] and logits.grad.isfinite().all() and logits.grad[0, 0] != 0


def slow(logits, top_p=1.0, top_k=0, min_p=0.0):
    """The same in a loop: the set as a list of ids."""
    p = sorted(((math.exp(x), -i) for i, x in enumerate(logits.double().log_softmax(-1).tolist())), reverse=True)
    p = [(x, i) for x, i in p if x >= min_p * p[0][0]][: top_k or None]
    whole, total, chosen = sum(x for x, _ in p), 0.0, []
    for x, i in p:
        if total / whole >= top_p and top_p < 1:
            break
        total += x
        chosen.append(-i)
    return sorted(chosen)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 1.0), st.integers(0, 12), st.floats(0.0, 1.0))
def test_any_set_is_that_of_a_loop(seed, top_p, top_k, min_p):
    logits = 3 * torch.randn(4, 11, generator=torch.Generator().manual_seed(seed))
    found = kept(logits, top_p=top_p, top_k=top_k, min_p=min_p)
    assert [row.nonzero()[:, 0].tolist() for row in found] == [slow(row, top_p, top_k, min_p) for row in logits]
    each = torch.full((4, 1), top_p), torch.full((4, 1), float(top_k)), torch.full((4, 1), min_p)
    as_tensors = kept(logits, **dict(zip(("top_p", "top_k", "min_p"), (x.double() for x in each), strict=True)))
    assert torch.equal(found, as_tensors)


def sampled(engine, truncation, temperature=0.7, **more):
    asked = Sampling(temperature, 9, **truncation, **more)
    rollouts = engine.generate(prompts(), 4, key=(3,), sampling=asked)
    return rollouts, collate(rollouts, [i for i in range(len(PROMPTS)) for _ in range(4)], [0.0] * 16, 0)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_engine_and_policy_agree_on_sets_log_probs_and_entropy(model, tokenizer, truncation, in_pieces, monkeypatch):
    if in_pieces:
        monkeypatch.setattr(hf, "LOGITS", 60)
        monkeypatch.setattr("moe_rl.models.vocabulary.LOGITS", 60)
    rollouts, batch = sampled(HFEngine(model, tokenizer, max_rows=8), truncation)
    assert len({len(r.tokens) for r in rollouts}) > 1, "rows that end early"
    for policy in (policy_of(model, temperature=0.7), policy_of(model, temperature=0.7, score_batch=3)):
        scored = policy.score(batch)
        assert (scored.logprobs - batch.rollout_logprobs).abs().max() < 2e-5
        assert scored.entropy.isfinite().all()
    off = policy.score(replace(batch, kept_tokens=None)).logprobs - batch.rollout_logprobs
    assert off.max() < 2e-5 and off.min() < -0.05, "over the whole vocabulary a token has less"
    for r in rollouts:
        whole = torch.tensor([r.prompt.tokens + r.tokens])
        with torch.no_grad():
            logits = model(input_ids=whole).logits[0, len(r.prompt.tokens) - 1 : -1] / 0.7
        sets = [sorted(ids.tolist()) for ids in r.kept_tokens.ids.split(r.kept_tokens.counts.tolist())]
        assert sets == [slow(row, **truncation) for row in logits]
        by_hand = [(row[t] - row[ids].logsumexp(0)).item() for row, t, ids in zip(logits, r.tokens, sets, strict=True)]
        assert r.logprobs.tolist() == pytest.approx(by_hand, abs=2e-5)


def test_a_set_of_all_tokens_changes_no_bit(model, tokenizer):
    plain, batch = sampled(HFEngine(model, tokenizer), {})
    neutral, same = sampled(HFEngine(model, tokenizer), {"top_p": 1.0, "top_k": 0, "min_p": 0.0})
    everything, full = sampled(HFEngine(model, tokenizer), {"top_k": 20})
    assert batch.kept_tokens is same.kept_tokens is None and all(r.kept_tokens is None for r in neutral)
    assert full.kept_tokens is not None and int(full.kept_tokens.counts.sum()) == 20 * int(batch.response_mask.sum())
    policy = policy_of(model, temperature=0.7)
    for other in (same, full):
        assert torch.equal(batch.tokens, other.tokens)
        assert torch.equal(batch.rollout_logprobs, other.rollout_logprobs)
        a, b = policy.score(batch), policy.score(other)
        assert torch.equal(a.logprobs, b.logprobs) and torch.equal(a.entropy, b.entropy)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_gradients_are_those_of_log_probs_over_the_kept_set(tokenizer, in_pieces, monkeypatch):
    """However the mini-batch is cut; the oracle is a plain forward with a softmax over lists of ids."""
    if in_pieces:
        monkeypatch.setattr(hf, "LOGITS", 60)
        monkeypatch.setattr("moe_rl.models.vocabulary.LOGITS", 60)
    one = make_model()
    rollouts, batch = sampled(HFEngine(one, tokenizer), {"top_p": 0.7}, temperature=1.0)
    advantages = torch.randn(16, 1, generator=torch.Generator().manual_seed(0)) * batch.response_mask
    batch = Batch(**vars(batch), old_logprobs=batch.rollout_logprobs, advantages=advantages)
    objective = objective_of(Arm(name="plain", loss="grpo", aggregate="token_mean"))
    batch = objective.attach_weights(batch)
    found = [policy_of(one, temperature=1.0, micro_batch=rows).gradient(batch, objective) for rows in (16, 3)]
    loss = torch.zeros(())
    for r, advantage in zip(rollouts, advantages.amax(1) + advantages.amin(1), strict=True):
        logits = one(input_ids=torch.tensor([r.prompt.tokens + r.tokens])).logits[0, len(r.prompt.tokens) - 1 : -1]
        ids = r.kept_tokens.ids.long().split(r.kept_tokens.counts.tolist())
        for row, token, kept_ids in zip(logits, r.tokens, ids, strict=True):
            loss = loss - advantage * (row[token] - row[kept_ids].logsumexp(0)) / int(batch.response_mask.sum())
    one.zero_grad()
    loss.backward()
    wanted = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in one.parameters()])
    assert wanted.norm() > 0.01
    assert all((x - wanted).norm() < 1e-5 * wanted.norm() for x in found)


def test_without_its_mask_nothing_is_kept_and_the_trainer_is_off(model, tokenizer):
    _, batch = sampled(HFEngine(model, tokenizer), {"top_p": 0.6}, keep_mask=False)
    assert batch.kept_tokens is None
    off = batch.rollout_logprobs - policy_of(model, temperature=0.7).score(batch).logprobs
    assert off.min() > -2e-5 and off.max() > 0.3, "log Σ π(kept) at every token, which is below 0"


def test_a_run_with_top_p_starts_every_step_at_a_ratio_of_one(tmp_path):
    arm = ARMS["kl"].replace(routes="old_policy")
    run = TINY.replace(arm=arm, top_p=0.7, steps=2, eval_prompts=1, prompts_per_step=2)
    tables = carry_out(run, tmp_path)["steps"]
    assert tables["first_update_log_ratio_max"].max() < 1e-5 and tables["engine_logprob_max"].max() < 1e-4
    assert 1 < tables["kept_tokens"].iloc[-1] < 258
    assert tables["kept_tokens"].isna().iloc[0], "nothing is drawn to be trained on before the first step"


def test_what_makes_two_distributions_of_one_is_said_or_refused():
    def cautions(**changes):
        return [text for text in check(TINY.replace(**changes)) if "kept tokens" in text]

    assert not cautions() and not cautions(top_p=0.9) and not cautions(sampling_mask=False)
    (text,) = cautions(min_p=0.1, sampling_mask=False)
    assert "min_p=0.1" in text and "(sampling_mask=False)" in text
    (text,) = cautions(top_k=5, engine="server(url='http://localhost:1')")
    assert "what it kept" in text
    with pytest.raises(ConfigError, match="top_p=0.9.*megatron"):
        check(TINY.replace(top_p=0.9, policy="megatron"))
