"""Traces of several calls, and their files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moe_rl.errors import RoutingError
from moe_rl.routing import Layout, MoeLayer, RoutingTrace
from tests.routing.test_trace import random_trace

quick = settings(deadline=None, max_examples=15)


def called(tokens, start, end, version, seed):
    """What one call says of the row `tokens`: routes of the tokens start … end - 2, which were its inputs."""
    trace = random_trace(batch=1, time=end - 1, seed=seed)
    experts = trace.experts.clone()
    experts[:, :start] = trace.layout.unknown
    return replace(trace, experts=experts, tokens=tokens[:, : end - 1].int(), weight_version=version)


# ---------------------------------------------------------------------- several calls
def test_a_rollout_continued_under_new_weights_keeps_what_sampled_it():
    """By hand: weights 3 read tokens 0 … 3 and sampled token 4; weights 4 read all of 0 … 7 and sampled 8."""
    tokens = torch.arange(9)[None]
    old, new = called(tokens, 0, 5, "3", 0), called(tokens, 0, 9, "4", 1)
    whole = RoutingTrace.splice([old, new], tokens)
    assert torch.equal(whole.experts[0, :4], old.experts[0]) and torch.equal(whole.experts[0, 4:8], new.experts[0, 4:])
    assert not whole.known[0, 8].any()
    assert whole.weight_version is None
    later = RoutingTrace.splice([new, old], tokens)  # the later prefill counts
    assert torch.equal(later.experts[0, :8], new.experts[0])


def test_turns_with_tool_tokens_between_and_a_cached_prefix():
    """Turn 1 reads 0 … 3, samples 4. A tool writes 5, 6. Turn 2 has 0 … 3 in its cache, reads 4 … 8 and samples 9."""
    tokens = torch.arange(10)[None]
    first, second = called(tokens, 0, 5, "7", 0), called(tokens, 4, 10, "7", 1)
    whole = RoutingTrace.splice([first, second], tokens)
    assert whole.weight_version == "7"
    assert torch.equal(whole.experts[0, :4], first.experts[0])
    assert torch.equal(whole.experts[0, 4:9], second.experts[0, 4:])
    gap = RoutingTrace.splice([first, called(tokens, 6, 10, "8", 1)], tokens)
    assert gap.known[0].all(-1).tolist() == [True] * 4 + [False] * 2 + [True] * 3 + [False]


def test_gates_come_with_their_ids():
    tokens = torch.arange(9)[None]
    parts = [
        replace(p, gates=torch.full(p.shape, w))
        for p, w in ((called(tokens, 0, 5, "3", 0), 0.25), (called(tokens, 0, 9, "4", 1), 0.75))
    ]
    whole = RoutingTrace.splice(parts, tokens)
    assert whole.gates[0, :, 0, 0].tolist() == [0.25] * 4 + [0.75] * 4 + [0]
    with pytest.raises(RoutingError, match="traces 0 and 1"):
        RoutingTrace.splice([parts[0], replace(parts[1], gates=None)], tokens)


@quick
@given(ends=st.lists(st.integers(2, 12), min_size=1, max_size=4), starts=st.lists(st.integers(0, 9), min_size=4))
def test_splicing_is_what_going_through_the_tokens_one_by_one_gives(ends, starts):
    tokens = torch.arange(12)[None]
    calls = enumerate(zip(ends, starts, strict=False))
    parts = [called(tokens, min(start, end - 1), end, f"{i % 2}", i) for i, (end, start) in calls]
    whole = RoutingTrace.splice(parts, tokens)
    for t in range(12):
        mine = next((p for p in parts if t < p.shape[1] and p.known[0, t].any()), None)
        if mine is None:
            assert not whole.known[0, t].any()
        else:
            assert torch.equal(whole.experts[0, t], mine.experts[0, t])


def test_parts_of_other_tokens_or_models_cannot_be_spliced():
    tokens = torch.arange(9)[None]
    old = called(tokens, 0, 5, "3", 0)
    with pytest.raises(RoutingError, match="trace 1 is of other tokens"):
        RoutingTrace.splice([old, called(tokens + 1, 0, 9, "3", 0)], tokens)
    with pytest.raises(RoutingError, match="another model"):
        RoutingTrace.splice([old, random_trace(batch=1, time=5, moe_layers=2)], tokens)
    with pytest.raises(RoutingError, match="no traces to join"):
        RoutingTrace.splice([], tokens)


# ---------------------------------------------------------------------- files
@pytest.mark.parametrize("experts", [8, 255, 256, 600])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_holes_and_further_tensors_come_back_from_a_file(tmp_path, experts, dtype):
    trace = random_trace(batch=5, time=12, lengths=[12, 9, 4, 7, 1], experts=experts)
    hole = torch.rand(trace.shape[:3], generator=torch.Generator().manual_seed(1)) < 0.8
    gates = torch.rand(trace.shape).to(dtype) * trace.attention_mask[..., None, None]
    trace = replace(trace.only(hole), gates=gates, keep=0.5)
    margins = torch.rand(5, 12, 3).bfloat16() * trace.attention_mask[..., None]
    trace.save(tmp_path / "t", {"margins": margins})
    back = RoutingTrace.load(tmp_path / "t")
    assert back == trace and back.gates.dtype == dtype and back.experts.dtype == trace.experts.dtype
    assert torch.equal(back.tokens, trace.tokens) and back.weight_version == "step 3"
    assert torch.equal(RoutingTrace.load_beside(tmp_path / "t")["margins"], margins)


@pytest.mark.parametrize("experts", [255, 256, 257])
def test_moe_layers_that_use_fewer_slots_come_back_as_they_were(tmp_path, experts):
    layout = Layout((MoeLayer("l0", 0, experts, 1), MoeLayer("l1", 1, experts, 2)), "x")
    last = experts - 1
    ids = torch.tensor([[[[3, -1], [5, 7]], [[last, -1], [last, 0]], [[-1, -1], [2, last]]]])
    trace = RoutingTrace.from_ids(ids, layout, tokens=torch.tensor([[1, 2, 3]]))
    trace.save(tmp_path / "t.safetensors")
    assert RoutingTrace.load(tmp_path / "t.safetensors") == trace


def test_a_file_without_sums_is_refused(tmp_path):
    save_file({"experts": torch.zeros(3, 2, 2)}, tmp_path / "t", metadata={"moe_rl_trace": "3"})
    with pytest.raises(RoutingError, match="not a readable"):
        RoutingTrace.load(tmp_path / "t")


@pytest.mark.parametrize(
    "gates, says",
    [
        (float("nan"), "expected finite"),
        (-0.5, "expected finite"),
        (0.0, "gate weights"),
    ],
)
def test_combine_weights_that_cannot_be_are_refused(tmp_path, gates, says):
    trace = replace(random_trace(), gates=torch.full(random_trace().shape, 0.5))
    trace.gates[1, 2, 0] = gates
    trace.save(tmp_path / "t")
    with pytest.raises(RoutingError, match=says):
        RoutingTrace.load(tmp_path / "t")


def test_what_lies_beside_a_trace_is_held_against_its_sums_and_a_damaged_file_is_named(tmp_path):
    trace, file = random_trace(), tmp_path / "trace"
    trace.save(file, {"x": torch.full(trace.shape[:2], 0.123)})
    written = file.read_bytes()
    for damaged in (written.replace(torch.tensor(0.123).numpy().tobytes(), bytes(4), 1), written[:-9], b""):
        assert damaged != written
        file.write_bytes(damaged)
        with pytest.raises(RoutingError, match=f"{file} .*readable"):
            RoutingTrace.load_beside(file)
    with pytest.raises(RoutingError, match="no trace file at"):
        RoutingTrace.load_beside(tmp_path / "none")
