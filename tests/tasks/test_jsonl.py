"""Files of question/answer pairs: what counts as right, and what a broken file says."""

from __future__ import annotations

import json
import threading

import pytest

from moe_rl.errors import ConfigError
from moe_rl.tasks.base import draw, load_task


def task_of(tmp_path, lines):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return load_task(f"jsonl:{file}")


@pytest.mark.parametrize(
    "answer, completion, reward",
    [
        ("1/2", "0.5", 1),
        (r"$\frac{1}{2}$", "0.5", 1),
        ("12", " 12\n", 1),
        ("12", "the answer is 12", 1),
        ("12", "13", 0),
        ("red", "red", 1),
        ("red", "blue", 0),
        ("red", "Red", 0),
        ("12", "", 0),
        ("x^2+2x+1", "(x+1)^2", 0),
        ("$x^2+2x+1$", "$(x+1)^2$", 1),
    ],
)
def test_equal_as_mathematics_or_as_text(tmp_path, answer, completion, reward):
    task = task_of(tmp_path, [{"question": "q", "answer": answer}])
    assert task.reward(task.prompts(1, 0)[0], completion) == reward


def test_scoring_works_outside_the_main_thread(tmp_path):
    task = task_of(tmp_path, [{"question": "q", "answer": "1/4"}])
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(task.reward(task.prompts(1, 0)[0], "0.25")))
    thread.start()
    thread.join()
    assert rewards == [1]


def test_every_line_comes_once_per_pass_and_numbers_are_answers_too(tmp_path):
    task = task_of(tmp_path, [{"question": f"q{i}", "answer": i, "level": i} for i in range(7)])
    prompts = task.prompts(21, 3)
    for start in (0, 7, 14):
        assert {p.text for p in prompts[start : start + 7]} == {f"q{i}" for i in range(7)}
    assert prompts[0].entry["level"] == int(prompts[0].answer)
    assert len(draw(task, 10, 0, excluding={f"q{i}" for i in range(6)})) == 10


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path):
    task = task_of(tmp_path, ['{"question": "a\u2028b", "answer": "c"}', ""])
    assert task.prompts(1, 0)[0].text == "a\u2028b"


@pytest.mark.parametrize(
    "lines, said",
    [
        ([{"question": "q", "answer": "1"}, {"question": "q", "solution": "1"}], "line 2: no 'answer'.*'solution'"),
        ([{"question": "q", "answer": ""}], "line 1: no 'answer'"),
        ([{"question": "q", "answer": None}], "line 1: no 'answer'"),
        (["", "{}"], "line 2: no 'question'"),
        (['{"question": "q", '], "line 1: a JSON object is needed.*Expecting property name"),
        (["[1]"], "line 1: a JSON object is needed"),
        ([], "holds no question"),
    ],
)
def test_a_broken_file_names_the_line(tmp_path, lines, said):
    with pytest.raises(ConfigError, match=said):
        task_of(tmp_path, lines)


def test_a_byte_order_mark_is_read_over(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "1"}\r\n{"question": "r", "answer": "2"}\r\n')
    assert {p.text for p in load_task(f"jsonl:{file}").prompts(2, 0)} == {"q", "r"}


@pytest.mark.parametrize(
    "line, said",
    [
        (rb'{"question": "a\ud800b", "answer": "1"}', r"pairs.jsonl, line 2: .ud800 is half of a surrogate pair"),
        (rb'{"question": "a", "answer": "1", "more": [{"\uDFFF": 1}]}', r"line 2: .*half of a surrogate pair"),
        (b'{"question": "\xff", "answer": "1"}', "pairs.jsonl, line 2: not UTF-8"),
        (b'{"question": "q", "answer": ' + b"1" * 5000 + b"}", "line 2: a JSON object is needed"),
        (b"[" * 100_000, "line 2: a JSON object is needed"),
    ],
)
def test_what_no_tokenizer_could_read_names_file_and_line(tmp_path, line, said):
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(rb'{"question": "\ud83d\ude00", "answer": "whole pairs are fine"}' + b"\n" + line)
    with pytest.raises(ConfigError, match=said):
        load_task(f"jsonl:{file}")


def test_a_missing_file_is_one_sentence():
    with pytest.raises(ConfigError, match="no such file"):
        load_task("jsonl:nowhere/at_all.jsonl")
