"""Tables with the names of before 0.2."""

import json

import pandas as pd
import pytest
from migrate import main

from moe_rl.errors import RunError
from moe_rl.storage.frames import load_study
from moe_rl.study.declaration import read_declaration

RUN = {"study": "s", "factors": "base", "seed": 0, "code": "1", "state": "finished", "step": 1, "steps": 1}


@pytest.fixture
def old(tmp_path):
    """Collected tables of before 0.2, with values that careless copies change: NaN, -0.0, a loss named as the arm."""
    folder = tmp_path / "s"
    folder.mkdir()
    names = ["gspo", "grpo"]
    config = [json.dumps({"arm": {"loss": {"name": "gspo"}, "name": name}}, sort_keys=True) for name in names]
    runs = [{**RUN, "arm": n, "path": f"{n}/base/seed=0", "config": c} for n, c in zip(names, config, strict=True)]
    pd.DataFrame(runs).to_parquet(folder / "runs.parquet")
    values = {"engine_kl_k3_natural": [float("nan"), -0.0], "engine_beyond_2_natural": [1, 2]}
    steps = {"study": "s", "arm": names, "factors": "base", "seed": 0, "code": "1", "step": 1}
    pd.DataFrame(steps | values).to_parquet(folder / "steps.parquet")
    declared = {
        "name": "s",
        "arms": [{"name": n} for n in names],
        "cells": {"base": {"arms": ["gspo"]}},
        "figures": ["learning_by_cell"],
        "comparisons": [["gspo", "grpo"]],
        "decision_rule": "natural, all cells",
    }
    (folder / "study.json").write_text(json.dumps(declared))
    return folder


def test_old_names_are_refused_and_renamed_without_another_change(old):
    for read in (load_study, read_declaration):
        with pytest.raises(RunError, match=r"studies/migrate.py"):
            read(old)
    before = {name: pd.read_parquet(old / f"{name}.parquet") for name in ("runs", "steps")}
    main(str(old), "gspo=gspo_short")
    frames, declared = load_study(old, mix_code=True), read_declaration(old)
    assert frames.conditions == ["base"] and set(frames.runs["arm"]) == {"gspo_short", "grpo"}
    assert json.loads(frames.runs["config"][0])["arm"] == {"loss": {"name": "gspo"}, "name": "gspo_short"}
    assert frames.runs["path"].tolist() == ["gspo_short/base/seed=0", "grpo/base/seed=0"]
    after = frames["steps"].rename(columns={"condition": "factors"})
    after.columns = [name.replace("unconstrained", "natural") for name in after.columns]
    pd.testing.assert_frame_equal(after.drop(columns="arm"), before["steps"].drop(columns="arm"), check_exact=True)
    assert str(after["engine_kl_k3_natural"].tolist()) == "[nan, -0.0]"
    assert declared["conditions"] == {"base": {"arms": ["gspo_short"]}}
    assert declared["figures"] == ["learning"] and declared["comparisons"] == [["gspo_short", "grpo"]]
    assert declared["decision_rule"] == "natural, all cells", "a declared text stays"


def test_a_second_call_changes_nothing(old):
    main(str(old), "gspo=gspo_short")
    before = {file.name: file.read_bytes() for file in old.iterdir()}
    main(str(old), "gspo=gspo_short")
    assert {file.name: file.read_bytes() for file in old.iterdir()} == before


@pytest.mark.parametrize("names", [["gspo=grpo"], ["gspo=x", "grpo=x"], ["gspo=grpo", "grpo=gspo"]])
def test_arms_that_would_become_one_are_refused_and_nothing_is_lost(old, names):
    before = {file.name: file.read_bytes() for file in old.glob("*.parquet")}
    with pytest.raises(SystemExit):
        main(str(old), *names)
    assert {file.name: file.read_bytes() for file in old.glob("*.parquet")} == before


def test_a_table_with_old_and_new_names_is_kept(old):
    table = pd.read_parquet(old / "steps.parquet").assign(condition="base")
    table.to_parquet(old / "steps.parquet")
    with pytest.raises(SystemExit, match="kept"):
        main(str(old))
    assert pd.read_parquet(old / "steps.parquet").equals(table)
