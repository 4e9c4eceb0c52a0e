"""The worker that a scheduler calls: told to stop, killed, called twice, called too late; in real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_rl.errors import RunError
from moe_rl.integrations.slurm import freeze_plan, planned_run
from moe_rl.registry import Component
from moe_rl.storage import folder as runs
from moe_rl.storage.frames import diff
from moe_rl.study.workers import carry_out, environment
from tests.fake_study import study
from tests.forked import Forked

STEPS = 60


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A plan of one run that commits at its end alone, unless it is told to stop."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    base = study.base.replace(steps=STEPS, save_every=100)
    planned = study.__class__(**{**vars(study), "base": base, "arms": study.arms[:1], "seeds": (0,)}).runs(tmp_path)
    runs.write_json(tmp_path / "plan.json", freeze_plan(planned, trainer=study.trainer, cache=tmp_path, mix_code=True))
    return tmp_path / "plan.json", planned[0]


def work(plan: Path, *words: str, nap: float = 0.1) -> subprocess.Popen:
    return Forked(
        [sys.executable, "-m", "moe_rl", "work", str(plan), "0", *words],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment() | {"FAKE_NAP": str(nap)},
    )


def said(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=120)
    assert out.strip(), err
    return process.returncode, json.loads(out.strip())["message"]


def under_way(path: Path) -> None:
    """Wait until the run is past its first step."""
    end = time.monotonic() + 60
    while runs.state(path)["step"] < 1:
        assert time.monotonic() < end, (path / "log.txt").read_text()
        time.sleep(0.02)


def whole(planned, tmp_path):
    """The same run, never disturbed."""
    path = tmp_path / "whole" / planned.path.name
    carry_out(type(planned)(path, planned.config), "tests.fake_study:train", tmp_path)
    return path


@pytest.mark.parametrize("how", [signal.SIGTERM, "a file"])
def test_told_to_stop_it_commits_the_next_step_and_goes_on_from_there_to_the_same_end(plan, tmp_path, how):
    file, planned = plan
    process = work(file, "--stop", str(tmp_path / "stop"))
    under_way(planned.path)
    (tmp_path / "stop").touch() if how == "a file" else process.send_signal(how)
    code, message = said(process)
    assert code == 75 and "was told to stop; step" in message
    now = runs.state(planned.path)
    assert now["state"] == "interrupted" and 1 <= runs.last_step(planned.path) < STEPS and "error" not in now
    code, message = said(work(file, "--stop", str(tmp_path / "none"), nap=0))
    assert (code, message) == (0, f"{planned.path} is finished")
    there = whole(planned, tmp_path)
    assert diff(there, planned.path) is None
    assert runs.read_manifest(there)["checkpoint"] == runs.read_manifest(planned.path)["checkpoint"]


def test_a_killed_worker_is_followed_at_once(plan, tmp_path):
    file, planned = plan
    first = work(file, nap=5)
    under_way(planned.path)
    code, message = said(work(file))
    assert code == 1 and f"another process is running {planned.path}" in message
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert said(work(file, nap=0)) == (0, f"{planned.path} is finished")
    assert diff(whole(planned, tmp_path), planned.path) is None
    assert said(work(file)) == (0, f"{planned.path} is finished"), "and is left alone then"
    first.communicate()


def test_what_would_not_be_the_planned_run_is_refused(plan, tmp_path):
    file, planned = plan
    content = json.loads(file.read_text())
    with pytest.raises(RunError, match="0.0.1.other"):
        planned_run(content | {"code": "0.0.1+other", "mix_code": False}, 0)
    assert planned_run(content, 0).config == planned.config
    file.write_text(json.dumps(content | {"runs": []}))
    code, message = said(work(file))
    assert code == 2 and "has 0 runs" in message
    code, message = said(work(tmp_path / "none.json"))
    assert code == 2 and "there is no plan" in message


def test_an_arm_of_functions_and_options_is_planned_as_it_is(tmp_path):
    arm = study.arms[0].__class__(
        name="any", loss=Component("gspo", clip_low=0.01, clip_high=0.013), terms=("entropy",)
    )
    planned = type(study)(**{**vars(study), "arms": (arm,)}).runs(tmp_path)
    content = json.loads(json.dumps(freeze_plan(planned, trainer=study.trainer, cache=tmp_path, mix_code=True)))
    assert [planned_run(content, n).config for n in range(2)] == [p.config for p in planned]
