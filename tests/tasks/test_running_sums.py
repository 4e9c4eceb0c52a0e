"""Running sums: their arithmetic, their lengths, their rewards."""

from __future__ import annotations

import pytest

from moe_rl.tasks.running_sums import RunningSums


def test_372_gives_302():
    prompt = RunningSums(digits=3).prompt([3, 7, 2])
    assert (prompt.text, prompt.answer) == ("372=", "302")


def test_modulo_3_worked_by_hand():
    assert RunningSums(digits=4, modulus=3).prompt([2, 2, 1, 2]).answer == "2121"  # 2, 4, 5, 7


def test_the_answer_is_as_long_as_the_question_and_its_differences_are_the_digits():
    for modulus in (2, 7, 10):
        for prompt in RunningSums(digits=9, min_digits=2, modulus=modulus).prompts(50, 1):
            question, answer = prompt.text[:-1], prompt.answer
            assert len(question) == len(answer)
            sums = [0, *map(int, answer)]
            assert [(b - a) % modulus for a, b in zip(sums, sums[1:], strict=False)] == list(map(int, question))


def test_lengths_are_fixed_by_default_and_all_occur_when_variable():
    assert {len(p.text) for p in RunningSums().prompts(50, 0)} == {13}
    assert {len(p.text) for p in RunningSums(digits=5, min_digits=3).prompts(100, 0)} == {4, 5, 6}


def test_more_prompts_begin_with_the_same_ones():
    task = RunningSums(min_digits=3)
    assert task.prompts(10, 4) == task.prompts(30, 4)[:10]


@pytest.mark.parametrize(
    "completion, exact, partial",
    [("302", 1, 1), ("301", 0, 2 / 3), ("", 0, 0), ("3021", 0, 3 / 4), ("30", 0, 2 / 3), ("999", 0, 0), (" 302", 0, 0)],
)
def test_rewards(completion, exact, partial):
    prompt = RunningSums(digits=3).prompt([3, 7, 2])
    assert RunningSums(digits=3).reward(prompt, completion) == exact
    assert RunningSums(digits=3, partial=True).reward(prompt, completion) == partial
