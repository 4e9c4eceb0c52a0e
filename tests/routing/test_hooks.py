"""Recording and replaying on real Hugging Face families: what is recorded, what is forced, and what is left behind."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from moe_rl.errors import RoutingError
from moe_rl.routing import layout_of, record_routing, replay_routing
from moe_rl.routing.intercept import SiteForward
from tests.conftest import FAMILIES, build, perturb
from tests.routing.families import older_than


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param)


def record(model, tokens):
    with torch.no_grad(), record_routing(model) as recording:
        logits = model(tokens).logits
    return recording.trace(tokens), logits


def expert_calls(model):
    """A list that fills with (ids, weights) as they reach the experts, and the hooks that fill it."""
    calls = []

    def note(_, args, kwargs):
        _, ids, weights = (*args, *kwargs.values())[:3]
        calls.append((ids.detach().clone(), weights.detach().clone()))

    experts = [m for n, m in model.named_modules() if n.endswith("mlp.experts")]
    return calls, [m.register_forward_pre_hook(note, with_kwargs=True) for m in experts]


def own_weights(family, model, site, hidden, ids):
    """The combine weights of given ids by the family's published formula, written out independently of its code."""
    config, router = model.config, dict(model.named_modules())[site.name]
    logits = hidden.float() @ router.weight.float().T
    if family == "gpt_oss":
        return (logits + router.bias).gather(1, ids).softmax(-1)
    if family in ("deepseek_v3", "glm4_moe"):
        chosen = logits.sigmoid().gather(1, ids)
        if config.norm_topk_prob:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen * config.routed_scaling_factor
    chosen = logits.softmax(-1).gather(1, ids)
    normalised = family == "mixtral" or config.norm_topk_prob
    return chosen / chosen.sum(-1, keepdim=True) if normalised else chosen


def test_recording_changes_no_logit(model, tokens):
    plain = model(tokens).logits
    _, logits = record(model, tokens)
    assert torch.equal(plain, logits)


def test_recorded_ids_are_those_that_reach_the_experts(model, tokens):
    calls, hooks = expert_calls(model)
    trace, _ = record(model, tokens)
    for hook in hooks:
        hook.remove()
    for site, (ids, _) in enumerate(calls):
        assert torch.equal(trace.ids()[:, :, site].flatten(0, 1), ids)
    assert len(calls) == len(trace.layout.sites)


def test_replay_of_own_routes_is_bitwise_identical(model, tokens):
    trace, logits = record(model, tokens)
    with torch.no_grad(), replay_routing(model, trace) as replay:
        assert torch.equal(model(tokens).logits, logits)
    assert replay.preferred == trace
    assert replay.coverage == 1


def test_after_a_weight_change_the_recorded_ids_reach_the_experts(model, tokens):
    trace, _ = record(model, tokens)
    perturb(model)
    live, _ = record(model, tokens)
    assert not live.same_sets(trace).all(), "the perturbation must change some routes, or this test shows nothing"
    calls, hooks = expert_calls(model)
    with torch.no_grad(), replay_routing(model, trace):
        model(tokens)
    for hook in hooks:
        hook.remove()
    for site, (ids, _) in enumerate(calls):
        assert torch.equal(trace.ids()[:, :, site].flatten(0, 1), ids)


def test_forced_experts_get_the_familys_own_weights(model, tokens):
    trace, _ = record(model, tokens)
    perturb(model)
    hidden = {}
    modules = dict(model.named_modules())
    hooks = [
        modules[s.name].register_forward_pre_hook(lambda _, args, s=s: hidden.__setitem__(s.name, args[0].detach()))
        for s in trace.layout.sites
    ]
    calls, more = expert_calls(model)
    with torch.no_grad(), replay_routing(model, trace):
        model(tokens)
    for hook in hooks + more:
        hook.remove()
    for site, (ids, weights) in zip(trace.layout.sites, calls, strict=True):
        expected = own_weights(model.config.model_type, model, site, hidden[site.name].flatten(0, -2), ids)
        torch.testing.assert_close(weights.float(), expected, rtol=1e-6, atol=1e-7)


def test_router_gradient_flows_under_replay(model, tokens):
    trace, _ = record(model, tokens)
    perturb(model)
    with replay_routing(model, trace):
        model(tokens).logits.logsumexp(-1).sum().backward()
    for site in trace.layout.sites:
        assert dict(model.named_modules())[site.name].weight.grad.abs().max() > 1e-7, site


def gradients(model, tokens, trace, checkpointing):
    """Gradients of one backward over two micro-batches, each under its own routes, in nested scopes."""
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
        for layer in model.modules():
            layer.training = getattr(layer, "gradient_checkpointing", False)

    def loss(rows):
        return model(tokens[rows], use_cache=False).logits.logsumexp(-1).pow(2).sum()

    one, two = slice(0, 2), slice(2, 4)
    with replay_routing(model, trace.rows(one)):
        first = loss(one)
        with replay_routing(model, trace.rows(two)):
            (first + loss(two)).backward()
    if checkpointing:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
        model.eval()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_checkpointing_recomputes_each_micro_batch_under_its_own_routes(model, tokens, mode):
    trace, _ = record(model, tokens)
    perturb(model)
    plain, checkpointed = (gradients(model, tokens, trace, how) for how in (None, mode))
    assert plain.keys() == checkpointed.keys()
    for name in plain:
        assert torch.equal(plain[name], checkpointed[name]), name


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_backward_outside_the_scope_raises_under_checkpointing(qwen, tokens, mode):
    trace, _ = record(qwen, tokens)
    qwen.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
    qwen.train()
    with pytest.raises(RoutingError, match="not backpropagated inside"), replay_routing(qwen, trace):
        qwen(tokens, use_cache=False).logits.sum()


def test_a_recomputation_is_not_recorded_again(qwen, tokens):
    qwen.gradient_checkpointing_enable({"use_reentrant": False})
    qwen.train()
    with record_routing(qwen) as recording:
        qwen(tokens, use_cache=False).logits.sum().backward()
    assert recording.trace(tokens).coverage == 1


def test_hooks_are_gone_after_the_block_and_after_an_exception(model, tokens):
    trace, logits = record(model, tokens)
    perturb(model)
    with pytest.raises(ZeroDivisionError), replay_routing(model, trace), record_routing(model):
        model(tokens)
        1 / 0  # noqa: B018
    for module in model.modules():
        assert "forward" not in module.__dict__ and not isinstance(module.forward, SiteForward)
        assert not module._forward_pre_hooks
    live = model(tokens).logits
    assert not torch.equal(live, logits)


def test_generation_with_a_cache_records_what_a_full_forward_would(model, tokens):
    with record_routing(model) as recording:
        full = model.generate(tokens, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    routes = recording.trace(full)
    assert not routes.known[:, -1].any(), "the last sampled token was never an input"
    again, _ = record(model, full)
    assert torch.equal(again.experts[:, :-1], routes.experts[:, :-1])


def test_left_padded_routes_align_to_right_padding(qwen, tokens):
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :4] = False
    with torch.no_grad(), record_routing(qwen) as recording:
        qwen(tokens, attention_mask=mask.long())
    left = recording.trace(tokens, mask)
    right_mask = mask.flip(1)
    right = torch.zeros_like(tokens)
    right[right_mask] = tokens[mask]
    with torch.no_grad(), record_routing(qwen) as recording:
        qwen(right, attention_mask=right_mask.long())
    moved = left.align(right_mask)
    assert moved == recording.trace(right, right_mask)
    assert torch.equal(moved.tokens[right_mask], right[right_mask].int())


def test_unknown_rows_route_freely_and_are_counted(model, tokens):
    trace, _ = record(model, tokens)
    perturb(model)
    live, logits = record(model, tokens)
    experts = trace.experts.clone()
    experts[1:] = trace.layout.unknown
    holes = type(trace).from_ids(experts, trace.layout, tokens=tokens)
    with torch.no_grad(), replay_routing(model, holes) as replay, record_routing(model) as recording:
        mixed = model(tokens).logits
    assert replay.coverage == 0.25
    used = recording.trace(tokens)
    assert torch.equal(used.experts[0], trace.experts[0])
    assert torch.equal(used.experts[1:], live.experts[1:])
    torch.testing.assert_close(mixed[1:], logits[1:], rtol=1e-5, atol=1e-5)


def test_preferred_is_not_the_natural_route_downstream_of_a_forced_site(qwen, tokens):
    with torch.no_grad():
        for name, parameter in qwen.named_parameters():
            parameter.mul_(10 if "experts" in name else 1)  # so that the choice of experts matters downstream
    trace, _ = record(qwen, tokens)
    perturb(qwen, 0.3)
    natural, _ = record(qwen, tokens)
    with torch.no_grad(), replay_routing(qwen, trace) as replay:
        qwen(tokens)
    same = replay.preferred.same_sets(natural)
    assert same[:, :, 0].all(), "nothing is forced upstream of the first site"
    assert not same[:, :, -1].all(), "replay upstream changes what the last router reads"


def test_scores_are_those_of_the_family(qwen, tokens):
    with torch.no_grad(), record_routing(qwen, scores=True) as recording:
        out = qwen(tokens, output_router_logits=True)
    trace, scores = recording.trace(tokens), recording.scores(4)
    for site, logits in enumerate(out.router_logits):
        if older_than("5.6"):  # they are probabilities there
            logits = logits.log()
        log_p = logits.log_softmax(-1).view(4, 9, -1)
        used = log_p.gather(-1, trace.ids()[:, :, site])
        torch.testing.assert_close(scores.log_probs[:, :, site], used)
        torch.testing.assert_close(scores.gates[:, :, site], used.softmax(-1))  # renormalised over the chosen two
        p = log_p.exp().sort(-1, descending=True).values
        torch.testing.assert_close(scores.margins[:, :, site], p[..., 1] - p[..., 2])
        torch.testing.assert_close(scores.log_probs_at(trace.ids().roll(1, 0))[:, :, site],
                                   log_p.gather(-1, trace.ids().roll(1, 0)[:, :, site]))


def test_take_gives_the_last_forward_and_forgets(qwen, tokens):
    with torch.no_grad(), record_routing(qwen) as recording:
        qwen(tokens[:1])
        qwen(tokens)
        taken = recording.take()
        with pytest.raises(RoutingError, match="no MoE layer ran inside"):
            recording.take()
    assert torch.equal(taken.unflatten(0, (4, 9)), record(qwen, tokens)[0].experts)


# ---------------------------------------------------------------------- never a silent no-op
def test_a_dense_model_is_refused():
    from transformers import AutoModelForCausalLM, Qwen3Config

    dense = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=8, hidden_size=8, num_hidden_layers=1,
                                                         intermediate_size=8, num_attention_heads=1,
                                                         num_key_value_heads=1, head_dim=8))
    with pytest.raises(RoutingError, match="it is dense"), record_routing(dense):
        pass


def test_ids_are_no_trace_and_the_message_says_how_to_make_one(qwen, tokens):
    unchecked = inspect.unwrap(replay_routing)  # without the type checks of the tests, as users call it
    with pytest.raises(RoutingError, match="needs a RoutingTrace, not a Tensor. .* RoutingTrace.from_ids"):
        next(unchecked(qwen, tokens))


def test_a_trace_of_another_model_is_refused(qwen, tokens):
    trace, _ = record(build("qwen3_moe", num_hidden_layers=2), tokens)
    with pytest.raises(RoutingError, match="another model"), replay_routing(qwen, trace):
        pass


def test_a_trace_of_other_tokens_is_refused(qwen, tokens):
    trace, _ = record(qwen, tokens)
    other = tokens.clone()
    other[2, 5] += 1
    with pytest.raises(RoutingError, match="row 2, position 5"), replay_routing(qwen, trace):
        qwen(other)
    with pytest.raises(RoutingError, match="shape"), replay_routing(qwen, trace):
        qwen(tokens[:, :5])


def test_replay_without_a_forward_raises(qwen, tokens):
    trace, _ = record(qwen, tokens)
    with pytest.raises(RoutingError, match="reached no router"), replay_routing(qwen, trace):
        pass


def test_a_router_that_bypasses_topk_is_not_silently_ignored(qwen, tokens):
    class Fused(nn.Module):
        """A router whose selection happens in a kernel that no Python top-k shows."""

        def __init__(self, router):
            super().__init__()
            self.weight, self.top_k, self.num_experts = router.weight, router.top_k, router.num_experts

        def forward(self, hidden):
            logits = hidden @ self.weight.T
            ids = logits.argsort(-1, descending=True)[:, : self.top_k]
            return logits, logits.gather(1, ids).softmax(-1), ids

    Fused.__name__ = "FusedRouter"
    qwen.model.layers[1].mlp.gate = Fused(qwen.model.layers[1].mlp.gate)
    with pytest.raises(RoutingError, match="layers.1.mlp.gate .*called top-k .* 0 times"), record_routing(qwen):
        qwen(tokens)


def test_replay_of_none_is_live(qwen, tokens):
    logits = qwen(tokens).logits
    with replay_routing(qwen, None) as replay:
        assert replay is None
        assert torch.equal(qwen(tokens).logits, logits)


def test_mismatched_forwards_do_not_join(qwen, tokens):
    with torch.no_grad(), record_routing(qwen) as recording:
        qwen(tokens)
        qwen(tokens[:2])
        with pytest.raises(RoutingError, match=r"read \[36, 18\] tokens.* join them with RoutingTrace.cat"):
            recording.trace(tokens)
    with torch.no_grad(), record_routing(qwen) as recording:
        for half in tokens[:, :8].split(2):
            qwen(half)
        with pytest.raises(RoutingError, match="has 2 rows of 8 tokens.* join them with RoutingTrace.cat"):
            recording.trace(tokens[:, :8])


def test_layouts_of_two_checkpoints_of_one_architecture_are_equal():
    assert layout_of(build("qwen3_moe", seed=0)) == layout_of(build("qwen3_moe", seed=5))
