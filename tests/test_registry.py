"""`Component` as data, and what becomes of names and options that are not there."""

from __future__ import annotations

import re
import sys
from functools import partial

import pytest

from moe_rl.config import Arm, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.objectives.spelling import suggest_field
from moe_rl.registry import Component, check_component, lookup, needs, needs_of
from moe_rl.study.declaration import located

GSPO = Component("gspo", clip_low=0.01, clip_high=0.013)


def plain(x):
    return x


def with_options(x, *, must, may=2):
    return x, must, may


def anything(x, **options):
    return x, options


@needs("scores", "reference")
def demanding(x, *, share=0.5):
    return x * share


KNOWN = {"plain": plain, "with_options": with_options, "anything": anything, "demanding": demanding}


# ---------------------------------------------------------------------- as data
def test_uses_are_equal_and_hash_alike_whatever_the_order_of_their_options():
    again = Component("gspo", clip_high=0.013, clip_low=0.01)
    assert again == GSPO and hash(again) == hash(GSPO) and len({again, GSPO, Component("gspo")}) == 2
    assert Component("gspo") != GSPO != Component("grpo", clip_low=0.01, clip_high=0.013)
    assert hash(Component("jsonl:a", names=["a", "b"])) == hash(Component("jsonl:a", names=["c"])), (
        "options need not be hashable"
    )


def test_code_that_a_mixture_names_is_named_by_its_run():
    """Else a table of somebody else's would have it run without being trusted."""
    tasks = (
        "mine:First",
        Component("other.mine:Second", of="jsonl:a.jsonl"),
        "jsonl:b.jsonl",
        "reasoning_gym:spell",
        "sums",
    )
    run = RunConfig(arm=Arm(name="a"), task=Component("mixture", tasks=tasks))
    for one in (run, RunConfig.from_dict(run.to_dict())):
        assert one.own_code() == {"mine:First", "other.mine:Second"}


def test_a_prefix_of_data_is_code_where_it_is_no_task():
    arm, task = Arm(name="a", loss="jsonl:loss"), Component("jsonl:a.jsonl", rewards=["jsonl:reward", Component("b:c")])
    run = RunConfig(arm=arm, task=task, engine="reasoning_gym:Engine")
    for one in (run, RunConfig.from_dict(run.to_dict())):
        assert one.own_code() == {"jsonl:loss", "jsonl:reward", "b:c", "reasoning_gym:Engine"}


@pytest.mark.parametrize(
    "name, own",
    [
        ("a:b", True),
        ("a.b_c:D", True),
        ("running_sums", False),
        ("jsonl:a/b.jsonl", False),
        ("jsonl:", False),
        ("a-b:c", False),
        (":b", False),
        ("a..b:c", False),
    ],
)
def test_what_names_a_users_own_code(name, own):
    assert Component(name).own == own


# ---------------------------------------------------------------------- what they name
def test_a_known_name_is_its_function_with_the_options_bound():
    assert lookup("part", "plain", KNOWN) is plain
    assert lookup("part", Component("with_options", must=1), KNOWN)(0) == (0, 1, 2)
    assert lookup("part", Component("anything", b=2), KNOWN)(0) == (0, {"b": 2})


@pytest.mark.parametrize(
    "kind, name, hint",
    [
        ("route source", "grpo", "loss="),
        ("term", "truncatd", "corrections="),
        ("loss", "dapo", "--arm dapo"),
        ("loss", "plane", "did you mean plain?"),
    ],
)
def test_a_name_of_another_kind_is_said_to_be_one(kind, name, hint):
    with pytest.raises(ConfigError, match=rf"no {kind} is called '{name}': .*{re.escape(hint)}.*anything"):
        lookup(kind, name, KNOWN, suggest_field)


@pytest.mark.parametrize(
    "use", [Component("with_options", must=1, mayy=3), Component("plain", may=1), Component("with_options", x=1)]
)
def test_an_unknown_option_is_refused_with_the_known_ones(use):
    with pytest.raises(ConfigError, match="no option of the part") as error:
        lookup("part", use, KNOWN)
    assert ("may, must" if use.name == "with_options" else "none") in str(error.value)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Somebody's module in the working directory, which nothing has put on the path."""
    (tmp_path / "own_parts_of_a_user.py").write_text("VALUE = 3\ndef fine(x, *, k=1): return x + k\n")
    (tmp_path / "failing_parts_of_a_user.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_users_own_function_is_found_in_the_working_directory(package):
    assert lookup("part", Component("own_parts_of_a_user:fine", k=5), {})(1) == 6
    with pytest.raises(ConfigError, match="'q'.*k"):
        lookup("part", Component("own_parts_of_a_user:fine", q=5), {})


def test_an_error_inside_a_users_module_is_its_own_and_passes(package):
    with pytest.raises(ZeroDivisionError):
        lookup("part", "failing_parts_of_a_user:f", {})


# ---------------------------------------------------------------------- what they need
class Marked:
    needs = frozenset({"scores"})

    def __call__(self, batch, unconstrained):
        return None

    @staticmethod
    def check(run):
        return "checked"


class Below(Marked):
    """Inherits its marks."""


marked = Marked()


@pytest.mark.parametrize("name", ["marked", "Below"])
def test_an_object_and_a_subclass_keep_the_marks_of_their_class(name):
    source = lookup("route source", f"{__name__}:{name}", {})
    assert needs_of(source) == {"scores"} and check_component(source, None) == "checked"


def test_what_a_part_needs_is_seen_through_its_options():
    assert needs_of(demanding) == {"scores", "reference"}
    assert needs_of(lookup("part", Component("demanding", share=0.1), KNOWN)) == {"scores", "reference"}
    assert needs_of(lookup("part", Component("with_options", must=1), KNOWN)) == frozenset()
    assert needs_of(None) == needs_of(plain) == needs_of(partial(plain)) == frozenset()


def typed(x, *, whole: int = 1, real: float = 1.0, flag: bool = False, word: str | None = None, any_of: tuple = ()):
    return x


@pytest.mark.parametrize(
    "text, words",
    [
        ("typed(whole=2.5)", r"typed\(whole=2.5\)"),
        ("typed(whole=true)", "whole=True"),
        ("typed(real=false)", "real=False"),
        ("typed(flag=1)", "flag=1"),
        ("typed(word=3)", r"word=3\)"),
    ],
)
def test_an_option_of_another_type_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        check_component(lookup("part", Component.read(text), {"typed": typed}), None)


def test_an_option_of_its_type_is_taken():
    for text in ("typed(whole=2, real=3, flag=true, word=a)", "typed(real=inf, word=None, any_of=(3,))"):
        check_component(lookup("part", Component.read(text), {"typed": typed}), None)


def test_files_that_a_mixture_names_are_found_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tasks = ("jsonl:a.jsonl", Component("jsonl:b.jsonl", match="math"), "running_sums")
    task = located(RunConfig(arm=Arm(name="a"), task=Component("mixture", tasks=tasks))).task
    there = (
        Component(f"jsonl:{tmp_path}/a.jsonl"),
        Component(f"jsonl:{tmp_path}/b.jsonl", match="math"),
        Component("running_sums"),
    )
    assert task == Component("mixture", tasks=there)
