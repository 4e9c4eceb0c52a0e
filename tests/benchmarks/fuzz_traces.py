"""Damaged payloads and trace files by the million: what is refused, what is accepted, and what that costs.

    python tests/benchmarks/fuzz_traces.py 1000000 --seed 0

Half are payloads in every form that `decode_routes` reads, half are files of `RoutingTrace.save`; each is damaged at
one to four places. Refused means a RoutingError, and nothing else may be raised. A payload has no sum, so a damaged one
may be another that is whole: what is accepted must be what a reader of its own, written with `struct` and lists alone,
finds in it, and a possible routing. A file has sums: what is accepted must be the trace that was saved.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import resource
import struct
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_rl.errors import RoutingError
from moe_rl.integrations.vllm.payloads import decode_routes
from moe_rl.routing import Layout, MoeLayer, RoutingTrace

LAYERS, TOKENS = (1, 2, 4), list(range(5))
CODES = {"uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "int32": "i", "int64": "q"}
HOSTILE = (
    None,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "uint8",
    "object",
    "<f4",
    b"",
    True,
    [],
    [[]],
    {},
    [10**9, 10**9, 10**9],
    [0, 0, 0],
    [-1, 5, 2],
    (4, 5),
    "4x5x2",
)


def layout(experts: int, k: int) -> Layout:
    return Layout(tuple(MoeLayer(f"layers.{i}.gate", i, experts, k) for i in LAYERS), "fuzzed")


# ---------------------------------------------------------------------- payloads
def payloads(rng: random.Random, experts: int, k: int) -> tuple[str, Any, dict]:
    """One honest payload: its form, itself, and what goes with it."""
    ids = [[[rng.sample(range(experts), k) if layer in LAYERS else [0] * k for layer in range(5)] for _ in range(4)]][0]
    if rng.random() < 0.2:
        ids[rng.randrange(4)] = [[-1] * k] * 5
    array, dtype = np.array(ids), "int16" if experts > 127 else rng.choice(("int8", "int16", "int32"))
    raw = base64.b64encode(array.astype(dtype).astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()
    form = rng.choice(("list", "array", "npy", "flat", "told", "packed", "apart", "beside"))
    if form == "list":
        return form, ids, {}
    if form == "array":
        return form, array.astype(dtype), {}
    if form == "npy":
        file = io.BytesIO()
        np.save(file, array.astype(dtype))
        return form, base64.b64encode(file.getvalue()).decode(), {}
    if form == "flat":
        return form, raw, {"dtype": dtype}
    if form == "told":
        return form, {"data": raw, "shape": [4, 5, k], "dtype": dtype, "start": 0}, {}
    weights = np.array(
        [[[rng.random() + 0.01 if layer in LAYERS else 0 for _ in range(k)] for layer in range(5)] for _ in range(4)],
        np.float32,
    )
    if form == "apart":
        data = {"data": base64.b64encode(weights.tobytes()).decode(), "dtype": "float32"}
        return form, ids, {"gates": rng.choice((data, weights, weights.tolist()))}
    if form == "beside":
        data = {"data": base64.b64encode(weights.tobytes()).decode(), "dtype": "float32"}
        return (
            form,
            {"data": raw, "shape": [4, 5, k], "dtype": dtype, "start": 0, "weights": data},
            {},
        )
    both = np.concatenate([array.astype(np.int32), weights.view(np.int32)], 2)
    data = base64.b64encode(both.tobytes()).decode()
    return form, {"data": data, "shape": [4, 5, 2 * k], "dtype": "int32", "start": 0}, {}


def damaged(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """The same with one thing wrong."""
    if depth > 6 or rng.random() < 0.08:
        return rng.choice(HOSTILE)
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: damaged(rng, value[key], depth + 1)}
    if isinstance(value, list | tuple) and value:
        at = rng.randrange(len(value))
        kind = rng.random()
        parts = list(value)
        if kind < 0.15:
            del parts[at]
        elif kind < 0.3:
            parts.insert(at, parts[at])
        else:
            parts[at] = damaged(rng, parts[at], depth + 1)
        return type(value)(parts)
    if isinstance(value, np.ndarray) and value.size:
        return damaged_array(rng, value)
    if isinstance(value, str) and value:
        try:
            if rng.random() < 0.6 and ":" not in value:
                return base64.b64encode(damaged_bytes(rng, base64.b64decode(value))).decode()
        except ValueError:
            pass
        return damaged_bytes(rng, value.encode()).decode("latin-1")
    if isinstance(value, bool | int):
        return rng.choice((value + 1, -value - 1, value ^ (1 << rng.randrange(40)), float(value), str(value)))
    return rng.choice(HOSTILE)


def damaged_array(rng: random.Random, array: np.ndarray) -> np.ndarray:
    kind = rng.randrange(5)
    if kind == 0:
        return array[: rng.randrange(len(array))]
    if kind == 1:
        return array.swapaxes(rng.randrange(array.ndim), rng.randrange(array.ndim))
    if kind == 2:
        kinds = ("float32", "uint8", "int64", "bool", "object") if array.dtype.kind in "iuf" else ("object",)
        return array.astype(rng.choice(kinds))
    if kind == 3:
        return array.reshape(-1)
    array = array.copy()
    if array.dtype != object:
        array.reshape(-1)[rng.randrange(array.size)] = np.array(rng.randrange(-120, 120)).astype(array.dtype)
    return array


def damaged_bytes(rng: random.Random, raw: bytes) -> bytes:
    kind, at = rng.randrange(6), rng.randrange(len(raw) or 1)
    if kind == 0:
        return raw[:at]
    if kind == 1:
        return raw[:at] + bytes([rng.randrange(256)]) + raw[at:]
    if kind == 2:
        return raw[:at] + raw[at + rng.randrange(1, 9) :]
    if kind == 3 and len(raw) >= 8:
        return raw[:at] + rng.randbytes(min(8, len(raw) - at)) + raw[at + 8 :]
    if kind == 4:
        return raw + rng.randbytes(rng.randrange(1, 9))
    return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :] if raw else b"\0"


# ---------------------------------------------------------------------- a reader of its own
def plainly(payload: Any, dtype: str, k: int) -> list[int]:
    """Every number in a payload, in order, without NumPy; weights as the bits they are."""
    if isinstance(payload, dict):
        data = payload.get("data") if payload.get("data") is not None else payload.get("routed_experts")
        told = payload.get("dtype") if payload.get("dtype") is not None else payload.get("routed_experts_dtype")
        return plainly(data, dtype if told is None else str(told), k)
    if isinstance(payload, str | bytes):
        raw = base64.b64decode(payload) if isinstance(payload, str) else payload
        if not raw.startswith(b"\x93NUMPY"):
            return list(struct.unpack(f"<{len(raw) // struct.calcsize(CODES[dtype])}{CODES[dtype]}", raw))
        size = struct.unpack("<H", raw[8:10])[0]
        header = raw[10 : 10 + size].decode("latin-1")
        code = header.split("'descr'")[1].split("'")[1]
        letter = {1: "b", 2: "h", 4: "i", 8: "q"}[int(code[2])]
        body = raw[10 + size :]
        order = ">" if code[0] == ">" else "<"
        letter = letter.upper() if code[1] == "u" else letter
        numbers = list(struct.unpack(f"{order}{len(body) // int(code[2])}{letter}", body))
        return numbers if "'fortran_order': False" in header else []  # a damaged word, and another order
    if isinstance(payload, np.ndarray):
        return [int(x) for x in payload.reshape(-1)]
    if isinstance(payload, list | tuple):
        return [number for part in payload for number in plainly(part, dtype, k)]
    return [int(payload)]


def require_plain(trace: RoutingTrace, payload: Any, more: dict, experts: int, k: int) -> None:
    """What was accepted is a possible routing, and what stands in the payload."""
    width = (
        2 * k
        if trace.gates is not None
        and "gates" not in more
        and not (isinstance(payload, dict) and payload.get("weights"))
        else k
    )
    ids = trace.ids()[0].tolist()
    said = (payload.get("start") or 0) if isinstance(payload, dict) else 0
    layouts = [(n, first, n * count) for n in (5, 3) for count, first in ((4 - said, said), (4, 0), (5, 0))]
    for dtype in [more["dtype"]] if more.get("dtype") else ["int32", "uint8", "uint16", "int64"]:  # else by its bytes
        if not (numbers := plainly(payload, dtype, k)):
            return
        rows = [numbers[i : i + width] for i in range(0, len(numbers), width)]
        if fits := [(n, first) for n, first, count in layouts if count == len(rows)]:
            layers, first = fits[0]
            break
    else:
        raise AssertionError(f"no dtype makes rows of {payload}")
    for t, token in enumerate(ids):
        for s, used in enumerate(token):
            if used[0] >= 0:
                assert len(set(used)) == k and all(0 <= e < experts for e in used), (used, payload)
            if t < first:
                assert used == [-1] * k, (t, payload)
                continue
            stated = rows[(t - first) * layers + (LAYERS[s] if layers == 5 else s)][:k]
            none = len(set(stated)) == 1 and stated[0] in (-1, 255, 65535) and not 0 <= stated[0] < experts
            assert used == ([-1] * k if none else stated), (t, s, used, stated, payload)
    if trace.gates is not None:
        gates = trace.gates[trace.known]
        assert bool(gates.isfinite().all()) and bool((gates >= 0).all()) and bool((gates.amax(-1) > 0).all()), payload


def one_payload(rng: random.Random) -> str:
    experts, k = rng.choice(((8, 2), (255, 2), (256, 2), (600, 3)))
    form, payload, more = payloads(rng, experts, k)
    for _ in range(rng.randrange(1, 5)):
        if "gates" in more and rng.random() < 0.5:
            more = more | {"gates": damaged(rng, more["gates"])}
        elif more.get("dtype") and rng.random() < 0.1:
            more = more | {"dtype": rng.choice((*CODES, "", "float32", "uint64", "<i4"))}
        else:
            payload = damaged(rng, payload)
    try:
        trace = decode_routes(payload, layout=layout(experts, k), tokens=TOKENS, **more)
    except RoutingError:
        return f"{form} refused"
    require_plain(trace, payload, more, experts, k)
    return f"{form} accepted"


# ---------------------------------------------------------------------- files
def honest_files(folder: Path) -> list[tuple[bytes, RoutingTrace]]:
    """Some of every kind: 1 and 2 bytes per id, with and without weights."""
    found = []
    for experts, k in ((8, 2), (256, 2), (600, 3)):
        for rich in (False, True):
            generator = torch.Generator().manual_seed(experts)
            mask = torch.tensor([[True] * 4, [True, True, False, False]])
            ids = torch.rand(2, 4, 3, experts, generator=generator).argsort(-1)[..., :k]
            ids[~mask] = -1
            ids[0, 3] = -1
            trace = RoutingTrace.from_ids(
                ids,
                layout(experts, k),
                tokens=torch.arange(8).view(2, 4) * mask,
                attention_mask=mask,
                weight_version="step 3",
            )
            if rich:
                one, two = trace.rows(slice(0, 1)), trace.rows(slice(1, 2))
                trace = RoutingTrace.cat([one, replace(two, weight_version="step 4")], trace.tokens, mask, mixed=True)
                gates = torch.rand(trace.shape, generator=generator) * mask[..., None, None]
                trace = replace(trace, keep=0.5, gates=gates)
            trace.save(folder / "honest")
            found.append(((folder / "honest").read_bytes(), trace))
    return found


def one_file(rng: random.Random, honest: list[tuple[bytes, RoutingTrace]], path: Path) -> str:
    raw, saved = rng.choice(honest)
    if rng.random() < 0.5:  # the header, where lengths, shapes and words are
        size = 8 + struct.unpack("<Q", raw[:8])[0]
        head, tail = raw[:size], raw[size:]
    else:
        head, tail = raw, b""
    if rng.random() < 0.2:  # another number or word, in a header of the right length
        head = reworded(rng, raw)[: len(raw) - len(tail)] if not tail else reworded(rng, raw[: len(head)])
    for _ in range(rng.randrange(1, 5)):
        head = damaged_bytes(rng, head)
    if head + tail == raw:
        return "file untouched"
    path.write_bytes(head + tail)
    try:
        found = RoutingTrace.load(path)
    except RoutingError:
        return "file refused"
    assert found == saved and torch.equal(found.tokens, saved.tokens), raw
    assert found.weight_version == saved.weight_version, raw
    return "file accepted, as it was saved"


def reworded(rng: random.Random, raw: bytes) -> bytes:
    """The header with another value somewhere, well formed."""
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    name = rng.choice(list(header))
    if name == "__metadata__":
        key = rng.choice(list(header[name]))
        header[name][key] = rng.choice(
            (
                "",
                "null",
                "-1",
                "2",
                "1e999",
                "[]",
                "{}",
                '["a"]',
                "[" * 2000,
                "9" * 30,
                header[name][key].replace("2", "1000000"),
                header[name][key].replace("8", "9"),
            )
        )
    else:
        key = rng.choice(list(header[name]))
        header[name][key] = rng.choice(
            (["U8", "F32", "I64", "BF16", "F8_E4M3"][rng.randrange(5)], [1, 1], [2**40, 2], [0, 2**50], [])
        )
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + size :]


def fuzz(count: int, seed: int) -> Counter[str]:
    """So many of each kind; what became of them. Raises whatever is neither refused nor right."""
    rng, found = random.Random(seed), Counter[str]()
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shared) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        honest = honest_files(Path(folder))
        for _ in range(count):
            found[one_payload(rng)] += 1
            found[one_file(rng, honest, Path(folder) / "damaged")] += 1
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, help="of payloads and files together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    fuzz(100, 0)
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what, number in sorted(fuzz(options.count // 2, options.seed).items()):
        print(f"{number:>9,} {what}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{time.perf_counter() - start:.0f} s; the process grew by {grown:.0f} MiB")
