"""Foreign routes: what every engine writes comes back as the ids it was made of, and nothing else gets in."""

from __future__ import annotations

import base64
import io
import resource
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import RoutingError
from moe_rl.integrations.vllm.payloads import RoutesRefused, decode_routes
from moe_rl.routing import Layout, MoeLayer
from tests.benchmarks.fuzz_traces import fuzz

quick = settings(deadline=None, max_examples=50)


def layout(layers=(1, 2, 4), experts=8, k=2):
    return Layout(tuple(MoeLayer(f"layers.{i}.gate", i, experts, k) for i in layers), "tiny-0")


def routes(rows, shape, seed=0):
    """Distinct ids in random order, [rows, MoE layers, k]."""
    moe_layer = shape.moe_layers[0]
    order = np.random.default_rng(seed).random((rows, len(shape.moe_layers), moe_layer.num_experts)).argsort(-1)
    return order[..., : moe_layer.top_k].astype(np.int32)


def with_dense(ids, shape, num_layers=None, fill=0):
    """The same, layers counted absolutely, dense ones filled."""
    layers = [moe_layer.decoder_layer for moe_layer in shape.moe_layers]
    wide = np.full((len(ids), num_layers or max(layers) + 1, ids.shape[2]), fill, ids.dtype)
    wide[:, layers] = ids
    return wide


def b64(data):
    return base64.b64encode(data).decode()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return b64(file.getvalue())


def ids_of(trace):
    return trace.ids()[0].numpy()


# ---------------------------------------------------------------------- round trips
def raw(array, dtype):
    return b64(array.astype(np.dtype(dtype).newbyteorder("<")).tobytes())


WIRES = {
    "vLLM 0.14: array": lambda ids, dtype: ids,
    "nested lists": lambda ids, dtype: ids.tolist(),
    "vLLM 0.22: base64 of .npy": lambda ids, dtype: npy(ids.astype(dtype)),
    "SGLang: base64 of int32": lambda ids, dtype: raw(ids, "int32"),
    "SGLang: meta_info": lambda ids, dtype: {"routed_experts": raw(ids, dtype), "routed_experts_dtype": dtype},
    "prime-rl": lambda ids, dtype: {"data": raw(ids, dtype), "shape": ids.shape, "dtype": dtype, "start": 0},
    "tensor": lambda ids, dtype: torch.from_numpy(ids),
}


@pytest.mark.parametrize("wire", WIRES)
@quick
@given(
    layers=st.sets(st.integers(0, 5), min_size=1),
    experts=st.sampled_from([4, 255, 256, 257, 600]),
    k=st.integers(1, 3),
    n=st.integers(5, 9),
    extra=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_what_an_engine_wrote_is_what_we_read(wire, layers, experts, k, n, extra, seed):
    shape = layout(sorted(layers), experts, k)
    ids = routes(n - 1 + extra, shape, seed)
    dtype = "uint8" if experts <= 256 else "uint16"
    trace = decode_routes(WIRES[wire](with_dense(ids, shape), dtype), layout=shape, tokens=range(n))
    assert np.array_equal(ids_of(trace), ids[: n - 1])
    assert trace.coverage == 1
    assert trace.tokens[0].tolist() == list(range(n - 1))


@quick
@given(n=st.integers(3, 9), start=st.integers(0, 8), ignored=st.booleans(), flat=st.booleans())
def test_a_start_offset_leaves_the_prefix_unknown_unless_the_server_ignored_it(n, start, ignored, flat):
    shape, start = layout(), min(start, n - 2)
    ids = routes(n - 1, shape)
    sent = with_dense(ids[0 if ignored else start :], shape)
    payload = b64(sent.astype("<i4").tobytes()) if flat else sent
    trace = decode_routes(payload, layout=shape, tokens=range(n), start=start, num_layers=5)
    known = ids_of(trace)
    assert np.array_equal(known[start:], ids[start:])
    assert ((known[:start] == -1).all() or start == 0) if not ignored else np.array_equal(known, ids)


def test_layers_that_are_dense_after_the_last_router_need_num_layers():
    shape = layout()
    ids = routes(4, shape)
    wide = with_dense(ids, shape, num_layers=7)
    assert np.array_equal(ids_of(decode_routes(wide, layout=shape, tokens=range(5), num_layers=7)), ids)
    with pytest.raises(RoutingError, match=r"\(4, 7, 2\)"):
        decode_routes(wide, layout=shape, tokens=range(5))


def test_expert_255_of_256_in_a_byte_is_an_expert():
    shape = layout([0], experts=256, k=1)
    trace = decode_routes(b64(bytes([255, 3])), layout=shape, tokens=[1, 2, 3], dtype="uint8")
    assert ids_of(trace)[:, 0, 0].tolist() == [255, 3]


def test_a_moe_layer_that_uses_fewer_experts_ignores_the_slots_it_lacks():
    shape = Layout((MoeLayer("a", 0, 8, 2), MoeLayer("b", 1, 8, 1)), "mixed-0")
    trace = decode_routes(np.array([[[3, 1], [4, 0]]]), layout=shape, tokens=[1, 2])
    assert ids_of(trace).tolist() == [[[3, 1], [4, -1]]]


# ---------------------------------------------------------------------- rows without a route
@pytest.mark.parametrize("mark, dtype", [(-1, "int32"), (255, "uint8"), (65535, "uint16")])
def test_a_row_marked_as_missing_is_unknown_and_lowers_coverage(mark, dtype):
    shape = layout()
    wide = with_dense(routes(4, shape), shape, fill=mark if mark < 256 else 0).astype(dtype)
    wide[:2, 2] = mark
    trace = decode_routes(npy(wide), layout=shape, tokens=range(5))
    assert trace.coverage == 10 / 12
    assert not trace.known[0, :2, 1].any()


BAD = {
    "all zero": [0, 0],
    "an expert twice": [3, 3],
    "out of range": [1, 8],
    "out of range, half missing": [1, -1],
    "out of range, negative": [-2, -2],
}


@pytest.mark.parametrize("reason, row", BAD.items(), ids=BAD)
def test_a_row_that_cannot_be_a_route_is_refused_and_named_or_on_request_unknown_and_counted(reason, row):
    shape, reason = layout(), reason.partition(",")[0]
    ids = routes(4, shape)
    ids[2, 1] = row
    with pytest.raises(RoutingError, match=rf"1 of 12 .*1 {reason}.*layers.2.gate, token 2"):
        decode_routes(ids, layout=shape, tokens=range(5))
    with pytest.warns(RoutesRefused, match=f"1 {reason}"):
        trace = decode_routes(ids, layout=shape, tokens=range(5), invalid="unknown")
    assert trace.coverage == 11 / 12 and not trace.known[0, 2, 1]


def test_expert_zero_alone_is_a_route_where_k_is_one():
    shape = layout([0], k=1)
    trace = decode_routes(np.zeros((2, 1, 1), int), layout=shape, tokens=[1, 2, 3])
    assert trace.coverage == 1 and not trace.ids().any()


# ---------------------------------------------------------------------- what does not fit
@pytest.mark.parametrize(
    "payload, match",
    [
        (None, "no routing"),
        (np.zeros((4, 3, 2)), "float64"),
        (np.zeros((4, 3, 3), int), r"\(4, 3, 3\)"),
        (np.zeros((6, 3, 2), int), r"\(6, 3, 2\)"),
        (np.zeros((4, 6), int), r"\(4, 6\)"),
        ((np.zeros((2, 3, 2), int), np.zeros((2, 5, 2), int)), "not an array"),
        ([[[1, 2], [3]]], "not an array"),
        ("not base64!", "not base64"),
        (b64(b"\x93NUMPY rubbish"), "npy"),
        (npy(np.zeros((4, 3, 2), int))[:-4], "npy"),
        (b64(base64.b64decode(npy(routes(4, layout()))) + bytes(4)), "npy"),
        (npy(np.array([None])), "npy"),
        (b64(bytes(7)), "7 bytes"),
        (b64(bytes(8)), r"\(2,\)"),
        ({"values": [], "valid_mask": []}, "no routing"),
        ({"data": b64(bytes(24)), "shape": [4, 3], "dtype": "uint8"}, r"\[4, 3\]"),
        ({"data": b64(bytes(24)), "dtype": "float16"}, "'float16'"),
        ({"data": b64(bytes(24)), "dtype": ""}, "dtype ''"),
        ({"data": b64(bytes(24)), "start": "2"}, "'2'"),
        ("nrlre1:int8", "not base64"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(payload, match):
    with pytest.raises(RoutingError, match=match):
        decode_routes(payload, layout=layout(), tokens=range(5))


def test_layers_counted_from_another_origin_are_noticed():
    shape = layout([1, 2])
    shifted = np.roll(with_dense(routes(4, shape), shape), -1, axis=1)
    with pytest.raises(RoutingError, match=r"\[1, 2\]"):
        decode_routes(shifted, layout=shape, tokens=range(5))


def test_a_model_with_two_moe_layers_in_a_layer_is_refused():
    with pytest.raises(RoutingError, match="several MoE layers"):
        decode_routes(np.zeros((1, 2, 2), int), layout=layout([1, 1]), tokens=[1, 2])


# ---------------------------------------------------------------------- combine weights
def weights_of(ids, seed=0):
    return np.random.default_rng(seed).random(ids.shape).astype(np.float32) + 0.01


def packed(ids, weights, shape):
    """prime-rl's Total Router Recall: k ids, then the bits of k float32 weights, all int32."""
    wide = np.concatenate([with_dense(ids, shape), with_dense(weights.view(np.int32), shape)], 2)
    return {"data": b64(wide.astype("<i4").tobytes()), "shape": list(wide.shape), "start": 0, "dtype": "int32"}


@pytest.mark.parametrize("experts", [8, 256, 600])
@pytest.mark.parametrize("extra", [0, 1])
def test_weights_packed_with_ids_come_back_bit_for_bit(experts, extra):
    shape = layout(experts=experts, k=3)
    ids = routes(4 + extra, shape)
    weights = weights_of(ids)
    trace = decode_routes(packed(ids, weights, shape), layout=shape, tokens=range(5))
    assert np.array_equal(ids_of(trace), ids[:4])
    assert trace.gates.dtype == torch.float32 and np.array_equal(trace.gates[0].numpy(), weights[:4])
    array = np.concatenate([ids, weights.view(np.int32)], 2)  # as Python has it, and routing layers alone
    assert decode_routes(array, layout=shape, tokens=range(5)) == trace


def test_packed_rows_from_a_start_and_missing_ones_weigh_nothing():
    shape = layout()
    ids, start = routes(4, shape), 2
    payload = packed(ids[start:], weights_of(ids)[start:], shape) | {"start": start}
    trace = decode_routes(payload, layout=shape, tokens=range(5))
    assert not trace.gates[0, :start].any() and np.array_equal(trace.gates[0, start:], weights_of(ids)[start:])
    ids[3] = -1
    trace = decode_routes(packed(ids, weights_of(ids), shape), layout=shape, tokens=range(5))
    assert not trace.known[0, 3].any() and not trace.gates[0, 3].any()


@pytest.mark.parametrize(
    "wire",
    [
        lambda w: w,
        lambda w: w.tolist(),
        lambda w: torch.from_numpy(w),
        lambda w: {"data": b64(w.tobytes()), "dtype": "float32"},
        lambda w: {"data": b64(w.astype("float16").tobytes()), "dtype": "float16"},
    ],
)
def test_weights_may_come_apart(wire):
    shape = layout()
    ids = routes(4, shape)
    weights = weights_of(ids).astype(np.float16).astype(np.float32)
    trace = decode_routes(with_dense(ids, shape), layout=shape, tokens=range(5), gates=wire(with_dense(weights, shape)))
    assert np.array_equal(trace.gates[0], weights)
    part = decode_routes(ids[1:], layout=shape, tokens=range(5), start=1, gates=weights[1:])
    assert np.array_equal(part.gates[0, 1:], weights[1:]) and not part.gates[0, 0].any()


@pytest.mark.parametrize("experts, dtype", [(8, "uint8"), (600, "uint16")])
@pytest.mark.parametrize("start, extra", [(0, 0), (0, 1), (2, 0)])
def test_weights_beside_the_ids_of_one_payload_come_back_bit_for_bit(experts, dtype, start, extra):
    """prime-rl's other Total Router Recall (pull request 3509): narrow ids, and weights of the same shape."""
    shape = layout(experts=experts, k=3)
    ids = routes(4 + extra, shape)
    weights = weights_of(ids)
    payload = {
        "data": b64(with_dense(ids, shape)[start:].astype(dtype).tobytes()),
        "start": start,
        "dtype": dtype,
        "shape": [4 + extra - start, 5, 3],
        "format_version": 1,
        "weights": {"data": b64(with_dense(weights, shape)[start:].tobytes()), "dtype": "float32"},
    }
    trace = decode_routes(payload, layout=shape, tokens=range(5))
    assert np.array_equal(ids_of(trace)[start:], ids[start:4]) and not trace.known[0, :start].any()
    assert np.array_equal(trace.gates[0, start:], weights[start:4]) and not trace.gates[0, :start].any()
    for weights_of_it in ({}, {"data": payload["weights"]["data"][:-16]}):
        with pytest.raises(RoutingError, match="gates"):
            decode_routes(payload | {"weights": weights_of_it}, layout=shape, tokens=range(5))
    for twice in (payload, packed(ids, weights, shape)):
        with pytest.raises(RoutingError, match="given twice"):
            decode_routes(twice, layout=shape, tokens=range(5), gates=weights)


@pytest.mark.parametrize("weight, match", [(np.nan, "NaN"), (np.inf, "infinite"), (-0.1, "finite"), (0, "1e-06")])
def test_weights_that_cannot_be_are_refused(weight, match):
    shape = layout()
    ids = routes(4, shape)
    weights = weights_of(ids)
    weights[2, 1] = weight
    with pytest.raises(RoutingError, match=match):
        decode_routes(ids, layout=shape, tokens=range(5), gates=weights)


def test_twice_as_many_ids_are_not_taken_for_weights():
    shape = layout(experts=8, k=2)
    four = routes(4, layout(experts=8, k=4))
    with pytest.raises(RoutingError, match=r"shape \(4, 3, 4\)"):
        decode_routes(four, layout=shape, tokens=range(5))


def test_a_file_of_numpy_that_claims_to_be_a_giant_takes_no_room():
    for size in (10**12, 10**9):
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (size, 5, 2)})
        with pytest.raises(RoutingError, match="npy"):
            decode_routes(b64(file.getvalue()), layout=layout(), tokens=range(5))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6, "KiB"


def test_damaged_payloads_and_files_are_refused_or_read_right():
    """A sample; `tests/benchmarks/fuzz_traces.py` takes a million."""
    found = fuzz(400, seed=5)
    refused = sum(count for what, count in found.items() if what.endswith("refused"))
    assert refused > 700 and sum(found.values()) == 800


# ---------------------------------------------------------------------- what a payload leaves out
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_a_dtype_that_is_left_out_is_the_one_that_fits_the_shape(dtype):
    """prime-rl omits the key for uint8."""
    shape = layout((0, 1, 2))
    ids = routes(8, shape)
    payload = {"data": raw(ids, dtype), "shape": [8, 3, 2]}
    assert np.array_equal(ids_of(decode_routes(payload, layout=shape, tokens=range(9))), ids)
    with pytest.raises(RoutingError, match=r"dtype None|\[5, 3, 2\]"):
        decode_routes(payload | {"shape": [5, 3, 2]}, layout=shape, tokens=range(6))


@pytest.mark.parametrize(
    "wire", ["vLLM 0.14: array", "SGLang: base64 of int32", "prime-rl", "vLLM 0.22: base64 of .npy"]
)
def test_a_trace_that_ends_early_is_unknown_there_on_request(wire):
    shape = layout((0, 1, 2))
    ids = routes(8, shape)
    payload = WIRES[wire](ids[:6], "uint8")
    with pytest.raises(RoutingError, match="8 rows"):
        decode_routes(payload, layout=shape, tokens=range(9))
    with pytest.warns(RoutesRefused, match="last 2 of 8"):
        trace = decode_routes(payload, layout=shape, tokens=range(9), invalid="unknown")
    assert np.array_equal(ids_of(trace)[:6], ids[:6]) and (ids_of(trace)[6:] == -1).all()


@pytest.mark.parametrize("row", [[0, 1], [5, 2]])
def test_equal_rows_in_all_layers_are_dummies(row):
    shape = layout((0, 1, 2))
    ids = routes(12, shape)
    ids[-5:] = row
    with pytest.raises(RoutingError, match="15 dummies.* token 7: " + str(row).replace("[", r"\[")):
        decode_routes(ids, layout=shape, tokens=range(13))
    with pytest.warns(RoutesRefused, match="15 dummies"):
        trace = decode_routes(ids, layout=shape, tokens=range(13), invalid="unknown")
    assert np.array_equal(ids_of(trace)[:7], ids[:7]) and (ids_of(trace)[7:] == -1).all()


@pytest.mark.parametrize(
    "layers, experts, k, rows, tokens",
    [
        ((0, 1, 2), 8, 2, 2, range(13)),  # 28^-6 happens
        ((0, 1, 2), 8, 2, 12, [7] * 13),  # one token again and again goes one way in each layer
        ((0,), 8, 2, 12, range(13)),  # a router that collapsed
        ((0, 1), 4, 1, 8, range(13)),  # 4^-15 happens
        ((0, 1, 2), 2, 2, 12, range(13)),  # there is no other set
    ],
)
def test_equal_rows_that_chance_may_make_are_routes(layers, experts, k, rows, tokens):
    shape = layout(layers, experts, k)
    ids = routes(12, shape)
    ids[:rows] = np.arange(k)[::-1]
    assert np.array_equal(ids_of(decode_routes(ids, layout=shape, tokens=tokens)), ids)


def test_a_read_only_array_from_the_last_token_on_has_no_rows_or_one():
    shape = layout((0, 1, 2))
    ids = routes(4, shape)
    ids.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        last = decode_routes(ids[3:], layout=shape, tokens=range(5), start=3)
    assert np.array_equal(ids_of(last)[3:], ids[3:]) and (ids_of(last)[:3] == -1).all()
    assert decode_routes(ids[:0], layout=shape, tokens=range(5), start=4).coverage == 0
    with pytest.raises(RoutingError, match="from start 5"):
        decode_routes(ids[:0], layout=shape, tokens=range(5), start=5)
