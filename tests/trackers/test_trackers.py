"""TensorBoard and wandb themselves, offline: `make test-trackers` installs them and runs these tests."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_rl.integrations.trackers import TensorBoard, Tracked
from moe_rl.storage.folder import run_folders
from tests.integrations.test_trackers import expected, run_for, tracked
from tests.test_cli import FAKE, fake_runs

ROOT = Path(__file__).parents[2]
REASON = "tests against the real trackers are run by `make test-trackers`"
MISSING = {name: not any(importlib.metadata.distributions(name=name)) for name in ("tensorboard", "wandb")}
REAL = [pytest.param(name, marks=pytest.mark.skipif(missing, reason=REASON)) for name, missing in MISSING.items()]


def of_tensorboard(folder, run):
    """(name, step) of every point and its value, as TensorBoard itself reads them; twice is an error."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / run.place), size_guidance={"scalars": 0}).Reload()
    found = [((name, e.step), e.value) for name in read.Tags()["scalars"] for e in read.Scalars(name)]
    assert len(found) == len(dict(found))
    return dict(found)


def records(file):
    """LevelDB's log format behind a header of 7 bytes: wandb's own."""
    from wandb.proto import wandb_internal_pb2 as pb

    data, at, part = file.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def of_wandb(folder, run):
    found = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        here = list(records(file))
        about = next((r.run for r in here if r.WhichOneof("record_type") == "run"), None)
        if about is None:  # killed before it was written
            continue
        if about.display_name != f"{run.arm}/{run.condition}/seed={run.seed}":
            continue
        assert (about.project, about.run_group, about.job_type) == (run.study, run.arm, run.condition)
        assert {c.key: json.loads(c.value_json) for c in about.config.update}["optimizer"] == run.config["optimizer"]
        for record in (r for r in here if r.WhichOneof("record_type") == "history"):
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            assert row.pop("_step") == record.history.step.num
            for name, value in row.items():
                if name[0] != "_":
                    key = name, record.history.step.num
                    assert found.setdefault(key, value) == value, "a step that is made again is equal"
    return found


READ = {"tensorboard": of_tensorboard, "wandb": of_wandb}


def check(name, folder, root):
    """That every number of every run is there, once, and nothing else."""
    for run in tracked(root):
        found, wanted = READ[name](folder, run), expected(root.parent / run.place)
        assert found.keys() == wanted.keys() and len(found) > 500
        rounded = np.float32 if name == "tensorboard" else float
        assert all(found[key] == rounded(value) for key, value in wanted.items())


def export(name, folder, root):
    return [sys.executable, "-m", "moe_rl", "runs", "export", str(root), "--to", f"{name}={folder}"]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    paths = (ROOT, ROOT / "tests", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))


@pytest.mark.parametrize("name", REAL)
def test_every_point_is_there_though_the_exporter_is_killed_again_and_again(name, tmp_path, environment):
    root, folder = fake_runs(tmp_path, seeds=(0,)), tmp_path / name
    draw = random.Random(0)
    for _ in range(3):
        process = subprocess.Popen(export(name, folder, root), stdout=subprocess.DEVNULL, start_new_session=True)
        start = time.monotonic()  # killed while it writes, most likely: Python starts for a while
        while not folder.exists() and time.monotonic() - start < 20:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1.5))
        os.killpg(process.pid, signal.SIGKILL)  # wandb's own process, too
        process.wait()
    run_for(root / "grpo/base/seed=0", 15)  # one of the runs went on meanwhile
    subprocess.run(export(name, folder, root), check=True, cwd=tmp_path)
    check(name, folder, root)


@pytest.mark.parametrize("name", REAL)
def test_a_study_that_is_killed_and_goes_on_gives_every_point(name, tmp_path, environment, monkeypatch):
    monkeypatch.setenv("FAKE_NAP", "0.05")
    root, folder = tmp_path / "fake", tmp_path / name
    words = f"--seeds 0 --arms grpo --steps 60 --out {tmp_path} --track {name}={folder}"
    command = [sys.executable, "-m", "moe_rl", "run", FAKE, *words.split()]
    study = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while not any(p.glob("commit/step=*") for p in run_folders(root)) or not [*folder.glob("**/*")]:
        assert study.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    os.killpg(study.pid, signal.SIGKILL)
    study.wait()
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0
    assert not any("is no longer used" in (run / "log.txt").read_text() for run in run_folders(root))
    check(name, folder, root)


@pytest.mark.skipif(MISSING["tensorboard"], reason=REASON)
def test_tensorboard_forgets_what_was_logged_after_the_last_commit_and_a_run_that_was_deleted(tmp_path):
    run = Tracked("study", "arm", "base", 0, {}, created=0.0)
    for started, steps in ((run, range(1, 11)), (replace(run, step=8), range(9, 13)), (run, range(1, 4))):
        tracker = TensorBoard(tmp_path, started)
        for step in steps:
            tracker.log(step, float(step), {"x": step / 100})
        expected = {("x", step): np.float32(step / 100) for step in range(1, steps.stop)}
        assert of_tensorboard(tmp_path, run) == expected
        time.sleep(1.1)  # its files are in the order of their seconds
