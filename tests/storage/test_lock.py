"""One holder at a time, whatever becomes of it."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from moe_rl.storage import lock
from moe_rl.storage.lock import Held, Lock, is_held

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
        with pytest.raises(Held, match=rf"run \(process {os.getpid()} on "):
            Lock(file)
        assert is_held(file)
    assert not is_held(file)
    with Lock(file):
        assert is_held(file)


def test_whoever_waits_gets_it_next(tmp_path):
    process, asked = holding(tmp_path / "lock"), []

    def wait():
        asked.append(is_held(tmp_path / "lock"))
        process.kill()
        process.join()

    with Lock(tmp_path / "lock", wait=wait):
        assert asked == [True]
