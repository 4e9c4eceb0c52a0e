"""The Hugging Face policy against the model itself: what it scores, what an update does, what it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_rl.config import Arm, Optimizer
from moe_rl.errors import ConfigError, Diverged
from moe_rl.models.load import keep_routers_in
from moe_rl.objectives import objective_of
from moe_rl.objectives.weights import seq_mean_token_mean
from moe_rl.policies.hf import HFPolicy, balance
from moe_rl.policies.optimizer import TrainedWeights, take_step
from moe_rl.rollouts.batches import collate
from moe_rl.routing import Layout, MoeLayer, RoutingTrace, record_routing, replay_routing
from moe_rl.routing.intercept import hooked
from moe_rl.routing.moe_layers import find_moe_layers, router_parameters
from moe_rl.routing.sources import random_sets
from moe_rl.types import Batch, Prompt, Rollout
from tests.conftest import FAMILIES, build, perturb
from tests.objectives import peers


def make_batch(prompts=4, group=3, seed=0):
    """Prompts and responses of unequal length, without an engine: random tokens and advantages; no old policy."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        n = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(3, 48, (n,), generator=generator).tolist())

    rollouts = []
    for _ in range(prompts):
        prompt = Prompt("", tokens=draw(2, 6))
        for _ in range(group):
            tokens = draw(1, 8)
            rollouts.append(Rollout(prompt, tokens, torch.zeros(len(tokens)), "", True))
    index = [p for p in range(prompts) for _ in range(group)]
    sampled = collate(rollouts, index, [0.0] * len(rollouts), 0)
    advantages = torch.randn(len(rollouts), generator=generator)[:, None].where(sampled.response_mask, 0)
    return Batch(**vars(sampled), old_logprobs=torch.zeros_like(advantages), advantages=advantages)


@pytest.fixture
def batch():
    return make_batch()


def policy_of(model, **settings):
    optimizer = Optimizer(**{"lr": 1e-3, **settings.pop("optimizer", {})})
    return HFPolicy(model, optimizer, **settings)


GRPO = objective_of(Arm(name="grpo"))


def part_of(batch, old, routes=None):
    """The batch as a mini-batch that can be trained on, with old log-probs, weights, and routes where it replays."""
    return GRPO.attach_weights(replace(batch, old_logprobs=old.logprobs, routes=routes))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_models_own_log_probabilities(family, temperature, batch):
    model = build(family)
    scored = policy_of(model, temperature=temperature, score_batch=5).score(batch)
    for b in range(len(batch)):
        n = int(batch.attention_mask[b].sum())
        with torch.no_grad(), record_routing(model) as recording:
            logits = model(batch.tokens[b : b + 1, :n]).logits[0]
        log_p = (logits / temperature).log_softmax(-1)
        expected = torch.zeros(batch.tokens.shape[1])
        expected[1:n] = log_p[:-1].gather(1, batch.tokens[b, 1:n, None])[:, 0]
        expected[~batch.response_mask[b]] = 0
        torch.testing.assert_close(scored.logprobs[b], expected, atol=2e-6, rtol=1e-5)
        entropy = torch.distributions.Categorical(log_p.exp()).entropy()
        where = batch.response_mask[b].nonzero()[:, 0]
        torch.testing.assert_close(scored.entropy[b, where], entropy[where - 1], atol=2e-6, rtol=1e-5)
        routes = recording.trace(batch.tokens[b : b + 1, :n])
        assert torch.equal(scored.routes.experts[b, : n - 1], routes.experts[0, : n - 1])
        assert not scored.routes.known[b, n - 1 :].any(), "the last token and padding route nothing that counts"


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_a_frozen_router_does_not_move_and_the_rest_does(weight_decay, batch):
    model = build("qwen3_moe")
    routers = {id(p) for p in router_parameters(model)}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    policy = policy_of(model, optimizer={"router_lr_scale": 0.0, "weight_decay": weight_decay})
    for _ in range(2):
        policy.update(part_of(batch, policy.score(batch)), GRPO)
    moved = {n: not torch.equal(p, before[n]) for n, p in model.named_parameters()}
    assert [n for n, p in model.named_parameters() if id(p) in routers] == [n for n in moved if "gate.weight" in n]
    assert not any(moved[n] for n in moved if "gate.weight" in n)
    assert any(moved[n] for n in moved if "experts" in n)


def test_the_reported_gradient_norm_is_taken_before_clipping(batch):
    norms = []
    for clip in (0.0, 1e-4):
        policy = policy_of(build("qwen3_moe"), optimizer={"grad_clip": clip})
        norms.append(policy.update(part_of(batch, policy.score(batch)), GRPO))
    assert norms[0].grad_norm == norms[1].grad_norm > 1e-4
    assert not norms[0].grad_clipped and norms[1].grad_clipped


def test_a_gradient_that_is_not_finite_stops_before_the_step(batch):
    policy = policy_of(build("qwen3_moe"))
    old = policy.score(batch)
    broken = replace(batch, advantages=batch.advantages / 0)
    before = {n: w.clone() for n, w in policy.weights()}
    row, token = broken.response_mask.nonzero()[0].tolist()
    with pytest.raises(Diverged, match=f"norm is .* Row {row}, token {token} "):
        policy.update(part_of(broken, old), GRPO)
    assert all(torch.equal(w, before[n]) for n, w in policy.weights())


# ---------------------------------------------------------------------- optimizers
def moved(batch, **optimizer):
    """How far one update moves every weight, and the policy."""
    policy = policy_of(build("qwen3_moe"), optimizer=optimizer)
    before = {n: w.clone() for n, w in policy.weights()}
    policy.update(part_of(batch, policy.score(batch)), GRPO)
    return {n: w - before[n] for n, w in policy.weights()}, policy


def test_warm_up_divides_the_learning_rate_of_the_first_updates(batch, tmp_path):
    full, _ = moved(batch, eps=1e-3)
    quarter, policy = moved(batch, eps=1e-3, warmup=4)
    for name, step in full.items():
        torch.testing.assert_close(4 * quarter[name], step, atol=1e-6, rtol=1e-3, msg=name)
    policy.save(tmp_path)
    again = policy_of(build("qwen3_moe"), optimizer={"eps": 1e-3, "warmup": 4})
    again.load(tmp_path)
    for p in (policy, again):
        p.update(part_of(batch, p.score(batch)), GRPO)
        assert [group["lr"] for group in p.optimizer.param_groups] == [0.5e-3] * len(p.optimizer.param_groups)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(policy.weights(), again.weights(), strict=True))


def test_norms_and_biases_do_not_decay_and_all_else_does():
    """Without a gradient, AdamW multiplies a weight by 1 − lr · weight_decay."""
    policy = policy_of(build("gpt_oss"), optimizer={"lr": 0.1, "weight_decay": 0.5})
    before = {n: w.clone() for n, w in policy.weights()}
    for p in policy.model.parameters():
        p.grad = torch.zeros_like(p)
    take_step(policy.trained, policy.optimizer, policy.settings, 1)
    for name, weight in policy.weights():
        share = 1.0 if weight.ndim < 2 or name.endswith("bias") else 0.95
        torch.testing.assert_close(weight, share * before[name], msg=name)
    assert any(name.endswith("experts.down_proj_bias") for name in before), "a bias of two axes"


def test_a_gradient_is_the_one_that_update_hands_to_its_optimizer(batch):
    """SGD moves the weights by minus the learning rate times v = 0.9 v + gradient; with and without replay."""
    policy = policy_of(build("qwen3_moe"), optimizer={"name": "sgd", "lr": 0.5, "betas": (0.9, 0.0), "grad_clip": 0.0})
    old = policy.score(batch)
    perturb(policy.model)
    velocity = 0
    for routes in (None, old.routes):
        gradient = policy.gradient(part_of(batch, old, routes), GRPO)
        before = torch.nn.utils.parameters_to_vector(policy.model.parameters()).detach()
        updated = policy.update(part_of(batch, old, routes), GRPO)
        after = torch.nn.utils.parameters_to_vector(policy.model.parameters()).detach()
        velocity = 0.9 * velocity + gradient
        torch.testing.assert_close((before - after) / 0.5, velocity, rtol=1e-4, atol=1e-6)
        assert gradient.abs().max() > 1e-3
        assert gradient.norm().item() == pytest.approx(updated.grad_norm, rel=1e-4)


# ---------------------------------------------------------------------- routers apart from the loss
def biases_of(policy):
    return {n: b.clone() for n, b in policy.weights() if n.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_bias_goes_against_the_load_of_the_live_choices(family, replayed, batch):
    """u · sign(mean − count) over the mini-batch's real tokens, however it is cut, and whatever is replayed."""
    u, found = 1e-2, []
    for micro_batch in (64, 5):
        policy = policy_of(build(family), micro_batch=micro_batch, optimizer={"loss_free_bias": u})
        old = policy.score(batch)
        perturb(policy.model, 0.3)
        forced = random_sets(batch, old) if replayed else None
        before = biases_of(policy)
        updated = policy.update(part_of(batch, old, forced), GRPO)
        live = updated.preferred if replayed else updated.routes
        for s, (name, bias) in enumerate(before.items()):
            chosen = live.ids()[:, :-1, s][batch.attention_mask[:, 1:]]
            count = torch.bincount(chosen.flatten(), minlength=8).double()
            expected = bias + u * (count.mean() - count).sign().float()
            assert torch.equal(biases_of(policy)[name], expected) and not torch.equal(bias, expected)
        found.append(biases_of(policy))
    assert len(before) == 2 and all(torch.equal(found[0][n], found[1][n]) for n in before)


def test_a_bias_is_saved_resumed_and_given_to_engines(tmp_path, batch):
    policy = policy_of(build("deepseek_v3"), optimizer={"loss_free_bias": 1e-2})
    policy.update(part_of(batch, policy.score(batch)), GRPO)
    policy.save(tmp_path)
    other = policy_of(build("deepseek_v3", seed=3), optimizer={"loss_free_bias": 1e-2})
    other.load(tmp_path)
    for p in (policy, other):
        p.update(part_of(batch, p.score(batch)), GRPO)
    first, second = biases_of(policy), biases_of(other)
    assert len(first) == 2 and all(torch.equal(first[n], second[n]) for n in first)
    given = dict(policy.weights())
    assert all(torch.equal(given[n], b) for n, b in first.items()), "what an engine is pushed"


def test_the_step_of_a_bias_is_megatrons():
    data = peers.case("main-wide-0")
    ids = torch.tensor(data["router_new"][:, :, :1]).topk(2).indices
    layout = Layout((MoeLayer("gate", 0, 8, 2),), "tiny")
    live = RoutingTrace.from_ids(ids, layout).only(torch.tensor(data["mask"])[..., None])
    bias = torch.zeros(8, dtype=torch.float64)
    balance([bias], live, 1e-3)
    assert bias.tolist() == peers.output("main-wide-0", "megatron/expert_bias").tolist()


def test_a_bias_that_is_not_there_or_rounds_its_steps_away_is_refused():
    with pytest.raises(ConfigError, match="Qwen3MoeTopKRouter"):
        policy_of(build("qwen3_moe"), optimizer={"loss_free_bias": 1e-3})
    model = build("deepseek_v3").to(torch.bfloat16)
    with pytest.raises(ConfigError, match="bfloat16.*router_dtype='float32'"):
        policy_of(model, optimizer={"loss_free_bias": 1e-3})
    keep_routers_in(model, torch.float32)
    assert len(policy_of(model, optimizer={"loss_free_bias": 1e-3}).biases) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_in_float32_compute_and_learn_in_it(family, batch):
    """The rest stays in bfloat16. Logits are those of float32 weights on the hidden states that the router read."""
    model, read, made = build(family).to(torch.bfloat16), [], []
    exact = {s.moe_layer.name: s.module.weight.detach().float() for s in find_moe_layers(model)}
    keep_routers_in(model, torch.float32)
    moe_layer = find_moe_layers(model)[0]
    policy = policy_of(model, optimizer={"lr": 1e-5})
    moe_layer.module.register_forward_pre_hook(lambda module, given: read.append(given[0]))
    with hooked((moe_layer,), "listeners", lambda index, used, choice, output: made.append(output)):
        old = policy.score(batch)
    assert read[0].dtype == made[0][0].dtype == made[0][1].dtype == torch.float32
    bias = getattr(moe_layer.module, "bias", None)
    expected = torch.nn.functional.linear(read[0].flatten(0, -2), exact[moe_layer.moe_layer.name], bias)
    assert torch.equal(made[0][0], expected)
    dtypes = {n: w.dtype for n, w in policy.weights()}
    inside = [n for n in dtypes if n.startswith(tuple(f"{s.moe_layer.name}." for s in find_moe_layers(model)))]
    assert inside and all((dtype == torch.float32) == (n in inside) for n, dtype in dtypes.items())
    before = dict(policy.weights())[f"{moe_layer.moe_layer.name}.weight"].clone()
    policy.update(part_of(batch, old), GRPO)
    step = dict(policy.weights())[f"{moe_layer.moe_layer.name}.weight"] - before
    assert 0 < step.abs().max() < 2e-5, "in bfloat16 such a step would be rounded away"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_and_the_clip_factor_are_exact_where_gradients_are_rounded(dtype):
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(300, 50).to(dtype)
    given = [torch.randn(p.shape, generator=generator).to(dtype) for p in layer.parameters()]
    for p, gradient in zip(layer.parameters(), given, strict=True):
        p.data.zero_()
        p.grad = gradient.clone()
    exact = torch.cat([g.double().flatten() for g in given]).norm().item()
    optimizer = torch.optim.SGD([{"params": layer.parameters(), "scale": 1.0}])
    norm, _ = take_step(TrainedWeights(layer, masters=False), optimizer, Optimizer(lr=1.0, grad_clip=1.0), 1)
    assert norm == pytest.approx(exact, rel=1e-5)
    if dtype == torch.float32:
        assert norm == torch.nn.utils.get_total_norm(given).item(), "the same bits as before"
    for p, g in zip(layer.parameters(), given, strict=True):
        assert torch.equal(-p.data, (g.float() / torch.tensor(norm + 1e-6)).to(dtype)) or dtype == torch.float32


def test_scoring_obeys_the_rows_of_a_forward_with_gradient(batch, monkeypatch):
    seen = []
    policy = policy_of(build("qwen3_moe"), micro_batch=1)
    monkeypatch.setattr(policy, "_forward", lambda part, *a, f=policy._forward: seen.append(len(part)) or f(part, *a))
    policy.score(batch)
    assert max(seen) == min(4, len(batch)) and sum(seen) == len(batch)


@pytest.mark.parametrize("ratio, gradient", [(True, False), (False, True)])
def test_ratio_and_gradient_may_have_routes_of_their_own(ratio, gradient):
    """Against autograd: Σ weights · sg[r · A, where not clipped] · log π, r and log π under routes of their own."""
    batch = make_batch()
    policy = HFPolicy(build("qwen3_moe"), Optimizer(grad_clip=0.0))
    old = policy.score(batch)
    of_ratio, of_gradient = (old.routes if replayed else None for replayed in (ratio, gradient))
    perturb(policy.model, 0.5)
    objective = objective_of(Arm(name="grpo"))
    found = {}
    policy.optimizer.register_step_pre_hook(
        lambda *_: found.update({n: p.grad.clone() for n, p in policy.model.named_parameters()})
    )
    reference = build("qwen3_moe")
    reference.load_state_dict(policy.model.state_dict())
    log_r = policy.score(batch, of_ratio).logprobs - old.logprobs
    r, a = log_r.exp(), batch.advantages
    kept = batch.response_mask & ~((a > 0) & (r > 1.27)) & ~((a < 0) & (r < 0.8))
    assert 0 < kept.sum() < batch.response_mask.sum()
    weights = seq_mean_token_mean(batch.response_mask)
    forced = None if of_gradient is None else of_gradient.rows(slice(None), batch.tokens.shape[1] - 1)
    with replay_routing(reference, forced):
        log_p = reference(batch.tokens[:, :-1]).logits.log_softmax(-1)
        chosen = torch.nn.functional.pad(log_p.gather(-1, batch.tokens[:, 1:, None])[..., 0], (1, 0))
        (-(weights * kept * r * a * chosen).sum()).backward()
    part = replace(part_of(batch, old, of_gradient), ratio_logprobs=log_r + old.logprobs)
    policy.update(part, objective)
    for name, p in reference.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, atol=1e-6, rtol=1e-4, msg=name)
