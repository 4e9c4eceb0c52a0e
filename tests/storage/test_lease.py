"""One holder at a time, whatever becomes of it: on one machine at once, across machines after a while without a sign.

Another machine is a process whose start of the kernel has another name; its locks are then not asked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time

import pytest

from moe_rl.errors import RunError
from moe_rl.storage import lease
from moe_rl.storage.lease import Held, Lease, holder, is_held

FORK = multiprocessing.get_context("fork")
QUICK = 0.6
"""Seconds to a stale lease."""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lease, "STALE", QUICK)
    monkeypatch.setattr(lease, "NOTICE", 0.2)


def elsewhere(name):
    """This process is on another machine from now on."""
    real = lease._identity
    lease._identity = lambda file: real(file) | {"machine": name, "host": name}


def hold(folder, machine, ready, seconds=60.0):
    elsewhere(machine)
    with Lease(folder) as held:
        ready.send(held.number)
        time.sleep(seconds)


def holding(folder, machine):
    """A process of another machine that holds the lease."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=hold, args=(folder, machine, there), daemon=True)
    process.start()
    assert here.recv() == 1
    return process


def test_a_second_holder_is_refused_by_name_and_may_follow(tmp_path, quick):
    with Lease(tmp_path / "run/lease") as first:
        assert first.held and is_held(first.folder)
        with pytest.raises(Held, match=rf"another process is running .*run \(process {os.getpid()} on "):
            Lease(tmp_path / "run/lease")
        assert first.held
    assert not first.held and not is_held(first.folder)
    with Lease(first.folder) as second:
        assert second.number == 2 and second.held and not first.held
    assert {p.name for p in first.folder.iterdir()} == {"1", "2"}, "and nothing else is left"


def test_on_one_machine_a_killed_holder_is_followed_at_once(tmp_path):
    lease_identity, process = lease._identity, holding(tmp_path, "")
    lease._identity = lambda file: lease_identity(file) | {"machine": ""}
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        start = time.monotonic()
        with Lease(tmp_path) as held:
            assert held.number == 2 and time.monotonic() - start < 1 < lease.STALE
    finally:
        lease._identity = lease_identity


def test_on_one_machine_a_stopped_holder_keeps_it_however_long(tmp_path, quick):
    with Lease(tmp_path) as held:
        held._ended.set()  # no heartbeat any more
        held._heart.join()
        os.utime(tmp_path / "1", (0, 0))
        with pytest.raises(Held):
            Lease(tmp_path)
        held._ended.clear()


def test_a_living_holder_elsewhere_is_refused_by_its_heartbeat(tmp_path, quick):
    process = holding(tmp_path, "there")
    assert is_held(tmp_path) and " on there" in holder(tmp_path)
    with pytest.raises(Held, match="on there"):
        Lease(tmp_path)
    process.kill()
    process.join()


def test_a_killed_holder_elsewhere_is_taken_over_when_it_is_stale_and_not_before(tmp_path, quick):
    process = holding(tmp_path, "there")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    last_beat = (tmp_path / "1").stat().st_mtime
    with Lease(tmp_path) as mine:
        assert mine.number == 2 and time.time() - last_beat > QUICK * 0.99


def test_a_holder_elsewhere_that_only_slept_finds_that_it_was_taken_over(tmp_path, quick):
    def sleeper(folder, ready, answer):
        elsewhere("there")
        held = Lease(folder)
        ready.send(held.number)
        while held.held:
            time.sleep(0.05)
        answer.send(holder(folder))

    (ready, r), (answer, a) = FORK.Pipe(), FORK.Pipe()
    process = FORK.Process(target=sleeper, args=(tmp_path, r, a), daemon=True)
    process.start()
    assert ready.recv() == 1
    os.kill(process.pid, signal.SIGSTOP)
    with Lease(tmp_path) as mine:
        os.kill(process.pid, signal.SIGCONT)
        assert answer.recv().startswith(f"process {os.getpid()} on ")
        assert mine.held
    process.join()


def test_whoever_waits_gets_it_next(tmp_path, quick):
    process = holding(tmp_path, "there")
    process.join(QUICK)
    process.kill()
    process.join()
    assert Lease(tmp_path, wait=lambda: None).number == 2


def contend(folder, machine, seed, log):
    """Take the lease again and again, each time writing when it was held."""
    elsewhere(machine)
    draw, end = random.Random(seed), time.monotonic() + 2
    while time.monotonic() < end:
        with contextlib.suppress(Held), Lease(folder) as held:
            with open(log, "a") as file:
                file.write(f"{held.number} {os.getpid()} begin {time.monotonic_ns()}\n")
            time.sleep(draw.uniform(0, 0.05))
            if draw.random() < 0.2:
                os.kill(os.getpid(), signal.SIGKILL)
            with open(log, "a") as file:
                file.write(f"{held.number} {os.getpid()} end {time.monotonic_ns()}\n")


def test_no_two_hold_it_at_once_on_three_machines_of_which_processes_are_killed(tmp_path, quick):
    log, processes = tmp_path / "log", []
    end = time.monotonic() + 2
    while time.monotonic() < end:
        processes = [p for p in processes if p.is_alive()]
        while len(processes) < 4:
            n = random.randrange(10**9)
            processes.append(FORK.Process(target=contend, args=(tmp_path / "lease", f"m{n % 3}", n, log), daemon=True))
            processes[-1].start()
        time.sleep(0.02)
    for process in processes:
        process.join()
    lines = [line.split() for line in log.read_text().splitlines()]
    numbers = [int(line[0]) for line in lines if line[2] == "begin"]
    assert len(numbers) > 10 and len(set(numbers)) == len(numbers), "every holding has a number of its own"
    ends = {int(line[0]): int(line[3]) for line in lines if line[2] == "end"}
    assert 0 < len(ends) < len(numbers), "some were killed"
    for number, _, word, when in lines:
        if word == "begin":
            assert all(at <= int(when) for n, at in ends.items() if n < int(number)), "those before had ended"


@pytest.mark.parametrize("locks", [True, False])
def test_without_locks_heartbeats_decide(tmp_path, quick, monkeypatch, locks):
    if not locks:
        monkeypatch.setattr(lease, "_flock", lambda descriptor, how: None)
    held = Lease(tmp_path)
    assert is_held(tmp_path)
    with pytest.raises(Held):
        Lease(tmp_path)
    held.release()
    assert not is_held(tmp_path) and Lease(tmp_path).number == 2


def test_a_file_system_without_links_is_told_what_to_do(tmp_path, monkeypatch):
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(lease.os, "link", no_links)
    with pytest.raises(RunError, match="cannot be locked: .*no hard links.*--out"):
        Lease(tmp_path / "run" / "lease")
    assert not list((tmp_path / "run/lease").iterdir()) and not is_held(tmp_path / "run/lease")
