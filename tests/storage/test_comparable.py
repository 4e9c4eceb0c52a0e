"""Runs that are not of one study, with one set of settings, are never pooled silently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_rl.config import Arm, RunConfig
from moe_rl.errors import RunError
from moe_rl.registry import Component
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import load_study
from moe_rl.study.collect import collect
from moe_rl.study.declaration import write_declaration
from moe_rl.study.workers import unfinished
from tests import fake_study

CONFIG = fake_study.study.base.replace(steps=2, save_every=2)
OTHER = {"optimizer.lr": 0.03, "temperature": 0.3}


def train(out: Path, config: RunConfig = CONFIG, study: str = "fake", **changes) -> Path:
    config = config.replace(**changes)
    path = out / study / config.arm.name / "base" / f"seed={config.seed}"
    with RunFolder.open(path, config.to_dict(), config.hash) as folder:
        fake_study.train(config, folder, cache=out)
    return path


def refused(root: Path, *words: str) -> None:
    """It is, with these words; and pooled on request."""
    with pytest.raises(RunError) as error:
        load_study(root)
    assert all(word in str(error.value) for word in (*words, str(root), "another --out", "--mix-code")), error.value
    assert len(load_study(root, mix_code=True).runs) == 2


@pytest.mark.parametrize("second", [{"arm": fake_study.GSPO}, {"seed": 1}], ids=["arms", "seeds"])
def test_runs_of_other_settings_are_refused_with_what_differs(tmp_path, second):
    train(tmp_path)
    path = train(tmp_path, **second, **OTHER)
    place = path.relative_to(tmp_path / "fake")
    words = [f"optimizer.lr: {CONFIG.optimizer.lr} in grpo/base/seed=0, 0.03 in {place}", "temperature: 1.0 in"]
    refused(tmp_path / "fake", *words)
    refused(tmp_path, *words)
    write_declaration(fake_study.study, tmp_path)
    with pytest.raises(RunError, match="different settings"):
        collect(tmp_path / "fake", tmp_path / "results")
    collect(tmp_path / "fake", tmp_path / "results", mix_code=True)
    refused(tmp_path / "results", *words)


def test_a_study_does_not_begin_beside_runs_of_other_settings(tmp_path):
    """The refusal does not wait until they have been carried out."""
    train(tmp_path)
    study = replace(fake_study.study, base=CONFIG, seeds=(0, 1))
    assert unfinished(study.runs(tmp_path), mix_code=False).count(False) == 1
    planned = replace(study, base=CONFIG.replace(**OTHER)).with_arms([], ["gspo"]).runs(tmp_path)
    with pytest.raises(RunError, match=r"temperature: 1.0 in grpo.*, 0.3 in gspo"):
        unfinished(planned, mix_code=False)
    assert unfinished(planned, mix_code=True) == [True, True]


def test_a_run_that_failed_before_its_first_step_stops_no_other(tmp_path):
    """As by a task that is not there: it has no number that could be pooled."""
    wrong = CONFIG.replace(task="unknown")
    planned = replace(fake_study.study, base=CONFIG).with_arms([], ["gspo"]).runs(tmp_path)
    path = tmp_path / "fake" / "grpo" / "base" / "seed=0"
    with RunFolder.open(path, wrong.to_dict(), wrong.hash) as folder:
        with pytest.raises(RunError, match="task: 'unknown' in grpo"):
            unfinished(planned, mix_code=False)  # while it goes on
        folder.progress(0, error="there is no task 'unknown'")
    assert unfinished(planned, mix_code=False) == [True, True]


def test_one_name_for_two_arms_is_refused(tmp_path):
    train(tmp_path)
    train(tmp_path, arm=Arm(name="grpo", loss=Component("grpo", clip_high=0.28)), seed=1)
    refused(tmp_path / "fake", "arm.loss: 'grpo' in grpo/base/seed=0, {'name': 'grpo'")


def test_another_study_in_the_folder_of_a_study_is_refused(tmp_path):
    train(tmp_path)
    train(tmp_path / "fake", study="old")
    assert set(load_study(tmp_path / "fake").runs["study"]) == {"fake", "old"}, "any folder of several"
    write_declaration(fake_study.study, tmp_path)
    refused(tmp_path / "fake", "are of 2 studies (fake, old)")


def test_what_may_differ_is_pooled(tmp_path):
    train(tmp_path)
    train(tmp_path, seed=1, steps=3, **{"measure.rollouts": 3})
    train(tmp_path, arm=fake_study.GSPO)
    train(tmp_path, study="another", **OTHER)
    assert len(load_study(tmp_path).runs) == 4


def test_seeds_may_have_cold_starts_of_their_own_and_no_others(tmp_path):
    for seed in (1, 2):
        train(tmp_path, seed=seed, **{"cold_start.seed": seed})
    train(tmp_path, arm=fake_study.GSPO, seed=2, **{"cold_start.seed": 2})
    assert len(load_study(tmp_path).runs) == 3
    train(tmp_path, arm=fake_study.GSPO, seed=1, **{"cold_start.seed": 2})
    with pytest.raises(RunError, match="cold_start.seed: 1 in .*, 2 in "):
        load_study(tmp_path)
