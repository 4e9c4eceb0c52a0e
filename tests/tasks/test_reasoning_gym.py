"""The adapter gives the package's own questions and its own scores."""

from __future__ import annotations

import sys

import pytest

from moe_rl.analysis.benchmarks import RIGHT
from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.tasks.base import load_task
from moe_rl.tasks.reasoning_gym import is_formula


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


EVALUATING = ("binary_matrix", "intermediate_integration", "n_queens", "polynomial_multiplication",
              "simple_integration", "spiral_matrix", "string_insertion", "countdown", "puzzle24")


@pytest.mark.parametrize("dataset", EVALUATING)
def test_a_completion_runs_no_code(dataset, tmp_path, monkeypatch):
    """Scorers that evaluate what a model wrote: these datasets' own do."""
    monkeypatch.chdir(tmp_path)
    task = load_task(f"reasoning_gym:{dataset}")
    (prompt,) = task.prompts(1, 0)
    for payload in ("__import__('pathlib').Path('ran').touch()", "open('ran', 'w')", "[open('ran', 'w')]"):
        assert task.reward(prompt, payload) == 0
    assert not (tmp_path / "ran").exists()
    assert task.reward(prompt, prompt.answer) == 1


def test_lists_and_formulas_are_read_as_before():
    spiral = load_task("reasoning_gym:spiral_matrix")
    (prompt,) = spiral.prompts(1, 0)
    assert spiral.reward(prompt, f"[{', '.join(prompt.answer.split())}]") == 0.1
    integral = load_task("reasoning_gym:simple_integration")
    (prompt,) = integral.prompts(1, 0)
    assert integral.reward(prompt, f"abs(-1)*sqrt(4)*({prompt.answer})/2 + const + sin(0)") == 1


@pytest.mark.parametrize("text", ["x.func", "exec(x)", "().y", "lambda: x", "sympify(x)", "x if x else y", "'x'",
                                  "ｅｘｅｃ(x)", "x[0]", "__x", "breakpoint()", "preview(x)",
                                  "9**9**9", "9**(9**9)", "2^9999",
                                  "factorial(99999999)", "partition(9)", "N(pi, 10)", "9999999999"])  # noqa: RUF001
def test_what_is_no_formula(text):
    assert not is_formula(text)
    assert is_formula("-2*(6*x - 9)**(3/2)/3 + C") and is_formula("1.5e3*exp(x) - log(abs(cos(x)))*pi")


def test_the_options_of_a_row_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="symbols must contain letters"):
        load_task(Component("reasoning_gym:simple_integration", symbols=["open('ran', 'w')"])).prompts(3, 0)
    assert not (tmp_path / "ran").exists()
