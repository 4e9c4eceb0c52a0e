"""The table of methods: every line is an arm, what is not one says why, and the page is what is generated."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from docs import methods_page
from moe_rl import cli
from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives.methods import (
    arm,
    components,
    entry,
    frameworks,
    methods,
    presets,
    refusals,
    spell,
)
from moe_rl.objectives.spelling import FIELD, known_components
from moe_rl.registry import Component
from moe_rl.study import Study
from tests.fake_study import study

ROOT = Path(__file__).parents[2]
NAMES = [*methods(), *presets()]


@pytest.mark.parametrize("name", NAMES)
def test_every_method_is_an_arm_that_can_be_written_down(name):
    made = arm(name)
    assert made.name == name and arm(spell(made)) == made
    assert entry(name).source


def test_the_default_arms_are_what_they_were():
    assert arm("grpo") == Arm(name="grpo") and arm("gspo") == Arm(name="gspo", loss="gspo")
    assert arm("replay") == Arm(name="replay", routes="old_policy")


def test_a_method_with_the_name_of_a_part_has_that_part():
    same = {*methods()} & {*components()}
    assert {"gspo", "sapo", "opsm", "recall"} <= same
    for name in same:
        value = getattr(arm(name), FIELD[known_components()[name].kind])
        assert name in [Component.of(part).name for part in (value if isinstance(value, tuple) else (value,))]
    assert not {*methods()} & {*refusals()} and not {*components()} & {*refusals()}
    for preset in presets().values():
        assert preset.name.partition(":")[0] in frameworks() and preset.of in methods()


def test_options_of_a_method_are_those_of_the_part_that_has_its_name():
    assert arm("opsm(delta=0.2)").corrections == (Component("opsm", delta=0.2),)
    assert arm("dapo(clip_high=0.3)").loss == Component("grpo", clip_low=0.2, clip_high=0.3)
    with pytest.raises(ConfigError, match="'opsm'"):
        arm("opsm(clip_high=0.2)")


@pytest.mark.parametrize("name", sorted(refusals()))
def test_what_is_no_arm_says_why(name):
    for text in (name, f"{name}(a=1)+old_policy"):
        with pytest.raises(ConfigError) as error:
            arm(text)
        assert refusals()[name] in str(error.value)


def test_the_page_is_what_is_generated():
    page = (ROOT / "docs" / "methods.md").read_text()
    assert page == methods_page.format_page(), "run `make docs/methods.md`"
    for name in (*methods(), *refusals(), *components()):
        assert f"`{name}" in page


def test_methods_are_shown(capsys):
    assert cli.main(["methods"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{said}" for name in methods())
    assert cli.main(["methods", "trl:gspo"]) == 0
    said = capsys.readouterr().out
    assert "grpo(clip_low=0.2, clip_high=0.2, level='sequence'" in said and "token_mean" in said
    assert cli.main(["methods", "gspo+old_policy"]) == 0
    assert cli.main(["methods", "gpso"]) == 2


def test_an_arm_is_read_without_torch():
    code = "import sys; from moe_rl.study import Study; from moe_rl.objectives.methods import arm; "
    code += "arm('sapo(tau_neg=1.05)+old_policy'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_studies_take_texts_for_arms(tmp_path):
    own = Study(
        name="own",
        question="",
        hypothesis="",
        arms=("gspo", "grpo(clip_high=0.3)+old_policy", Arm(name="x")),
        base=study.base,
        seeds=(0,),
    )
    assert own.arms == (arm("gspo"), arm("grpo(clip_high=0.3)+old_policy"), Arm(name="x"))
    assert [p.path.parts[-3] for p in own.runs(tmp_path)] == ["gspo", "grpo(clip_high=0.3)+old_policy", "x"]
    with pytest.raises(ConfigError, match="a/b"):
        Study(name="own", question="", hypothesis="", arms=("grpo+terms=mine:f(of='a/b')",), base=study.base)


def test_other_arms_take_the_place_of_a_studys_and_keep_its_contrasts_where_they_can():
    first, second, *_ = (a.name for a in study.arms)
    other = study.with_arms([first, "sapo"])
    assert other.arms == (study.arms[0], arm("sapo")) and not other.comparisons
    assert study.with_arms([]) == study
    with pytest.raises(ConfigError, match="did you mean"):
        study.with_arms(["sappo"])
    contrasted = dataclasses.replace(study, comparisons=((first, second),))
    assert contrasted.with_arms([second, first, "gspo_token"]).comparisons == ((first, second),)
    assert contrasted.with_arms([second, "gspo_token"]).comparisons == ()


def test_the_command_line_takes_arms(tmp_path, capsys):
    words = ["run", "tests/fake_study.py", "--out", str(tmp_path), "--dry-run", "--arm", "gspo_token+old_policy"]
    assert cli.main(words) == 0
    assert "gspo_token+old_policy" in capsys.readouterr().out
    assert cli.main([*words[:-1], "gspo+oldpolicy"]) == 2
    assert "did you mean old_policy" in capsys.readouterr().err
