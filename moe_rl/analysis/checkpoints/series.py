"""How far routing moved along a series of checkpoints: each compared with the one before it, and with the first.

Every pair is a comparison of its own, in `out/<i>-<j>`, which goes on where it was killed and is skipped when finished,
so that a series can grow. Its cost is two forwards of every text per pair of neighbours and one per pair with the
first, whose routes are kept until the end.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from moe_rl.analysis.checkpoints.measure import Comparison, identity, located, measure_volatility
from moe_rl.analysis.checkpoints.texts import check_file
from moe_rl.errors import ConfigError, RunError
from moe_rl.storage import folder as runs
from moe_rl.storage.lease import Lease
from moe_rl.storage.terminal import say

SERIES = "series.json"
WHOLE = "config.json"
"""What makes a folder a Hugging Face checkpoint."""


def checkpoints_of(name: str) -> list[str]:
    """A checkpoint itself, or those that a folder holds, by their step: of a run that saved some (`hf_checkpoints`), or
    of a trainer that writes `checkpoint-500` and the like. Raises ConfigError for the folder of a run without any, and
    for an empty one."""
    folder = Path(name).expanduser()
    if not folder.is_dir() or (folder / WHOLE).is_file():
        return [name]
    run = (folder / "manifest.json").exists()  # in its folder engine/ an engine finds the model's description
    places = (folder / "checkpoints",) if run else (folder / "checkpoints", folder)
    below = [file.parent for where in places for file in where.glob(f"*/{WHOLE}")]
    if not below and (run or not any(folder.iterdir())):
        raise ConfigError(f"{name} holds no checkpoint (looked at {folder.absolute()}): neither it, nor a folder in "
                          f"{'' if run else 'it or in '}its checkpoints/ has a {WHOLE}. A run saves some with --set "
                          "hf_checkpoints=(10,20).")
    if not below:  # a damaged checkpoint, or an adapter: whoever reads it says so
        return [name]
    return [str(path) for path in sorted(below, key=lambda path: (step_of(path.name) or 0, path.name))]


def step_of(name: str) -> int | None:
    """The number that the name of a checkpoint has after the word for a step, or ends with; None where there is none: a
    model's size is no step."""
    found = re.findall(r"(?:step|iter|iteration|update|epoch|checkpoint|ckpt)[-_=]?(\d+)|(\d+)$", Path(name).name)
    return int("".join(found[-1])) if found else None


def measure_series(
    checkpoints: Sequence[str], data: str, out: Path, *, console: Console | None = None, keep_traces: bool = False,
    settings: dict[str, Any], **where: Any,
) -> pd.DataFrame:
    """Compare neighbours, and all with the first; or go on with it. Returns the table `series`, which it writes into
    `out`: a row per checkpoint from the second on, `since` ("previous" or "first") and metric.

    `settings` are those of a `Comparison`, `where` further ones of `measure_volatility`. Raises as that does, and
    ConfigError for fewer than three checkpoints or one that comes twice.
    """
    names = [located(name) for name in checkpoints]
    if len(names) < 3 or len(set(names)) < len(names):
        raise ConfigError(f"a series is three checkpoints or more, each once, not {', '.join(names) or 'none'}")
    if out.exists() and any(file.name != runs.LEASE for file in out.iterdir()) and not (out / SERIES).exists():
        raise RunError(f"--out {out} has other files in it; give a folder that is new or empty.")
    with Lease(out / runs.LEASE):
        runs.write_json(out / SERIES, {"checkpoints": names, "data": located(data), **settings})
        console = console or Console(stderr=True)
        first = Comparison(names[0], names[0], located(data), **settings)
        shared = None if keep_traces else out / f".first-{_digest(first)}"
        rows = []
        for j in range(1, len(names)):
            for i in dict.fromkeys((0, j - 1)):
                pair = out / f"{i:02d}-{j:02d}"
                say(console, (pair.name, "bold"), f" {names[i]} → {names[j]}", wrap=True)
                frames = measure_volatility(Comparison(names[i], names[j], data, **settings), pair, console=console,
                                            keep_traces=keep_traces, shared=shared if i == 0 else None, **where)
                for since in ("first", "previous") if j == 1 else ("first" if i == 0 else "previous",):
                    place = {"index": j, "since": since, "step": step_of(names[j]), "checkpoint": names[j]}
                    rows.append(frames["summary"].assign(**place))
        for folder in out.glob(".first-*"):  # what was kept of others, too
            shutil.rmtree(folder, ignore_errors=True)
    table = pd.concat(rows, ignore_index=True)
    table = table[["index", "step", "checkpoint", "since", *(c for c in frames["summary"] if c in table)]]
    table.to_parquet(out / "series.parquet", index=False)
    return table


def _digest(comparison: Comparison) -> str:
    """A digest of all that decides what is kept of the first checkpoint, compared with itself: kept of another state of
    it or of the data, or under other settings, it belongs to no pair."""
    told = json.dumps(identity(comparison, check_file(Path(comparison.data))), sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]
