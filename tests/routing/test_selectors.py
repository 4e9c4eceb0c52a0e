"""Routers as older releases of transformers wrote them: what takes the top-k of their logits, what they hand out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing import record_routing, replay_routing
from moe_rl.routing.intercept import in_order
from moe_rl.routing.moe_layers import find_moe_layers, router_matrices, router_parameters


class Experts(nn.Module):
    """Ten experts that multiply by their number."""

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.given = ids, weights
        return hidden * (ids * weights).sum(-1, keepdim=True)


class Selector(nn.Module):
    """As jamba's block before 5.21: the router is a plain matrix, and the shared expert beside it one too."""

    top_k = 2

    def __init__(self):
        super().__init__()
        self.shared, self.gate, self.experts = nn.Linear(4, 4), nn.Linear(4, 10, bias=False), Experts()

    def route_tokens_to_experts(self, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = logits.softmax(-1).topk(self.top_k, dim=-1)
        return ids, weights

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, 4)
        chosen = self.route_tokens_to_experts(flat, F.linear(flat, self.gate.weight))  # deepseek_v2 calls no gate
        return (self.experts(flat, *chosen) + self.shared(flat)).view_as(hidden)


class SelectingExperts(Experts):
    """As Aria's before 5.18: the experts take the top-k, the module around them holds the router."""

    moe_topk = 2

    def route_tokens_to_experts(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = logits.topk(self.moe_topk, dim=-1)
        return weights.softmax(-1), ids

    def forward(self, hidden: Tensor, logits: Tensor) -> Tensor:
        weights, ids = self.route_tokens_to_experts(logits)
        return super().forward(hidden, ids, weights)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 10, bias=False), SelectingExperts()

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, 4)
        return self.experts(flat, self.router(flat)).view_as(hidden)


class Model(nn.Module):
    def __init__(self, block: type):
        super().__init__()
        self.embed, self.layers = nn.Embedding(20, 4), nn.ModuleList([block(), block()])

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


@pytest.mark.parametrize("block, router", [(Selector, "gate"), (Around, "router")])
def test_the_moe_layer_is_the_router_whose_logits_another_module_takes_the_top_k_of(block, router):
    torch.manual_seed(0)
    model, tokens = Model(block), torch.randint(0, 20, (3, 5))
    moe_layers = find_moe_layers(model)
    assert [s.moe_layer.name for s in moe_layers] == [f"layers.{i}.{router}" for i in (0, 1)]
    assert all((s.moe_layer.num_experts, s.moe_layer.top_k) == (10, 2) for s in moe_layers)
    matrices = [getattr(layer, router).weight for layer in model.layers]
    assert [id(m) for s in moe_layers for m in router_matrices(s)] == [id(p) for p in router_parameters(model)]
    assert {id(m) for m in matrices} == {id(p) for p in router_parameters(model)}
    with record_routing(model, scores=True, logits=True) as recording:
        unconstrained = model(tokens)
    trace, scores = recording.trace(tokens), recording.scores(3)
    expected = model.embed(tokens).flatten(0, 1) @ matrices[0].T
    torch.testing.assert_close(recording.logits(3)[0].flatten(0, 1), expected)
    assert torch.equal(trace.ids()[:, :, 0].flatten(0, 1), expected.topk(2).indices)
    recording.logits(3)[1].sum().backward()
    assert matrices[1].grad is not None
    other = replace(trace, experts=9 - trace.experts, gates=scores.gates * 0.5)
    with torch.no_grad(), replay_routing(model, other):
        forced = model(tokens)
        for moe_layer, layer in enumerate(model.layers):
            ids, weights = layer.experts.given
            assert torch.equal(ids, 9 - trace.ids()[:, :, moe_layer].flatten(0, 1))
            assert torch.equal(weights, scores.gates[:, :, moe_layer].flatten(0, 1) * 0.5)
    assert not torch.equal(forced, unconstrained)
    assert not any("route_tokens_to_experts" in vars(s.selector) for s in moe_layers)


def test_a_selector_without_a_router_is_refused():
    model = Model(Selector)
    for layer in model.layers:
        layer.shared, layer.gate, layer.classifier = nn.Identity(), None, layer.gate
    with pytest.raises(RoutingError, match="gate or router"):
        find_moe_layers(model)


def test_what_a_router_hands_out_is_put_in_order_and_back():
    """With as many slots as experts, shapes alone would not tell logits from weights."""
    logits, weights, ids = torch.randn(5, 3), torch.rand(5, 3), torch.zeros(5, 3, dtype=torch.long)
    for given in ((logits, weights, ids), (ids, weights, logits), (logits, ids, weights)):
        ordered, order = in_order(given)
        assert all(a is b for a, b in zip(ordered, (logits, weights, ids), strict=True))
        assert all(ordered[i] is x for i, x in zip(order, given, strict=True))
    for given in (logits, (weights, ids), (logits, weights, ids, logits), (ids, ids, weights, [3], logits)):
        assert in_order(given) == (given, None)
