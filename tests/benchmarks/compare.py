"""Ours against TRL: alternating processes, median of the pairs' ratios.

python tests/benchmarks/compare.py --trl-python trl-env/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PHASES = ("sample", "score", "update", "step")


def run(python: str, script: str, *arguments: str) -> dict:
    """The JSON object that a benchmark script prints last."""
    path = os.pathsep.join(filter(None, (str(HERE.parent.parent), os.environ.get("PYTHONPATH"))))
    environment = os.environ | ({"PYTHONPATH": path} if script == "our_step.py" else {})
    command = [python, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {phase: statistics.median(seconds[phase]) for phase in PHASES if phase in seconds}


def table(title: str, rows: dict[str, list[dict[str, float]]]) -> None:
    print(f"\n{title}\n{'':12s}" + "".join(f"{phase:>9s}" for phase in PHASES))
    for name, pairs in rows.items():
        cells = [statistics.median(p[phase] for p in pairs) if phase in pairs[0] else None for phase in PHASES]
        print(f"{name:12s}" + "".join(f"{'':9s}" if cell is None else f"{cell:9.3f}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="Python of an environment that has TRL")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps per process, after 2 of warm-up")
    parser.add_argument("--shipped", action="store_true", help="TRL's own defaults instead of the tuned ones")
    options = parser.parse_args()
    steps = ("--steps", str(options.steps))
    ours, trl = [], []
    for pair in range(options.pairs):
        a = run(sys.executable, "our_step.py", *steps)
        b = run(options.trl_python, "trl_step.py", *steps, *(["--shipped"] if options.shipped else []))
        assert (a["new_tokens"], a["parameters"]) == (b["new_tokens"], b["parameters"]), (a, b)
        ours.append(medians(a["seconds"]["plain"]))
        trl.append(medians(b["seconds"]))
        mine, theirs = ours[-1]["step"], trl[-1]["step"]
        print(f"pair {pair + 1}: ours {mine:.3f}, trl {theirs:.3f} CPU-s, ratio {mine / theirs:.3f}", flush=True)
    ratios = [{p: a[p] / b[p] for p in PHASES} for a, b in zip(ours, trl, strict=True)]
    versions = ", ".join(f"{name} {version}" for name, version in b["versions"].items())
    table(f"CPU-seconds, medians of {options.pairs} pairs ({versions})", {"ours": ours, "trl": trl})
    table("ratio, median of the pairs", {"ours / trl": ratios})


if __name__ == "__main__":
    main()
