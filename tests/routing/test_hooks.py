"""Recording and replaying on real Hugging Face families: what is recorded, what is forced, and what is left behind."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moe_rl.errors import RoutingError
from moe_rl.routing import layout_of, record_routing, replay_routing
from moe_rl.routing.intercept import MoeLayerForward
from moe_rl.routing.moe_layers import router_parameters
from tests.conftest import FAMILIES, build, perturb
from tests.routing.families import older_than


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param)


def record(model, tokens, **inputs):
    """The routes and the logits of a forward."""
    with torch.no_grad(), record_routing(model) as recording:
        logits = model(tokens, **inputs).logits
    mask = inputs.get("attention_mask")
    return recording.trace(tokens, None if mask is None else mask.bool()), logits


def expert_calls(model):
    """A list that fills with (ids, weights) as they reach the experts, and the hooks that fill it."""
    calls = []

    def note(_, args, kwargs):
        _, ids, weights = (*args, *kwargs.values())[:3]
        calls.append((ids.detach().clone(), weights.detach().clone()))

    experts = [m for n, m in model.named_modules() if n.endswith("mlp.experts")]
    return calls, [m.register_forward_pre_hook(note, with_kwargs=True) for m in experts]


def test_hooks_are_gone_after_the_block_and_after_an_exception(model, tokens):
    trace, logits = record(model, tokens)
    perturb(model)
    with pytest.raises(ZeroDivisionError), replay_routing(model, trace), record_routing(model):
        model(tokens)
        1 / 0  # noqa: B018
    for module in model.modules():
        assert "forward" not in module.__dict__ and not isinstance(module.forward, MoeLayerForward)
        assert not module._forward_pre_hooks
    live = model(tokens).logits
    assert not torch.equal(live, logits)


def test_preferred_is_not_the_unconstrained_route_downstream_of_a_forced_moe_layer(qwen, tokens):
    with torch.no_grad():
        for name, parameter in qwen.named_parameters():
            parameter.mul_(10 if "experts" in name else 1)  # so that the choice of experts matters downstream
    trace, _ = record(qwen, tokens)
    perturb(qwen, 0.3)
    unconstrained, _ = record(qwen, tokens)
    with torch.no_grad(), replay_routing(qwen, trace) as replay:
        qwen(tokens)
    same = replay.preferred.same_sets(unconstrained)
    assert same[:, :, 0].all(), "nothing is forced upstream of the first MoE layer"
    assert not same[:, :, -1].all(), "replay upstream changes what the last router reads"


def test_margins_and_scores_at_other_ids_are_those_of_the_family(qwen, tokens):
    with torch.no_grad(), record_routing(qwen, scores=True) as recording:
        out = qwen(tokens, output_router_logits=True)
    others, scores = recording.trace(tokens).ids().roll(1, 0), recording.scores(4)
    for moe_layer, logits in enumerate(out.router_logits):
        if older_than("5.6"):  # they are probabilities there
            logits = logits.log()
        log_p = logits.log_softmax(-1).view(4, 9, -1)
        p = log_p.exp().sort(-1, descending=True).values
        torch.testing.assert_close(scores.margins[:, :, moe_layer], p[..., 1] - p[..., 2])
        found = scores.log_probs_at(others)[:, :, moe_layer]
        torch.testing.assert_close(found, log_p.gather(-1, others[:, :, moe_layer]))


def test_take_gives_the_last_forward_and_forgets(qwen, tokens):
    with torch.no_grad(), record_routing(qwen) as recording:
        qwen(tokens[:1])
        qwen(tokens)
        taken = recording.take()
        with pytest.raises(RoutingError, match="no MoE layer ran"):
            recording.take()
    assert torch.equal(taken.unflatten(0, (4, 9)), record(qwen, tokens)[0].experts)


# ---------------------------------------------------------------------- never a silent no-op
def test_a_dense_model_is_refused():
    with pytest.raises(RoutingError, match="it is dense"), record_routing(nn.Linear(2, 2)):
        pass


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


class Renamed(nn.Module):
    """A router by its forward, and by nothing else."""

    def __init__(self, router):
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k

    def forward(self, hidden):
        logits = hidden @ self.weight.T
        weights, ids = logits.softmax(-1).topk(self.top_k)
        return logits, weights, ids


class OwnBlock(nn.Module):
    """Eight experts in a list, or in one tensor, under names of their own."""

    def __init__(self, stacked):
        super().__init__()
        lists = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
        self.chooses, self.parts = nn.Linear(4, 8), nn.Bilinear(4, 4, 8) if stacked else lists


def derived(qwen):
    """The model, with a router in its second layer whose class is derived from the family's."""
    gate = qwen.model.layers[1].mlp.gate
    gate.__class__ = type("Noisy", (type(gate),), {})
    return qwen


def test_a_router_of_a_derived_class_is_recorded_as_the_familys_own(qwen, tokens):
    trace, logits = record(qwen, tokens)
    again, same = record(derived(qwen), tokens)
    assert again == trace and torch.equal(same, logits)
    other = type(trace).from_ids((trace.ids() + 1) % 8, trace.layout, tokens=tokens)
    calls, _ = expert_calls(qwen)
    with torch.no_grad(), replay_routing(qwen, other):
        qwen(tokens)
    assert [ids.tolist() for ids, _ in calls] == [other.ids()[:, :, s].flatten(0, 1).tolist() for s in range(3)]


def test_experts_whose_router_cannot_be_recorded_are_named(qwen):
    layer = qwen.model.layers[1]
    gate = layer.mlp.gate
    for other in (Renamed(gate), nn.Identity(), qwen.model.layers[0].mlp.gate):
        layer.mlp.gate = other
        with pytest.raises(RoutingError, match=r"layers\.1\.mlp\.experts"):
            layout_of(qwen)
    layer.mlp.gate = gate
    for stacked in (False, True):
        layer.mlp = OwnBlock(stacked)
        with pytest.raises(RoutingError, match=r"layers\.1\.mlp\.parts"):
            layout_of(qwen)


def passed_over(model):
    model.model.layers[1].forward = lambda hidden, **kwargs: hidden


def used_twice(model):
    model.model.layers[1] = model.model.layers[0]


def own_forward(model):
    gate = model.model.layers[1].mlp.gate
    gate.forward = functools.partial(type(gate).forward, gate)


def other_gate(model):
    model.model.layers[1].mlp.gate = build("qwen3_moe", seed=5).model.layers[1].mlp.gate


def other_block(model):
    model.model.layers[1].mlp = build("qwen3_moe", seed=5).model.layers[1].mlp


def other_layer(model):
    model.model.layers[1] = build("qwen3_moe", seed=5).model.layers[1]


@pytest.mark.filterwarnings("ignore:.*load-balancing loss")
@pytest.mark.parametrize("change", [passed_over, used_twice, own_forward, other_gate, other_block, other_layer])
@pytest.mark.parametrize("scope", ["recording", "replay", "monitor"])
def test_a_forward_that_leaves_a_router_out_is_refused_at_its_end(qwen, tokens, change, scope):
    def monitor(model):
        return pytest.importorskip("moe_rl.integrations.monitor").monitor(model)

    trace, _ = record(qwen, tokens)
    scopes = {"recording": record_routing, "replay": lambda m: replay_routing(m, trace), "monitor": monitor}
    mask = torch.ones_like(tokens)  # a monitor needs it
    with scopes[scope](qwen), torch.no_grad():
        qwen(tokens, attention_mask=mask)
        change(qwen)
        with pytest.raises(RoutingError, match=r"mlp\.gate (ran [02]|chose)"):
            qwen(tokens, attention_mask=mask)


def test_a_layer_that_comes_in_later_is_refused(tokens):
    model, more = build("qwen3_moe", num_hidden_layers=2), build("qwen3_moe", num_hidden_layers=3)
    with torch.no_grad(), record_routing(model):
        model(tokens, use_cache=False)
        model.model.layers.append(more.model.layers[2])
        model.config.num_hidden_layers = 3
        with pytest.raises(RoutingError, match="other MoE layers"):
            model(tokens, use_cache=False)


def test_a_forward_that_failed_half_way_does_not_count(qwen, tokens):
    trace, logits = record(qwen, tokens)
    with torch.no_grad(), replay_routing(qwen, trace) as replay:
        hook = qwen.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            qwen(tokens)
        hook.remove()
        assert torch.equal(qwen(tokens).logits, logits)
    assert replay.preferred == trace


def test_a_block_may_read_one_row_in_pieces(qwen, tokens):
    """Of several rows nobody says whether a piece is some rows, or some columns of all."""
    trace, _ = record(qwen, tokens[:1])
    for layer in qwen.model.layers:
        whole = layer.mlp.forward
        layer.mlp.forward = lambda x, f=whole: torch.cat([f(y) for y in x.view(1, -1, 32).split(3, 1)], 1).view_as(x)
    assert record(qwen, tokens[:1])[0] == trace
    with pytest.raises(RoutingError, match="gate ran 12 times"):
        record(qwen, tokens)


def test_a_list_as_long_as_the_experts_that_nothing_chooses_from_is_no_layer(qwen, tokens):
    trace, _ = record(qwen, tokens)
    for owner in (qwen.model.norm, qwen.model.layers[0].self_attn):
        owner.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
    assert record(qwen, tokens)[0] == trace


class Held(nn.Module):
    """As FSDP1 wraps a module, under the name that it gives it."""

    def __init__(self, module, name="_fsdp_wrapped_module"):
        super().__init__()
        self.add_module(name, module)

    def forward(self, *args, **kwargs):
        return next(self.children())(*args, **kwargs)


WRAPPERS = {
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "checkpointed": checkpoint_wrapper,
    "parallel": nn.DataParallel,
    "fsdp1": Held,
    "several": lambda module: nn.DataParallel(checkpoint_wrapper(Held(module))),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("path", ["model", "model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.gate"])
def test_wrapped_modules_are_the_moe_layers_of_the_plain_model(qwen, tokens, path, wrap):
    trace, _ = record(qwen, tokens)
    shapes = [p.shape for p in router_parameters(qwen)]
    qwen.set_submodule(path, WRAPPERS[wrap](qwen.get_submodule(path)))
    assert layout_of(qwen) == trace.layout
    assert [p.shape for p in router_parameters(qwen)] == shapes
    if wrap != "compiled":
        assert record(qwen, tokens)[0] == trace


def test_a_part_that_a_model_itself_calls_module_keeps_its_name(qwen):
    qwen.model.layers[1] = Held(qwen.model.layers[1], name="module")
    assert layout_of(qwen).moe_layers[1].name == "model.layers.1.module.mlp.gate"


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
    with pytest.raises(RoutingError, match="layers.1.mlp.gate .* 0 times"), record_routing(qwen):
        qwen(tokens)


def test_mismatched_forwards_do_not_join(qwen, tokens):
    with torch.no_grad(), record_routing(qwen) as recording:
        qwen(tokens)
        qwen(tokens[:2])
        with pytest.raises(RoutingError, match=r"\[36, 18\]"):
            recording.trace(tokens)
    with torch.no_grad(), record_routing(qwen) as recording:
        for half in tokens[:, :8].split(2):
            qwen(half)
        with pytest.raises(RoutingError, match=r"shape \(2, 8\)"):
            recording.trace(tokens[:, :8])
