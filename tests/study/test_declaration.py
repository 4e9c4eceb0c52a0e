"""Declaring studies, planning their runs, and settings given as text."""

from __future__ import annotations

import dataclasses
import json

import pandas as pd
import pytest

from moe_rl.analysis.folders import make_absolute
from moe_rl.config import SHIPPED, Arm, RunConfig, parse_settings
from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.results import printed
from moe_rl.results.summary import verdict_of
from moe_rl.storage.frames import Frames
from moe_rl.study.declaration import (
    Study,
    load_study_file,
    located,
    name_namesake,
    read_declaration,
    write_declaration,
)
from tests import fake_study
from tests.fake_study import GRPO, GSPO, study

BASE = RunConfig(arm=GRPO)


def with_changes(**changes) -> Study:
    return dataclasses.replace(study, **changes)


def test_runs_are_arms_times_seeds_and_differ_in_nothing_else(tmp_path):
    planned = study.runs(tmp_path)
    assert [p.path.relative_to(tmp_path).as_posix() for p in planned] == [
        f"fake/{arm}/base/seed={seed}" for seed in (0, 1) for arm in ("grpo", "grpo-replay", "gspo")
    ]
    for p in planned:
        assert p.config == study.base.replace(arm=p.config.arm, seed=p.config.seed)


def test_factors_are_crossed_and_named_in_the_path(tmp_path):
    crossed = with_changes(factors={"optimizer.lr": (1e-4, 2e-4), "model.name": ("a/b",)}, arms=(GRPO,))
    planned = crossed.runs(tmp_path, seeds=[7], steps=5)
    assert [p.path.parts[-2] for p in planned] == [f"optimizer.lr=0.000{n},model.name=a_b" for n in (1, 2)]
    assert [p.config.optimizer.lr for p in planned] == [1e-4, 2e-4]
    assert {(p.config.model.name, p.config.seed, p.config.steps) for p in planned} == {("a/b", 7, 5)}


def test_cells_are_named_variations_and_factors_cross_them(tmp_path):
    varied = with_changes(
        conditions={"N=1": {"mini_batches": 1, "steps": 7}, "N=2": {"mini_batches": 2}},
        arms=(GRPO,),
        factors={"optimizer.lr": (1e-4, 2e-4)},
    )
    planned = varied.runs(tmp_path, seeds=[0])
    assert [p.path.parts[-2] for p in planned] == [
        f"N={n},optimizer.lr={lr}" for n in (1, 2) for lr in (0.0001, 0.0002)
    ]
    base = study.base.steps
    assert [(p.config.mini_batches, p.config.steps) for p in planned] == [(1, 7), (1, 7), (2, base), (2, base)]
    assert {p.config.steps for p in varied.runs(tmp_path, steps=3)} == {3}
    assert with_changes(conditions={"one": {}}).runs(tmp_path)[0].path.parts[-2] == "one"


def test_conditions_are_chosen_by_name_and_keep_what_tells_them_apart(tmp_path):
    """A setting of a condition, or a part of it, cannot be changed from outside: the condition's name would lie."""
    study = with_changes(conditions={"fresh": {}, "old": {"batches": "lagged"}})
    assert {p.path.parts[-2] for p in study.with_conditions(["old"]).runs(tmp_path)} == {"old"}
    assert study.with_conditions([]) == study
    with pytest.raises(ConfigError, match="'odl'.*old"):
        study.with_conditions(["odl"])
    for key in ("batches", "batches.lag"):
        with pytest.raises(ConfigError, match=f"{key} .*'old'"):
            study.with_settings({key: "fresh"})
    assert study.with_settings({"mini_batches": 2}).base.mini_batches == 2
    assert study.with_settings({"batches": "lagged"}, ["fresh"]).base.batches == Component("lagged")


def test_a_condition_may_be_for_some_arms_alone(tmp_path):
    conditions = {"all": {}, "one": {"mini_batches": 2, "arms": ("gspo",)}}
    varied = with_changes(conditions=conditions, factors={"optimizer.lr": (1e-4,)})
    planned = varied.runs(tmp_path, seeds=[0])
    assert [(p.path.parts[-2].split(",")[0], p.config.arm.name) for p in planned] == [
        ("all", "grpo"),
        ("all", "grpo-replay"),
        ("all", "gspo"),
        ("one", "gspo"),
    ]
    assert planned[-1].config.mini_batches == 2


def test_own_cold_starts_belong_to_seeds_and_are_shared_by_arms(tmp_path):
    planned = with_changes(own_cold_starts=True).runs(tmp_path, seeds=[3, 4])
    assert [(p.config.seed, p.config.cold_start.seed) for p in planned] == [(3, 3)] * 3 + [(4, 4)] * 3
    assert {p.config.cold_start.seed for p in study.runs(tmp_path, seeds=[3, 4])} == {0}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"own_cold_starts": True, "factors": {"cold_start.seed": (1, 2)}}, "own_cold_starts"),
        ({"conditions": {"a/b": {}}}, "condition 'a/b'"),
        ({"conditions": {"a": {"arm.loss": "gspo"}}}, "arm"),
        ({"conditions": {"a": {"arms": ("gpso",)}}}, "gpso"),
        ({"arms": (GRPO, GRPO)}, "names"),
        ({"arms": (Arm(name="../up"),)}, "name of a folder"),
        ({"factors": {"seed": (1, 2)}}, "seed"),
    ],
)
def test_a_study_that_cannot_be_stored_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        with_changes(**changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"factors": {"model.name": ("a/b", "a_b")}}, "model.name='a/b'.*model.name='a_b'"),
        ({"factors": {"task.x": (0.1, "0.1")}}, "task.x=0.1.*task.x='0.1'"),
        ({"factors": {"optimizer.lr": (1e-4, 0.0001)}}, "optimizer.lr=0.0001.*optimizer.lr=0.0001"),
    ],
)
def test_two_values_that_would_share_a_folder_are_refused_by_name(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        with_changes(**changes).runs(tmp_path)


@pytest.mark.parametrize(
    "text, key, value",
    [
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("optimizer.betas=0.9,0.95", "optimizer.betas", (0.9, 0.95)),
        ("measure.full=true", "measure.full", True),
        ("task=reasoning_gym:a=b", "task", "reasoning_gym:a=b"),
        ("hf_checkpoints=0,10", "hf_checkpoints", (0, 10)),
        ("model.overrides.num_experts=32", "model.overrides.num_experts", 32),
        ("task.digits=12", "task.digits", 12),
        ("model.router_dtype=None", "model.router_dtype", None),
    ],
)
def test_settings_get_the_type_of_their_field(text, key, value):
    got = parse_settings(BASE, [text])
    assert got == {key: value} and type(got[key]) is type(value)
    changed = BASE.replace(**got).to_dict()
    for part in key.split("."):
        changed = changed.get("options", changed)
        changed = changed[part]
    assert changed == (list(value) if isinstance(value, tuple) else value)
    assert type(BASE.replace(**{"optimizer.lr": 1}).optimizer.lr) is float


@pytest.mark.parametrize(
    "text, words",
    [
        ("group_size=4.5", "group_size=4.5: "),
        ("optimizer.lr=fast", "optimizer.lr='fast': "),
        ("optimiser.lr=1", "did you mean optimizer.lr"),
        ("optimizer.lr.more=1", "lr.more"),
        ("group_size", "key=value"),
        ("arm.clip=1,2", "study file"),
        ("seed=3", "--seeds"),
    ],
)
def test_settings_of_another_type_or_name_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_settings(BASE, [text])


def test_a_study_file_anywhere_is_loaded_and_its_folder_is_importable(tmp_path):
    (tmp_path / "beside_it.py").write_text("ARM = 'mine'\n")
    (tmp_path / "own.py").write_text(
        "from beside_it import ARM\nfrom moe_rl.config import Arm, RunConfig\nfrom moe_rl.study import Study\n"
        "arm = Arm(name=ARM)\n"
        "study = Study(name='own', question='', hypothesis='', arms=(arm,), base=RunConfig(arm=arm))\n"
    )
    assert load_study_file(str(tmp_path / "own.py")).arms[0].name == "mine"
    assert load_study_file("own").name == "own", "as a module, now that its folder is importable"


def test_the_study_that_comes_along_is_the_declared_comparison(tmp_path, monkeypatch):
    same = load_study_file("studies/routing_replay/study.py")
    monkeypatch.chdir(tmp_path)
    routing_replay = load_study_file("routing_replay")
    assert dataclasses.replace(routing_replay, file=None) == dataclasses.replace(same, file=None)
    assert not any(map(name_namesake, routing_replay.arms)), "an arm with the name of a method is that method"


def test_a_condition_may_name_the_seeds_that_run_there(tmp_path):
    study = with_changes(seeds=(0, 1, 2), conditions={"all": {}, "two": {"arms": ("grpo",), "seeds": (0, 2)}})
    found = [(p.config.arm.name, p.config.seed) for p in study.runs(tmp_path) if "two" in p.path.parts]
    assert found == [("grpo", 0), ("grpo", 2)]
    assert [p.config.seed for p in study.runs(tmp_path, seeds=(1,))] == [1, 1, 1], "and no others when asked for some"


@pytest.mark.parametrize("seeds", [(3, 4), (0, 3), ("1",), (), 1])
def test_a_condition_cannot_name_seeds_that_the_study_does_not_run(seeds):
    with pytest.raises(ConfigError, match=r"condition 'two' .*seeds="):
        with_changes(seeds=(0, 1, 2), conditions={"all": {}, "two": {"seeds": seeds}})


def test_seeds_of_no_condition_are_refused_and_a_quick_form_runs_every_condition(tmp_path):
    study = with_changes(seeds=(0, 1, 2), conditions={"one": {"seeds": (1,)}, "two": {"seeds": (1, 2)}})
    with pytest.raises(ConfigError, match=r"seeds \[0\]"):
        study.runs(tmp_path, seeds=(0,))
    printed.check(dataclasses.replace(study, conditions={"N=2": {"seeds": (1,)}, "N=4": {}}, figures=("against:N",)))
    assert {(p.path.parts[-2], p.config.seed) for p in study.quick_form().runs(tmp_path)} == {("one", 0), ("two", 0)}


def test_other_arms_leave_conditions_that_are_for_some(tmp_path):
    conditions = {"all": {}, "one": {"mini_batches": 2, "arms": ("gspo", "grpo")}, "other": {"arms": ("grpo",)}}
    some = with_changes(conditions=conditions).with_arms(["sapo"], ["gspo"])
    assert {(p.path.parts[-3], p.path.parts[-2]) for p in some.runs(tmp_path)} == {
        ("gspo", "all"),
        ("sapo", "all"),
        ("gspo", "one"),
    }
    with pytest.raises(ConfigError, match="runs sapo"):
        with_changes(conditions={"one": {"arms": ("gspo",)}}).with_arms(["sapo"])


def test_arms_of_ones_own_are_named_with_their_commas_and_others_are_refused():
    mine = with_changes(arms=(*study.arms, "dapo+masked(low=0.5,high=5.0)"))
    assert mine.own_arms("gspo,dapo+masked(low=0.5,high=5.0)") == ["gspo", "dapo+masked(low=0.5,high=5.0)"]
    assert mine.own_arms(None) == []
    with pytest.raises(ConfigError, match="did you mean gspo"):
        mine.own_arms("grpo,gspoo")


def test_a_name_of_two_arms_is_refused_unless_it_is_said_which():
    with pytest.raises(ConfigError, match=r"0\.01.*0\.0003"):
        study.with_arms(["gspo"])
    assert study.with_arms([], ["gspo"]).arms == (GSPO,) and study.with_arms(["grpo"]).arms == study.arms[:1]
    (paper,) = study.with_arms(["gspo+name=paper_gspo"]).arms
    assert paper.loss == Component("gspo") and not name_namesake(paper)
    assert "clip_low=0.0003" in name_namesake(GSPO), "as a text it is another arm"


def declared(out):
    content = json.loads((out / "fake" / "study.json").read_text())
    return [arm["name"] for arm in content["arms"]], content["comparisons"], content["conditions"]


def test_arms_that_are_added_leave_the_declaration_whole(tmp_path):
    conditions = {"all": {}, "one": {"arms": ("gspo", "grpo")}}
    whole = with_changes(comparisons=(("gspo", "grpo"),), conditions=conditions)
    write_declaration(whole, tmp_path)
    own, comparisons, there = declared(tmp_path)
    assert write_declaration(whole.with_arms(["sapo"], ["gspo"]), tmp_path, keep=True) == []
    assert declared(tmp_path) == ([*own, "sapo"], comparisons, there), (
        "neither arms nor contrasts nor conditions are lost"
    )
    assert write_declaration(whole, tmp_path, keep=True) == []
    assert declared(tmp_path)[0] == [*own, "sapo"]
    assert write_declaration(with_changes(question="Another?"), tmp_path, keep=True) == ["question"]


def test_a_part_with_options_may_be_a_condition_or_a_factor(tmp_path):
    sums, longer = Component("corrected_sums", digits=3), Component("corrected_sums", digits=9)
    study = with_changes(conditions={"sums": {"task": sums}}, factors={"task": (longer, "running_sums")})
    write_declaration(study, tmp_path)
    said = json.loads((tmp_path / study.name / "study.json").read_text())
    assert Component.of(said["conditions"]["sums"]["task"]) == sums
    assert [Component.of(task) for task in said["factors"]["task"]] == [longer, Component("running_sums")]


def test_a_row_says_where_a_checkpoint_and_a_file_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = ["qwen3_moe-tiny", *SHIPPED]
    for folder in ("mine", *ours):
        (tmp_path / folder).mkdir()
    found = [
        located(BASE.replace(**{"model.name": name})).model.name
        for name in ("mine", str(tmp_path / "mine"), *ours, "somebody/mine")
    ]
    assert found == [str(tmp_path / "mine")] * 2 + [*ours, "somebody/mine"]
    assert [make_absolute(name) for name in ("mine", *SHIPPED)] == [str(tmp_path / "mine"), *SHIPPED]
    task = located(BASE.replace(task=Component("jsonl:pairs.jsonl", seed=1))).task
    assert task == Component(f"jsonl:{tmp_path}/pairs.jsonl", seed=1) == located(BASE.replace(task=task)).task
    assert located(BASE) == BASE and located(BASE).hash == BASE.hash
    moved = with_changes(base=BASE.replace(task="jsonl:pairs.jsonl"))
    assert all(p.config.task.name == f"jsonl:{tmp_path}/pairs.jsonl" for p in moved.runs(tmp_path))


DECIDED = """
import dataclasses
import fake_study
RULE = "{rule}"
def verdict(frames):
    return [f"{{RULE}}: {{len(frames.runs)}} runs"]
study = dataclasses.replace(fake_study.study, name="{name}", verdict="study.py:verdict")
"""


def test_a_verdict_may_be_a_function_of_the_studys_own_file_and_is_that_of_no_other_study(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(fake_study.__file__.rpartition("/")[0])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "study.py").write_text(DECIDED.format(name=name, rule=f"rule of {name}"))
    frames = Frames(pd.DataFrame({"seed": [0, 1]}), {})
    for name in ("one", "two"):
        one = load_study_file(str(tmp_path / name / "study.py"))
        write_declaration(one, tmp_path / name)  # into the folder of the study itself
        declared = read_declaration(tmp_path / name / name, trust=True)
        assert verdict_of(frames, declared) == [f"rule of {name}: 2 runs"]
        printed.check(one)
    assert read_declaration(tmp_path / "one" / "one")["verdict"] == "", "it is code, and needs trust"
    (other,) = verdict_of(frames, declared | {"file": str(tmp_path / "one" / "study.py")})
    assert "'one'" in other and "rule of" not in other
    with pytest.raises(ConfigError, match="nothing"):
        printed.check(dataclasses.replace(one, verdict="study.py:nothing"))
