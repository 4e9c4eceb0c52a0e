"""RoutingTrace as a value: what it refuses, how it is cut, moved and joined, and what its files give back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moe_rl.errors import RoutingError
from moe_rl.routing import Layout, MoeLayer, RoutingTrace


def layout(experts=8, k=2, moe_layers=3):
    return Layout(tuple(MoeLayer(f"layers.{i}.gate", i, experts, k) for i in range(moe_layers)), "tiny-0")


def random_trace(batch=3, time=5, seed=0, lengths=None, **kwargs):
    """Routes of right-padded rows, unknown at padding."""
    shape = layout(**kwargs)
    generator = torch.Generator().manual_seed(seed)
    moe_layer = shape.moe_layers[0]
    order = torch.rand(batch, time, len(shape.moe_layers), moe_layer.num_experts, generator=generator).argsort(-1)
    ids = order[..., : moe_layer.top_k]
    mask = torch.arange(time)[None] < torch.tensor(lengths or [time] * batch)[:, None]
    ids[~mask] = -1
    tokens = torch.randint(0, 99, (batch, time), generator=generator) * mask
    return RoutingTrace.from_ids(ids, shape, tokens=tokens, attention_mask=mask, weight_version="step 3")


@pytest.mark.parametrize(
    "experts, dtype", [(8, torch.uint8), (255, torch.uint8), (256, torch.int16), (600, torch.int16)]
)
def test_an_id_takes_one_byte_up_to_255_experts(experts, dtype):
    trace = random_trace(experts=experts)
    assert trace.experts.dtype == dtype
    ids = trace.ids()
    assert ids.min() >= 0 and ids.max() < experts


def test_the_largest_id_is_not_mistaken_for_unknown():
    ids = torch.tensor([[[[254, 0]]]])
    trace = RoutingTrace.from_ids(ids, layout(experts=255, moe_layers=1))
    assert trace.known.all() and torch.equal(trace.ids(), ids)


def test_coverage_counts_tokens_not_padding():
    trace = random_trace(lengths=[5, 3, 2])
    assert trace.coverage == 1
    experts = trace.experts.clone()
    experts[0, 0] = trace.layout.unknown
    holes = RoutingTrace.from_ids(experts, trace.layout, attention_mask=trace.attention_mask)
    assert holes.coverage == 0.9
    assert holes.known.sum() == 9 * 3


def test_a_file_holds_known_tokens_times_moe_layers_times_k_bytes(tmp_path):
    trace = random_trace(batch=50, time=200, lengths=[20] * 50)
    trace.save(tmp_path / "t.safetensors")
    routes, tokens, mask = 50 * 20 * 3 * 2, 50 * 20 * 4, 50 * 200
    assert (tmp_path / "t.safetensors").stat().st_size < routes + tokens + mask + 1024


def damaged(path: Path, how: str) -> Path:
    trace = random_trace()
    trace.save(path)
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    elif how == "text":
        path.write_text("not a trace")
    elif how == "foreign":
        save_file({"weight": torch.zeros(3)}, path, metadata={"format": "pt"})
    elif how == "without sums":
        save_file({"experts": torch.zeros(3, 2, 2)}, path, metadata={"moe_rl_trace": "3"})
    elif how == "newer":
        path.write_bytes(path.read_bytes().replace(b'"moe_rl_trace":"3"', b'"moe_rl_trace":"9"'))
    elif how == "ids":
        raw = bytearray(path.read_bytes())
        start = raw.index(trace.experts.numpy().tobytes())
        raw[start] = 77
        path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    "how, says",
    [
        ("missing", "no trace file"),
        ("cut", "not a readable"),
        ("text", "not a readable"),
        ("without sums", "not a readable"),
        ("newer", "format 9"),
        ("foreign", "format None"),
        ("ids", "has another checksum"),
    ],
)
def test_a_damaged_file_is_refused_with_its_reason(tmp_path, how, says):
    with pytest.raises(RoutingError, match=says):
        RoutingTrace.load(damaged(tmp_path / "t.safetensors", how))


@pytest.mark.parametrize(
    "ids, says",
    [
        ([8, 0], r"ids run from 0 to 7"),
        ([-1, 0], "ids run from 0 to 7"),
        ([3, 3], "contain an expert twice"),
        ([0, 0], "some engines write zeros"),
    ],
)
def test_impossible_ids_are_refused(ids, says):
    rows = random_trace().ids()
    rows[1, 2, 0] = torch.tensor(ids)
    with pytest.raises(RoutingError, match=says) as error:
        RoutingTrace.from_ids(rows, layout())
    assert "row 1, token 2" in str(error.value)


def test_a_wrong_number_of_moe_layers_is_refused():
    with pytest.raises(RoutingError, match="expected .* 4 MoE layers"):
        RoutingTrace.from_ids(random_trace().ids(), layout(moe_layers=4))


def test_equality_is_ordered_and_same_sets_is_not():
    trace = random_trace()
    swapped = RoutingTrace.from_ids(trace.ids().flip(-1), trace.layout)
    assert trace == random_trace() and trace != swapped
    assert trace.same_sets(swapped).all()


def test_align_round_trips_between_left_and_right_padding():
    right = random_trace(lengths=[5, 3, 2])
    left = right.align(right.attention_mask.flip(1))
    assert torch.equal(left.experts[1, 2:], right.experts[1, :3])
    assert not left.known[2, :3].any()
    assert left.align(right.attention_mask) == right
    assert torch.equal(left.align(right.attention_mask).tokens, right.tokens)


def test_stacked_rows_are_unknown_past_their_end_and_checked_against_the_tokens():
    rows = random_trace(lengths=[5, 3, 4])
    pieces = [rows.rows(slice(b, b + 1), n - 1) for b, n in enumerate([5, 3, 4])]
    whole = RoutingTrace.cat(pieces, rows.tokens, rows.attention_mask)
    for b, n in enumerate([5, 3, 4]):
        assert torch.equal(whole.experts[b, : n - 1], rows.experts[b, : n - 1])
        assert not whole.known[b, n - 1 :].any()
    with pytest.raises(RoutingError, match="row 0"):
        RoutingTrace.cat(pieces, rows.tokens + 1, rows.attention_mask)


# ---------------------------------------------------------------------- joining micro-batches
def test_micro_batches_join_into_the_whole():
    rows = random_trace(batch=4, lengths=[5, 3, 2, 2])
    pieces = [rows.rows(slice(0, 2)), rows.rows(slice(2, 4), 2)]
    assert RoutingTrace.cat(pieces, rows.tokens, rows.attention_mask) == rows
    ones = RoutingTrace.cat(pieces, rows.tokens, rows.attention_mask.long())
    assert ones == rows and ones.attention_mask.dtype == torch.bool, "a mask of 0 and 1, as tokenizers give it"
    without = replace(rows, experts=rows.experts.clamp(min=0), attention_mask=torch.ones_like(rows.attention_mask))
    assert RoutingTrace.cat([without], rows.tokens, rows.attention_mask) == rows, "recorded without a mask"
    with pytest.raises(RoutingError, match=r"\(2, 5, 3, 2\) and \(4, 5, 3, 2\)"):
        pieces[0].agreement(rows)


def test_micro_batches_in_another_order_are_refused():
    rows = random_trace(batch=4, lengths=[5, 3, 2, 5])
    pieces = [rows.rows(slice(2, 4)), rows.rows(slice(0, 2))]
    with pytest.raises(RoutingError, match="trace 0 .*row 0"):
        RoutingTrace.cat(pieces, rows.tokens, rows.attention_mask)
    with pytest.raises(RoutingError, match="trace 1 .*row 3"):
        RoutingTrace.cat(
            [pieces[1], pieces[0].rows(slice(None, None))], rows.tokens[[0, 1, 2, 2]], rows.attention_mask[[0, 1, 2, 2]]
        )


def test_padding_of_a_micro_batch_may_hold_other_tokens():
    rows = random_trace(batch=2, lengths=[5, 3])
    other = RoutingTrace.from_ids(
        rows.ids(),
        rows.layout,
        tokens=rows.tokens.masked_fill(~rows.attention_mask, 7),
        attention_mask=rows.attention_mask,
        weight_version="step 3",
    )
    assert RoutingTrace.cat([other], rows.tokens, rows.attention_mask) == rows


def test_rows_too_long_or_too_many_are_refused():
    rows = random_trace(batch=4)
    with pytest.raises(RoutingError, match="trace 0 .* 5 .* 4"):
        RoutingTrace.cat([rows], rows.tokens[:, :4], rows.attention_mask[:, :4])
    with pytest.raises(RoutingError, match="4 rows, but the batch has 3"):
        RoutingTrace.cat([rows.rows(slice(0, 2)), rows.rows(slice(2, 4))], rows.tokens[:3], rows.attention_mask[:3])
    with pytest.raises(RoutingError, match="2 rows, but the batch has 4"):
        RoutingTrace.cat([rows.rows(slice(0, 2))], rows.tokens, rows.attention_mask)


def test_micro_batches_of_two_weight_versions_or_layouts_are_refused():
    rows = random_trace(batch=2)
    other = replace(rows.rows(slice(1, 2)), weight_version="step 4")
    with pytest.raises(RoutingError, match="'step 3' and 'step 4'"):
        RoutingTrace.cat([rows.rows(slice(0, 1)), other], rows.tokens, rows.attention_mask)
    mixed = RoutingTrace.cat([rows.rows(slice(0, 1)), other], rows.tokens, rows.attention_mask, mixed=True)
    assert mixed == rows and mixed.weight_version is None
    other = random_trace(batch=1, moe_layers=2)
    with pytest.raises(RoutingError, match="another model"):
        RoutingTrace.cat([rows.rows(slice(0, 1)), other], rows.tokens, rows.attention_mask)


# ---------------------------------------------------------------------- agreement
def test_agreement_counts_pairs_whose_route_both_know():
    """By hand: of 2 rows of 3 tokens and 1 MoE layer, one is padding, one unknown here and one there; 2 of 3 agree."""
    shape = layout(moe_layers=1)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    here = torch.tensor([[[0, 1], [2, 3], [4, 5]], [[-1, -1], [6, 7], [0, 1]]])[:, :, None]
    there = torch.tensor([[[1, 0], [2, 4], [-1, -1]], [[0, 1], [7, 6], [0, 1]]])[:, :, None]
    here, there = (RoutingTrace.from_ids(ids, shape, attention_mask=mask) for ids in (here, there))
    assert here.agreement(there) == there.agreement(here) == pytest.approx(2 / 3)
    assert here.agreement(here) == 1
    nothing = RoutingTrace.from_ids(torch.full((2, 3, 1, 2), -1), shape, attention_mask=mask)
    assert math.isnan(here.agreement(nothing))
    with pytest.raises(RoutingError, match="another model"):
        here.agreement(random_trace())


def test_a_trace_keeps_nothing_that_its_maker_fills_again():
    trace = random_trace(batch=2, time=4)
    given = trace.experts.clone(), torch.ones(2, 4, dtype=torch.bool), torch.arange(8, dtype=torch.int32).view(2, 4)
    ids, mask, tokens = given
    made = RoutingTrace.from_ids(ids, trace.layout, tokens=tokens, attention_mask=mask)
    joined, moved = RoutingTrace.cat([made], tokens, mask), made.align(mask)
    spliced = RoutingTrace.splice([made], tokens, mask)
    for x in given:
        x.zero_()
    for one in (made, joined, moved, spliced):
        assert torch.equal(one.experts, trace.experts) and one.attention_mask.all()
        assert one.tokens.flatten().tolist() == list(range(8))


def test_traces_of_other_tokens_are_not_compared():
    trace = random_trace(batch=2, time=4)
    one = replace(trace, tokens=torch.arange(8, dtype=torch.int32).view(2, 4))
    other = one.rows(torch.tensor([1, 0]))
    for compare in (one.agreement, one.same_sets):
        with pytest.raises(RoutingError, match="row 0, position 0 .* 4 .* 0"):
            compare(other)
    padded = replace(other, attention_mask=torch.zeros(2, 4, dtype=torch.bool))
    assert one.same_sets(padded).shape == (2, 4, trace.shape[2]), "padding is no token"
    assert one.agreement(replace(other, tokens=None)) == trace.agreement(replace(other, tokens=None))


quick = settings(deadline=None, max_examples=15)


def called(tokens, start, end, version, seed):
    """What one call says of the row `tokens`: routes of the tokens start … end - 2, which were its inputs."""
    trace = random_trace(batch=1, time=end - 1, seed=seed)
    experts = trace.experts.clone()
    experts[:, :start] = trace.layout.unknown
    return replace(trace, experts=experts, tokens=tokens[:, : end - 1].int(), weight_version=version)


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
