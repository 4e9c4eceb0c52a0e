"""Which task a name means, and that nothing unusable gets past the door."""

from __future__ import annotations

import math
import sys
from itertools import pairwise

import pytest

from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.tasks.base import Split, Task, draw, held_out, load_task, rewards_of, split_of
from moe_rl.tasks.running_sums import RunningSums
from moe_rl.types import Prompt


class Finite:
    """Five prompts, in turn."""

    def prompts(self, count, seed):
        return [Prompt(text=str((seed + i) % 5), answer="x") for i in range(count)]

    def reward(self, prompt, completion):
        return {"nan": math.nan, "two": 2.0, "none": None, "true": True, "text": "1"}.get(completion, 0.25)


@pytest.mark.parametrize(
    "spec, said",
    [
        ("runing_sums", "did you mean running_sums?"),
        ("jsonl:", "jsonl:<file>"),
        ("", "is not the name of a component"),
        ("reasoning_gym:spel_backward", "did you mean spell_backward"),
        ("no_such_package.tasks:Mine", "'no_such_package'"),
        ("moe_rl.tasks.running_sums:RuningSums", "did you mean RunningSums"),
        ("moe_rl.config:Arm", "is not a task"),
    ],
)
def test_an_unknown_task_is_one_sentence_with_the_choices(spec, said):
    with pytest.raises(ConfigError) as error:
        load_task(spec)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_task_of_ones_own_is_found_in_the_working_directory(tmp_path, monkeypatch):
    package = tmp_path / "my_own_tasks"
    package.mkdir()
    (package / "deep.py").write_text(
        "from moe_rl.types import Prompt\n"
        "class Echo:\n"
        "    def __init__(self, word='a'): self.word = word\n"
        "    def prompts(self, count, seed): return [Prompt(text=self.word)] * count\n"
        "    def reward(self, prompt, completion): return 1.0\n"
        "class NoTask: pass\n"
    )
    (package / "broken.py").write_text("import not_installed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    task = load_task(Component("my_own_tasks.deep:Echo", word="b"))
    assert isinstance(task, Task)
    assert task.prompts(1, 0)[0].text == "b"
    with pytest.raises(ConfigError, match="is not a task"):
        load_task("my_own_tasks.deep:NoTask")
    with pytest.raises(ModuleNotFoundError, match="not_installed"):  # the user's bug, with its traceback
        load_task("my_own_tasks.broken:Echo")


def test_a_class_that_is_no_task_is_not_even_built(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="subprocess:Popen"):
        load_task(Component("subprocess:Popen", args=["touch", "built"]))
    assert not (tmp_path / "built").exists()


def test_draw_leaves_out_what_is_excluded_and_keeps_the_order():
    assert [p.text for p in draw(Finite(), 4, 0, excluding={"1", "3"})] == ["0", "2", "4", "0"]
    task = RunningSums(digits=2)
    everything = task.prompts(300, 5)
    excluded = {p.text for p in everything[:50]}
    assert draw(task, 40, 5, excluded) == [p for p in everything if p.text not in excluded][:40]


def test_draw_of_an_exhausted_task_says_how_many_there_are():
    with pytest.raises(ConfigError, match="0 of 5"):
        draw(Finite(), 2, 0, excluding=set("01234"))


def test_a_task_without_prompts_is_refused():
    class Empty(Finite):
        def prompts(self, count, seed):
            return []

    with pytest.raises(ConfigError, match="no prompts"):
        draw(Empty(), 3, 0)


class Sized(Finite):
    def __init__(self, different):
        self.different = different

    def __len__(self):
        return self.different


@pytest.mark.parametrize(
    "different, evaluation, stopping",
    [
        (256, 128, 64),  # as ever, where there is enough
        (10_000, 128, 64),
        (200, 40, 64),
        (100, 40, 30),
        (2, 1, 1),
        (1, 0, 1),
    ],
)
def test_the_prompts_of_a_finite_task_are_shared_out(different, evaluation, stopping):
    assert split_of(Sized(different), evaluation) == Split(different, evaluation, stopping)


def test_more_than_half_held_out_is_refused_with_the_number_that_would_do():
    with pytest.raises(ConfigError, match="200 .*eval_prompts=128 .*eval_prompts=40"):
        split_of(Sized(200), 128)
    with pytest.raises(ConfigError, match="eval_prompts=128"):
        split_of(Sized(128), 128)


def test_held_out_prompts_are_the_same_for_everyone():
    assert held_out(RunningSums(), 8) == held_out(RunningSums(), 16)[:8]


def test_a_reward_outside_the_unit_interval_is_refused():
    task, prompt = Finite(), Prompt(text="q")
    assert rewards_of(task, [prompt, prompt], ["", "true"]) == [0.25, 1.0]
    for bad in ("nan", "two", "none", "text"):
        with pytest.raises(ConfigError, match=r"numbers in \[0, 1\]"):
            rewards_of(task, [prompt], [bad])


@pytest.mark.parametrize("spec", ["running_sums", "reasoning_gym:spell_backward"])
def test_neighbouring_seeds_share_no_prompts(spec):
    task = load_task(spec)
    drawn = [{p.text for p in task.prompts(20, seed)} for seed in range(5)]
    assert all(len(a & b) <= 1 for a, b in pairwise(drawn))
    assert task.prompts(20, 3) == task.prompts(20, 3)
