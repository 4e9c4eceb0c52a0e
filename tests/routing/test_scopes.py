"""Scopes in scopes, closed in any order, with checkpointed backwards: each forward keeps its own routes."""

from __future__ import annotations

import copy
import gc
from contextlib import ExitStack

import pytest
import torch

from moe_rl.errors import RoutingError
from moe_rl.routing import record_routing, replay_routing
from moe_rl.routing.sources import random_sets
from tests.conftest import build, perturb
from tests.policies.test_hf import GRPO, make_batch, part_of, policy_of
from tests.routing.test_hooks import record

MODES = ["reentrant", "non-reentrant"]


def checkpointed(model, mode):
    model.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
    model.enable_input_require_grads()
    for layer in model.modules():
        layer.training = getattr(layer, "gradient_checkpointing", False)
    return model


def loss(model, tokens):
    return model(tokens, use_cache=False).logits.logsumexp(-1).pow(2).sum()


def left_behind(model):
    return [name for name, m in model.named_modules() if "forward" in m.__dict__ or m._forward_pre_hooks]


@pytest.fixture
def moved(qwen, tokens):
    """A model, the routes it took before its weights moved, and random ones; the three differ."""
    trace, _ = record(qwen, tokens)
    other, _ = record(build("qwen3_moe", seed=5), tokens)
    perturb(qwen)
    return qwen, trace, other


# ---------------------------------------------------------------------- nested
@pytest.mark.parametrize("mode", MODES)
def test_an_inner_scope_keeps_its_place_after_the_outer_ones_backward(moved, tokens, mode):
    model, trace, other = moved
    checkpointed(model, mode)
    with replay_routing(model, trace):
        outer = loss(model, tokens)
        with replay_routing(model, other):
            outer.backward()
            with record_routing(model) as recording:
                loss(model, tokens).backward()
            assert recording.trace(tokens) == other
            with torch.no_grad(), record_routing(model) as recording:
                model(tokens)
            assert recording.trace(tokens) == other, "the inner scope's routes, not the outer's"
        with torch.no_grad(), record_routing(model) as recording:
            model(tokens)
        assert recording.trace(tokens) == trace


@pytest.mark.parametrize("mode", MODES)
def test_scopes_closed_out_of_order_leave_nothing_behind(moved, tokens, mode):
    model, trace, other = moved
    checkpointed(model, mode)
    model.disable_input_require_grads()
    functions = [m._gradient_checkpointing_func for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]
    first, second = ExitStack(), ExitStack()
    first.enter_context(replay_routing(model, trace))
    with torch.no_grad():
        model(tokens)
    second.enter_context(replay_routing(model, other))
    with torch.no_grad():
        model(tokens)
    first.close()
    with torch.no_grad(), record_routing(model) as recording:
        model(tokens)
    assert recording.trace(tokens) == other
    second.close()
    assert not left_behind(model)
    assert functions == [
        m._gradient_checkpointing_func for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")
    ]


def test_a_forward_that_somebody_else_wrapped_inside_the_scope_stays_theirs(qwen, tokens):
    gate, calls = qwen.model.layers[0].mlp.gate, []
    with torch.no_grad():
        logits = qwen(tokens).logits
        with record_routing(qwen) as recording:
            ours = gate.forward
            gate.forward = lambda *args, **kwargs: (calls.append(1), ours(*args, **kwargs))[1]
            qwen(tokens)
        assert recording.trace(tokens).coverage == 1
        assert torch.equal(qwen(tokens).logits, logits) and len(calls) == 2
        recording = record(qwen, tokens)[0]
    assert recording.coverage == 1 and len(calls) == 3


# ---------------------------------------------------------------------- two backwards through one forward
@pytest.mark.parametrize("mode", MODES)
def test_two_backwards_through_a_checkpointed_forward_are_twice_the_gradient(moved, tokens, mode):
    model, trace, _ = moved
    checkpointed(model, mode)
    gradients = []
    for backwards in (1, 2):
        model.zero_grad()
        with replay_routing(model, trace):
            value = loss(model, tokens)
            for _ in range(backwards):
                value.backward(retain_graph=True)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(2 * gradient, gradients[1][name], msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_a_second_backward_does_not_stand_in_for_a_missing_one(moved, tokens, mode):
    model, trace, _ = moved
    checkpointed(model, mode)
    with pytest.raises(RoutingError, match="3 checkpointed layers were not"), replay_routing(model, trace):
        first, _forgotten = loss(model, tokens), loss(model, tokens)
        first.backward(retain_graph=True)
        first.backward()


# ---------------------------------------------------------------------- copies
def test_a_model_in_a_scope_refuses_to_be_copied(qwen, tokens):
    trace, _ = record(qwen, tokens)
    for scope in (record_routing(qwen), replay_routing(qwen, trace)):
        with pytest.raises(RoutingError, match="Copy the model outside"), scope:
            copy.deepcopy(qwen)
        assert not left_behind(qwen)
    twin = copy.deepcopy(qwen)
    assert not left_behind(twin)
    assert record(twin, tokens)[0] == trace


# ---------------------------------------------------------------------- memory
def test_a_replay_keeps_ids_and_no_scores(moved, tokens):
    model, trace, _ = moved
    experts = trace.layout.sites[0].num_experts

    def scores():
        gc.collect()
        found = (x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.dim() == 2)
        return sum(x.shape == (tokens.numel(), experts) for x in found)

    before = scores()
    with torch.no_grad(), replay_routing(model, trace) as replay:
        model(tokens)
        assert scores() == before
    assert replay.preferred.experts.dtype == torch.uint8
    assert not replay.preferred.same_sets(trace).all()


# ---------------------------------------------------------------------- parts of a trace
def holed(routes, rows):
    """The routes, unknown but in these rows."""
    ids = routes.ids()
    ids[[b for b in range(len(ids)) if b not in rows]] = -1
    return type(routes).from_ids(ids, routes.layout, tokens=routes.tokens, attention_mask=routes.attention_mask)


@pytest.mark.parametrize("activation_checkpointing", [False, *MODES])
def test_a_micro_batch_without_a_known_route_routes_freely_within_a_batch_that_has_some(activation_checkpointing):
    batch, found = make_batch(), []
    for micro_batch in (64, 3):
        model = build("qwen3_moe")
        policy = policy_of(model, micro_batch=micro_batch, score_batch=micro_batch,
                           activation_checkpointing=activation_checkpointing)  # fmt: skip
        routes = holed(policy.score(batch).routes, rows=(4, 5))
        perturb(model)
        old = policy.score(batch, routes)
        updated = policy.update(part_of(batch, old, routes), GRPO)
        found.append((old, updated))
    (old, updated), (old_cut, updated_cut) = found
    assert old_cut.routes == old.routes and old_cut.preferred == old.preferred
    assert updated_cut.routes == updated.routes and updated_cut.preferred == updated.preferred
    torch.testing.assert_close(old_cut.logprobs, old.logprobs)
    torch.testing.assert_close(updated_cut.grad_norm, updated.grad_norm, rtol=1e-4, atol=0)


def test_a_whole_trace_that_knows_nothing_is_refused_everywhere():
    batch = make_batch()
    policy = policy_of(build("qwen3_moe"))
    natural = policy.score(batch)
    routes = holed(random_sets(batch, natural), rows=())
    for use in (lambda: policy.score(batch, routes), lambda: policy.update(part_of(batch, natural, routes), GRPO)):
        with pytest.raises(RoutingError, match="no known routing"):
            use()
    with pytest.raises(RoutingError, match="no known routing"), replay_routing(policy.model, routes):
        pass
