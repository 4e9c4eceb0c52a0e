"""A run that is killed at random instants, its writes included, ends identical to one that never was.

The process is forked, not started anew: a child is running within milliseconds, so that ten kills cost seconds.
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from moe_rl.storage import frames
from moe_rl.storage.folder import read_manifest
from tests.test_trainer import ARMS, TINY, carry_out, weights

RUN = TINY.replace(arm=ARMS["replay"], steps=8, save_every=1, eval_every=8, prompts_per_step=2, mini_batches=2)


def forked(work: Callable[[], object], seconds: float | None) -> bool:
    """Do the work in a child, kill it with SIGKILL after so many seconds, or with None let it do that itself; whether
    it was killed before its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forking with threads; torch has one, and it is idle
        child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed by itself"
    return os.WIFSIGNALED(status)


def finished(path: Path) -> bool:
    return (read_manifest(path) or {}).get("finished") == RUN.steps


def test_ten_kills_at_random_instants_change_nothing(tmp_path):
    start = time.perf_counter()
    carry_out(RUN, tmp_path / "whole")
    whole = time.perf_counter() - start
    draw, kills, cut, share = random.Random(0), 0, tmp_path / "cut", 0.3
    while kills < 10 or not finished(cut):
        # at first too short to get far, so that the kills are spread over the run; then long enough to finish
        killed = forked(partial(carry_out, RUN, cut), draw.uniform(share / 6, share if kills < 10 else 2) * whole)
        kills += killed
        share *= 1 if killed else 0.7  # the machine was busier when the whole run was timed
        if finished(cut) and kills < 10:
            cut = tmp_path / f"cut-{kills}"
    assert frames.diff(tmp_path / "whole", cut) is None
    assert weights(tmp_path / "whole")[1] == weights(cut)[1]
    steps = frames.read_table(cut, "steps")
    assert list(steps["step"]) == list(range(RUN.steps + 1))
