"""The adapter gives the package's own questions and its own scores."""

from __future__ import annotations

import sys

import pytest

from moe_rl.analysis.benchmarks import RIGHT
from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.tasks.base import load_task


@pytest.mark.parametrize("dataset", ["spell_backward", "chain_sum", "letter_counting", "basic_arithmetic"])
def test_any_dataset_by_name_rewards_its_own_answers(dataset):
    task = load_task(f"reasoning_gym:{dataset}")
    for prompt in task.prompts(5, 3):
        assert task.reward(prompt, prompt.answer) == 1
        assert task.reward(prompt, f" {prompt.answer}\n") == 1
        assert task.reward(prompt, "~") < 1


def test_partial_credit_is_the_scorers():
    task = load_task(Component("reasoning_gym:spell_backward", min_word_len=4, max_word_len=4))
    prompt = task.prompts(1, 0)[0]
    assert len(prompt.answer) == 4
    assert task.reward(prompt, prompt.answer[:3] + "~") == 0.75


def test_partial_credit_that_rounds_past_one_is_not_right():
    task = load_task(Component("reasoning_gym:spell_backward", min_word_len=9, max_word_len=9))
    prompt = task.prompts(1, 0)[0]
    assert sum([1 / 9] * 9) > 1
    for more in ("uc", "u", "abcd"):
        assert 0.999 < task.reward(prompt, prompt.answer + more) < RIGHT


def test_wrong_options_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="max_word_length"):
        load_task(Component("reasoning_gym:spell_backward", max_word_length=4))
    with pytest.raises(ConfigError, match="seed"):
        load_task(Component("reasoning_gym:spell_backward", seed=4))
    with pytest.raises(ConfigError, match="composite"):
        load_task("reasoning_gym:composite")


def test_without_the_package_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        load_task("reasoning_gym:spell_backward")
