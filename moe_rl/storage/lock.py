"""Who works in a folder: one process at a time, by a lock that the kernel gives up with its process, however that ends.

Several machines that share a file system need one whose locks reach from one to another, as those of NFS 4 do.
"""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from moe_rl.errors import RunError
from moe_rl.storage.links import replaced

NOTICE = 2.0
"""Seconds that a worker whose parent was killed may take to notice."""


class Held(RunError):
    """Another process holds the lock."""


class Lock:
    """A lock, held from `Lock(file)` to `release()` or the end of the process. `with` releases it."""

    def __init__(self, file: Path, wait: Callable[[], None] | None = None) -> None:
        """Take the lock. While another process holds it, call `wait`, which may raise, and try again; without `wait`
        raise Held. Raises RunError where the file system has no locks."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(replaced(file), thread_local=False)
        while not self._lock.is_locked:
            try:
                self._lock.acquire(timeout=NOTICE if wait is None else 0.1)
            except Timeout:
                if wait is None:
                    raise Held(f"another process is running {file.parent} ({holder(file)})") from None
                wait()
            except NotImplementedError as error:
                raise RunError(f"{file} cannot be locked. Choose an --out on a file system with locks.") from error
        job = f", job {job}" if (job := os.environ.get("SLURM_JOB_ID")) else ""
        replaced(file.with_suffix(".holder")).write_text(
            f"process {os.getpid()} on {platform.node()}{job}", encoding="utf-8"
        )

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Give it back."""
        self._lock.release()


def is_held(file: Path) -> bool:
    """Whether a process holds the lock. Writes nothing. On a file system that has no locks, or may only be read, no
    process here holds one."""
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def holder(file: Path) -> str:
    """The last process that took the lock: its number, its machine and, under a scheduler, its job."""
    known = file.with_suffix(".holder")
    return known.read_text(encoding="utf-8", errors="replace") if known.exists() else "not known"
