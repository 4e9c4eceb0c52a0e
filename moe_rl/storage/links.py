"""Links in a folder that somebody may have sent: nothing is written or removed through one that leads out of it."""

from __future__ import annotations

import os
from pathlib import Path

from moe_rl.errors import RunError


def replaced(file: Path, below: Path | None = None) -> Path:
    """A file or folder that is about to be written. Where it is a link, the link is removed, and so is that of a folder
    on the way to it which leads out of `below`, by default the folder that it is in."""
    below = file.parent if below is None else below
    for path in [*reversed(file.parents), file]:
        own = path != below and path.is_relative_to(below)
        if own and path.is_symlink() and not (path.is_dir() and _inside(path, below)):
            path.unlink()
    return file


def require_inside(folder: Path, below: Path | None = None, but: str = "") -> None:
    """Raise RunError where a folder that is about to be changed, or anything in it, leads out of `below` by a link; by
    default out of the folder itself, which may be a link. A file with the name `but` is left to who writes it."""
    for path in [folder, *folder.rglob("*")]:
        if path.name != but and not _inside(path, below or folder):
            raise RunError(f"{path} is a link to {os.path.realpath(path)}, outside of {below or folder}. Remove it.")


def _inside(path: Path, below: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(below))
