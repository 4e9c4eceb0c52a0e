"""Whether the package still computes what an earlier commit of it computes: `make test-refactoring`.

Reruns the first steps of ROWS of the committed tables twice, in a worktree of BASE and in this tree, and compares every
value and the final weights, bit for bit. What BASE gives is kept in `.cache/refactoring`, by machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[2]
RENAMED = json.loads(Path(__file__).with_name("renamed.json").read_text())
"""`columns`: old to new names of columns and tables; `folders`: of folders in the path of a row."""
BASE = Path(__file__).with_name("base.txt").read_text().strip()
STEPS = 3
ROWS = [
    "routing_replay/grpo-replay/volatile/seed=0",
    "volatility_dial/gspo/dial.form=weights,dial.sigma=2/seed=200",
    "volatility_dial/grpo-replay/dial.form=choice,dial.sigma=2/seed=200",
    "lag/sat-r3/lag=8/seed=400",
    "lag/m2po/lag=2/seed=400",
    "stabilisers/mis/mismatch/seed=300",
    "stabilisers/clip-cov/dial-further/seed=300",
    "stabilisers/gmpo/quiet/seed=300",
    "flip_effects/grpo/k=4/seed=400",  # with a trainer of its own
    "gradient_quality/grpo/base/seed=34",  # with a trainer of its own
    "why_gspo/random-mask/base/seed=40",  # with a loss of its own
    "engine_mismatch/grpo-r3/base/seed=1",
    "many_turns/grpo-turn/base/seed=400",
    "placebos/shuffled/base/seed=40",
]


def machine() -> str:
    """The same text on machines that give the same bits, as far as Linux tells."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    named = [line for line in lines if line.startswith(("model name", "flags"))]
    return hashlib.sha256("\n".join(named).encode()).hexdigest()[:10]


def rerun(tree: Path, row: str, out: Path) -> Path:
    """The folder of a row's first steps, as the code of `tree` makes it from the tables there."""
    found = out / row
    if not (found / "manifest.json").exists() or "finished" not in json.loads((found / "manifest.json").read_text()):
        command = [sys.executable, "-m", "moe_rl", "rerun", f"studies/results/{row}", "--steps", str(STEPS), "--trust",
                   "--jobs", "1", "--out", str(out)]
        environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'studies'}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{row} in {tree} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return found


def differences(before: Path, now: Path) -> list[str]:
    """What is not equal between two folders of one run."""
    found = []
    then, here = (json.loads((folder / "manifest.json").read_text())["checkpoint"] for folder in (before, now))
    if then != here:
        found.append(f"weights and optimizer state: {then[:10]} before, {here[:10]} now")
    for file in sorted(before.glob("*.parquet")):
        a = pd.read_parquet(file).rename(columns=RENAMED["columns"])
        other = now / f"{RENAMED['columns'].get(file.stem, file.stem)}.parquet"
        if not other.exists():
            found.append(f"the table {file.stem} is not there now")
            continue
        b = pd.read_parquet(other)
        for column in a:
            if "seconds" in column or column == "memory_peak_mb" or column in RENAMED["dropped"]:
                continue
            if column not in b:
                found.append(f"{file.stem}.{column} is not there now")
            elif not a[column].equals(b[column].astype(a[column].dtype)):
                found.append(f"{file.stem}.{column}: {a[column].tolist()[:4]} before, {b[column].tolist()[:4]} now")
    return found


def main() -> None:
    home = ROOT / ".cache" / "refactoring"
    tree = home / "tree"
    if not tree.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), BASE], cwd=ROOT, check=True)
    subprocess.run(["git", "checkout", "--quiet", "--detach", BASE], cwd=tree, check=True)
    state = subprocess.run(["git", "stash", "create"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    old, new = home / machine() / BASE[:10], home / machine() / f"{head[:10]}{state[:10]}"
    rows = [row for row in ROWS if not sys.argv[1:] or any(word in row for word in sys.argv[1:])]

    def check(row: str) -> bool:
        renamed = "/".join(RENAMED["folders"].get(part, part) for part in row.split("/"))
        found = differences(rerun(tree, row, old), rerun(ROOT, renamed, new))
        print("\n  ".join([f"{'DIFFERENT' if found else 'equal    '} {row}", *found[:8]]), flush=True)
        return not found

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        equal = list(pool.map(check, rows))
    print(f"{sum(equal)} passed, {len(equal) - sum(equal)} failed")
    sys.exit(not all(equal))


if __name__ == "__main__":
    main()
