"""What the folder of an evaluation says that it holds, which no other evaluation may go on with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_rl.errors import RunError
from moe_rl.storage import folder as runs

MANIFEST = "evaluation.json"
GROWING = ("benchmarks", "checkpoints")
"""What there may be more of, by name, than a command asks for."""
SCORING = ("scored", "inputs", "packages")
"""What older folders do not say of a benchmark, or not all of it."""


def claim(out: Path, wanted: Mapping[str, Any], complete: bool) -> None:
    """Write what the folder holds, and will: `settings`, `versions`, `benchmarks` and `checkpoints`. Raises RunError if
    it holds anything else; of one that is `complete`, having all that is asked for, moe_rl and packages may have been
    others."""
    there = _manifest(out, tuple(wanted))
    if there is None and any(file.name != runs.LEASE for file in out.iterdir()):
        raise RunError(f"--out {out} has other files in it; give a folder that is new or empty.")
    if not any(out.glob("samples/*/*.jsonl")):
        there = None  # nothing was sampled under what it says
    before: Mapping[str, Any] = there or wanted
    for part in wanted:
        old, new = before[part], wanted[part]
        both = old.keys() & new.keys() if part in GROWING else new.keys()
        if part == "benchmarks":
            old = {name: _known(old[name], new[name], complete) for name in both}
        different = runs.differing({key: old.get(key) for key in both}, {key: new[key] for key in both})
        if different and not (part == "versions" and complete):
            listed = "; ".join(f"{key}: {a!r} there, {b!r} now" for key, (a, b) in different.items())
            raise RunError(f"{out} holds an evaluation with other {part} ({listed}); give another --out, or delete it.")
    if there is None or not complete:
        out.mkdir(parents=True, exist_ok=True)
        runs.write_json(out / MANIFEST, {**wanted, **{part: before[part] | wanted[part] for part in GROWING}})


def _known(old: Mapping[str, Any], new: Mapping[str, Any], complete: bool) -> dict[str, Any]:
    """What a folder says of a benchmark; what it does not say, or need not, is as it is now."""
    free = {key: new[key] for key in SCORING if key not in old or complete and key == "packages"}
    return {**old, **free}


def _manifest(out: Path, parts: tuple[str, ...]) -> dict[str, Any] | None:
    """What the folder says, if anything. Raises RunError where nothing can be compared with it."""
    there = runs.read_json(out / MANIFEST, parts)
    if there is not None:
        said = {part: there[part] for part in parts}
        if isinstance(there["benchmarks"], dict):
            said |= {f"benchmarks.{name}": entry for name, entry in there["benchmarks"].items()}
        for name, value in said.items():
            if not isinstance(value, dict):
                raise RunError(f"{out / MANIFEST} is damaged: {name} is {repr(value)[:80]}, where names and their "
                               f"values belong; restore it from a copy, or delete {out}.")
    return there
