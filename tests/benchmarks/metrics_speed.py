"""Time and temporary memory of the routing metrics, of checked traces and of engines' payloads, per token.

    python tests/benchmarks/metrics_speed.py                       # 256 responses of 1,024 tokens, 48 layers, 8 of 128
    python tests/benchmarks/metrics_speed.py --experts 256 --layers 61 --rows 64

One thread. Prints for each function the best of some repetitions in microseconds of the processor per token, its ratio
to the floor of the machine, which is one pass over the bytes of two traces, and the peak of its temporaries in bytes
per token: what the process grew by at most, less what the function returned. Linux only. Below 3 GB in all.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_rl.integrations.vllm.payloads import decode_routes
from moe_rl.metrics.volatility import load_statistics, response_change, route_change
from moe_rl.routing import Layout, MoeLayer, RoutingTrace
from moe_rl.routing.ids import blocks

CHANGED = 0.1
"""Share of the (token, layer) pairs whose experts are others after the update."""


@dataclass(frozen=True)
class Case:
    """Two traces of the same tokens."""

    layout: Layout
    before: Tensor
    after: Tensor
    mask: Tensor

    @property
    def tokens(self) -> int:
        return self.mask.numel()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.empty(31 * 2**20, dtype=torch.uint8)  # from now on glibc keeps freed memory, as in a process that trains
    case = make_case(args.rows, args.time, args.layers, args.experts, args.top_k)
    print(
        f"{case.tokens} tokens in {args.rows} rows, {args.layers} layers, {args.top_k} of {args.experts} experts, "
        f"{case.before.dtype}"
    )
    floor, _ = measure(lambda: read_both(case), args.repeat)
    print(f"{'one pass over both traces':40} {floor / case.tokens * 1e6:6.2f} µs")
    for name, call in calls(case).items():
        seconds, grown = measure(call, args.repeat)
        print(
            f"{name:40} {seconds / case.tokens * 1e6:6.2f} µs {seconds / floor:6.1f} × {grown / case.tokens:8.1f} B",
            flush=True,
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--time", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_args()


def make_case(rows: int, time: int, layers: int, experts: int, k: int) -> Case:
    layout = Layout(tuple(MoeLayer(f"layers.{i}", i, experts, k) for i in range(layers)), "benchmark")
    generator = torch.Generator().manual_seed(0)
    some = torch.rand(4096, layers, experts, generator=generator).argsort(-1)[..., :k].to(layout.dtype)
    before = some.repeat(-(-rows * time // len(some)), 1, 1)[: rows * time]
    after = before.clone()
    for i in range(0, len(after), len(some)):
        part = after[i : i + len(some)]
        changed = torch.rand(part.shape[:2], generator=generator) < CHANGED
        part[changed] = some.roll(i + 7, 0)[: len(part)][changed]
    shape = (rows, time, layers, k)
    return Case(layout, before.view(shape), after.view(shape), torch.ones(rows, time, dtype=torch.bool))


def calls(case: Case) -> dict[str, Callable[[], Any]]:
    layout, tokens = case.layout, list(range(case.tokens + 1))
    before, after = (RoutingTrace.from_ids(ids, layout, check=False) for ids in (case.before, case.after))
    experts = max(moe_layer.num_experts for moe_layer in layout.moe_layers)
    reported = case.before.flatten(0, 1).numpy()
    flat = base64.b64encode(reported.tobytes()).decode()
    file = io.BytesIO()
    np.save(file, reported)
    npy = base64.b64encode(file.getvalue()).decode()
    wide = reported.astype(np.int32)
    return {
        "route_change": lambda: route_change(case.before, case.after, case.mask),
        "same_sets": lambda: before.same_sets(after),
        "load_statistics": lambda: load_statistics(case.before, experts, case.mask),
        "response_change": lambda: response_change(case.before, case.after, case.mask, experts),
        "from_ids(check=True)": lambda: RoutingTrace.from_ids(case.before, layout),
        "decode_routes, array": lambda: decode_routes(reported, layout=layout, tokens=tokens),
        "decode_routes, base64 of .npy": lambda: decode_routes(npy, layout=layout, tokens=tokens),
        "decode_routes, base64 of a buffer": lambda: decode_routes(
            flat, layout=layout, tokens=tokens, dtype=str(reported.dtype)
        ),
        "decode_routes, int32 array": lambda: decode_routes(wide, layout=layout, tokens=tokens),
    }


def read_both(case: Case) -> None:
    for at in blocks(*case.before.shape[:3]):
        torch.bitwise_xor(case.before[at], case.after[at])


def measure(call: Callable[[], Any], repeat: int) -> tuple[float, int]:
    """Seconds of the fastest call, and bytes by which the process grew in one, without those of the result."""
    best, libc = float("inf"), ctypes.CDLL(None)
    for _ in range(repeat):
        started = time.thread_time()
        call()
        best = min(best, time.thread_time() - started)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now
    before = resident("VmRSS")
    result = call()
    return best, max(0, resident("VmHWM") - before - size_of(result))


def resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def size_of(result: Any) -> int:
    tensors = (
        [result]
        if isinstance(result, Tensor)
        else [x for x in getattr(result, "__dict__", {}).values() if isinstance(x, Tensor)]
    )
    return sum(x.nbytes for x in tensors)


if __name__ == "__main__":
    main()
