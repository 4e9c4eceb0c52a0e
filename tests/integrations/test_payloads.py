"""Foreign routes: what every engine writes comes back as the ids it was made of, and nothing else gets in."""

from __future__ import annotations

import base64
import io
import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import RoutingError
from moe_rl.integrations.megatron.trace import read_megatron_trace
from moe_rl.integrations.vllm.payloads import RoutesRefused, decode_routes, reported_routes
from moe_rl.routing import Layout, RoutingTrace, Site
from tests.benchmarks.fuzz_traces import fuzz

quick = settings(deadline=None, max_examples=50)


def layout(layers=(1, 2, 4), experts=8, k=2):
    return Layout(tuple(Site(f"layers.{i}.gate", i, experts, k) for i in layers), "tiny-0")


def routes(rows, shape, seed=0):
    """Distinct ids in random order, [rows, sites, k]."""
    site = shape.sites[0]
    order = np.random.default_rng(seed).random((rows, len(shape.sites), site.num_experts)).argsort(-1)
    return order[..., : site.top_k].astype(np.int32)


def with_dense(ids, shape, num_layers=None, fill=0):
    """The same, layers counted absolutely, dense ones filled."""
    layers = [site.decoder_layer for site in shape.sites]
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
    "vLLM 0.21: prompt and completion": lambda ids, dtype: (ids[:2], ids[2:]),
    "vLLM 0.21: nested lists": lambda ids, dtype: (ids[:2].tolist(), ids[2:].tolist()),
    "vLLM 0.22: base64 of .npy": lambda ids, dtype: npy(ids.astype(dtype)),
    "SGLang: base64 of int32": lambda ids, dtype: raw(ids, "int32"),
    "SGLang: meta_info": lambda ids, dtype: {"routed_experts": raw(ids, dtype), "routed_experts_dtype": dtype},
    "prime-rl": lambda ids, dtype: {"data": raw(ids, dtype), "shape": ids.shape, "dtype": dtype, "start": 0},
    "NeMo-RL": lambda ids, dtype: f"nrlre1:int16:{'x'.join(map(str, ids.shape))}:{raw(ids, 'int16')}",
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


def test_only_routing_layers_in_order_is_understood_too():
    shape = layout()
    ids = routes(4, shape)
    assert np.array_equal(ids_of(decode_routes(ids, layout=shape, tokens=range(5))), ids)
    assert np.array_equal(ids_of(decode_routes(b64(ids.tobytes()), layout=shape, tokens=range(5))), ids)


def test_layers_that_are_dense_after_the_last_router_need_num_layers():
    shape = layout()
    ids = routes(4, shape)
    wide = with_dense(ids, shape, num_layers=7)
    assert np.array_equal(ids_of(decode_routes(wide, layout=shape, tokens=range(5), num_layers=7)), ids)
    with pytest.raises(RoutingError, match=r"expected \[4 rows, 5 or 3 layers, 2\]"):
        decode_routes(wide, layout=shape, tokens=range(5))


def test_ids_keep_the_order_in_which_the_engine_selected_them():
    ids = np.array([[[5, 3]], [[1, 6]]])
    assert ids_of(decode_routes(ids, layout=layout([0]), tokens=[1, 2, 3])).tolist() == [[[5, 3]], [[1, 6]]]


def test_expert_255_of_256_in_a_byte_is_an_expert():
    shape = layout([0], experts=256, k=1)
    trace = decode_routes(b64(bytes([255, 3])), layout=shape, tokens=[1, 2, 3], dtype="uint8")
    assert ids_of(trace)[:, 0, 0].tolist() == [255, 3]


def test_a_site_that_uses_fewer_experts_ignores_the_slots_it_lacks():
    shape = Layout((Site("a", 0, 8, 2), Site("b", 1, 8, 1)), "mixed-0")
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
    "all zero": ([0, 0], "all zero, where k = 2"),
    "twice": ([3, 3], "with an expert twice"),
    "too large": ([1, 8], "with an id outside 0 … 7"),
    "half missing": ([1, -1], "with an id outside 0 … 7"),
    "negative": ([-2, -2], "with an id outside 0 … 7"),
}


@pytest.mark.parametrize("row, reason", BAD.values(), ids=BAD)
def test_a_row_that_cannot_be_a_route_is_refused_and_named(row, reason):
    shape = layout()
    ids = routes(4, shape)
    ids[2, 1] = row
    with pytest.raises(RoutingError, match=rf"layers.2.gate \(layer 2\): 1 of 4 rows are {reason}.*row 0, token 2"):
        decode_routes(ids, layout=shape, tokens=range(5))


@pytest.mark.parametrize("row, reason", BAD.values(), ids=BAD)
def test_on_request_it_becomes_unknown_and_is_counted(row, reason):
    shape = layout()
    ids = routes(4, shape)
    ids[2, 1] = row
    with pytest.warns(RoutesRefused, match=f"1 rows are not routing and count as missing: 1 {reason}"):
        trace = decode_routes(ids, layout=shape, tokens=range(5), invalid="unknown")
    assert trace.coverage == 11 / 12
    assert not trace.known[0, 2, 1]


def test_expert_zero_alone_is_a_route_where_k_is_one():
    shape = layout([0], k=1)
    trace = decode_routes(np.zeros((2, 1, 1), int), layout=shape, tokens=[1, 2, 3])
    assert trace.coverage == 1 and not trace.ids().any()


# ---------------------------------------------------------------------- what does not fit
@pytest.mark.parametrize(
    "payload, says",
    [
        (None, "reported no routing"),
        (np.zeros((4, 3, 2)), "dtype float64; expected integer ids"),
        (np.zeros((4, 3, 3), int), r"shape \(4, 3, 3\); expected \[4 rows, 5 or 3 layers, 2\]"),
        (np.zeros((6, 3, 2), int), r"expected \[4 rows, 5 or 3 layers, 2\]"),
        (np.zeros((4, 6), int), r"shape \(4, 6\); expected"),
        ([[[1, 2], [3]]], "not an array of ids"),
        ("not base64!", "neither base64 nor another known text"),
        (b64(b"\x93NUMPY rubbish"), "cannot be read as one"),
        (b64(bytes(7)), "cannot be divided into int32 ids"),
        (b64(bytes(8)), "2 ids came; expected"),
        ({"values": [], "valid_mask": []}, r"keys \['valid_mask', 'values'\] has no routing"),
        ({"data": b64(bytes(24)), "shape": [4, 3], "dtype": "uint8"}, r"24 ids do not fit their shape \[4, 3\]"),
        ({"data": b64(bytes(24)), "dtype": "float16"}, "dtype 'float16'; expected one of uint8"),
        ({"data": b64(bytes(24)), "start": "2"}, "starts at '2'"),
        ("nrlre1:int8", "do not fit their shape|cannot be divided"),
        ((np.zeros((2, 3, 2), int), np.zeros((2, 5, 2), int)), "equal layers and k"),
    ],
    ids=str,
)
def test_what_does_not_fit_says_what_was_expected(payload, says):
    with pytest.raises(RoutingError, match=says):
        decode_routes(payload, layout=layout(), tokens=range(5))


def test_layers_counted_from_another_origin_are_noticed():
    shape = layout([1, 2])
    shifted = np.roll(with_dense(routes(4, shape), shape), -1, axis=1)
    with pytest.raises(RoutingError, match=r"layers \[0\] have routing, but the MoE layers of the model are \[1, 2\]"):
        decode_routes(shifted, layout=shape, tokens=range(5))


def test_a_model_with_two_sites_in_a_layer_is_refused():
    with pytest.raises(RoutingError, match="several MoE layers in one decoder layer"):
        decode_routes(np.zeros((1, 2, 2), int), layout=layout([1, 1]), tokens=[1, 2])


def test_an_unknown_policy_is_refused():
    with pytest.raises(RoutingError, match='expected "raise" or "unknown"'):
        decode_routes(np.zeros((1, 3, 2), int), layout=layout(), tokens=[1, 2], invalid="ignore")


ANY = st.recursive(
    st.none() | st.integers() | st.text(max_size=20) | st.binary(max_size=80) | st.floats() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4)
    | st.tuples(inner, inner)
    | st.dictionaries(st.sampled_from(["data", "routed_experts", "shape", "dtype", "start"]), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(
    payload=ANY | st.binary().map(b64) | st.binary().map(lambda rest: b64(b"\x93NUMPY\x01\x00" + rest)),
    n=st.integers(0, 5),
    start=st.integers(-2, 6),
    invalid=st.sampled_from(["raise", "unknown"]),
)
def test_rubbish_is_a_routing_error_or_a_valid_trace_never_anything_else(payload, n, start, invalid):
    shape = layout([0, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoutesRefused)
        try:
            trace = decode_routes(payload, layout=shape, tokens=range(n), start=start, invalid=invalid)
        except RoutingError:
            return
    assert trace == RoutingTrace.from_ids(trace.ids(), shape)  # which checks every id


# ---------------------------------------------------------------------- Megatron
def trace_file(path, forwards, layers, block="decoder", broken=None):
    """[rows, layers, k] per forward, in Megatron-LM's own record format."""
    with path.open("w") as file:
        for step, ids in enumerate(forwards):
            for i, layer in enumerate(layers):
                record = {"step": step, "stage": "pre_dispatch", "block": block, "layer": layer, "rank": 0,
                          "num_tokens": len(ids), "topk": ids.shape[2], "top_indices": ids[:, i].tolist()}
                file.write(json.dumps(record | (broken or {})) + "\n")
    return path


@pytest.mark.parametrize("numbering", [(1, 2, 4), (2, 3, 5), (0, 1, 2)], ids=["absolute", "from 1", "by position"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_router_trace_gives_back_every_forward(tmp_path, numbering, batch):
    shape = layout()
    forwards = [routes(6, shape, seed) for seed in range(3)]
    found = list(read_megatron_trace(trace_file(tmp_path / "t.jsonl", forwards, numbering), shape, batch=batch))
    assert len(found) == 3
    for trace, ids in zip(found, forwards, strict=True):
        for b in range(batch):
            assert np.array_equal(trace.ids()[b].numpy(), ids[b::batch])  # row t * batch + b is token t of sequence b


def test_micro_batches_of_one_step_are_forwards_of_their_own(tmp_path):
    shape = layout()
    path = trace_file(tmp_path / "t.jsonl", [routes(6, shape, 0)], (1, 2, 4))
    path.write_text(path.read_text() * 2)
    assert len(list(read_megatron_trace(path, shape))) == 2


def test_multi_token_prediction_records_are_not_decoder_layers(tmp_path):
    shape = layout()
    decoder = trace_file(tmp_path / "a.jsonl", [routes(6, shape)], (1, 2, 4)).read_text()
    mtp = trace_file(tmp_path / "b.jsonl", [routes(6, shape, 1)], (1, 2, 4), block="mtp").read_text()
    (tmp_path / "a.jsonl").write_text(decoder + mtp)
    (trace,) = read_megatron_trace(tmp_path / "a.jsonl", shape)
    assert np.array_equal(trace.ids()[0].numpy(), routes(6, shape))


@pytest.mark.parametrize(
    "layers, broken, says",
    [
        ((1, 2), None, r"layers \[1, 2\], but the MoE layers are \[1, 2, 4\]"),
        ((1, 2, 4), {"topk": 3}, "line 1: indices have shape"),
        ((1, 2, 4), {"top_indices": "x"}, "line 1 is not a record"),
        ((1, 2, 4), {"block": "mtp"}, "no decoder record"),
    ],
)
def test_a_router_trace_that_does_not_fit_is_refused_with_its_line(tmp_path, layers, broken, says):
    path = trace_file(tmp_path / "t.jsonl", [routes(6, layout())], layers, broken=broken)
    with pytest.raises(RoutingError, match=says):
        list(read_megatron_trace(path, layout()))


def test_a_missing_a_cut_and_an_indivisible_router_trace_are_refused(tmp_path):
    with pytest.raises(RoutingError, match="no Megatron router trace"):
        list(read_megatron_trace(tmp_path / "none.jsonl", layout()))
    path = trace_file(tmp_path / "t.jsonl", [routes(5, layout())], (1, 2, 4))
    with pytest.raises(RoutingError, match="a multiple of batch=2"):
        list(read_megatron_trace(path, layout(), batch=2))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(RoutingError, match="line 3 is not a record"):
        list(read_megatron_trace(path, layout()))


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


@pytest.mark.parametrize("wire", [lambda w: w, lambda w: w.tolist(), lambda w: torch.from_numpy(w),
                                  lambda w: {"data": b64(w.tobytes()), "dtype": "float32"},
                                  lambda w: {"data": b64(w.astype("float16").tobytes()), "dtype": "float16"}])
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
    payload = {"data": b64(with_dense(ids, shape)[start:].astype(dtype).tobytes()), "start": start, "dtype": dtype,
               "shape": [4 + extra - start, 5, 3], "format_version": 1,
               "weights": {"data": b64(with_dense(weights, shape)[start:].tobytes()), "dtype": "float32"}}
    trace = decode_routes(payload, layout=shape, tokens=range(5))
    assert np.array_equal(ids_of(trace)[start:], ids[start:4]) and not trace.known[0, :start].any()
    assert np.array_equal(trace.gates[0, start:], weights[start:4]) and not trace.gates[0, :start].any()
    for change, says in (({"format_version": 2}, "format_version 2"), ({"format_version": np.ones(2)}, "version 1"),
                         ({"weights": {}}, "gates do not fit"),
                         ({"weights": {"data": payload["weights"]["data"][:-16]}}, "gates do not fit")):
        with pytest.raises(RoutingError, match=says):
            decode_routes(payload | change, layout=shape, tokens=range(5))
    for twice in (payload, packed(ids, weights, shape)):
        with pytest.raises(RoutingError, match="given twice"):
            decode_routes(twice, layout=shape, tokens=range(5), gates=weights)


@pytest.mark.parametrize("weight, says", [(np.nan, "expected finite"), (-0.1, "expected finite"), (0, "1e-06 or more")])
def test_packed_weights_that_cannot_be_are_refused(weight, says):
    shape = layout()
    ids = routes(4, shape)
    weights = weights_of(ids)
    weights[2, 1] = weight
    with pytest.raises(RoutingError, match=says):
        decode_routes(packed(ids, weights, shape), layout=shape, tokens=range(5))


def test_packed_weights_are_finite_before_they_are_looked_at():
    """What a diagnosis reads: of rows that nobody reported, the bits of -1 would be a NaN."""
    shape, ids = layout(), routes(4, layout())
    payload = packed(ids[2:], weights_of(ids)[2:], shape) | {"start": 2}
    read, weights = reported_routes(payload, layout=shape, tokens=range(5), any_k=True)
    assert (read[:2] == -1).all() and not weights[:2].any() and np.isfinite(weights).all()
    infinite = packed(ids, np.full_like(weights_of(ids), np.inf), shape)
    with pytest.raises(RoutingError, match="NaN or infinite"):
        reported_routes(infinite, layout=shape, tokens=range(5), any_k=True)


def test_twice_as_many_ids_are_not_taken_for_weights():
    shape = layout(experts=8, k=2)
    four = routes(4, layout(experts=8, k=4))
    with pytest.raises(RoutingError, match=r"shape \(4, 3, 4\)"):
        decode_routes(four, layout=shape, tokens=range(5))


def test_a_file_of_numpy_that_claims_to_be_a_giant_takes_no_room():
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (10**12, 5, 2)})
    with pytest.raises(RoutingError, match="cannot be read as one .*0 bytes are not"):
        decode_routes(b64(file.getvalue()), layout=layout(), tokens=range(5))


def test_an_empty_dtype_is_not_the_usual_one():
    ids = routes(4, layout())
    with pytest.raises(RoutingError, match="dtype ''"):
        decode_routes({"data": raw(ids, "int32"), "dtype": ""}, layout=layout(), tokens=range(5))


def test_damaged_payloads_and_files_are_refused_or_read_right():
    """A sample; `tests/benchmarks/fuzz_traces.py` takes a million."""
    found = fuzz(400, seed=5)
    refused = sum(count for what, count in found.items() if what.endswith("refused"))
    assert refused > 700 and sum(found.values()) == 800
