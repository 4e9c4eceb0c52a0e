"""Volatility of routes: sets small enough to count by hand, a loop over sets, and exact pooling."""

import math
from inspect import unwrap

import pytest
import torch

from moe_rl.errors import ConfigError
from moe_rl.metrics.ratios import ratio_statistics
from moe_rl.metrics.volatility import (
    coverage,
    load_statistics,
    margin_summary,
    response_change,
    route_change,
    router_shift,
)

ALL = torch.ones(1, 2, dtype=torch.bool)


def ids(rows):
    return torch.tensor(rows, dtype=torch.long)


def random_routes(seed, shape=(5, 7, 3), k=2, experts=8, unknown=0.1):
    generator = torch.Generator().manual_seed(seed)
    routes = torch.rand(*shape, experts, generator=generator).argsort(-1)[..., :k]
    routes[torch.rand(shape, generator=generator) < unknown] = -1
    return routes


@pytest.mark.parametrize(
    "measure",
    [
        lambda mask: unwrap(route_change)(random_routes(0), random_routes(1), mask),
        lambda mask: unwrap(response_change)(random_routes(0), random_routes(1), mask, 8),
        lambda mask: unwrap(load_statistics)(random_routes(0), 8, mask),
        lambda mask: unwrap(coverage)(random_routes(0)[..., 0] >= 0, mask),
        lambda mask: unwrap(margin_summary)(torch.rand(5, 7, 3), mask),
        lambda mask: unwrap(ratio_statistics)(torch.rand(5, 7), mask),
    ],
)
def test_a_mask_of_0_and_1_is_refused_without_the_type_checker_of_the_tests_too(measure):
    """As an index it names rows."""
    mask = torch.rand(5, 7) < 0.5
    assert measure(mask)
    with pytest.raises((ConfigError, TypeError)):  # the latter by the type checker of the tests
        measure(mask.long())


def test_changes_by_hand():
    """Token 0: {0,1} → {1,0} (order only) and {2,3} → {2,4}; token 1: {0,1} → {2,3}, and {4,5} stays."""
    before = ids([[[[0, 1], [2, 3]], [[0, 1], [4, 5]]]])
    after = ids([[[[1, 0], [2, 4]], [[2, 3], [5, 4]]]])
    gates = torch.tensor([[[[0.9, 0.1], [0.7, 0.3]], [[0.6, 0.4], [0.5, 0.5]]]])
    change = route_change(before, after, ALL, gates)
    moe_layers = change.moe_layer_rows()
    assert [s["expert_change_rate"] for s in moe_layers] == [0.5, 0.25]
    assert [s["any_change_rate"] for s in moe_layers] == [0.5, 0.5]
    assert [s["jaccard_distance"] for s in moe_layers] == pytest.approx([0.5, 1 / 3])
    assert [s["gate_mass_moved"] for s in moe_layers] == pytest.approx([0.5, 0.15])
    assert change.row() == pytest.approx(
        {
            "expert_change_rate": 0.375,
            "any_change_rate": 0.5,
            "jaccard_distance": 5 / 12,
            "gate_mass_moved": 0.325,
            "any_layer_change": 1.0,
            "layers_changed": 1.0,
            "volatility_tokens": 2,
            "volatility_unknown": 0,
        }
    )


def test_gates_of_any_sum_count_as_shares_of_it():
    """As DeepSeek-V3 scales them by 2.5; a token whose gates are all 0 has none to lose."""
    before, after = ids([[[[0, 1]], [[2, 3]]]]), ids([[[[1, 4]], [[2, 3]]]])
    gates = torch.tensor([[[[0.5, 2.0]], [[0.0, 0.0]]]])
    assert route_change(before, after, ALL, gates).row()["gate_mass_moved"] == 0.1
    whole = random_routes(0, unknown=0.0)
    change = route_change(
        whole,
        random_routes(1, experts=40, unknown=0.0) + 8,
        torch.ones(5, 7, dtype=torch.bool),
        torch.rand(5, 7, 3, 2) * 2.5,
    )
    assert change.row()["gate_mass_moved"] == 1


def test_without_gates_the_gate_mass_is_undefined_not_zero():
    routes = random_routes(0)
    mask = torch.ones(5, 7, dtype=torch.bool)
    bare = route_change(routes, random_routes(1), mask)
    assert math.isnan(bare.row()["gate_mass_moved"])
    gated = route_change(routes, random_routes(1), mask, torch.rand(5, 7, 3, 2))
    assert (bare + gated).row()["gate_mass_moved"] == gated.row()["gate_mass_moved"]


@pytest.mark.parametrize("measure", ["route", "response", "shift", "load"])
def test_adding_batches_equals_measuring_them_together(measure):
    before, after = random_routes(0), random_routes(1)
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(2)) < 0.7
    functions = {
        "route": lambda r: route_change(before[r], after[r], mask[r], after[r].double()),
        "response": lambda r: response_change(before[r], after[r], mask[r], 8),
        "shift": lambda r: router_shift(before[r] / 10, after[r] / 10, mask[r]),
        "load": lambda r: load_statistics(before[r], 8, mask[r]),
    }
    of = functions[measure]
    pooled = of(slice(0, 1)) + of(slice(1, 4)) + of(slice(4, 5))
    assert pooled.row() == pytest.approx(of(slice(0, 5)).row(), abs=1e-12)
    for one, other in zip(pooled.moe_layer_rows(), of(slice(0, 5)).moe_layer_rows(), strict=True):
        assert one == pytest.approx(other, abs=1e-12)


def test_response_level_change_by_hand():
    """Response 0 uses {0,1,2} before and {0,1,3} after; response 1 only swaps its tokens, which is no change."""
    before = ids([[[[0, 1]], [[0, 2]]], [[[0, 1]], [[2, 3]]]])
    after = ids([[[[0, 1]], [[0, 3]]], [[[2, 3]], [[0, 1]]]])
    change = response_change(before, after, torch.ones(2, 2, dtype=torch.bool), 4)
    assert change["responses"].tolist() == [2]
    assert change.row() == pytest.approx({"response_set_change": (1 / 3 + 0) / 2, "response_usage_change": (1 / 4) / 2})
    nothing = response_change(before, after, torch.zeros(2, 2, dtype=torch.bool), 4)
    assert nothing["responses"].tolist() == [0] and math.isnan(nothing.row()["response_set_change"])


def test_router_shift_by_hand():
    """One token, two MoE layers: |Δ| = (log 2, 0) and (log 4, unused) give means log 2 / 2 and log 4, γ = 3/4 · 1/4."""
    old = torch.tensor([[[[-1.0, -2.0], [-3.0, math.nan]]]], dtype=torch.float64)
    delta = torch.tensor([[[[math.log(2), 0.0], [-math.log(4), math.nan]]]], dtype=torch.float64)
    shift = router_shift(old, old + delta, torch.ones(1, 1, dtype=torch.bool))
    assert [s["router_shift"] for s in shift.moe_layer_rows()] == pytest.approx([math.log(2) / 2, math.log(4)])
    expected = {"router_shift": 1.25 * math.log(2), "router_shift_ratio": 3 / 16, "router_shift_ratio_low": 1.0}
    assert shift.row() == pytest.approx(expected)


def test_router_shift_leaves_out_and_counts_unknown_rows():
    old = torch.zeros(1, 2, 1, 2)
    new = torch.zeros(1, 2, 1, 2)
    new[0, 1] = math.nan
    shift = router_shift(old, new, ALL)
    assert shift["shift_n"].tolist() == [1] and shift.row()["router_shift_ratio"] == 1


def test_load_by_hand():
    """MoE layer 0: 4 experts fill (2, 2, 0, 0) of 4 slots. MoE layer 1, of 2 experts: (3, 1), its unknown row left
    out."""
    none = [-1, -1]
    routes = ids([[[[0, 1], [0, -1]], [[1, 0], [0, -1]], [none, [0, -1]], [none, [1, -1]], [none, none]]])
    load = load_statistics(routes, (4, 2), torch.ones(1, 5, dtype=torch.bool))
    assert [[x for x in moe_layer if x == x] for moe_layer in load["load"].tolist()] == [[2, 2, 0, 0], [3, 1]]
    first, second = load.moe_layer_rows()
    expected = {"load_entropy": 0.5, "load_max_violation": 1.0, "load_cv": 1.0, "load_dead_experts": 2}
    assert first == pytest.approx(expected)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    expected = {"load_entropy": entropy, "load_max_violation": 0.5, "load_cv": 0.5, "load_dead_experts": 0}
    assert second == pytest.approx(expected)
    assert load.row()["load_dead_experts"] == 1.0


def test_load_without_tokens_is_undefined():
    row = load_statistics(random_routes(0), 8, torch.zeros(5, 7, dtype=torch.bool)).row()
    assert all(math.isnan(value) for value in row.values())


def test_margins_by_hand():
    margins = torch.tensor([[[0.0, math.nan], [0.05, math.nan], [0.2, 1.0], [9.0, 9.0]]])
    mask = torch.tensor([[True, True, True, False]])
    first, second = margin_summary(margins, mask)
    assert first["margin_n"] == 3 and first["margin_q50"] == pytest.approx(0.05)
    assert first["margin_below_0.01"] == pytest.approx(1 / 3) and first["margin_below_0.1"] == pytest.approx(2 / 3)
    assert second["margin_n"] == 1 and second["margin_q01"] == 1.0
