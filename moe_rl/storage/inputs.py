"""Digests of what a run is made from beside this package: data, code and checkpoints that somebody may edit; and of the
study file that declares it.

Nothing is imported for them, neither torch nor the code that is hashed.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from moe_rl.config import folder_of, leaves
from moe_rl.storage.versions import PACKAGE, git_state, merged_git, path_in_checkout

NAMED = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""`pkg.module:name`, as a configuration names code."""
DATA, LIBRARY = "jsonl:", "reasoning_gym:"
"""Tasks that name a file, and a dataset of an installed library, whose version says what it is."""
INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def inputs_of(config: Mapping[str, Any], trainer: str = "") -> dict[str, str]:
    """SHA-256 of everything outside the package that a configuration, as `RunConfig.to_dict` gives it, names.

    By name: a module of which it uses something, and the modules in its folder that it imports (`sources_of`), a data
    file, which a task or one of its options names, and the folder of a checkpoint (names and bytes of its files). What
    cannot be found is left out: whoever needs it says so. Reads every byte of a checkpoint, at the speed of the disk,
    once per process.
    """
    found: dict[str, str] = {}
    for text in [trainer, *_texts(config)]:
        if text.startswith(DATA):
            found |= _of_file(text.removeprefix(DATA))
        elif ((named := NAMED.fullmatch(text)) and not text.startswith((LIBRARY, "moe_rl."))
              and (source := _source(named[1])) is not None):
            found |= {named[1]: _file_digest(*_stamp(source)), **_beside(named[1], source)}
    for text in _texts(config.get("task", {})):
        found |= _of_file(text)
    name = config.get("model", {}).get("name", "")
    if name and (folder := folder_of(name)).is_dir():
        found[name] = _folder_digest(folder, tuple(sorted(_stamp(f) for f in folder.rglob("*") if f.is_file())))
    return found


def sources_of(file: Path, folder: Path) -> dict[str, str]:
    """SHA-256 of a Python file and of what it imports from `folder`, directly or not, by path from there.

    Imports are read from the text, wherever in it they stand; those that are computed are not seen. Packages count with
    their `__init__.py`. A file that Python cannot read is hashed, and its imports are not followed.
    """
    found: dict[str, str] = {}
    waiting = [file]
    while waiting:
        source = waiting.pop()
        name = source.relative_to(folder).as_posix()
        if name not in found:
            found[name] = _file_digest(*_stamp(source))
            waiting += [folder / other for other in _imported(source, folder)]
    return dict(sorted(found.items()))


def declared_by(file: Path | None, before: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """What a run keeps of the study file that declares it: its path in its checkout, digests of it and of what it
    imports from its folder, and the state of that checkout; `before` is what the run kept of it when it began."""
    if file is None:
        return None if before is None else dict(before)
    sources, before = sources_of(file, file.parent), before or {}
    return {"file": path_in_checkout(file), "sources": merged(before.get("sources", {}), sources),
            "git": merged_git(before.get("git"), git_state(file.parent, *sources))}


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


def _beside(module: str, source: Path) -> dict[str, str]:
    """Digests of what a module imports from where it is found itself, by module; of what is installed, none: its
    version says what it is."""
    folder = source.parents[module.count(".") + (source.name == "__init__.py")]
    if source.suffix != ".py" or any(Path(place) in source.parents for place in INSTALLED):
        return {}
    return {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): value
            for name, value in sources_of(source, folder).items()}


def _imported(source: Path, folder: Path) -> set[str]:
    """Files of the folder that a file of it imports, by path from that folder; this package is not among them."""
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    package = source.relative_to(folder).parent.parts
    modules: set[tuple[str, ...]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = (*above, *(node.module or "").split(".")) if node.module else above
            modules |= {base, *((*base, alias.name) for alias in node.names)}
    steps = {parts[:n] for parts in modules for n in range(1, len(parts) + 1) if parts[0] != PACKAGE.name}
    paths = {form for parts in steps for form in ("/".join(parts) + ".py", "/".join((*parts, "__init__.py")))}
    return {path for path in paths if (folder / path).is_file()}


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
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        found = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((s for s in found if s is not None), None)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None
