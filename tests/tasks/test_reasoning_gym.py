"""The adapter gives the package's own questions and its own scores."""

from __future__ import annotations

import inspect
import re

import pytest

from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.tasks.base import RIGHT, load_task
from moe_rl.tasks.reasoning_gym import EVALUATED


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


def test_datasets_whose_scorers_evaluate_an_answer_are_refused_and_no_others():
    """By the source of every scorer: `eval`, or what sympy reads text with, which is `eval`, too."""
    from reasoning_gym.factory import DATASETS

    def evaluates(kind: type) -> bool:
        return re.search(r"\beval\(|\bparse_expr\(|\bsympify\(", inspect.getsource(kind.score_answer)) is not None

    own = {"number_sorting"}  # which evaluates the answer of its own entry alone
    assert {name for name, (kind, _) in DATASETS.items() if evaluates(kind)} == EVALUATED | own
    for dataset in EVALUATED:
        with pytest.raises(ConfigError, match=dataset):
            load_task(f"reasoning_gym:{dataset}")
