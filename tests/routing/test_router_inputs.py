"""What objectives see of a model's routers: against the model itself, with its gradient, however it is computed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import RoutingError
from moe_rl.objectives import objective_of
from moe_rl.registry import Component
from moe_rl.routing import record_routing
from moe_rl.routing.inputs import RouterInputs, load_of, shares, token_weights
from moe_rl.routing.moe_layers import find_moe_layers, router_parameters
from moe_rl.routing.sources import random_sets
from tests.conftest import FAMILIES, build, perturb
from tests.policies.test_hf import make_batch, policy_of
from tests.routing import families

TERMS = (
    Component("router_kl", coef=0.5),
    Component("z_loss", coef=0.1),
    Component("load_balance", coef=0.3),
)
RSPO = objective_of(Arm(name="a", loss=Component("rspo", base="grpo", floor=0.9), terms=TERMS))


@pytest.fixture
def batch():
    return make_batch()


def moved_policy(family="qwen3_moe", **settings):
    """A policy whose routers have moved, and the batch as a mini-batch scored before."""
    model = build(family)
    policy = policy_of(model, **settings)
    batch = make_batch()
    old = policy.score(batch, scores=True)
    perturb(model, 0.3)
    return policy, batch, old


def mini_batch(batch, old, routes=None, objective=RSPO):
    return objective.attach_weights(replace(batch, old_logprobs=old.logprobs, old_scores=old.scores, routes=routes))


def seen(policy, part, objective=RSPO):
    """The RouterInputs of every micro-batch of an update's gradient."""
    found, of = [], RouterInputs.of
    try:
        RouterInputs.of = staticmethod(lambda *args: found.append(of(*args)) or found[-1])
        gradient = policy.gradient(part, objective)
    finally:
        RouterInputs.of = staticmethod(of)
    return found, gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_at_a_token_stands_what_routed_its_predecessor(family):
    """Row by row against the model's own routers, without padding; ids and old scores of the same rows."""
    policy, batch, old = moved_policy(family)
    (router,), _ = seen(policy, mini_batch(batch, old))
    for b in range(len(batch)):
        n = int(batch.attention_mask[b].sum())
        row = batch.tokens[b : b + 1, :n]
        logits: list[torch.Tensor] = []
        keep = partial(
            lambda kept, module, given, output: kept.append(
                torch.nn.functional.linear(given[0].flatten(0, -2), module.weight, getattr(module, "bias", None))
            ),
            logits,
        )
        handles = [moe_layer.module.register_forward_hook(keep) for moe_layer in find_moe_layers(policy.model)]
        with torch.no_grad(), record_routing(policy.model) as recording:
            policy.model(row)
        for handle in handles:
            handle.remove()
        for s, expected in enumerate(logits):
            torch.testing.assert_close(router.logits[s][b, 1:n], expected[:-1], atol=1e-5, rtol=1e-5)
            mine, theirs = router.old_log_probs[s][b, 1:n], old.scores.all_log_probs[s][b, : n - 1]
            assert torch.equal(mine, theirs) and mine.abs().sum() > 0
            assert not router.logits[s][b, 0].any()
        routes = recording.trace(row).ids()[0]
        assert torch.equal(router.used[b, 1:n], routes[: n - 1]) and (router.used[b, 0] == -1).all()
        assert torch.equal(router.old_used[b, 1:n], old.routes.ids()[b, : n - 1])
        assert (router.used[b, n:] == -1).all() and not router.weights[b, n:].any()
    assert router.weights.sum() == pytest.approx(1) and not router.weights[:, 0].any()
    assert (router.old_used != router.used).any(), "routes moved, or the test compares nothing"


@pytest.mark.parametrize("micro_batch", [1, 5, 8])
def test_the_gradient_does_not_depend_on_the_micro_batch(micro_batch):
    """All terms and the weight: what spans the mini-batch is not taken over a part of it."""
    found = []
    for size in (64, micro_batch):
        policy, batch, old = moved_policy(micro_batch=size)
        found.append(seen(policy, mini_batch(batch, old))[1])
    torch.testing.assert_close(found[1], found[0], atol=5e-6, rtol=1e-4)
    assert found[0].abs().max() > 1e-3


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_under_activation_checkpointing_the_gradient_is_the_same(family, replayed):
    found = []
    for mode in (False, "non-reentrant"):
        policy, batch, old = moved_policy(family, activation_checkpointing=mode, micro_batch=5)
        routes = old.routes if replayed else None
        found.append(policy.gradient(mini_batch(batch, old, routes), RSPO))
    assert torch.equal(found[0], found[1])


def test_checkpointing_without_a_graph_is_refused():
    policy, batch, old = moved_policy(activation_checkpointing="reentrant")
    with pytest.raises(RoutingError, match="re-entrant activation checkpointing"):
        policy.gradient(mini_batch(batch, old), RSPO)


@pytest.mark.parametrize("term", TERMS, ids=str)
def test_every_term_reaches_every_router(term):
    """And through them the layers below; at a loss of nothing but the term."""
    policy, batch, old = moved_policy()
    objective = objective_of(Arm(name="a", terms=(term,)))
    still = replace(batch, advantages=torch.zeros_like(batch.advantages))
    part = mini_batch(still, old, objective=objective)
    grads = {}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: grads.__setitem__(id(p), p.grad.clone()))
        for p in policy.model.parameters()
    ]
    policy.gradient(part, objective)
    assert len(hooks) == len(list(policy.model.parameters()))
    assert all(grads[id(p)].abs().max() > 1e-8 for p in router_parameters(policy.model))


def test_preferred_are_the_live_choices_under_replay():
    policy, batch, old = moved_policy()
    forced = random_sets(batch, old)
    (router,), _ = seen(policy, mini_batch(batch, old, forced))
    assert torch.equal(router.used[:, 1:], forced.ids()[:, :-1])
    real = router.weights > 0
    unconstrained = torch.stack([logits[real].topk(2).indices for logits in router.logits], 1)
    assert torch.equal(router.preferred[real].sort(-1).values, unconstrained.sort(-1).values)
    assert not torch.equal(router.preferred, router.used)


def test_in_bfloat16_scores_are_float32_and_the_first_ratio_is_1(batch):
    policy = policy_of(build("qwen3_moe").to(torch.bfloat16))
    old = policy.score(batch, scores=True)
    (router,), _ = seen(policy, mini_batch(batch, old))
    assert all(x.dtype == torch.float32 for x in router.logits)
    for new, before in zip(router.log_probs, router.old_log_probs, strict=True):
        torch.testing.assert_close(new.detach()[router.weights > 0], before[router.weights > 0], atol=1e-6, rtol=1e-6)


def test_old_scores_are_asked_for_by_name(batch):
    policy = policy_of(build("qwen3_moe"))
    with pytest.raises(RoutingError, match="no old_scores"):
        policy.gradient(mini_batch(batch, replace(policy.score(batch), scores=None)), RSPO)


def test_a_family_without_logits_is_refused_by_name():
    family = next(f for f in families.FAMILIES if f.model_type == "jetmoe")
    model = families.build(family)
    with pytest.raises(RoutingError, match="JetMoeTopKGating does not.*logits"), record_routing(model, logits=True):
        model(torch.randint(3, 39, (2, 5)))


def test_a_router_that_hands_out_probabilities_has_logits_too():
    """Those of which it makes them, by the matrix that it multiplies what its projection reads with, with gradient."""
    gemma = families.build(next(f for f in families.FAMILIES if f.model_type == "gemma4_text"))
    router, read = find_moe_layers(gemma)[0].module, []
    router.proj.register_forward_pre_hook(lambda _, args: read.append(args[0].detach()))
    with record_routing(gemma, logits=True) as recording:
        gemma(torch.randint(3, 39, (2, 5)))
    logits = recording.logits(2)[0].flatten(0, 1)
    torch.testing.assert_close(logits, read[0] @ router.proj.weight.T, rtol=1e-6, atol=1e-6)
    logits.square().sum().backward()
    assert router.proj.weight.grad.abs().max() > 0


def test_weights_of_tokens_and_shares_of_slots_by_hand():
    batch = make_batch()
    weights = token_weights(batch.attention_mask, batch.response_mask)
    assert weights.sum() == pytest.approx(1) and not weights[:, 0].any()
    assert ((weights > 0) == batch.attention_mask & (torch.arange(weights.shape[1]) > 0)).all()
    ids = torch.tensor([[[[0, 1]], [[1, 2]], [[-1, -1]]]])
    (found,) = shares(ids, torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64), [4])
    assert found.tolist() == [0.125, 0.5, 0.375, 0.0]
    routes = policy_of(build("qwen3_moe")).score(batch).routes
    load = load_of(weights, routes, None)
    known = routes.ids()[:, :, 1][routes.known[:, :, 1]]
    expected = torch.bincount(known.flatten(), minlength=8).double() / known.numel()
    torch.testing.assert_close(load["used"][1], expected)
