"""Peak memory of `moe-rl diagnose`: over 250, 500, 1,000 short responses, and of a file of 1,000 × 4,000 tokens × 48
layers × 8 experts (2 GB).

    python tests/benchmarks/diagnose_memory.py
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from moe_rl.analysis.diagnose import diagnose
from moe_rl.analysis.diagnose.forwards import STATED, measure_agreement, score
from moe_rl.analysis.diagnose.responses import Rollouts
from moe_rl.analysis.diagnose.routes import Reported, find_faults
from moe_rl.analysis.diagnose.scopes import cast_to
from moe_rl.routing import layout_of
from tests.benchmarks.broken_engines import Engine
from tests.conftest import build


def peak(mode: str, *arguments: str) -> float:
    """Peak memory of this script in a process of its own, in MB."""
    words = [sys.executable, __file__, mode, *arguments]
    return float(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        short = Path(folder) / "short.jsonl"
        entries = Engine("qwen3_moe", count=64).honest()
        for count in (250, 500, 1000):
            with short.open("w") as out:
                for i in range(count):
                    out.write(json.dumps(entries[i % 64] | {"routes": entries[i % 64]["routes"].tolist()}) + "\n")
            print(count, "short responses, peak MB:", peak("short", str(short)), flush=True)
        wide, few = Path(folder) / "wide.jsonl", Path(folder) / "few.jsonl"
        began, lines = time.time(), [json.dumps(entry) + "\n" for entry in long_responses(4)]
        for file, count in ((few, 8), (wide, 1000)):
            with file.open("w") as out:
                out.writelines(lines[i % 4] for i in range(count))
        size = wide.stat().st_size / 1e9
        print(f"1000 × 4000 tokens × 48 × 8, {size:.1f} GB, made in {time.time() - began:.0f} s", flush=True)
        began = time.time()
        for more in ((), ("--forwards",)):
            used = peak("wide", str(wide), *more)
            print(
                f"read and held against as many unconstrained ones, {' '.join(more)} peak MB: {used}, "
                f"{time.time() - began:.0f} s",
                flush=True,
            )
        for looked_at in (1, 3):
            began = time.time()
            used = peak("deep", str(few), str(looked_at))
            print(f"{looked_at} of them diagnosed, peak MB: {used}, {time.time() - began:.0f} s", flush=True)


def deep_model() -> torch.nn.Module:
    """48 layers of 64 experts, top-8, as narrow as they come."""
    return build(
        "qwen3_moe",
        num_hidden_layers=48,
        num_experts=64,
        num_experts_per_tok=8,
        hidden_size=16,
        head_dim=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        moe_intermediate_size=8,
        intermediate_size=8,
        vocab_size=16,
        max_position_embeddings=4096,
    )


def long_responses(count: int) -> list[dict]:
    """Of that model itself, 4,000 tokens each, with its routes."""
    model, draw, entries = deep_model(), np.random.default_rng(0), []
    for _ in range(count):
        tokens = draw.integers(0, 16, 4000).tolist()
        entry = {"tokens": tokens, "prompt_length": 500, "logprobs": [-1.0] * 3500}
        scores = score(model, Rollouts([entry], layout_of(model), vocabulary=16).responses)
        ids = scores.routes[0].astype(np.uint8)
        routes = {"data": base64.b64encode(ids.tobytes()).decode(), "shape": ids.shape, "dtype": "uint8"}
        entries.append(entry | {"logprobs": scores.logprobs[STATED].tolist(), "routes": routes})
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=("all", "short", "wide", "deep"))
    parser.add_argument("file", nargs="?")
    parser.add_argument("responses", nargs="?", type=int, default=128)
    parser.add_argument("--forwards", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # as the command does
    torch.set_num_threads(1)
    if options.what == "all":
        memory()
        return
    if options.what == "short":
        diagnose(options.file, Engine("qwen3_moe").model)
    elif options.what == "deep":
        diagnose(options.file, deep_model(), responses=options.responses)
    else:  # what the routes of 128 take, with forwards of two of them alone: those of 128 take half an hour
        model = deep_model()
        layout = layout_of(model)
        read = Rollouts(options.file, layout, vocabulary=16).responses
        unconstrained = [r.ids.copy() for r in read]
        for dtype in (torch.float32, torch.bfloat16) if options.forwards else ():
            with cast_to(dtype)(model) as twin:
                score(twin, read[:2])
        find_faults(
            Reported(read, unconstrained, [], layout, float(measure_agreement(unconstrained, unconstrained).mean()))
        )
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


if __name__ == "__main__":
    main()
