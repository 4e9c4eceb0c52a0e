"""Metrics and checks of compact ids against loops over Python's sets: dtypes, unknown rows, MoE layers of fewer
slots."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import RoutingError
from moe_rl.metrics import volatility
from moe_rl.metrics.volatility import load_statistics, response_change, route_change, router_confidence
from moe_rl.routing import Layout, MoeLayer, RoutingTrace, ids
from moe_rl.routing.ids import signed, used
from tests.second_device import DEVICE, There, second_device

quick = settings(deadline=None, max_examples=60)
DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass
class Case:
    """Two traces as int64 with -1, in a dtype, and what their MoE layers are."""

    layout: Layout
    before: torch.Tensor
    after: torch.Tensor
    mask: torch.Tensor
    dtype: torch.dtype

    def given(self, x):
        return x.masked_fill(x < 0, 255).to(self.dtype) if self.dtype == torch.uint8 else x.to(self.dtype)

    @property
    def experts(self):
        return max(moe_layer.num_experts for moe_layer in self.layout.moe_layers)


@st.composite
def cases(draw):
    batch, time, moe_layers = draw(st.integers(0, 3)), draw(st.integers(0, 6)), draw(st.integers(1, 4))
    top = draw(st.lists(st.integers(1, 4), min_size=moe_layers, max_size=moe_layers))
    experts = [draw(st.sampled_from([k, k + 1, 9, 255, 256, 300])) for k in top]
    shape = Layout(
        tuple(MoeLayer(f"layers.{s}", s, e, k) for s, (e, k) in enumerate(zip(experts, top, strict=True))), "x"
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    unknown = draw(st.sampled_from([0.0, 0.2, 1.0]))

    def routes():
        found = torch.full((batch, time, moe_layers, max(top)), -1)
        for s, (e, k) in enumerate(zip(experts, top, strict=True)):
            found[:, :, s, :k] = torch.rand(batch, time, e, generator=generator).argsort(-1)[..., :k]
        found[torch.rand(batch, time, moe_layers, generator=generator) < unknown] = -1
        return found

    before, after = routes(), routes()
    kept = torch.rand(batch, time, moe_layers, 1, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    mask = torch.rand(batch, time, generator=generator) < draw(st.sampled_from([-1.0, 0.6, 2.0]))
    dtype = draw(st.sampled_from([dtype for dtype in DTYPES if dtype != torch.uint8 or shape.dtype == torch.uint8]))
    return Case(shape, before, torch.where(kept, before, after), mask, dtype)


def sets(x):
    """Of each slot row, the set of its experts; empty where it is unknown."""
    return [[[set(row) - {-1} for row in token] for token in tokens] for tokens in x.tolist()]


def changes(case, gates):
    """Per MoE layer the sums of `route_change`, by a loop over sets."""
    moe_layers = len(case.layout.moe_layers)
    total = {
        name: [0.0] * moe_layers
        for name in (
            "volatility_tokens",
            "volatility_unknown",
            "expert_change_rate",
            "any_change_rate",
            "jaccard_distance",
            "gate_mass_moved",
        )
    }
    tokens = any_layer = layers = 0
    old, new = sets(case.before), sets(case.after)
    for b, t in case.mask.nonzero().tolist():
        flips = []
        for s in range(moe_layers):
            a, z = old[b][t][s], new[b][t][s]
            if not a or not z:
                total["volatility_unknown"][s] += 1
                continue
            flips.append(a != z)
            total["volatility_tokens"][s] += 1
            total["expert_change_rate"][s] += 1 - len(a & z) / max(len(a), len(z))
            total["any_change_rate"][s] += a != z
            total["jaccard_distance"][s] += 1 - len(a & z) / len(a | z)
            of = {e: g for e, g in zip(case.before[b, t, s].tolist(), gates[b, t, s].tolist(), strict=True) if e >= 0}
            total["gate_mass_moved"][s] += sum(of[e] for e in a - z) / sum(of.values())
        if len(flips) == moe_layers:
            tokens, any_layer, layers = tokens + 1, any_layer + any(flips), layers + sum(flips)
    return total | {"tokens": tokens, "any_layer_change": any_layer, "layers_changed": layers}


@quick
@given(cases(), st.booleans())
def test_route_change_equals_a_loop_over_sets(case, strided):
    before, after = case.given(case.before), case.given(case.after)
    if strided:
        before, after = torch.cat([before, before], 2)[:, :, : before.shape[2]], after.mT.contiguous().mT
    gates = torch.rand(before.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = route_change(before, after, case.mask, gates)
    for name, value in changes(case, gates).items():
        assert found[name].tolist() == pytest.approx(value, rel=1e-13), name
    mixed = route_change(before, case.after, case.mask, gates)
    assert all(torch.equal(x, mixed[name]) for name, x in found.items())


@quick
@given(cases())
def test_load_and_responses_equal_counts_in_a_loop(case):
    moe_layers, experts = len(case.layout.moe_layers), case.experts
    old, new = sets(case.before), sets(case.after)
    counts = torch.zeros(moe_layers, experts)
    responses, set_change, usage_change = ([0.0] * moe_layers for _ in range(3))
    for b, tokens in enumerate(case.mask.tolist()):
        for s in range(moe_layers):
            here = [t for t, inside in enumerate(tokens) if inside]
            for t in here:
                for e in old[b][t][s]:
                    counts[s, e] += 1
            both = [t for t in here if old[b][t][s] and new[b][t][s]]
            a, z = ([e for t in both for e in x[b][t][s]] for x in (old, new))
            if both:
                responses[s] += 1
                set_change[s] += 1 - len(set(a) & set(z)) / len(set(a))
                usage_change[s] += sum(abs(a.count(e) / len(a) - z.count(e) / len(z)) for e in set(a) | set(z)) / 2
    given = case.given(case.before), case.given(case.after)
    load = load_statistics(given[0], [moe_layer.num_experts for moe_layer in case.layout.moe_layers], case.mask)
    assert torch.equal(load["load"].nan_to_num().float(), counts)
    change = response_change(*given, case.mask, experts)
    assert change["responses"].tolist() == responses
    assert change["response_set_change"].tolist() == pytest.approx(set_change, abs=1e-12)
    assert change["response_usage_change"].tolist() == pytest.approx(usage_change, abs=1e-12)


@quick
@given(cases())
def test_traces_are_made_of_any_dtype_and_compared_as_sets(case):
    before, after = (RoutingTrace.from_ids(case.given(x), case.layout) for x in (case.before, case.after))
    assert torch.equal(before.ids(), case.before) and torch.equal(signed(before.experts), case.before)
    assert torch.equal(used(before.experts), case.before >= 0)
    same = [
        [[a == z for a, z in zip(x, y, strict=True)] for x, y in zip(xs, ys, strict=True)]
        for xs, ys in zip(sets(case.before), sets(case.after), strict=True)
    ]
    assert before.same_sets(after).tolist() == same
    log_probs = torch.rand(case.before.shape).log()
    found = [router_confidence(log_probs, x, case.mask) for x in (case.before, before.experts)]
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


@quick
@given(cases(), st.data())
def test_a_fault_is_found_wherever_it_is(case, data):
    if not case.before.numel():
        return
    ids_, at = case.before.clone(), tuple(data.draw(st.integers(0, n - 1)) for n in case.before.shape[:3])
    moe_layer = case.layout.moe_layers[at[2]]
    row = data.draw(st.lists(st.integers(0, moe_layer.num_experts), min_size=moe_layer.top_k, max_size=moe_layer.top_k))
    if case.dtype == torch.uint8 and set(row) == {255}:
        return  # which is how uint8 says unknown
    ids_[at][: moe_layer.top_k] = torch.tensor(row)
    fine = len(set(row)) == len(row) and max(row) < moe_layer.num_experts
    try:
        RoutingTrace.from_ids(case.given(ids_), case.layout)
    except RoutingError as error:
        assert not fine and f"{moe_layer.name}: row {at[0]}, token {at[1]} has experts {row}" in str(error)
    else:
        assert fine


@pytest.mark.parametrize("measure", ["route", "response", "load", "sets", "check"])
def test_blocks_change_nothing(measure, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    shape = Layout(tuple(MoeLayer(f"layers.{s}", s, 8, 4) for s in range(16)), "x")
    before, after = (
        torch.rand(3, 40, 16, 8, generator=generator).argsort(-1)[..., :4].to(torch.uint8) for _ in range(2)
    )
    mask = torch.rand(3, 40, generator=generator) < 0.8

    def found():
        one, other = (RoutingTrace.from_ids(x, shape) for x in (before, after))
        return {
            "route": lambda: route_change(before, after, mask),
            "response": lambda: response_change(before, after, mask, 8),
            "load": lambda: load_statistics(before, 8, mask),
            "sets": lambda: {"same": one.same_sets(other)},
            "check": lambda: {"experts": RoutingTrace.from_ids(before.long(), shape).experts},
        }[measure]()

    whole = found()
    monkeypatch.setattr(ids, "BLOCK", 7 * 16)
    monkeypatch.setattr(volatility, "SUMMED", 16)
    for name, value in found().items():
        torch.testing.assert_close(value, whole[name], rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    "slots, experts, dtype", [(254, 255, torch.uint8), (255, 256, torch.int16), (300, 400, torch.int16)]
)
def test_counts_of_many_slots_do_not_overflow(slots, experts, dtype):
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.rand(1, 2, 1, experts, generator=generator).argsort(-1)[..., :slots] for _ in range(2))
    shape = Layout((MoeLayer("layers.0", 0, experts, slots),), "x")
    one, other = (RoutingTrace.from_ids(x, shape) for x in (before, after))
    assert one.experts.dtype == dtype
    change = route_change(one.experts, other.experts, torch.ones(1, 2, dtype=torch.bool))
    both = [set(x) & set(y) for x, y in zip(before[0, :, 0].tolist(), after[0, :, 0].tolist(), strict=True)]
    assert change["expert_change_rate"].item() == pytest.approx(sum(1 - len(x) / slots for x in both), rel=1e-12)
    assert change["jaccard_distance"].item() == pytest.approx(sum(1 - len(x) / (2 * slots - len(x)) for x in both))
    with pytest.raises(RoutingError, match="contain an expert twice"):
        RoutingTrace.from_ids(torch.full_like(before, 3), shape)


def test_metrics_stay_on_the_device_of_the_ids():
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.rand(2, 5, 3, 9, generator=generator).argsort(-1)[..., :2].to(torch.uint8) for _ in range(2))
    shape = Layout(tuple(MoeLayer(f"layers.{s}", s, 9, 2) for s in range(3)), "x")
    mask = torch.rand(2, 5, generator=generator) < 0.8
    measures = {
        "route": lambda a, b: route_change(a, b, mask, torch.ones(a.shape, device=a.device)),
        "response": lambda a, b: response_change(a, b, mask.to(a.device), 9),
        "load": lambda a, b: load_statistics(a, 9, mask.to(a.device)),
    }
    here = {name: measure(before, after) for name, measure in measures.items()}
    same = RoutingTrace.from_ids(before, shape).same_sets(RoutingTrace.from_ids(after, shape))
    with second_device():
        there = before.to(DEVICE), after.to(DEVICE)
        for name, measure in measures.items():
            for field, value in measure(*there).items():
                assert isinstance(value, There)
                assert torch.equal(value.cpu().nan_to_num(), here[name][field].nan_to_num()), field
        found = RoutingTrace.from_ids(there[0], shape).same_sets(RoutingTrace.from_ids(there[1], shape))
        assert isinstance(found, There) and torch.equal(found.cpu(), same)


def test_expert_255_is_no_empty_slot_of_another_dtype():
    before = torch.tensor([[[[255, 3]]]], dtype=torch.int16)
    after = torch.tensor([[[[3, 255]]]], dtype=torch.uint8)
    change = route_change(before, after, torch.ones(1, 1, dtype=torch.bool))
    assert change["expert_change_rate"].item() == change["jaccard_distance"].item() == 0.5


def test_another_number_of_slots_afterwards_is_compared_as_sets():
    """U = {0, 1, 2} and U' = {0, 1, 2, 3}; f = (2, 1, 1, 0) / 4 and f' = (2, 1, 1, 2) / 6. Empty slots add nothing."""
    two = torch.tensor([[[[0, 1]], [[0, 2]]]], dtype=torch.uint8)
    three = torch.tensor([[[[0, 1, 3]], [[3, 0, 2]]]], dtype=torch.uint8)
    padded, mask = torch.nn.functional.pad(two, (0, 1), value=255), torch.ones(1, 2, dtype=torch.bool)
    for before, after, set_change, slots in ((two, three, 0, 1 / 3), (three, two, 1 / 4, 1 / 3)):
        change, routes = response_change(before, after, mask, 4), route_change(before, after, mask)
        assert change["response_set_change"].item() == set_change
        assert change["response_usage_change"].item() == pytest.approx(1 / 3)
        assert routes["expert_change_rate"].item() == pytest.approx(2 * slots)
        same = [padded if x is two else x for x in (before, after)]
        assert change == response_change(*same, mask, 4)
        assert routes == route_change(*same, mask)


def test_what_does_not_fit_is_refused():
    x, mask = torch.zeros(2, 3, 1, 1, dtype=torch.uint8), torch.ones(2, 3, dtype=torch.bool)
    for measure in (lambda: load_statistics(x, 256, mask), lambda: response_change(x, x, mask, 256)):
        with pytest.raises(ValueError, match="ids of 256 experts are uint8"):
            measure()
    with pytest.raises(ValueError, match="an id is 7"):
        load_statistics(x + 7, 4, mask)
    assert math.isnan(route_change(x, x, ~mask).row()["expert_change_rate"])
