"""Replay in part, softly, and with combine weights: what reaches the experts, and what the degenerate cases are."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.integrations.vllm.payloads import decode_routes
from moe_rl.objectives import objective_of
from moe_rl.registry import Component, lookup
from moe_rl.routing import RoutingTrace, record_routing, replay_routing
from moe_rl.routing.intercept import hooked
from moe_rl.routing.moe_layers import find_moe_layers, router_parameters
from moe_rl.routing.selection import kept
from moe_rl.routing.sources import SOURCES, by_layer, by_margin, old_policy, recall, soft
from tests.conftest import FAMILIES, build, perturb
from tests.policies.test_hf import make_batch, policy_of
from tests.routing import families
from tests.routing.test_trace import random_trace

GRPO = objective_of(Arm(name="grpo"))


def scored(family="qwen3_moe", **settings):
    """A policy that has moved since it scored the batch, and that scoring."""
    policy, batch = policy_of(build(family), **settings), make_batch()
    unconstrained = policy.score(batch, scores=True)
    perturb(policy.model, 0.3)
    return policy, batch, unconstrained


@pytest.fixture(scope="module")
def step():
    return scored()


# ---------------------------------------------------------------------- in part
def test_layers_are_chosen_by_number_end_or_share(step):
    _, batch, unconstrained = step
    routes, whole = unconstrained.routes, unconstrained.routes.known.any((0, 1))

    def moe_layers(**options):
        found = by_layer(batch, unconstrained, **options)
        if found is None:
            return []
        for s in range(3):  # an MoE layer is replayed as a whole or not at all
            assert torch.equal(found.known[:, :, s], routes.known[:, :, s] & found.known[:, :, s].any())
        return found.known.any((0, 1)).nonzero()[:, 0].tolist()

    assert whole.all() and len(whole) == 3
    assert moe_layers(first=2) == [0, 1] and moe_layers(last=1) == [2] and moe_layers(moe_layers=[0, 2]) == [0, 2]
    assert moe_layers(first=9) == moe_layers(last=9) == moe_layers(share=1.0) == [0, 1, 2]
    assert moe_layers(share=0.34) == [2] and moe_layers(share=0.67) == [1, 2]
    assert moe_layers(first=0) == moe_layers(last=0) == moe_layers(moe_layers=[]) == moe_layers(share=0.0) == []
    assert by_layer(batch, unconstrained, first=3) == routes


def test_a_share_of_layers_loses_none_to_rounding(step):
    """100 · 0.29 is 28.999… in binary."""
    _, batch, unconstrained = step
    wide = replace(unconstrained.routes.layout, moe_layers=unconstrained.routes.layout.moe_layers[:1] * 100)
    experts = unconstrained.routes.experts[:, :, :1].expand(-1, -1, 100, -1)
    routes = replace(unconstrained.routes, experts=experts, layout=wide)
    for hundredths in (29, 57, 58):
        found = by_layer(batch, replace(unconstrained, routes=routes), share=hundredths / 100)
        assert int(found.known.any((0, 1)).sum()) == hundredths


def test_pairs_are_chosen_by_margin(step):
    _, batch, unconstrained = step
    routes, scores = unconstrained.routes, unconstrained.scores
    bound = scores.margins[routes.known].median().item()
    found = by_margin(batch, unconstrained, below=bound)
    assert torch.equal(found.known, routes.known & (scores.margins < bound))
    assert torch.equal(found.experts[found.known], routes.experts[found.known])
    assert 0 < found.known.sum() < routes.known.sum()
    assert by_margin(batch, unconstrained, below=torch.inf) is routes
    assert by_margin(batch, unconstrained, below=0.0) is None


def test_a_part_may_be_of_the_engines_routes(step):
    _, batch, unconstrained = step
    engine = replace(unconstrained.routes, experts=unconstrained.routes.experts.flip(-1))
    sampled = replace(batch, rollout_routes=engine)
    assert by_layer(sampled, unconstrained, first=1, base="rollout") == engine.only(
        torch.tensor([[[True, False, False]]])
    )
    assert by_margin(sampled, unconstrained, below=torch.inf, base="rollout") is engine
    assert soft(sampled, unconstrained, ratio=0.5, base="rollout") == replace(engine, keep=0.5)
    with pytest.raises(RoutingError, match="rollout"):
        soft(batch, unconstrained, ratio=0.5, base="rollout")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (by_layer, {}, "exactly one"),
        (by_layer, {"first": 1, "last": 1}, "exactly one"),
        (by_layer, {"first": None}, "exactly one"),
        (by_layer, {"moe_layers": [3]}, "3 MoE layers"),
        (by_layer, {"share": 1.5}, "share=1.5"),
        (by_layer, {"first": 1, "base": "live"}, "base='live'"),
        (by_margin, {"below": -1.0}, "below=-1.0"),
        (by_margin, {"below": float("nan")}, "below"),
        (soft, {"ratio": float("inf")}, "ratio=inf"),
    ],
)
def test_an_option_out_of_range_is_refused(step, source, options, message):
    with pytest.raises(ConfigError, match=message):
        lookup("route source", Component(source.__name__, **options), SOURCES)(*step[1:])


# ---------------------------------------------------------------------- softly
def test_what_is_kept_by_hand():
    """Live top-2 of .4 .3 .2 .1 is {0, 1}, its weakest .3."""
    scores, own = torch.tensor([[0.4, 0.3, 0.2, 0.1]]), torch.tensor([[1, 0]])
    for ids, share, expected in (
        ([2, 3], 0.0, [2, 3]),
        ([2, 3], 0.5, [2, 0]),  # .2 >= .15 stays, .1 goes, and the best live one takes its place
        ([3, 2], 0.5, [0, 2]),
        ([2, 3], 2 / 3 - 1e-6, [2, 0]),
        ([2, 3], 1.0, [0, 1]),
        ([0, 3], 1.0, [0, 1]),  # 0 is there already: the next best
        ([3, 1], 1.0, [0, 1]),
        ([1, 0], 1.0, [1, 0]),
        ([1, 0], 5.0, [0, 1]),
    ):
        assert kept(torch.tensor([ids]), own, scores, share).tolist() == [expected], (ids, share)
    tied = torch.tensor([[0.5, 0.5, 0.25, 0.0]])
    assert kept(torch.tensor([[2, 0]]), own, tied, 0.5).tolist() == [[2, 0]], "on the bound it stays"


def by_hand(forced, choice, k, share):
    """Per token, the set that stays and fills up."""
    live = sorted(range(len(choice)), key=lambda e: -choice[e])[:k]
    stays = [e for e in forced if choice[e] >= share * choice[live[-1]]]
    return set(stays + [e for e in live if e not in stays][: k - len(stays)])


@pytest.mark.parametrize("share", [0.3, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_soft_replay_is_its_rule_in_every_family(family, share):
    """On the scores each router chooses by in that forward; softmax of logits where it chooses by these."""
    if family in ("deepseek_v3", "glm4_moe") and families.older_than("5.6"):
        pytest.skip("experts of closed groups may be chosen there")
    policy, batch, unconstrained = scored(family)
    seen = []
    moe_layers = find_moe_layers(policy.model)
    with hooked(moe_layers, "listeners", lambda moe_layer, used, choice, output: seen.append((used, choice))):
        under = policy.score(batch, soft(batch, unconstrained, ratio=share))
    changed, stayed = 0, 0
    for s, (used, choice) in enumerate(seen):
        bias = getattr(moe_layers[s].module, "e_score_correction_bias", torch.zeros(1))
        choice = choice.softmax(-1) if family == "gpt_oss" else choice - bias.min()
        real = batch.attention_mask[:, 1:].flatten()
        forced = unconstrained.routes.ids()[:, :-1, s].flatten(0, 1)
        for t in real.nonzero()[:, 0].tolist():
            expected = by_hand(forced[t].tolist(), choice[t].tolist(), used.shape[-1], share)
            assert set(used[t].tolist()) == expected, (s, t)
            live = set(choice[t].topk(used.shape[-1]).indices.tolist())
            changed += expected != set(forced[t].tolist())
            stayed += expected != live
    assert changed and stayed, "the rule must matter"
    assert not under.routes.same_sets(unconstrained.routes).all()


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "axk2", "longcat_flash"])
def test_a_constant_in_the_bias_does_not_change_what_soft_replay_keeps(family):
    """8, as DeepSeek-V3's own checkpoint has it: scores in [8, 9] would all be near each other."""
    used = []
    for constant in (0.0, 8.0, -0.01, -8.0):
        model = families.build(next(f for f in families.FAMILIES if f.model_type == family))
        with torch.no_grad(), record_routing(model) as recording:
            model(tokens := torch.arange(3, 35).view(2, 16))
        for moe_layer in find_moe_layers(model):
            bias = next(
                x
                for name, x in (*moe_layer.reader.named_buffers(), *moe_layer.reader.named_parameters())
                if name.endswith("e_score_correction_bias")
            )
            bias.data += constant
        forced = recording.trace(tokens).rows(torch.tensor([1, 0]))
        negative = pytest.raises(RoutingError, match=r"at most -[67]\.") if constant == -8 else nullcontext()
        with (
            torch.no_grad(),
            negative,
            record_routing(model) as recording,
            replay_routing(model, replace(forced, tokens=None, keep=0.5)),
        ):
            model(tokens)
            used.append(recording.trace(tokens))
    assert 0 < used[0].agreement(replace(forced, tokens=None)) < 1, "some stay, some go"
    assert used[0] == used[1] == used[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_of_soft_replay_are_replay_and_live_routing(family):
    policy, batch, unconstrained = scored(family)
    assert soft(batch, unconstrained, ratio=0.0) is unconstrained.routes
    hard = policy.score(batch, unconstrained.routes)
    least = policy.score(batch, soft(batch, unconstrained, ratio=1e-9))
    if family != "deepseek_v3" and family != "glm4_moe":  # there an expert of a closed group has no score at all
        assert torch.equal(least.logprobs, hard.logprobs) and least.routes == hard.routes
    live, most = policy.score(batch), policy.score(batch, soft(batch, unconstrained, ratio=1.0))
    assert live.routes.same_sets(most.routes)[live.routes.known].all()
    torch.testing.assert_close(most.logprobs, live.logprobs, atol=1e-5, rtol=1e-5)
    assert not live.routes.same_sets(hard.routes)[live.routes.known].all()


@pytest.mark.parametrize("rule", ["soft", "recall"])
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_checkpointed_layers_are_recomputed_with_what_their_forward_used(family, mode, rule):
    found = []
    for checkpointing in (False, mode):
        policy, batch, unconstrained = scored(family, activation_checkpointing=checkpointing, micro_batch=5)
        routes = soft(batch, unconstrained, ratio=0.6) if rule == "soft" else recall(batch, unconstrained)
        part = GRPO.attach_weights(replace(batch, old_logprobs=unconstrained.logprobs, routes=routes))
        found.append(policy.gradient(part, GRPO))
    assert torch.equal(*found) and found[0].abs().max() > 1e-4


# ---------------------------------------------------------------------- with combine weights
@pytest.mark.parametrize("family", FAMILIES)
def test_recalled_weights_reach_the_experts_and_no_gradient_the_router(family):
    policy, batch, unconstrained = scored(family)
    routes = recall(batch, unconstrained)
    under = policy.score(batch, routes, scores=True)
    known = routes.known
    seen = []
    experts = [m for name, m in policy.model.named_modules() if name.endswith(".experts")]
    handles = [m.register_forward_pre_hook(lambda m, args: seen.append(args[1:3])) for m in experts]
    policy.score(batch, routes)
    for handle in handles:
        handle.remove()
    for s, (ids, gates) in enumerate(seen):
        at = known[:, :-1, s].flatten()
        assert torch.equal(ids[at], unconstrained.routes.ids()[:, :-1, s].flatten(0, 1)[at])
        assert torch.equal(gates[at].float(), unconstrained.scores.gates[:, :-1, s].flatten(0, 1)[at])
    assert len(seen) == known.shape[2]
    hard = policy.score(batch, unconstrained.routes)
    assert under.routes == hard.routes and not torch.equal(under.logprobs, hard.logprobs)
    part = GRPO.attach_weights(replace(batch, old_logprobs=unconstrained.logprobs, routes=routes))
    routers = {id(p) for p in router_parameters(policy.model)}
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    updated = policy.update(part, GRPO)
    moved = {id(p): not torch.equal(p, before[n]) for n, p in policy.model.named_parameters()}
    assert not any(moved[i] for i in routers) and sum(moved.values()) > len(moved) / 2
    assert updated.preferred is not None and not updated.preferred.same_sets(updated.routes)[known].all()


@pytest.mark.parametrize("family", FAMILIES)
def test_at_old_weights_recall_is_replay_value_for_value(family):
    policy, batch = policy_of(build(family)), make_batch()
    unconstrained = policy.score(batch, scores=True)
    forced = [policy.score(batch, source(batch, unconstrained)).logprobs for source in (recall, old_policy)]
    assert torch.equal(*forced)


@pytest.mark.parametrize("kind", ["jetmoe", "llama4_text", "inkling_text", "zaya"])
def test_a_family_that_hands_out_something_else_cannot_recall(kind):
    model = families.build(next(f for f in families.FAMILIES if f.model_type == kind))
    tokens = torch.randint(3, 39, (2, 5))
    with torch.no_grad(), record_routing(model) as recording:
        model(tokens)
    trace = recording.trace(tokens)
    name = type(find_moe_layers(model)[0].module).__name__
    with (
        pytest.raises(RoutingError, match=rf"\({name}\).*cannot be replayed"),
        torch.no_grad(),
        replay_routing(model, replace(trace, gates=torch.ones(trace.shape))),
    ):
        model(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_weights_are_recalled_from_what_it_sent(family):
    """Ids and weights as prime-rl packs them, through the decoder, are those of the forward that made them."""
    policy, batch = policy_of(build(family)), make_batch()
    unconstrained = policy.score(batch, scores=True)
    layout, rows = unconstrained.routes.layout, []
    for b, row in enumerate(batch.tokens):
        n = int(batch.attention_mask[b].sum())
        ids, bits = (
            unconstrained.routes.ids()[b, : n - 1],
            unconstrained.scores.gates[b, : n - 1].float().view(torch.int32),
        )
        rows.append(decode_routes(torch.cat([ids.int(), bits], -1), layout=layout, tokens=row[:n].tolist()))
    engine = RoutingTrace.cat(rows, batch.tokens, batch.attention_mask)
    sampled = replace(batch, rollout_routes=engine)
    perturb(policy.model, scale=0.3)
    under = [
        policy.score(batch, routes).logprobs
        for routes in (recall(sampled, unconstrained, base="rollout"), recall(batch, unconstrained))
    ]
    assert torch.equal(*under) and not torch.equal(under[0], policy.score(batch, unconstrained.routes).logprobs)
    with pytest.raises(RoutingError, match="recall"):
        recall(replace(batch, rollout_routes=unconstrained.routes), unconstrained, base="rollout")
    with pytest.raises(ConfigError, match="base='live'"):
        lookup("route source", Component("recall", base="live"), SOURCES)


# ---------------------------------------------------------------------- what travels with a trace
def test_rules_and_weights_travel_with_a_trace(tmp_path):
    plain = random_trace(batch=4, lengths=[5, 3, 4, 5])
    gates = torch.rand(plain.shape)
    trace = replace(plain, gates=gates.where(plain.attention_mask[..., None, None], 0), keep=0.5)
    rows = torch.tensor([2, 0])
    assert trace.rows(rows, 4).keep == 0.5 and torch.equal(trace.rows(rows, 4).gates, trace.gates[rows][:, :4])
    assert trace.only(trace.known).gates is trace.gates and trace.to("cpu") == trace
    assert trace.to("meta").gates.device.type == "meta"
    joined = RoutingTrace.cat([trace.rows(slice(0, 3)), trace.rows(slice(3, 4))], trace.tokens, trace.attention_mask)
    assert joined == trace != plain and replace(trace, keep=0.4) != trace != replace(trace, gates=gates + 1)
    left = torch.flip(trace.attention_mask, (1,))
    assert torch.equal(trace.align(left).gates[left], trace.gates[trace.attention_mask])
    assert trace.align(left).align(trace.attention_mask) == trace
    trace.save(tmp_path / "trace")
    assert RoutingTrace.load(tmp_path / "trace") == trace == replace(trace, gates=gates), "where routes are known"
    plain.save(tmp_path / "plain")
    assert RoutingTrace.load(tmp_path / "plain") == plain
    for other in (replace(trace, keep=0.0), replace(trace, gates=None)):
        with pytest.raises(RoutingError, match="keep or gates"):
            RoutingTrace.cat([trace, other], trace.tokens.repeat(2, 1), trace.attention_mask.repeat(2, 1))
