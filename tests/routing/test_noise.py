"""Router noise: what it moves, what it leaves alone, and that nothing of it stays."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from moe_rl.errors import RoutingError
from moe_rl.policies.hf import last_step
from moe_rl.routing import record_routing, replay_routing
from moe_rl.routing.intercept import hooked
from moe_rl.routing.moe_layers import find_moe_layers, router_matrices
from moe_rl.routing.router_noise import Noise, directions, disturbed, shifted, steps
from tests.conftest import FAMILIES, build
from tests.policies.test_hf import GRPO, make_batch, part_of, policy_of
from tests.routing.families import FAMILIES as ALL
from tests.routing.families import build as tiny


def forward(model, tokens):
    with torch.no_grad(), record_routing(model) as recording:
        logits = model(tokens).logits
    return logits, recording.trace(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_weights_is_a_model_whose_routers_are_moved(family, tokens):
    model, twin = build(family), build(family)
    with torch.no_grad():
        for index, moe_layer in enumerate(find_moe_layers(twin)):
            matrices = router_matrices(moe_layer)
            assert matrices and all(m.shape[0] == moe_layer.moe_layer.num_experts for m in matrices)
            for matrix, u in zip(matrices, directions(matrices, 7, index), strict=True):
                matrix += 0.5 * matrix.std() * u
    with disturbed(model, Noise("weights", 0.5, 7)):
        logits, routes = forward(model, tokens)
    expected, expected_routes = forward(twin, tokens)
    assert torch.equal(logits, expected) and routes == expected_routes
    assert routes != forward(model, tokens)[1]


@pytest.mark.parametrize("family", [*FAMILIES, "dbrx"])
def test_the_form_choice_takes_each_moe_layers_ids_from_its_moved_router_and_all_else_from_its_own(family, tokens):
    """MoE layer by MoE layer, by hand: the router runs on the hidden states that it got in the forward, with moved
    weights; and the whole is what replaying the ids it picked there gives, bit for bit."""
    model = build(family) if family in FAMILIES else tiny(next(f for f in ALL if f.model_type == family))
    noise, seen = Noise("choice", 0.5, 7), {}
    handles = [
        moe_layer.reader.register_forward_pre_hook(lambda m, a, k: seen.update({m: (a, k)}), with_kwargs=True)
        for moe_layer in find_moe_layers(model)
    ]
    with disturbed(model, noise):
        logits, routes = forward(model, tokens)
    for handle in handles:
        handle.remove()
    with torch.no_grad(), replay_routing(model, routes):
        assert torch.equal(logits, model(tokens).logits)
    assert routes != forward(model, tokens)[1]
    for index, moe_layer in enumerate(find_moe_layers(model)):
        arguments, settings = seen[moe_layer.reader]
        with torch.no_grad(), shifted(router_matrices(moe_layer), noise, index), record_one(moe_layer) as ids:
            moe_layer.reader(*arguments, **settings)
        used = routes.ids()[:, :, index, : moe_layer.moe_layer.top_k].flatten(0, 1)
        assert torch.equal(ids[0].sort(-1).values, used.sort(-1).values)


@contextmanager
def record_one(moe_layer):
    """The ids that one MoE layer picks in a call of its own."""
    ids = []
    with hooked((moe_layer,), "listeners", lambda number, used, *_: ids.append(used)):
        yield ids


def test_under_a_choice_gradient_reaches_the_routers_own_weights_through_the_gates(tokens):
    model = build("qwen3_moe")
    with disturbed(model, Noise("choice", 0.5, 7)), record_routing(model) as recording:
        model(tokens).logits.square().sum().backward()
    routes, mine = recording.trace(tokens), [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with replay_routing(model, routes):
        model(tokens).logits.square().sum().backward()
    for parameter, gradient in zip(model.parameters(), mine, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-5)
    assert all(m.grad.any() for moe_layer in find_moe_layers(model) for m in router_matrices(moe_layer))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_beside_moves_every_matrix_of_the_layers_but_the_routers(family, tokens):
    model, twin = build(family), build(family)
    routers = {id(m) for moe_layer in find_moe_layers(twin) for m in router_matrices(moe_layer)}
    beside = [
        p
        for name, p in twin.named_parameters()
        if ".layers." in name and p.dim() > 1 and id(p) not in routers and not name.endswith("bias")
    ]
    with torch.no_grad():
        for matrix, u in zip(beside, directions(beside, 7, 0), strict=True):
            matrix += 0.1 * matrix.std() * u
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with disturbed(model, Noise("other_weights", 0.1, 7)):
        logits, routes = forward(model, tokens)
        moved_names = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    expected, expected_routes = forward(twin, tokens)
    assert torch.equal(logits, expected) and routes == expected_routes
    assert len(moved_names) == len(beside) and not any("embed" in name or "lm_head" in name for name in moved_names)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("name, lr", [("adamw", 1e-2), ("sgd", 10.0)])  # steps far above the rounding of weights
def test_the_last_step_is_where_the_optimizer_went_and_outlives_a_checkpoint(name, lr, tmp_path):
    settings = {"name": name, "lr": lr, "grad_clip": 0.0}
    policy, batch = policy_of(build("qwen3_moe"), optimizer=settings), make_batch()
    for _ in range(3):
        before = [m.detach().clone() for moe_layer in find_moe_layers(policy.model) for m in router_matrices(moe_layer)]
        policy.update(part_of(batch, policy.score(batch)), GRPO)
    policy.save(tmp_path)
    again = policy_of(build("qwen3_moe"), optimizer=settings)
    again.load(tmp_path)
    for owner in (policy, again):
        after = [m for moe_layer in find_moe_layers(owner.model) for m in router_matrices(moe_layer)]
        along = steps(after, partial(last_step, owner.trained, owner.optimizer))
        for new, old, u in zip(after, before, along, strict=True):
            step = (new - old).detach()
            torch.testing.assert_close(u, step / step.square().mean().sqrt(), rtol=1e-3, atol=1e-3)
    noise = Noise("weights", 1.0, 0, "last_step")
    one, other = (owner.score(batch, noise=noise).logprobs for owner in (policy, again))
    assert torch.equal(one, other) and not torch.equal(one, policy.score(batch).logprobs)


def test_before_its_first_step_an_optimizer_has_no_direction():
    policy = policy_of(build("qwen3_moe"))
    with pytest.raises(RoutingError, match="has not changed these weights"):
        policy.score(make_batch(), noise=Noise("weights", 1.0, 0, "last_step"))


@pytest.mark.parametrize("activation_checkpointing", [False, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("form", ["weights", "choice"])
def test_activation_checkpointing_recomputes_under_the_same_dose(form, activation_checkpointing):
    found = []
    for checkpointing in (False, activation_checkpointing):
        policy = policy_of(build("qwen3_moe"), activation_checkpointing=checkpointing)
        batch = make_batch()
        old = policy.score(batch)
        updated = policy.update(part_of(batch, old), GRPO, noise=Noise(form, 1.0, 3))
        found.append((updated, policy.score(batch)))
    (updated, after), (again, after_again) = found
    assert torch.equal(updated.logprobs, again.logprobs) and updated.routes == again.routes
    torch.testing.assert_close(after.logprobs, after_again.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["weights", "choice"])
def test_weights_are_exactly_as_before_after_a_backward_and_after_an_exception(form, tokens):
    model = build("deepseek_v3")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with disturbed(model, Noise(form, 2.0, 1)):
        model(tokens).logits.sum().backward()
    with pytest.raises(ZeroDivisionError), disturbed(model, Noise(form, 2.0, 1)):
        model(tokens)
        raise ZeroDivisionError
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert not any("forward" in vars(moe_layer.module) for moe_layer in find_moe_layers(model))


def test_the_step_moves_the_weights_of_before_the_dose():
    """A gradient clipped to nothing leaves them where they were, dose or not."""
    policy, batch = policy_of(build("qwen3_moe"), optimizer={"grad_clip": 1e-30, "name": "sgd"}), make_batch()
    before = {name: weight.clone() for name, weight in policy.weights()}
    policy.update(part_of(batch, policy.score(batch)), GRPO, noise=Noise("weights", 2.0, 1))
    assert all(torch.equal(weight, before[name]) for name, weight in policy.weights())


def test_a_direction_has_the_spread_of_its_weights_and_is_the_seeds_own(tokens):
    matrices = [torch.zeros(64, 200), torch.zeros(8, 3)]
    first, second = directions(matrices, 5, 0), directions(matrices, 5, 1)
    assert first[0].std().item() == pytest.approx(1, abs=0.02) and first[0].mean().item() == pytest.approx(0, abs=0.03)
    assert all(torch.equal(a, b) for a, b in zip(first, directions(matrices, 5, 0), strict=True))
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[0], directions(matrices, 6, 0)[0])


def test_tokens_that_route_freely_under_replay_take_the_choice_of_the_moved_router(tokens):
    """Every other token is replayed: the others' first MoE layer picks what a moved router picks without any replay."""
    model, noise = build("qwen3_moe"), Noise("choice", 1.0, 7)
    _, unconstrained = forward(model, tokens)
    with disturbed(model, noise):
        _, everywhere = forward(model, tokens)
    every_other = torch.arange(tokens.shape[1]) % 2 == 0
    half = unconstrained.only(every_other[None, :, None].expand(unconstrained.shape[:3]))
    with torch.no_grad(), disturbed(model, noise), replay_routing(model, half), record_routing(model) as recording:
        model(tokens)
    used, replayed, moved_ids = (trace.ids()[:, :, 0] for trace in (recording.trace(tokens), unconstrained, everywhere))
    assert torch.equal(used[:, every_other], replayed[:, every_other])
    assert torch.equal(used[:, ~every_other], moved_ids[:, ~every_other])
    assert not torch.equal(used[:, ~every_other], replayed[:, ~every_other])
