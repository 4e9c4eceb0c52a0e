"""Traces of several calls and weight versions, cut for ranks, read from files in part."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moe_rl.errors import RoutingError
from moe_rl.routing import Layout, RoutingTrace, Site
from moe_rl.routing.trace_files import TraceFile
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
    assert whole.segments(0) == [(0, 4, "3"), (4, 8, "4")] and whole.weight_version is None
    assert "of 2 versions" in repr(whole)
    later = RoutingTrace.splice([new, old], tokens)  # the later prefill counts
    assert torch.equal(later.experts[0, :8], new.experts[0]) and later.segments(0) == [(0, 8, "4")]


def test_turns_with_tool_tokens_between_and_a_cached_prefix():
    """Turn 1 reads 0 … 3, samples 4. A tool writes 5, 6. Turn 2 has 0 … 3 in its cache, reads 4 … 8 and samples 9."""
    tokens = torch.arange(10)[None]
    first, second = called(tokens, 0, 5, "7", 0), called(tokens, 4, 10, "7", 1)
    whole = RoutingTrace.splice([first, second], tokens)
    assert whole.weight_version == "7" and whole.version_index is None and whole.segments(0) == [(0, 9, "7")]
    assert torch.equal(whole.experts[0, :4], first.experts[0])
    assert torch.equal(whole.experts[0, 4:9], second.experts[0, 4:])
    gap = RoutingTrace.splice([first, called(tokens, 6, 10, "8", 1)], tokens)
    assert gap.segments(0) == [(0, 4, "7"), (6, 9, "8")] and not gap.known[0, 4:6].any()


def test_gates_come_with_their_ids():
    tokens = torch.arange(9)[None]
    parts = [replace(p, gates=torch.full(p.shape, w)) for p, w in ((called(tokens, 0, 5, "3", 0), 0.25),
                                                                  (called(tokens, 0, 9, "4", 1), 0.75))]
    whole = RoutingTrace.splice(parts, tokens)
    assert whole.gates[0, :, 0, 0].tolist() == [0.25] * 4 + [0.75] * 4 + [0]
    with pytest.raises(RoutingError, match="traces 0 and 1 .* are replayed by different rules"):
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
        said = [version for start, end, version in whole.segments(0) if start <= t < end]
        if mine is None:
            assert not whole.known[0, t].any() and said == []
        else:
            assert torch.equal(whole.experts[0, t], mine.experts[0, t]) and said == [mine.weight_version]


def test_parts_of_other_tokens_or_models_cannot_be_spliced():
    tokens = torch.arange(9)[None]
    old = called(tokens, 0, 5, "3", 0)
    with pytest.raises(RoutingError, match="trace 1 is of other tokens"):
        RoutingTrace.splice([old, called(tokens + 1, 0, 9, "3", 0)], tokens)
    with pytest.raises(RoutingError, match="another model"):
        RoutingTrace.splice([old, random_trace(batch=1, time=5, sites=2)], tokens)
    with pytest.raises(RoutingError, match="no traces to join"):
        RoutingTrace.splice([], tokens)


def test_rows_of_several_versions_make_a_batch_where_they_may():
    rows = random_trace(batch=3, lengths=[5, 3, 2])
    tokens, mask = rows.tokens, rows.attention_mask
    one, two, three = (replace(rows.rows(slice(b, b + 1), n), weight_version=v)
                       for b, n, v in ((0, 4, "3"), (1, 2, "4"), (2, 1, "3")))
    with pytest.raises(RoutingError, match="mixed=True"):
        RoutingTrace.cat([one, two, three], tokens, mask)
    whole = RoutingTrace.cat([one, two, three], tokens, mask, mixed=True)
    assert [whole.segments(b) for b in range(3)] == [[(0, 4, "3")], [(0, 2, "4")], [(0, 1, "3")]]
    assert whole.rows(torch.tensor([1])).segments(0) == [(0, 2, "4")]
    left = whole.align(mask.flip(1))
    assert left.segments(1) == [(2, 4, "4")] and left.align(mask).segments(1) == [(0, 2, "4")]
    again = RoutingTrace.cat([whole], tokens, mask)  # of one and the same versions
    assert again.versions == ("3", "4") and again.segments(1) == [(0, 2, "4")]
    other = RoutingTrace.cat([replace(one, weight_version="9"), whole.rows(torch.tensor([1, 2]))], tokens, mask,
                             mixed=True)  # fmt: skip
    assert [other.segments(b) for b in range(3)] == [[(0, 4, "9")], [(0, 2, "4")], [(0, 1, "3")]]


# ---------------------------------------------------------------------- ranks
def whole_trace(batch=5, time=12, **kwargs):
    trace = random_trace(batch=batch, time=time, lengths=[time, 9, 4, 7, 1][:batch], **kwargs)
    versions = torch.where(trace.known.any(-1), torch.arange(time).gt(4).long(), -1).short()
    return replace(trace, gates=torch.rand(trace.shape), weight_version=None, versions=("a", "b"),
                   version_index=versions)


def same(a, b):
    return a == b and torch.equal(a.tokens, b.tokens) and torch.equal(a.gates, b.gates) \
        and [a.segments(i) for i in range(len(a.experts))] == [b.segments(i) for i in range(len(b.experts))]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shards_of_rows_and_of_blocks_of_tokens_are_the_whole_again(world):
    trace = whole_trace()
    rows = [trace.shard(r, world) for r in range(world)]
    assert same(RoutingTrace.cat(rows, trace.tokens, trace.attention_mask), trace)
    columns = [trace.shard(r, world, "tokens") for r in range(world)]
    assert torch.equal(torch.cat([c.experts for c in columns], 1), trace.experts)
    assert torch.equal(torch.cat([c.version_index for c in columns], 1), trace.version_index)


@pytest.mark.parametrize("world, time", [(1, 12), (2, 12), (3, 12), (2, 10), (4, 13)])
def test_zigzag_is_megatrons_cut(world, time):
    """Megatron-core views a sequence as 2 · world blocks and gives a rank the blocks rank and 2 · world - rank - 1."""
    trace = whole_trace(time=time)
    padded = -(-time // (2 * world)) * 2 * world
    experts = torch.nn.functional.pad(trace.experts, (0, 0, 0, 0, 0, padded - time), value=255)
    for rank in range(world):
        blocks = experts.view(5, 2 * world, padded // (2 * world), 3, 2)
        theirs = blocks.index_select(1, torch.tensor([rank, 2 * world - rank - 1])).flatten(1, 2)
        mine = trace.shard(rank, world, "zigzag")
        assert torch.equal(mine.experts, theirs)
        assert mine.attention_mask.shape == theirs.shape[:2] and not mine.known[~mine.attention_mask].any()


def test_stages_of_a_pipeline_get_the_layers_that_are_theirs():
    """By hand: layers 1, 2, 4, 5 of 6 route; three stages have 0-1, 2-3 and 4-5."""
    sites = (Site(f"layers.{i}.gate", i, 300 if i < 4 else 8, 3 if i == 1 else 2) for i in (1, 2, 4, 5))
    shape = Layout(tuple(sites), "x")
    ids = torch.tensor([[[5, 299, 7], [1, 2, -1], [3, 4, -1], [-1, -1, -1]]])[None]
    trace = RoutingTrace.from_ids(ids, shape)
    parts = [trace.shard(r, 3, "layers") for r in range(3)]
    assert [p.ids()[0, 0].tolist() for p in parts] == [[[5, 299, 7]], [[1, 2]], [[3, 4], [-1, -1]]]
    assert [p.layout.dtype for p in parts] == [torch.int16, torch.int16, torch.uint8]
    assert [[s.decoder_layer for s in p.layout.sites] for p in parts] == [[1], [2], [4, 5]]
    with pytest.raises(RoutingError, match="6 decoder layers cannot be cut into 4 equal stages"):
        trace.shard(0, 4, "layers")
    with pytest.raises(RoutingError, match="stage 3 of 4 has layers 6 to 7, which have no router"):
        trace.shard(3, 4, "layers", num_layers=8)


def test_a_shard_lets_the_whole_go():
    trace = whole_trace(batch=4)
    for by in ("rows", "tokens", "zigzag", "layers"):
        part = trace.shard(0, 3 if by == "layers" else 2, by)
        assert part.experts.untyped_storage().nbytes() == part.experts.nbytes < trace.experts.nbytes
        assert part.gates.untyped_storage().nbytes() == part.gates.nbytes
    with pytest.raises(RoutingError, match="rank=2 must be from 0 to 1"):
        trace.shard(2, 2)
    with pytest.raises(RoutingError, match="by='experts': cut by rows, tokens, zigzag, layers"):
        trace.shard(0, 2, "experts")


# ---------------------------------------------------------------------- files
@pytest.mark.parametrize("experts", [8, 255, 256, 257, 600])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_versions_weights_and_validity_come_back_from_a_file(tmp_path, experts, dtype):
    trace = whole_trace(experts=experts)
    hole = torch.rand(trace.shape[:3], generator=torch.Generator().manual_seed(1)) < 0.8
    trace = replace(trace.only(hole), gates=trace.gates.to(dtype) * trace.attention_mask[..., None, None])
    trace.save(tmp_path / "t")
    back = RoutingTrace.load(tmp_path / "t")
    assert same(back, trace) and back.gates.dtype == dtype and back.experts.dtype == trace.experts.dtype


@pytest.mark.parametrize("experts", [8, 256])
@quick
@given(rows=st.tuples(st.integers(0, 5), st.integers(0, 5)), columns=st.tuples(st.integers(0, 12), st.integers(0, 12)),
       sites=st.sampled_from([(0, 3), (0, 1), (1, 3)]))  # fmt: skip
def test_a_part_of_a_file_is_that_part(tmp_path_factory, experts, rows, columns, sites):
    path = tmp_path_factory.mktemp("part") / "t"
    trace = whole_trace(experts=experts)
    trace.save(path)
    (a, b), (c, d) = sorted(rows), sorted(columns)
    part = RoutingTrace.load(path, rows=slice(a, b), columns=slice(c, d), sites=slice(*sites))
    mask = trace.attention_mask[a:b, c:d]
    assert torch.equal(part.experts, trace.experts[a:b, c:d, slice(*sites)])
    assert torch.equal(part.gates[mask], trace.gates[a:b, c:d, slice(*sites)][mask])
    assert torch.equal(part.version_index, trace.version_index[a:b, c:d])
    assert torch.equal(part.tokens, trace.tokens[a:b, c:d]) and torch.equal(part.attention_mask, mask)
    assert part.layout.sites == trace.layout.sites[slice(*sites)]


def test_a_part_is_read_without_the_rest(tmp_path, monkeypatch):
    """Of 50 rows of 200 tokens the file hands out two."""
    whole = random_trace(batch=50, time=200)
    whole.save(tmp_path / "t")
    read, tensor = [], TraceFile.tensor

    def counting(self, *args):
        read.append(tensor(self, *args))
        return read[-1]

    monkeypatch.setattr(TraceFile, "tensor", counting)
    part = RoutingTrace.load(tmp_path / "t", rows=slice(7, 9), sites=slice(1, 2))
    assert part.experts.shape == (2, 200, 1, 2) and torch.equal(part.experts, whole.experts[7:9, :, 1:2])
    assert sum(x.nbytes for x in read) == 50 * 200 + 2 * 200 * (2 + 4)  # the padding, ids and tokens
    with pytest.raises(RoutingError, match="slices with a step"):
        RoutingTrace.load(tmp_path / "t", rows=slice(0, 9, 2))


@pytest.mark.parametrize("experts", [255, 256, 257])
def test_sites_that_use_fewer_slots_come_back_as_they_were(tmp_path, experts):
    layout = Layout((Site("l0", 0, experts, 1), Site("l1", 1, experts, 2)), "x")
    last = experts - 1
    ids = torch.tensor([[[[3, -1], [5, 7]], [[last, -1], [last, 0]], [[-1, -1], [2, last]]]])
    trace = RoutingTrace.from_ids(ids, layout, tokens=torch.tensor([[1, 2, 3]]))
    trace.save(tmp_path / "t.safetensors")
    assert RoutingTrace.load(tmp_path / "t.safetensors") == trace
    assert RoutingTrace.load(tmp_path / "t.safetensors", sites=slice(1, 2)).ids().tolist() == ids[:, :, 1:].tolist()


@pytest.mark.parametrize("experts, per_id", [(128, 1), (255, 1), (256, 1.05), (257, 2)])
def test_ids_take_a_byte_each(tmp_path, experts, per_id):
    """48 layers, 8 experts per token, rows of unequal length, the last token of each unknown: bytes as stated, and at
    most 1.05 per id for the whole file up to 256 experts."""
    shape = Layout(tuple(Site(f"l{i}", i, experts, 8) for i in range(48)), "qwen")
    lengths = torch.tensor([400, 310, 275, 390])
    mask = torch.arange(400) < lengths[:, None]
    ids = (torch.randint(experts, (4, 400, 48, 1)) + 3 * torch.arange(8)) % experts
    ids[~(torch.arange(400) < lengths[:, None] - 1)] = -1
    trace = RoutingTrace.from_ids(ids, shape, tokens=torch.zeros(4, 400, dtype=torch.int), attention_mask=mask)
    trace.save(tmp_path / "t")
    count = int(lengths.sum()) * 48 * 8
    with open(tmp_path / "t", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    stored = {name: np.diff(entry["data_offsets"])[0] for name, entry in header.items() if name != "__metadata__"}
    assert count * min(per_id, 2) * 0.95 <= stored["experts"] + stored.get("known", 0) <= count * per_id
    assert (tmp_path / "t").stat().st_size <= 1.05 * max(1, round(per_id)) * count
    assert RoutingTrace.load(tmp_path / "t") == trace


def test_a_small_file_that_unpacks_to_a_giant_is_refused(tmp_path):
    shape = Layout(tuple(Site(f"l{i}", i, 8, 8) for i in range(500)), "wide")
    empty = RoutingTrace(torch.zeros(1, 0, 500, 8, dtype=torch.uint8), torch.zeros(1, 0, dtype=torch.bool), shape)
    trace = replace(empty, attention_mask=torch.zeros(1000, 1000, dtype=torch.bool),
                    experts=torch.empty(1, dtype=torch.uint8).expand(1000, 1000, 500, 8))
    trace.save(tmp_path / "t")
    with pytest.raises(RoutingError, match="needs 4,000,000,000 bytes.*Load it in parts"):
        RoutingTrace.load(tmp_path / "t")
    assert RoutingTrace.load(tmp_path / "t", rows=slice(0, 1), sites=slice(3)).shape == (1, 1000, 3, 8)


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_earlier_version_names_the_release_that_reads_it(tmp_path, version):
    save_file({"experts": torch.zeros(3, 2, 2)}, tmp_path / "t", metadata={"moe_rl_trace": str(version)})
    says = rf"format {version} of an earlier version. Read it with moe_rl 0\.1\.0"
    for read in (RoutingTrace.load, RoutingTrace.load_beside):
        with pytest.raises(RoutingError, match=says):
            read(tmp_path / "t")


def test_a_file_without_sums_is_refused(tmp_path):
    """As a newer format would be that somebody calls format 3."""
    save_file({"experts": torch.zeros(3, 2, 2)}, tmp_path / "t", metadata={"moe_rl_trace": "3"})
    with pytest.raises(RoutingError, match="not a readable"):
        RoutingTrace.load(tmp_path / "t")


@pytest.mark.parametrize("gates, says", [
    (float("nan"), "expected finite"), (-0.5, "expected finite"), (0.0, "gate weights"),
])
def test_combine_weights_that_cannot_be_are_refused(tmp_path, gates, says):
    trace = replace(random_trace(), gates=torch.full(random_trace().shape, 0.5))
    trace.gates[1, 2, 0] = gates
    trace.save(tmp_path / "t")
    with pytest.raises(RoutingError, match=says):
        RoutingTrace.load(tmp_path / "t")


def test_a_version_that_is_no_text_is_not_written(tmp_path):
    trace = random_trace()
    object.__setattr__(trace, "weight_version", 5)  # as where types are not checked
    with pytest.raises(RoutingError, match="a weight version has type int: 5. Use a text"):
        trace.save(tmp_path / "t")
    assert not (tmp_path / "t").exists(), "it could not be read"


def test_unused_slots_of_a_file_hold_nothing(tmp_path):
    shape = Layout((Site("a", 0, 4, 1), Site("b", 1, 8, 2)), "mixed")
    good, bad = (torch.tensor([[[[3, unused], [5, 0]]]]) for unused in (-1, 2))
    RoutingTrace.from_ids(good, shape).save(tmp_path / "good", {"x": torch.ones(1, 1, dtype=torch.bfloat16)})
    assert torch.equal(RoutingTrace.load(tmp_path / "good").ids(), good)
    assert RoutingTrace.load_beside(tmp_path / "good")["x"].dtype == torch.bfloat16
    RoutingTrace.from_ids(bad, shape).save(tmp_path / "bad")
    with pytest.raises(RoutingError, match="a uses 1 slots, but other slots contain ids too"):
        RoutingTrace.load(tmp_path / "bad")


def test_what_lies_beside_a_trace_is_held_against_its_sums_and_a_damaged_file_is_named(tmp_path):
    trace, file = random_trace(), tmp_path / "trace"
    trace.save(file, {"x": torch.full(trace.shape[:2], 0.123)})
    written = file.read_bytes()
    for damaged in (written.replace(torch.tensor(0.123).numpy().tobytes(), bytes(4), 1), written[:-9], b""):
        assert damaged != written
        file.write_bytes(damaged)
        with pytest.raises(RoutingError, match=f"{file} is not a readable routing trace"):
            RoutingTrace.load_beside(file)
    with pytest.raises(RoutingError, match="no trace file at"):
        RoutingTrace.load_beside(tmp_path / "none")
