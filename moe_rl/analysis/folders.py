"""Checkpoints by their names, and the folders that hold what was measured of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe_rl.config import SHIPPED, ModelConfig, folder_of
from moe_rl.errors import ConfigError, RoutingError, RunError
from moe_rl.models.load import PRESETS, check_weights, skeleton
from moe_rl.routing.moe_layers import layout_of
from moe_rl.routing.trace import Layout
from moe_rl.storage import folder as runs
from moe_rl.storage.provenance import code_version, package_versions

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
        raise ConfigError(
            f"{name} contains no checkpoint ({folder.absolute()}). To save some during a run, use --set "
            "hf_checkpoints=(10,20)."
        )
    if not below:  # a damaged checkpoint, or an adapter: whoever reads it says so
        return [name]
    return [str(path) for path in sorted(below, key=lambda path: (step_of(path.name) or 0, path.name))]


def step_of(name: str) -> int | None:
    """The number that the name of a checkpoint has after the word for a step, or ends with; None where there is none: a
    model's size is no step."""
    matches = re.findall(r"(?:step|iter|iteration|update|epoch|checkpoint|ckpt)[-_=]?(\d+)|(\d+)$", Path(name).name)
    return int("".join(matches[-1])) if matches else None


def make_absolute(name: str) -> str:
    """A file or folder by its absolute path, wherever it is read again; a name on the hub, or of what comes with the
    package, as it is."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() and name not in SHIPPED else name


def fingerprint(name: str) -> str:
    """Of the files of a checkpoint folder, by name, size and time; the name itself on the hub."""
    folder = folder_of(name)
    if not folder.is_dir():
        return name
    files = sorted(f for f in folder.iterdir() if f.is_file())
    listed = repr([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def check_checkpoint(name: str) -> None:
    """Raises ConfigError for a preset, and for a checkpoint without weights."""
    if name in PRESETS:
        raise ConfigError(f"{name!r} is a preset with random weights. Give the folder of a checkpoint.")
    check_weights(name)


def describe(name: str, trust: bool) -> tuple[Layout, Any]:
    """The routing layout and the sizes of a checkpoint, from its configuration alone."""
    check_checkpoint(name)
    try:
        model: Any = skeleton(ModelConfig(name=name), trust)
    except ConfigError as error:
        if "trust_remote_code" in str(error.__cause__):
            raise ConfigError(f"{name} contains code of its own. If you trust it, add --trust-remote-code.") from error
        raise
    try:
        return layout_of(model), model.config.get_text_config()
    except RoutingError as error:
        raise ConfigError(f"{name}: {error}") from error


def versions() -> dict[str, Any]:
    """Of moe_rl's own code and of the packages, as a folder stores them."""
    return {"code": code_version("analysis"), "packages": package_versions()}


def check_new(out: Path) -> None:
    """Raises RunError for a folder that has files in it, a lock aside."""
    if out.exists() and any(file.name not in (runs.LOCK, "lock.holder") for file in out.iterdir()):
        raise RunError(f"--out {out} is not empty. Give a new or empty folder.")


def check_same(out: Path, what: str, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises RunError, which lists what differs, unless a folder holds `what` is wanted."""
    if different := runs.differing(there, wanted):
        listed = "; ".join(f"{key}: {a!r} there, {b!r} now" for key, (a, b) in different.items())
        raise RunError(f"{out} contains {what} ({listed}). Give another --out, or delete it.")


def progress() -> Progress:
    """Bars on stderr."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(30), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
