"""Files of question/answer pairs: what counts as right, and what a broken file says."""

from __future__ import annotations

import json

import pytest

from moe_rl.analysis.evaluation import benchmark
from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.seeds import HELD_OUT, derive
from moe_rl.tasks.base import draw, held_out, load_task


def task_of(tmp_path, lines):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return load_task(f"jsonl:{file}")


def test_an_answer_alone_is_right_unless_mathematics_is_asked_for(tmp_path):
    task = task_of(tmp_path, [{"question": "3+9=", "answer": 12}])
    by_value = load_task(Component(f"jsonl:{tmp_path}/pairs.jsonl", match="math"))
    (prompt,) = task.prompts(1, 0)
    for completion, exact, math in ((" 12\n", 1, 1), ("it is = 12", 0, 1), ("3+9", 0, 0), ("13", 0, 0)):
        assert (task.reward(prompt, completion), by_value.reward(prompt, completion)) == (exact, math)


def test_repeated_questions_count_once(tmp_path):
    task = task_of(tmp_path, [{"question": f"q{i % 3}", "answer": i % 3} for i in range(7)])
    assert len(task) == 3


def test_a_question_that_a_file_repeats_is_one_problem_of_an_evaluation(tmp_path):
    """As published files do, for more completions of each: as problems of their own they would narrow intervals."""
    task = task_of(tmp_path, [{"question": f"q{i // 4}", "answer": i // 4, "level": i} for i in range(40)])
    assert len({p.text for p in draw(task, 5, derive(HELD_OUT, 0, 0))}) < 5, "drawn, some come twice"
    few, all_of_them = ([p.text for p in held_out(task, n)] for n in (5, 10))
    assert len(set(few)) == 5 and few == all_of_them[:5] and len(set(all_of_them)) == 10
    whole = benchmark(Component(f"jsonl:{tmp_path}/pairs.jsonl")).prompts
    assert [(p.text, p.entry["level"]) for p in whole] == [(f"q{i}", 4 * i) for i in range(10)]


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
        ([{"question": "q", "answer": "1"}, {"question": "q", "solution": "1"}], "line 2: no key 'answer'.*'solution'"),
        ([{"question": "q", "answer": ""}], "line 1: no key 'answer'"),
        ([{"question": "q", "answer": None}], "line 1: no key 'answer'"),
        (["", "{}"], "line 2: no key 'question'"),
        ([{"question": "q", "answer": ["1"]}], "line 1: 'answer' is .*Write text or a number"),
        ([{"question": [{"role": "user"}], "answer": "1"}], "line 1: 'question' is .*Write text or a number"),
        ([{"question": "q", "answer": True}], "line 1: 'answer' is true"),
        (['{"question": "q", "answer": NaN}'], "line 1: 'answer' is NaN"),
        (['{"question": "q", '], "line 1: expected a JSON object.*Expecting property name"),
        (["[1]"], "line 1: expected a JSON object"),
        (['{"question": "q", "answer": "1", "answer": "2"}'], "line 1: .*the key 'answer' is there twice"),
        ([], "contains no question"),
        ([{"question": "q", "answer": 1}, {"question": "r", "answer": 2}, {"question": "q", "answer": "2"}],
         r"line 3: the question 'q' has the answer '2' here, but '1' at .*pairs.jsonl, line 1"),
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
        (rb'{"question": "a\ud800b", "answer": "1"}', r"pairs.jsonl, line 2: .ud800 is only half of a surrogate pair"),
        (rb'{"question": "a", "answer": "1", "more": [{"\uDFFF": 1}]}', r"line 2: .*half of a surrogate pair"),
        (b'{"question": "\xff", "answer": "1"}', "pairs.jsonl, line 2: not UTF-8"),
        (b'{"question": "q", "answer": ' + b"1" * 5000 + b"}", "line 2: expected a JSON object"),
        (b"[" * 100_000, "line 2: expected a JSON object"),
    ],
)
def test_what_no_tokenizer_could_read_names_file_and_line(tmp_path, line, said):
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(rb'{"question": "\ud83d\ude00", "answer": "whole pairs are fine"}' + b"\n" + line)
    with pytest.raises(ConfigError, match=said):
        load_task(f"jsonl:{file}")


def test_a_missing_file_is_one_sentence():
    with pytest.raises(ConfigError, match="file not found"):
        load_task("jsonl:nowhere/at_all.jsonl")
