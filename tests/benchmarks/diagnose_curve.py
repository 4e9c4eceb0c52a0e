"""The operating curve of `moe-rl diagnose`: honest and faulty files by kind, engine dtype and seed.

    python tests/benchmarks/diagnose_curve.py --seeds 0:2                     # every kind, one file per seed and dtype
    python tests/benchmarks/diagnose_curve.py --honest 150 --seeds 0:0        # 600 files of 150 honest engines
    python tests/benchmarks/diagnose_curve.py --speed                         # CPU time of 1,000 responses

Seeds below 1000 calibrate thresholds; the tables of docs/diagnose.md are of seeds from 1000 on, looked at once.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict

import torch

from moe_rl.analysis.diagnose import Diagnosis, diagnose
from tests.analysis.engine_files import FAULTS, STRANGE, UNKNOWN, Engine, File, make_file, make_honest_files

DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
VAGUE = {"unexplained", "routing", "combine_weights", "rounding", "dtype"}


def judge(found: Diagnosis, cause: str) -> str:
    """named, near (among others or as equally good), wrong, unexplained, nothing to mend; of an honest file ok or
    false alarm. A fault within twice the rounding that is called rounding is hidden."""
    if not cause:
        return "false alarm" if found.fault else "ok"
    if cause == UNKNOWN and found.fault:
        return UNKNOWN if set(found.causes) <= VAGUE else "wrong"
    if found.causes[:1] == (cause,) and not found.equally:
        return "named"
    if cause in found.causes or any(cause in x.split("+") for x in found.equally):
        return "near"
    if not found.fault:
        natural, _, rounding = found.fits[:3]
        return "nothing to mend" if natural.mean > 2 * rounding.mean else "hidden"
    return UNKNOWN if set(found.causes) <= VAGUE else "wrong"


def report(kind: str, seed: int, dtype: str, file: File, tables: dict[str, Counter[str]]) -> None:
    found = diagnose(file.entries, file.model, tokenizer=file.tokenizer, also=file.also)
    verdict = judge(found, file.cause)
    group = "honest" if not file.cause else "no hypothesis" if file.cause == UNKNOWN else "listed"
    tables[f"{group}, {dtype}"][verdict] += 1
    tables[f"{kind}: {dtype}"][verdict] += 1
    fits = {f.name: f for f in found.fits}
    base, rounding = found.fits[0], found.fits[2]
    rungs = [f"{n[7:]} {f.distance.mean() / max(base.distance.mean(), 1e-12):.2f} {f.nearer.mean():+.2f}"
             for n, f in fits.items() if n.startswith("all in ") and "matrices" not in n]
    best = sorted((x[0], n) for n, x in found.left.items() if "forced" not in n)[:2]
    print(kind, seed, dtype, type(file.model).__name__[:8], f"n={found.responses}/{found.tokens}", verdict,
          "+".join(found.causes) + "".join(f" or {x}" for x in found.equally),
          f"KL {base.mean:.2g} = {base.mean / max(rounding.mean, 1e-12):.2g} x",
          f"d {base.distance.mean() / max(rounding.distance.mean(), 1e-12):.2g} x", *rungs,
          "; ".join(f"{n} {100 * x:.2g}%" for x, n in best), sep="\t", flush=True)


def measure_speed() -> None:
    """CPU time of 1,000 responses of a tiny model: an honest engine, one in bfloat16, one with other weights."""
    for name, dtype, made in (("honest", None, "honest"), ("rounding", torch.bfloat16, "honest"),
                              ("unexplained", None, "weight_version")):
        engine = Engine("qwen3_moe", 1000, 0, dtype, 1)
        entries, began = getattr(engine, made)(), time.process_time()
        found = diagnose(entries, engine.model, tokenizer=engine.tokenizer, responses=1000)
        print(name, found.causes, f"{found.responses} responses, {len(found.fits)} rows, "
              f"{time.process_time() - began:.0f} s of CPU", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1", help="from:to, of the faults")
    parser.add_argument("--honest", type=int, default=0, help="honest engines, of the seeds from the first on")
    parser.add_argument("--kinds", default=",".join((*FAULTS, *STRANGE)))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--speed", action="store_true", help="nothing but the CPU time of 1,000 responses")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.speed:
        return measure_speed()
    low, high = map(int, options.seeds.split(":"))
    tables: dict[str, Counter[str]] = defaultdict(Counter)
    for seed in range(low, high):
        for kind in filter(None, options.kinds.split(",")):
            for dtype in options.dtypes.split(","):
                report(kind, seed, dtype, make_file(kind, seed, DTYPES[dtype]), tables)
    for n in range(low, low + options.honest):  # a sixth of the trainers is in bfloat16, as is its engine then
        dtype, trainer = list(DTYPES)[n % 3], torch.bfloat16 if n % 6 == 4 else None
        for file in make_honest_files(n, DTYPES[dtype], trainer):
            report("honest", n, dtype if trainer is None else "both bfloat16", file, tables)
    columns = ("ok", "false alarm", "named", "near", UNKNOWN, "wrong", "nothing to mend", "hidden")
    print("\n| files |", " | ".join(columns), "|\n|" + "---|" * (1 + len(columns)))
    for name, row in sorted(tables.items(), key=lambda item: (":" in item[0], item[0])):
        if ":" not in name or row.keys() - {"ok", "named"}:  # of single kinds those with something else
            print(f"| {name} |", " | ".join(str(row[c]) for c in columns), "|")
    print(f"{time.process_time():.0f} s of CPU")


if __name__ == "__main__":
    main()
