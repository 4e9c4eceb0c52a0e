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
from moe_rl.tasks.matching import matcher
from tests.conftest import python_block
from tests.test_trainer import TINY

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
LINES = [
    [line for line in text.splitlines() if line.startswith(("| `exact` |", "| `math` |"))]
    for text in (Path(__file__).with_name("matching.md").read_text(), PAGE)
]
ROWS = [
    [cell.replace("⏎", "\n") for cell in row]
    for row in re.findall(r"^\| `(exact|math)` \| `(.*?)` \| `(.*?)` \| ([01]) \|$", "\n".join(LINES[0]), re.MULTILINE)
]


def test_every_row_was_read_and_those_of_the_page_are_among_them():
    assert len(ROWS) == len(LINES[0]) > 20 and set(LINES[1]) <= set(LINES[0])
    assert f"[{len(LINES[0]) - len(LINES[1])} more]" in PAGE


@pytest.mark.parametrize("match, answer, completion, reward", ROWS)
def test_a_completion_earns_what_the_page_says(match, answer, completion, reward):
    assert matcher(match)(answer, completion) == (reward == "1")


@pytest.mark.parametrize("match", ["exact", "math"])
def test_nothing_earns_nothing_and_the_answer_itself_earns_all(match):
    for _, answer, *_ in ROWS:
        assert matcher(match)(answer, answer)
        assert not any(matcher(match)(answer, empty) for empty in ("", " ", "\n", "=", "$$", r"\boxed{}"))


def test_mathematics_is_scored_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(matcher("math")("1/4", "0.25")))
    thread.start()
    thread.join()
    assert found == [True]


def test_what_cannot_score_is_refused_where_the_task_is_made(monkeypatch):
    with pytest.raises(ConfigError, match="match='maths'"):
        load_task(Component("jsonl:pairs.jsonl", match="maths"))
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
        assert preview(TINY.replace(task=task, max_new_tokens=14))[1] == []
    task = load_task("page_mine:Reversed")
    assert task.prompts(5, 1) == task.prompts(5, 1) != task.prompts(5, 2)
    assert task.reward(task.prompts(1, 0)[0], "") == 0


@pytest.mark.parametrize("completion", ["\\boxed{" + "\\text{" * 1500 + "7" + "}" * 1501, "(" * 3000, "1+" * 5000])
def test_what_no_parser_reads_earns_nothing(completion):
    """A model may write anything, and a reward must not end its training."""
    assert not matcher("math")("7", completion)
