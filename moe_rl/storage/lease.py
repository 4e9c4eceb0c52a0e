"""Who works in a folder: a lease with a heartbeat, which holds where locks do not reach from one machine to another.

    <folder>/1, 2, …    a file per holding, made by link(2), which one process alone can win; it says who that was

The holder of the last file touches it. After STALE seconds without a touch anybody may make the next one, and a holder
that only slept finds that it is `held` no longer. These files are never renamed or deleted, so no judgement can come
too late: one about n can only try for n + 1. Ages are differences of two times that the same file system made.

On one machine nobody waits: a holder also locks its file (flock) under another name, and who sees the same file system
of the same running machine asks that lock, which the kernel gives up with its process, however that ended. On a network
mount this takes a STALE that is longer than attributes are cached there (60 s on NFS, by default).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from moe_rl.errors import RunError

STALE = 120.0
"""Seconds without a heartbeat after which a holder on another machine counts as gone."""
BEATS = 6
"""Heartbeats in that time."""
NOTICE = 2.0
"""Seconds that a worker whose parent was killed may take to notice."""


class Held(RunError):
    """Another process holds the lease."""


class Lease:
    """A folder's lease, held from `Lease(folder)` to `release()` or the end of the process. `with` releases it."""

    def __init__(self, folder: Path, wait: Callable[[], None] | None = None) -> None:
        """Take the lease, at once where nobody holds it. Of a holder on another machine this waits for the next
        heartbeat, or takes over when none comes; of a living one it waits for the end with `wait`, which is called
        meanwhile and may raise.

        Raises Held when another process holds it, RunError where the file system has no hard links.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.number = folder, 0
        self._private = folder / f".{platform.node()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        self._file = self._private.open("w")
        try:
            _flock(self._file.fileno(), fcntl.LOCK_EX)
            job = os.environ.get("SLURM_JOB_ID")
            json.dump(_identity(self._private) | {"name": self._private.name, "job": job, "since": time.time()},
                      self._file)
            self._file.flush()
            while not self.number:
                self._win(self._await_end(wait))
        except BaseException:
            self._file.close()
            self._private.unlink()
            raise
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._heart.start()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def held(self) -> bool:
        """Whether nobody has taken over; to be asked before anything is written that others could be writing."""
        return not self._ended.is_set() and _last(self.folder) == self.number

    def release(self) -> None:
        """Give it back."""
        if not self._ended.is_set():
            self._ended.set()
            self._heart.join()
            with contextlib.suppress(OSError):  # who took over may have removed it
                os.utime(self._file.fileno(), (0, 0))  # as old as can be
            self._file.close()
            self._private.unlink(missing_ok=True)

    def _win(self, last: int) -> None:
        """Make the file after the last one, unless another process just did."""
        os.utime(self._file.fileno())  # it may have waited, and must not look stale
        mine, before = self.folder / str(last + 1), _record(self.folder / str(last)).get("name")
        try:
            os.link(self._private, mine)
        except FileExistsError:
            if _record(mine).get("name") != self._private.name:  # else a network lost the answer
                return
        except OSError as error:
            raise RunError(f"{self.folder.parent} cannot be locked: its file system has no hard links "
                           f"({error.strerror}), so nothing would stop two processes from writing there at once; "
                           "choose an --out on another file system") from error
        self.number = last + 1
        if before:
            (self.folder / before).unlink(missing_ok=True)

    def _await_end(self, wait: Callable[[], None] | None) -> int:
        """The number of the last holder, once it is gone. Raises Held for one that lives, without `wait`."""
        start, seen = time.monotonic(), None
        while last := _last(self.folder):
            file = self.folder / str(last)
            alive, beat = _locked(file), (last, file.stat().st_mtime)
            if alive is False or alive is None and self._age(file) > STALE:
                return last
            # A lock may be that of a worker about to notice that it is alone; without one, a heartbeat decides.
            lives = time.monotonic() - start > NOTICE if alive else seen is not None and beat != seen
            if lives and wait is None:
                raise Held(f"another process is running {self.folder.parent} ({holder(self.folder)}); wait for it or "
                           "choose another --out")
            if wait is not None:
                wait()
            seen = seen or beat
            time.sleep(min(0.1, STALE / BEATS / 4) if alive else min(1.0, STALE / BEATS / 4))
        return 0

    def _age(self, file: Path) -> float:
        """Seconds since a file was touched, by the clock of its file system."""
        os.utime(self._file.fileno())
        with file.open() as other:  # a server is asked when a file is opened
            return os.fstat(self._file.fileno()).st_mtime - os.fstat(other.fileno()).st_mtime

    def _beat(self) -> None:
        while not self._ended.wait(STALE / BEATS):
            with contextlib.suppress(OSError):
                os.utime(self._file.fileno())


def is_held(folder: Path) -> bool:
    """Whether somebody holds a folder's lease, as far as can be seen without writing."""
    if not (last := _last(folder)):
        return False
    try:
        alive = _locked(folder / str(last))
        return time.time() - (folder / str(last)).stat().st_mtime < STALE if alive is None else alive
    except FileNotFoundError:  # somebody removes the run
        return False


def holder(folder: Path) -> str:
    """The last one to hold a folder's lease: machine, process and, under a scheduler, job."""
    record = _record(folder / str(_last(folder)))
    job = f", job {record['job']}" if record.get("job") else ""
    return f"process {record.get('pid')} on {record.get('host')}{job}"


def _flock(descriptor: int, how: int) -> bool | None:
    """Whether a lock (flock) is had at once; None on a file system that has none."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def _locked(file: Path) -> bool | None:
    """Whether the process that made a lease's file lives; None when that cannot be known from here."""
    record, here = _record(file), _identity(file)
    if any(record.get(key) != here[key] for key in ("machine", "device")):
        return None
    try:
        with (file.parent / record["name"]).open() as opened:  # of two names, some file systems lock one
            free = _flock(opened.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    return None if free is None else not free


def _identity(file: Path) -> dict[str, Any]:
    """This process, the machine as it runs since its last start, and the file system as it is mounted there: another
    mount of the same one may have locks of its own."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = f"{platform.node()} {psutil.boot_time():.0f}"
    return {"host": platform.node(), "pid": os.getpid(), "machine": machine, "device": file.stat().st_dev}


def _record(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _last(folder: Path) -> int:
    """The number of the last holding; 0 before the first."""
    try:
        return max((int(name) for name in os.listdir(folder) if name.isdigit()), default=0)
    except FileNotFoundError:
        return 0
