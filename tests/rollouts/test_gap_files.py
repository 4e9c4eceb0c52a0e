"""Rollouts of a step whose gap stands out are kept, few and small, for `moe-rl diagnose`; the run does not notice."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch

from moe_rl.analysis.diagnose import diagnose
from moe_rl.build import build
from moe_rl.rollouts import log
from moe_rl.rollouts.log import FILES, GapFiles
from moe_rl.storage import frames
from moe_rl.storage.folder import RunFolder
from moe_rl.trainer import sample, train
from moe_rl.types import Sampling
from tests.test_trainer import TINY, carry_out

RUN = TINY.replace(steps=2, eval_every=2)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return build(RUN, tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("cache"))


def kept(folder):
    return sorted(p.name for p in folder.glob("*")) if folder.exists() else []


def test_what_stands_out_is_kept_and_no_more_than_three(parts, tmp_path):
    batch, watch = sample(parts, 1), GapFiles(tmp_path / "rollouts", Sampling())
    for step, gap in enumerate((1e-3, 2e-3, 1e-3, 2e-3, 4.9e-3), start=1):
        watch(step, batch, {"engine_kl_k3": gap})
    watch(6, batch, {})
    assert kept(tmp_path / "rollouts") == []
    for step in range(10, 20):
        with (
            pytest.warns(UserWarning, match=f"step {step}: .*moe-rl diagnose")
            if step < 10 + FILES
            else warnings.catch_warnings()
        ):
            watch(step, batch, {"engine_kl_k3": 0.5 * 20 ** (step - 9)})
    assert kept(tmp_path / "rollouts") == [f"step=0000{10 + i}.jsonl" for i in range(FILES)]


def test_a_first_step_far_off_is_kept_and_rounding_never(parts, tmp_path):
    batch = sample(parts, 1)
    watch = GapFiles(tmp_path / "a", Sampling())
    for step in range(1, 9):
        watch(step, batch, {"engine_kl_k3": 1e-13 if step < 8 else 9e-7})
    assert kept(tmp_path / "a") == []
    with pytest.warns(UserWarning, match="0.02 nats"):
        GapFiles(tmp_path / "b", Sampling())(1, batch, {"engine_kl_k3": 0.02})
    assert kept(tmp_path / "b") == ["step=000001.jsonl"]


def test_a_gap_that_is_no_number_is_kept_and_not_remembered(parts, tmp_path):
    batch, watch = sample(parts, 1), GapFiles(tmp_path / "rollouts", Sampling())
    watch(1, replace(batch, response_mask=torch.zeros_like(batch.response_mask)), {"engine_kl_k3": math.nan})
    assert kept(tmp_path / "rollouts") == [], "nobody said anything"
    with pytest.warns(UserWarning, match="step 1: .*nan"):
        watch(1, batch, {"engine_kl_k3": math.nan})
    for step, gap in enumerate((1e-3, 1e-3, 1e-3, 4e-3), start=2):
        watch(step, batch, {"engine_kl_k3": gap})
    assert kept(tmp_path / "rollouts") == ["step=000001.jsonl"]


def test_a_kept_file_is_read_by_diagnose(parts, tmp_path):
    batch = sample(parts, 1)
    with pytest.warns(UserWarning):
        GapFiles(tmp_path, Sampling())(1, batch, {"engine_kl_k3": 1.0})
    found = diagnose(tmp_path / "step=000001.jsonl", parts.policy.model)
    assert found.causes == () and found.of == len(batch) and found.tokens == int(batch.response_mask.sum())
    assert any(r.name == "ids forced" for r in found.fits)


def test_a_file_is_bounded_and_says_what_is_not_the_policys_own(parts, tmp_path, monkeypatch):
    batch = sample(parts, 1)
    mask = batch.response_mask.clone()
    start = int(mask[0].long().argmax())
    mask[0, start + 1] = False
    (first, *_) = map(json.loads, log.to_lines(replace(batch, response_mask=mask), Sampling(0.7), "step 0"))
    assert first["prompt_length"] == start and first["logprobs"][1] is None and first["temperature"] == 0.7
    monkeypatch.setattr(log, "FILE_BYTES", 2000)
    with pytest.warns(UserWarning):
        GapFiles(tmp_path, Sampling())(1, batch, {"engine_kl_k3": 1.0})
    file = tmp_path / "step=000001.jsonl"
    assert 0 < file.stat().st_size <= 2000 and all(map(json.loads, file.read_text().splitlines()))


def test_watching_changes_no_number_of_a_run(tmp_path, monkeypatch):
    plain = carry_out(RUN, tmp_path / "plain")
    monkeypatch.setattr(log, "NOTHING", 0.0)
    monkeypatch.setattr(log, "UNHEARD_OF", 0.0)
    with pytest.warns(UserWarning, match="moe-rl diagnose"):
        watched = carry_out(RUN, tmp_path / "watched")
    assert kept(tmp_path / "watched" / "rollouts") == ["step=000001.jsonl", "step=000002.jsonl"]
    assert frames.diff(tmp_path / "plain", tmp_path / "watched") is None and plain.keys() == watched.keys()


def test_the_trainer_shows_every_step(tmp_path):
    """And no rank waits for another to have seen it: what all wait for is what `from_rank_0` is asked."""
    seen, waiting = [], []

    def from_rank_0(function):
        waiting.append(function)
        try:
            return function()
        finally:
            waiting.pop()

    with RunFolder.open(tmp_path / "run", RUN.to_dict(), RUN.hash) as folder:
        parts = replace(
            build(RUN, folder.path, tmp_path),
            watch=lambda step, row: (
                seen.append((step.step, len(step.batch), row["engine_kl_k3"] < 1e-9, len(waiting))) or {}
            ),
        )
        parts.policy.from_rank_0 = from_rank_0
        train(RUN, parts, folder)
    assert seen == [(1, 16, True, 0), (2, 16, True, 0)]
