"""Scopes in scopes, closed in any order, with checkpointed backwards: each forward keeps its own routes."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import threading
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    experts = trace.layout.moe_layers[0].num_experts

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
        policy = policy_of(
            model, micro_batch=micro_batch, score_batch=micro_batch, activation_checkpointing=activation_checkpointing
        )
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
    unconstrained = policy.score(batch)
    routes = holed(random_sets(batch, unconstrained), rows=())
    for use in (
        lambda: policy.score(batch, routes),
        lambda: policy.update(part_of(batch, unconstrained, routes), GRPO),
    ):
        with pytest.raises(RoutingError, match="no known routing"):
            use()
    with pytest.raises(RoutingError, match="no known routing"), replay_routing(policy.model, routes):
        pass


# ---------------------------------------------------------------------- checkpoints of one's own
class OwnCheckpoint(torch.autograd.Function):
    """Re-entrant activation checkpointing as other libraries write it."""

    @staticmethod
    def forward(ctx, function, hidden):
        ctx.function = function
        ctx.save_for_backward(hidden)
        return function(hidden)

    @staticmethod
    def backward(ctx, gradient):
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.function(hidden), gradient)
        return None, hidden.grad


class Hidden(OwnCheckpoint):
    """The same, by a decorator that names nothing, with the function where nobody looks for it."""

    @staticmethod
    @functools.wraps(OwnCheckpoint.forward)
    def forward(*everything):
        ctx, function, hidden = everything
        ctx.save_for_backward(hidden)
        ctx.state = {"run": [function]}
        return function(hidden)

    @staticmethod
    def backward(ctx, gradient):
        ctx.function = ctx.state["run"][0]
        return OwnCheckpoint.backward(ctx, gradient)


class Apart(OwnCheckpoint):
    """The same, whose forward has no context."""

    @staticmethod
    def forward(function, hidden):
        return function(hidden)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function, hidden = inputs
        ctx.save_for_backward(hidden)


OWN = {
    "reentrant": lambda function, hidden: checkpoint(function, hidden, use_reentrant=True),
    "non-reentrant": lambda function, hidden: checkpoint(function, hidden, use_reentrant=False),
    "own function": OwnCheckpoint.apply,
    "hidden function": Hidden.apply,
}


def wrap(module, run):
    inner = module.forward
    module.forward = lambda hidden, **kwargs: run(lambda x: inner(x, **kwargs), hidden)


def own_checkpoints(model, how):
    """The model with every layer checkpointed, and its MoE block once more inside the layer."""
    for layer in model.model.layers if how else ():
        wrap(layer.mlp, OWN[how])
        wrap(layer, OWN[how])
    model.get_input_embeddings().weight.requires_grad_()
    return model


def gradients_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("how", OWN)
def test_checkpoints_of_ones_own_recompute_each_forward_as_it_ran(tokens, how):
    trace, _ = record(build("qwen3_moe", seed=3), tokens)
    other, _ = record(build("qwen3_moe", seed=5), tokens)
    found = []
    for wrapped in (None, how):
        model = own_checkpoints(build("qwen3_moe"), wrapped)
        with record_routing(model):
            free = loss(model, tokens)
        with replay_routing(model, trace):
            outer = loss(model, tokens)
            with replay_routing(model, other):
                (free + outer + loss(model, tokens)).backward()
        found.append(gradients_of(model))
    assert torch.equal(*found)


@pytest.mark.parametrize("how", OWN)
def test_a_checkpoint_of_ones_own_is_not_recomputed_under_other_routes(tokens, how):
    trace, _ = record(build("qwen3_moe", seed=5), tokens)
    model = own_checkpoints(build("qwen3_moe"), how)
    with pytest.raises(RoutingError, match="checkpointed layers were not backpropagated"), replay_routing(model, trace):
        _kept = loss(model, tokens)
    free = loss(model, tokens)
    with pytest.raises(RoutingError, match="recomputed in a replay"), replay_routing(model, trace):
        (free + loss(model, tokens)).backward()
    assert not left_behind(model.model.layers[0].mlp.experts)


def test_a_checkpoint_without_a_context_is_refused(tokens):
    trace, _ = record(build("qwen3_moe", seed=5), tokens)
    model = build("qwen3_moe")
    wrap(model.model.layers[1].mlp, Apart.apply)
    model.get_input_embeddings().weight.requires_grad_()
    with pytest.raises(RoutingError, match="1 checkpointed layers were not"), replay_routing(model, trace):
        _kept = loss(model, tokens)


def test_checkpointing_that_is_switched_on_inside_a_scope_is_seen(moved, tokens):
    model, trace, other = moved
    with replay_routing(model, trace):
        loss(model, tokens).backward()
    plain = gradients_of(model)
    model.zero_grad()
    with replay_routing(model, trace):
        outer = loss(checkpointed(model, "non-reentrant"), tokens)
        with replay_routing(model, other), torch.no_grad():
            loss(model, tokens)
            with torch.enable_grad():
                outer.backward()
    assert torch.equal(gradients_of(model), plain)


# ---------------------------------------------------------------------- threads
def test_a_scope_is_of_the_thread_that_opened_it(moved, tokens):
    model, trace, other = moved
    unconstrained, logits = record(model, tokens)

    def elsewhere(scope):
        """What another thread sees that opens a scope of its own, or none."""
        found = []

        def run():
            with torch.no_grad(), scope() as recording:
                found.append(model(tokens).logits if recording is None else (model(tokens), recording)[1])

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return found[0]

    with torch.no_grad(), replay_routing(model, trace), record_routing(model) as recording:
        model(tokens)
        assert torch.equal(elsewhere(nullcontext), logits)
        assert elsewhere(lambda: record_routing(model)).trace(tokens) == unconstrained
        assert elsewhere(lambda: replay_routing(model, other)).preferred != trace
    assert recording.trace(tokens) == trace


# ---------------------------------------------------------------------- ids that are changed after the choice
def first_expert(output):
    """Expert 0 in the last slot of every token that does not have it."""
    return tuple(
        x if x.is_floating_point() else torch.cat([x[:, :-1], x[:, -1:].where((x == 0).any(-1, True), 0)], -1)
        for x in output
    )


def steer_hook(mlp):
    mlp.gate.register_forward_hook(lambda _, args, output: first_expert(output))


def steer_in_place(mlp):
    mlp.gate.register_forward_hook(lambda _, args, output: (output[2].copy_(first_expert(output)[2]), None)[1])


def steer_experts(mlp):
    mlp.experts.register_forward_pre_hook(lambda _, args: first_expert(args))


def steer_wrapper(mlp):
    inner = mlp.gate.forward
    mlp.gate.forward = lambda *args: first_expert(inner(*args))


class Around(nn.Module):
    """Around a router, or around experts."""

    def __init__(self, module, given):
        super().__init__()
        self.inner, self.given = module, given

    def forward(self, *args):
        return self.inner(*first_expert(args)) if self.given else first_expert(self.inner(*args))


def steer_around(mlp):
    mlp.experts = Around(mlp.experts, given=True)


def steer_around_gate(mlp):
    mlp.gate = Around(mlp.gate, given=False)


@pytest.mark.parametrize(
    "steer, inside",
    [
        *itertools.product([steer_hook, steer_in_place, steer_experts, steer_wrapper], [False, True]),
        (steer_around, False),
        (steer_around_gate, False),
    ],
)
def test_ids_that_are_changed_on_their_way_to_the_experts_are_refused(qwen, tokens, steer, inside):
    trace, _ = record(qwen, tokens)
    with pytest.raises(RoutingError, match=r"layers\.1\.mlp\.gate.* chose"), ExitStack() as scope:
        if not inside:
            steer(qwen.model.layers[1].mlp)
        scope.enter_context(torch.no_grad())
        another = steer is steer_around_gate  # to which the trace does not belong
        scope.enter_context(record_routing(qwen) if another else replay_routing(qwen, trace))
        if inside:
            steer(qwen.model.layers[1].mlp)
        qwen(tokens)


def test_a_hook_that_changes_weights_and_the_order_of_slots_is_none_of_our_business(qwen, tokens):
    trace, logits = record(qwen, tokens)
    for layer in qwen.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, out: (out[0], 1 * out[1].flip(-1), out[2].flip(-1)))
    again, turned = record(qwen, tokens)
    assert again == trace
    torch.testing.assert_close(turned, logits)


def test_a_compiled_router_is_recorded_and_refused_for_replay(qwen, tokens):
    trace, _ = record(qwen, tokens)
    gate = qwen.model.layers[1].mlp.gate
    gate.forward = torch.compile(gate.forward, backend="eager")
    assert record(qwen, tokens)[0] == trace
    with pytest.raises(RoutingError, match="layers.1.mlp.gate is compiled"), replay_routing(qwen, trace):
        pass


def test_a_compiled_block_prefers_its_own_choice(moved, tokens):
    model, trace, _ = moved
    with torch.no_grad(), replay_routing(model, trace) as replay:
        model(tokens)
    model.model.layers[1].mlp.compile(backend="eager")
    with torch.no_grad(), replay_routing(model, trace) as compiled:
        model(tokens)
    assert compiled.preferred == replay.preferred != trace
