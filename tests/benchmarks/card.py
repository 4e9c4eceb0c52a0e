"""Which card it is, and how long things take on it."""

from __future__ import annotations

import gc
import platform
import statistics
import subprocess
import time
from collections.abc import Callable

import torch
import transformers


def card(device: torch.device) -> str:
    """The device, and the versions that its numbers depend on."""
    versions = f"torch {torch.__version__}"
    if device.type == "cpu":
        return f"**Dry run on a CPU ({platform.machine()})**, {versions}: no number of it means anything"
    try:
        driver = (
            subprocess.run(
                ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                check=True,
            )
            .stdout.split("\n")[0]
            .strip()
        )
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown (no nvidia-smi)"
    found = torch.cuda.get_device_properties(device)
    return (
        f"**{found.name}**, {found.total_memory / 1e9:.0f} GB, driver {driver}, {versions}, CUDA "
        f"{torch.version.cuda}, transformers {transformers.__version__}"
    )


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Of one call, its kernels included."""
    if device.type == "cpu":
        start = time.perf_counter()
        action()
        return time.perf_counter() - start
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def median(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of a call; the first one warms up."""
    return statistics.median([seconds(action, device) for _ in range(repeats + 1)][1:])


def overhead(plain: Callable[[], object], more: Callable[[], object], device: torch.device, pairs: int) -> str:
    """Median and quartiles of more / plain - 1; neighbours in turns, the first two pairs warm up."""
    ratios = []
    for pair in range(pairs + 2):
        order = (plain, more) if pair % 2 else (more, plain)
        spent = {action: seconds(action, device) for action in order}
        ratios.append(100 * (spent[more] / spent[plain] - 1))
    low, middle, high = statistics.quantiles(ratios[2:], n=4)
    return f"{middle:+.2f} % ({low:+.2f} … {high:+.2f}; aim: at most 1 %)"


def matmul_rate(size: int, device: torch.device) -> float:
    """FLOP/s of a product of two bfloat16 matrices: what `share of the peak` is taken of."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median(lambda: [a @ b for _ in range(10)], device, 5) * 10


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
