"""Every declared study can be carried out: its settings, losses, sources, figures and contrasts exist."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pandas as pd
import pytest

from moe_rl.config import RunConfig
from moe_rl.results import printed
from moe_rl.study.declaration import QUICK_STEPS, load_study_file
from moe_rl.study.workers import preflight

ROOT = Path(__file__).parents[2] / "studies"
FILES = sorted(f for f in ROOT.glob("*/*.py") if "study = " in f.read_text() and f.parent.name != "recipes")
"""Recipes are tried by tests of their own."""
PILOTS = set(range(10, 20))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.parent.name)
def test_a_declaration_is_complete_and_its_parts_exist(file, tmp_path):
    study = load_study_file(str(file))
    assert study.name == file.parent.name + ("" if file.stem == "study" else f"_{file.stem}")
    for said in (study.question, study.hypothesis, study.decision_rule, study.differs_from_paper, study.caution):
        assert len(said) > 10
    assert study.seconds_per_step and (study.cost or study.seconds_of_warm_up)
    printed.check(study)
    study = study.quick_form()
    planned = study.runs(tmp_path, steps=QUICK_STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of clip ranges and of corrections without an effect
        preflight(study, planned)


@pytest.mark.parametrize("file", [f for f in FILES if "base import" in f.read_text()], ids=lambda f: f.parent.name)
def test_seeds_of_pilots_take_part_in_no_study(file):
    study = load_study_file(str(file))
    assert not PILOTS & set(study.seeds) and study.own_cold_starts


EARLIER = {"lag": "lag=0", "routing_replay": "gspo_short"}
"""Study → the runs whose rows have an earlier form: fresh rollouts without their name, and an arm under another one."""


@pytest.mark.parametrize("folder", sorted(file.parent for file in ROOT.glob("*/study.json")), ids=lambda f: f.name)
def test_the_committed_runs_are_those_that_the_file_declares(folder):
    rows = pd.read_parquet(folder / "runs.parquet", columns=["arm", "condition", "seed", "config"])
    made = {
        (row.arm, row.condition, row.seed): RunConfig.from_dict(json.loads(row.config)) for row in rows.itertuples()
    }
    planned = load_study_file(str(folder / "study.py")).runs(Path("runs"))
    configs = {(one.config.arm.name, one.path.parts[-2], one.config.seed): one.config for one in planned}
    assert len(made) == len(rows) == len(configs)
    assert all(EARLIER.get(folder.name) in key for key, config in configs.items() if made.get(key) != config)
