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
    for completion, exact, math in ((" 12\n", 1, 1), ("it is = 12", 0, 1), ("3+9", 0, 1), ("13", 0, 0)):
        assert (task.reward(prompt, completion), by_value.reward(prompt, completion)) == (exact, math)


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
        ([{"question": "q", "answer": "1"}, {"question": "q", "solution": "1"}], "line 2: 'answer' is null"),
        ([{"question": "q", "answer": " "}], "line 1: 'answer'"),
        (['{"question": "q", "answer": NaN}'], "line 1: 'answer' is NaN"),
        ([{"question": [{"role": "user"}], "answer": "1"}], r"line 1: 'question' is \["),
        ([{"question": "q", "answer": True}], "line 1: 'answer' is true"),
        (['{"question": "q", '], "line 1: expected a JSON object"),
        (['{"question": "q", "answer": "1", "answer": "2"}'], "line 1: .*'answer' is there twice"),
        ([], "contains no line"),
        (
            [{"question": "q", "answer": 1}, {"question": "r", "answer": 2}, {"question": "q", "answer": "2"}],
            "line 3: .*'2', but '1' at .*line 1",
        ),
    ],
)
def test_a_broken_file_names_the_line(tmp_path, lines, said):
    with pytest.raises(ConfigError, match=said):
        task_of(tmp_path, lines)


def test_a_byte_order_mark_is_read_over(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "1"}\r\n{"question": "r", "answer": "2"}\r\n')
    assert {p.text for p in load_task(f"jsonl:{file}").prompts(2, 0)} == {"q", "r"}
