"""RSPO and the router terms against NumPy written from their equations, and against other frameworks' numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import objective_of
from moe_rl.objectives.losses import LOSSES
from moe_rl.objectives.router import (
    load_balance,
    router_kl,
    router_shift,
    rspo,
    z_loss,
)
from moe_rl.registry import Component, needs_of
from moe_rl.routing.inputs import RouterInputs
from tests.objectives import peers
from tests.objectives.examples import case, inputs

K = 2
RELATIVE = dict(rtol=1e-12, atol=1e-12)
BASES = {
    "grpo": dict(clip_low=0.2, clip_high=0.28),
    "gspo": dict(clip_low=0.02, clip_high=0.03),
    "gmpo": dict(clip_low=0.1, clip_high=0.15),
}


def routers_of(new, old, real, *, moe_layers=None, weights=None, preferred=None, **further) -> RouterInputs:
    """Of arrays [batch, time, MoE layer, expert], routers of top-K over softmax; `new` may carry a gradient."""
    new, old = (torch.as_tensor(x)[:, :, : moe_layers or None] for x in (new, old))
    ids = new.detach().topk(K).indices
    real = torch.as_tensor(real)
    return RouterInputs(
        logits=new.unbind(2),
        used=ids,
        preferred=ids if preferred is None else preferred,
        old_log_probs=old.log_softmax(-1).unbind(2),
        old_used=old.topk(K).indices,
        weights=real.double() / real.sum() if weights is None else weights,
        **further,
    )


def example(seed=0, moe_layers=3, experts=5):
    """`examples.case` with logits of routers; every token after the first is real, in the last row but three."""
    new, old, advantages, mask = case(seed)
    rng = np.random.default_rng(seed + 100)
    before = rng.normal(size=(*mask.shape, moe_layers, experts))
    after = before + 0.2 * rng.normal(size=before.shape)
    real = np.ones(mask.shape, dtype=bool)
    real[:, 0] = real[2, 4:] = False
    assert not (mask & ~real).any()
    return new, old, advantages, mask, after, before, real


def log_softmax(z):
    return z - z.max(-1, keepdims=True) - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))


def top(z):
    return np.argsort(-z, axis=-1, kind="stable")[..., :K]


def gamma_by_hand(after, before, floor):
    """Equations 5 to 9 and 11, token by token."""
    batch, time, moe_layers, _ = after.shape
    gamma = np.ones((batch, time))
    for i in range(batch):
        for t in range(time):
            total = 0.0
            for s in range(moe_layers):
                new, old = log_softmax(after[i, t, s]), log_softmax(before[i, t, s])
                total += sum(abs(new[e] - old[e]) for e in top(before[i, t, s])) / K
            gamma[i, t] = max(floor, math.exp(-total / moe_layers))
    return gamma


# ---------------------------------------------------------------------- RSPO
@pytest.mark.parametrize("floor", [0.0, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("base", BASES)
def test_rspo_is_the_base_on_a_ratio_times_gamma(base, floor):
    new, old, advantages, mask, after, before, real = example()
    logprobs = torch.tensor(new, requires_grad=True)
    logits = torch.tensor(after, requires_grad=True)
    x = inputs(logprobs, old, advantages, mask)
    out = rspo(replace(x, router=routers_of(logits, before, real)), base=base, floor=floor, options=BASES[base])
    out.loss.backward()
    again = torch.tensor(new, requires_grad=True)
    shifted = old - np.log(gamma_by_hand(after, before, floor))
    expected = LOSSES[base](inputs(again, shifted, advantages, mask), **BASES[base])
    expected.loss.backward()
    np.testing.assert_allclose(out.loss.item(), expected.loss.item(), **RELATIVE)
    np.testing.assert_allclose(logprobs.grad, again.grad, **RELATIVE)
    assert torch.equal(out.clipped_by, expected.clipped_by)
    assert logits.grad is None, "γ has no gradient"
    shift = -np.log(gamma_by_hand(after, before, 0.0))
    assert out.metrics["own_router_shift"] == pytest.approx((shift * real).sum() / real.sum(), rel=1e-12)


@pytest.mark.parametrize("base", BASES)
def test_rspo_without_a_shift_is_its_base(base):
    """A floor of 1, or routers that stood still; a shift that makes γ < 1 is not."""
    new, old, advantages, mask, after, before, real = example()
    found = []
    for router, floor in ((None, None), ((after, before), 1.0), ((before, before), 0.8), ((after, before), 0.8)):
        logprobs = torch.tensor(new, requires_grad=True)
        x = inputs(logprobs, old, advantages, mask)
        if router is None:
            out = LOSSES[base](x, **BASES[base])
        else:
            out = rspo(replace(x, router=routers_of(*router, real)), base=base, floor=floor, options=BASES[base])
        found.append((out.loss.item(), *torch.autograd.grad(out.loss, logprobs), out.clipped_by, out.log_ratio))
    for other in found[1:3]:
        assert found[0][0] == other[0]
        assert all(torch.equal(a, b) for a, b in zip(found[0][1:], other[1:], strict=True))
    assert not torch.equal(found[0][3], found[3][3])


@pytest.mark.parametrize("name", peers.ROUTED)
def test_gamma_is_that_of_a_fork_of_verl(name):
    data = peers.case(name)
    mask = data["mask"]
    router = routers_of(data["router_new"], data["router_old"], mask)
    gamma = (-router_shift(router)).exp().clamp(min=0.8)
    theirs = peers.output(name, "rspo_fork_a/gamma")
    np.testing.assert_allclose(gamma[mask], theirs[mask], **RELATIVE)
    # Another fork: all experts, and the mean over them and over layers after the exponential, not before.
    new, old = (log_softmax(data[k]) for k in ("router_new", "router_old"))
    product = np.exp(-abs(new - old)).mean(-1).prod(-1)
    np.testing.assert_allclose(peers.output(name, "rspo_fork_b/gamma.product")[mask], product[mask], **RELATIVE)
    assert abs(product - gamma.numpy())[mask].max() > 0.01


def test_an_arm_with_router_parts_says_what_it_needs():
    arm = Arm(
        name="a",
        loss=Component("rspo", base="gspo", options={"clip_low": 0.01}),
        terms=(Component("z_loss", coef=1e-3), Component("router_kl", coef=0.1)),
    )
    assert objective_of(arm).needs == {"router"}
    assert needs_of(load_balance) == {"router", "load"}
    for part in (rspo, partial(z_loss, coef=1.0), partial(router_kl, coef=1.0)):
        with pytest.raises(ConfigError, match="needs RouterInputs"):
            part(inputs(*case()), **({"base": "grpo"} if part is rspo else {}))


# ---------------------------------------------------------------------- terms
def terms_by_hand(new, old, advantages, mask, after, before, real):
    """Values and gradients with respect to the logits, written out. f is detached; d p_e / d z_j = p_e (δ_ej − p_j)."""
    p, q = np.exp(log_softmax(after)), np.exp(log_softmax(before))
    moe_layers, experts = after.shape[2:]
    rows = mask.any(1).sum()
    w = mask / np.maximum(mask.sum(1, keepdims=True), 1) / rows
    d = np.log(q) - np.log(p)
    kl = (w[..., None, None] * (np.exp(d) - 1 - d)).sum() / moe_layers / experts
    g = 1 - q / p  # per log-prob
    kl_gradient = w[..., None, None] * (g - p * g.sum(-1, keepdims=True)) / moe_layers / experts
    lse = np.log(np.exp(after).sum(-1))
    z = (real[..., None] * lse**2).sum() / real.sum()
    z_gradient = real[..., None, None] * 2 * lse[..., None] * p / real.sum()
    balance, balance_gradient = 0.0, np.zeros(after.shape)
    for s in range(moe_layers):
        f, mean = np.zeros(experts), np.zeros(experts)
        for i, t in np.argwhere(real):
            f[top(after[i, t, s])] += 1 / K / real.sum()
            mean += p[i, t, s] / real.sum()
        balance += experts * (f * mean).sum()
        for i, t in np.argwhere(real):
            here = p[i, t, s]
            balance_gradient[i, t, s] = experts * here * (f - (f * here).sum()) / real.sum()
    return {
        router_kl: (kl, kl_gradient),
        z_loss: (z, z_gradient),
        load_balance: (balance, balance_gradient),
    }


TERMS = [router_kl, z_loss, load_balance]


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_its_equation_and_so_is_its_gradient(term):
    data = example()
    new, old, advantages, mask, after, before, real = data
    logits = torch.tensor(after, requires_grad=True)
    router = routers_of(logits, before, real)
    value = term(replace(inputs(new, old, advantages, mask), router=router), coef=0.3)
    value.backward()
    expected, gradient = terms_by_hand(*data)[term]
    np.testing.assert_allclose(value.item(), 0.3 * expected, **RELATIVE)
    np.testing.assert_allclose(logits.grad, 0.3 * gradient, **RELATIVE)


@pytest.mark.parametrize("term", TERMS)
def test_what_routed_no_token_reaches_no_term(term):
    """Padding may hold anything; equal routers are 0 for the terms that compare."""
    new, old, advantages, mask, after, before, real = example()
    found = []
    for garbage in (0.0, np.nan, np.inf):
        dirty = [np.where(real[..., None, None], z, garbage) for z in (after, before)]
        ids = routers_of(after, before, real).used
        router = replace(routers_of(*dirty, real), used=ids, preferred=ids)
        found.append(term(replace(inputs(new, old, advantages, mask), router=router), coef=1.0).item())
    assert found[0] == found[1] == found[2] != 0
    same = replace(inputs(new, old, advantages, mask), router=routers_of(before, before, real))
    assert (term(same, coef=1.0).item() == 0) == (term is router_kl)


@pytest.mark.parametrize("name", peers.ROUTED)
@pytest.mark.parametrize(("term", "key"), [(load_balance, "megatron/aux_loss"), (z_loss, "megatron/z_loss")])
def test_terms_are_those_of_megatron(term, key, name):
    """One layer, response tokens for real ones, padding full of garbage."""
    data = peers.case(name)
    logits = torch.tensor(data["router_new"], requires_grad=True)
    router = routers_of(logits, data["router_old"], data["mask"], moe_layers=1)
    value = term(replace(peers.loss_inputs(name), router=router), coef=1.0)
    value.backward()
    loss, gradient = peers.expected(name, key)
    np.testing.assert_allclose(value.item(), loss, **RELATIVE)
    np.testing.assert_allclose(logits.grad[:, :, 0].flatten(0, 1), gradient, **RELATIVE)


def test_moe_layers_of_unequal_size_add_up_and_an_even_load_is_1_each():
    """Two MoE layers with 4 and 3 experts, top-2 and top-1; the second slot of the latter is none."""
    zeros = [torch.zeros(1, 12, n, dtype=torch.float64) for n in (4, 3)]
    ids = torch.stack(
        [torch.tensor([[t % 4, (t + 1) % 4] for t in range(12)]), torch.tensor([[t % 3, -1] for t in range(12)])], 1
    )[None]
    router = RouterInputs(
        logits=tuple(zeros),
        used=ids,
        preferred=ids,
        old_used=ids,
        old_log_probs=tuple(z.log_softmax(-1) for z in zeros),
        weights=torch.full((1, 12), 1 / 12, dtype=torch.float64),
    )
    x = inputs(np.zeros((1, 12)), np.zeros((1, 12)), np.array([1.0]), np.ones((1, 12), dtype=bool))
    assert load_balance(replace(x, router=router), coef=0.5).item() == pytest.approx(0.5 * 2, rel=1e-12)
    assert z_loss(replace(x, router=router), coef=1.0).item() == pytest.approx(math.log(4) ** 2 + math.log(3) ** 2)


def test_under_replay_the_load_is_that_of_the_live_choices_unless_said_otherwise():
    new, old, advantages, mask, after, before, real = example()
    used = torch.zeros(*after.shape[:3], K, dtype=torch.long)
    used[..., 1] = 1
    router = replace(routers_of(after, before, real), used=used)
    x = replace(inputs(new, old, advantages, mask), router=router)
    found = {routes: load_balance(x, coef=1.0, routes=routes).item() for routes in ("live", "replayed")}
    p = np.exp(log_softmax(after))[real].mean(0)
    assert found["replayed"] == pytest.approx((5 * p[:, :2].mean(-1)).sum(), rel=1e-12)
    assert found["live"] == load_balance(replace(x, router=replace(router, used=router.preferred)), coef=1.0).item()
