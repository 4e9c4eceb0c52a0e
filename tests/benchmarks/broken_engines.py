"""Every broken engine in every family, honest files by the hundred, and what a large file costs.

    python tests/benchmarks/broken_engines.py faults           # 20 faults × 4 families: named, not named, wrongly
    python tests/benchmarks/broken_engines.py honest --files 200
    python tests/benchmarks/broken_engines.py memory           # peak over 250, 500, 1,000 responses; one large file

Prints a line each, and the counts.
"""

from __future__ import annotations

import argparse
import base64
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from moe_rl.compare.diagnose import diagnose
from moe_rl.compare.diagnose.ladder import agreement
from moe_rl.compare.diagnose.reported import Reported
from moe_rl.compare.diagnose.responses import Rollouts
from moe_rl.compare.diagnose.signatures import findings
from moe_rl.routing import Layout, Site
from tests.compare.broken_engines import ALSO, FAULTS, Bench, expected, possible

FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral")


def faults(families: tuple[str, ...], seed: int) -> None:
    counts: Counter[str] = Counter()
    for family in families:
        bench = Bench(family, seed=seed)
        for fault in FAULTS:
            if possible(fault, bench):
                also = {"older": bench.older()} if fault in ALSO else None
                found = diagnose(getattr(bench, fault)(), bench.model, tokenizer=bench.tokenizer, also=also)
                wanted = expected(fault, bench)
                silent = ((), ("rounding",), ("unexplained",), ("routing",))
                what = "not named" if found.causes in silent else "named wrongly"
                what = "named" if found.causes[:1] == (wanted,) else what
                counts[what] += 1
                print(family, fault, what, *found.causes, *(f"or {x}" for x in found.equally), sep="\t", flush=True)
    print(dict(counts))


def honest(files: int, start: int) -> None:
    """Families, dtypes of engine and trainer, temperatures and numbers of responses in turn."""
    alarms = 0
    for n in range(start, start + files):
        family, half = FAMILIES[n % 4], (None, torch.bfloat16)[n // 4 % 2]
        bench = Bench(family, count=2 + n % 7, seed=n, dtype=half)
        entries = bench.honest(temperature=(1.0, 0.7, 1.3)[n % 3])
        trainer = bench.engine() if half and n // 8 % 2 else bench.model  # bfloat16 against bfloat16, and float32
        if n % 5 == 0:
            entries = [{k: v for k, v in e.items() if k != "routes"} for e in entries]
        found = diagnose(entries, trainer, tokenizer=bench.tokenizer)
        alarms += found.fault
        print(n, family, half, next(trainer.parameters()).dtype, len(entries), found.causes,
              f"{found.rungs[0].mean:.2g}", *(found.verdict,) * found.fault, sep="\t", flush=True)
    print(f"{alarms} false alarms on {files} honest files")


def peak(mode: str, *arguments: str) -> float:
    """Peak memory of this script in a process of its own, in MB."""
    words = [sys.executable, __file__, mode, *arguments]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1])


def memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        short = Path(folder) / "short.jsonl"
        entries = Bench("qwen3_moe", count=64).honest()
        for count in (250, 500, 1000):
            with short.open("w") as out:
                for i in range(count):
                    out.write(json.dumps(entries[i % 64] | {"routes": entries[i % 64]["routes"].tolist()}) + "\n")
            print(count, "short responses, peak MB:", peak("short", str(short)), flush=True)
        wide = Path(folder) / "wide.jsonl"
        draw, began = np.random.default_rng(0), time.time()
        lines = []
        for _ in range(4):
            ids = np.argsort(draw.random((3999, 1, 64), dtype=np.float32), -1)[..., :8].astype(np.uint8)
            ids = np.repeat(ids, 48, 1)
            data = {"data": base64.b64encode(ids.tobytes()).decode(), "shape": ids.shape, "dtype": "uint8"}
            lines.append(json.dumps({"tokens": [1] * 4000, "prompt_length": 500, "logprobs": [-1.0] * 3500,
                                     "routes": data}) + "\n")
        with wide.open("w") as out:
            out.writelines(lines[i % 4] for i in range(1000))
        size = wide.stat().st_size / 1e9
        print(f"1000 × 4000 tokens × 48 × 8, {size:.1f} GB, written in {time.time() - began:.0f} s", flush=True)
        began = time.time()
        used = peak("wide", str(wide))
        print(f"read and held against as many natural ones, peak MB: {used}, {time.time() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "honest", "memory", "short", "wide"))
    parser.add_argument("file", nargs="?")
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--start", type=int, default=0, help="first honest file, or the seed of the faults' models")
    parser.add_argument("--families", default=",".join(FAMILIES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "faults":
        faults(tuple(options.families.split(",")), options.start)
    elif options.what == "honest":
        honest(options.files, options.start)
    elif options.what == "memory":
        memory()
    elif options.what == "short":
        diagnose(options.file, Bench("qwen3_moe").model)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    else:  # what the routes alone take: a forward of 48 layers is the model's own affair
        sites = tuple(Site(f"model.layers.{i}.mlp.gate", i, 64, 8) for i in range(48))
        layout = Layout(sites, "wide-0")
        read = Rollouts(options.file, layout, vocabulary=10).responses
        natural = [r.ids.copy() for r in read]
        findings(Reported(read, natural, [], layout, agreement(natural, natural)))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


if __name__ == "__main__":
    main()
