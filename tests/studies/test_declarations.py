"""Every declared study can be carried out: its settings, losses, sources, figures and contrasts exist."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from moe_rl.results import printed
from moe_rl.study.declaration import QUICK_STEPS, load_study_file
from moe_rl.study.workers import preflight

ROOT = Path(__file__).parents[2] / "studies"
FILES = sorted(f for f in ROOT.glob("*.py") if "study = " in f.read_text())
PILOTS = set(range(10, 20))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_declaration_is_complete_and_its_parts_exist(file, tmp_path):
    study = load_study_file(str(file))
    assert study.name == file.stem
    for said in (study.question, study.hypothesis, study.decision_rule, study.differs_from_paper, study.caution):
        assert len(said) > 20
    assert study.seconds_per_step and study.cost
    printed.check(study)
    study = study.quick_form()
    planned = study.runs(tmp_path, steps=QUICK_STEPS)
    if study.base.engine.name != "vllm":  # which is in an environment of its own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a clip range is wide is what `clip_fraction` asks about
            preflight(study, planned)


@pytest.mark.parametrize("file", [f for f in FILES if "small import" in f.read_text()], ids=lambda f: f.stem)
def test_seeds_of_pilots_take_part_in_no_study(file):
    study = load_study_file(str(file))
    assert not PILOTS & set(study.seeds) and study.own_cold_starts
