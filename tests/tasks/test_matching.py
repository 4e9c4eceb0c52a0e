"""What is right: every row of matching.md and of the table in docs/tasks.md; the page's file and class are a task."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
from pathlib import Path

import pytest

from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.study.rehearsal import preview
from moe_rl.tasks.base import load_task
from moe_rl.tasks.matching import final, matcher, pieces
from tests.conftest import python_block
from tests.test_trainer import TINY

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
LINES = [[line for line in text.splitlines() if line.startswith(("| `exact` |", "| `math` |"))]
         for text in (Path(__file__).with_name("matching.md").read_text(), PAGE)]  # fmt: skip
ROWS = [[cell.replace("⏎", "\n") for cell in row] for row in re.findall(
    r"^\| `(exact|math)` \| `(.*?)` \| `(.*?)` \| `(.*?)` \| ([01]) \|$", "\n".join(LINES[0]), re.MULTILINE)]


def test_every_row_was_read_and_those_of_the_page_are_among_them():
    assert len(ROWS) == len(LINES[0]) > 80 and set(LINES[1]) <= set(LINES[0])
    assert f"[{len(LINES[0]) - len(LINES[1])} more]" in PAGE


@pytest.mark.parametrize("match, question, answer, completion, reward", ROWS)
def test_a_completion_earns_what_the_page_says(match, question, answer, completion, reward):
    assert matcher(match)(question, answer, completion) == (reward == "1")


@pytest.mark.parametrize("match", ["exact", "math"])
def test_nothing_earns_nothing_and_the_answer_itself_earns_all(match):
    for _, question, answer, *_ in ROWS:
        assert matcher(match)(question, answer, answer)
        assert not any(matcher(match)(question, answer, empty) for empty in ("", " ", "\n", "=", "$$", r"\boxed{}"))


@pytest.mark.parametrize("text, wanted", [
    (r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}"), (r"\boxed {3}", "3"), ("a\n\nThe answer: $4$.\n", "4"),
    ("x >= 2", "x >= 2"), ("a == b", "a == b"), ("#### -5", "-5"), (r"\[ x = 7. \]", "7"), (".5", ".5"), ("", ""),
])
def test_the_final_answer_of_a_text(text, wanted):
    assert final(text) == wanted


@pytest.mark.parametrize("text, count", [
    ("12", 1), ("1,200.5", 1), ("-12", 2), ("3+9", 3), ("24/2", 3), ("2/3", 1), (r"\frac{2}{3}", 1), (r"\frac23", 1),
    ("12%", 2), ("2x", 2), (r"2 \cdot x", 2), ("(x+1)^2", 5), ("12 apples", 2), ("1/2/3", 5),
])
def test_pieces_counted_by_hand(text, count):
    assert pieces(text) == count


def test_mathematics_is_scored_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(matcher("math")("q", "1/4", "0.25")))
    thread.start()
    thread.join()
    assert found == [True]


def test_what_cannot_score_is_refused_where_the_task_is_made(monkeypatch):
    with pytest.raises(ConfigError, match="no match is called 'maths': did you mean math"):
        matcher("maths")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert matcher("exact")
    with pytest.raises(ConfigError, match=r"pip install 'moe_rl\[math\]'"):
        matcher("math")


def test_the_file_and_the_class_of_the_page_are_tasks_whose_answers_earn_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (lines,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    code = python_block(PAGE, "class Reversed")
    more = [{"question": f"{n}+1=", "answer": n + 1} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text(lines + "\n".join(map(json.dumps, more)))
    (tmp_path / "page_mine.py").write_text(code)
    for task in (Component("jsonl:pairs.jsonl", match="math"), Component("page_mine:Reversed", length=4)):
        made = load_task(task)
        assert all(made.reward(p, p.answer) == 1 for p in made.prompts(30, 0))
        assert preview(TINY.replace(task=task, max_new_tokens=14)).cautions == ()
    task = load_task("page_mine:Reversed")
    assert task.prompts(5, 1) == task.prompts(5, 1) != task.prompts(5, 2)
    assert task.reward(task.prompts(1, 0)[0], "") == 0


def test_an_answer_that_is_nested_deeply_is_compared():
    """A model may write anything, and a reward must not end its training."""
    nested = "\\boxed{" + "\\text{" * 1500 + "7" + "}" * 1501
    assert final(nested) == "7" and matcher("math")("", "7", nested)
