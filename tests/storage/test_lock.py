"""One holder at a time, whatever becomes of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time

import pytest

from moe_rl.errors import RunError
from moe_rl.storage import lock
from moe_rl.storage.lock import Held, Lock, holder, is_held

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "NOTICE", 0.1)


def hold(file, ready):
    with Lock(file):
        ready.send(os.getpid())
        time.sleep(60)


def holding(file):
    """A process that holds the lock."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=hold, args=(file, there), daemon=True)
    process.start()
    assert here.recv() == process.pid
    return process


def test_a_second_holder_is_refused_by_name_and_may_follow(tmp_path, quick):
    file = tmp_path / "run/lock"
    assert not is_held(file) and not file.parent.exists(), "who asks writes nothing"
    with Lock(file):
        assert is_held(file)
        with pytest.raises(Held, match=rf"another process is running .*run \(process {os.getpid()} on "):
            Lock(file)
        assert is_held(file)
    assert not is_held(file)
    with Lock(file):
        assert is_held(file)


def test_a_killed_holder_is_followed_at_once(tmp_path):
    process = holding(tmp_path / "lock")
    assert holder(tmp_path / "lock").startswith(f"process {process.pid} on ")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    start = time.monotonic()
    with Lock(tmp_path / "lock"):
        assert time.monotonic() - start < 1 < lock.NOTICE


def test_whoever_waits_gets_it_next(tmp_path):
    process, asked = holding(tmp_path / "lock"), []

    def wait():
        asked.append(is_held(tmp_path / "lock"))
        process.kill()
        process.join()

    with Lock(tmp_path / "lock", wait=wait):
        assert asked == [True]


def contend(file, seed, log):
    """Take the lock again and again, each time writing when it was held."""
    draw, end = random.Random(seed), time.monotonic() + 2
    lock.NOTICE = 0.05
    while time.monotonic() < end:
        with contextlib.suppress(Held), Lock(file), log.open("a") as lines:
            lines.write(f"{seed} begin {time.monotonic_ns()}\n")
            lines.flush()
            time.sleep(draw.uniform(0, 0.05))
            if draw.random() < 0.2:
                os.kill(os.getpid(), signal.SIGKILL)
            lines.write(f"{seed} end {time.monotonic_ns()}\n")


def test_no_two_hold_it_at_once_though_processes_are_killed(tmp_path):
    log, processes, seeds = tmp_path / "log", [], iter(range(10**6))
    end = time.monotonic() + 2
    while time.monotonic() < end:
        processes = [p for p in processes if p.is_alive()]
        while len(processes) < 4:
            processes.append(FORK.Process(target=contend, args=(tmp_path / "lock", next(seeds), log), daemon=True))
            processes[-1].start()
        time.sleep(0.02)
    for process in processes:
        process.join()
    lines = [line.split() for line in log.read_text().splitlines()]
    begun = [seed for seed, word, _ in lines if word == "begin"]
    ended = [seed for seed, word, _ in lines if word == "end"]
    assert len(begun) > 10 and 0 < len(ended) < len(begun), "some were killed"
    for (first, word, _), (then, next_word, _) in zip(lines, lines[1:], strict=False):
        if next_word == "end":
            assert word == "begin" and first == then, "nobody begins while another holds it"


def test_a_file_system_without_locks_is_refused_with_what_to_do(tmp_path, monkeypatch):
    def no_locks(*_: object, **__: object) -> None:
        raise NotImplementedError("flock")

    monkeypatch.setattr(lock.FileLock, "acquire", no_locks)
    with pytest.raises(RunError, match="cannot be locked"):
        Lock(tmp_path / "run/lock")
