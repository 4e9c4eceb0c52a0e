"""Published benchmarks by name: ten lines made by hand in each schema, from files, and without the package."""

from __future__ import annotations

import json
import sys
import types

import pandas as pd
import pytest

from moe_rl.analysis.benchmarks import of_problems
from moe_rl.analysis.evaluation import benchmark
from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.tasks.base import load_task
from moe_rl.tasks.matching import integer

GOLD = [3, 70_000, 18, 1, 540, 20, 64, 260, 160, 45]
LATEX = [
    r"\frac{1}{2}",
    "2",
    r"\left( 3, \frac{\pi}{2} \right)",
    "p - q",
    r"\sqrt{3}",
    "9",
    r"\text{Evelyn}",
    "42",
    "27",
    "90^\\circ",
]
GSM8K = [{"question": f"g{n}", "answer": f"He has <<{a}*1={a}>>{a:,}.\n#### {a:,}"} for n, a in enumerate(GOLD)]
MATH500 = [
    {
        "problem": f"m{n}",
        "solution": f"So $\\boxed{{{a}}}$.",
        "answer": a,
        "subject": "Algebra",
        "level": 2,
        "unique_id": f"test/{n}",
    }
    for n, a in enumerate(LATEX)
]
AIME = {
    "hugging face": [
        {"id": n, "problem": f"a{n}", "solution": "…", "answer": f"{a % 1000:03}", "url": "", "year": "2024"}
        for n, a in enumerate(GOLD)
    ],
    "maxwell jia": [
        {"ID": f"2024-I-{n}", "Problem": f"a{n}", "Solution": "…", "Answer": a % 1000} for n, a in enumerate(GOLD)
    ],
    "evalchemy": [
        {"id": n, "problem": f"a{n}", "reference_solution": "…", "expected_answer": str(a % 1000)}
        for n, a in enumerate(GOLD)
    ],
    "opencompass": [{"question": f"a{n}", "answer": str(a % 1000)} for n, a in enumerate(GOLD)],
}
COPIES = [
    ("gsm8k", GSM8K),
    ("math500", MATH500),
    *(("aime2024", rows) for rows in AIME.values()),
    ("aime2025", AIME["opencompass"]),
]


@pytest.mark.filterwarnings("ignore:.* different ones")
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("name, rows", COPIES)
def test_a_file_in_its_own_schema_is_a_benchmark(tmp_path, name, rows, form):
    file = tmp_path / f"copy.{form}"
    if form == "parquet":
        pd.DataFrame(rows).to_parquet(file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    made = benchmark(Component(f"jsonl:{file}", benchmark=name))
    assert (made.name, len(made.prompts)) == (name, 10) and str(file) not in made.scored
    wanted = LATEX if name == "math500" else [str(a if name == "gsm8k" else a % 1000) for a in GOLD]
    assert [prompt.answer for prompt in made.prompts] == wanted
    assert all(prompt.text.endswith("final answer within \\boxed{}.") for prompt in made.prompts)
    right = [made.task.reward(p, f"First $7$, then \\boxed{{{p.answer}}}") for p in made.prompts]
    assert right == [1.0] * 10
    assert [made.task.reward(p, "I cannot say") for p in made.prompts] == [0.0] * 10


def test_another_number_of_problems_is_said(tmp_path):
    (tmp_path / "short.jsonl").write_text("\n".join(map(json.dumps, AIME["opencompass"])))
    with pytest.warns(UserWarning, match="30 .*short.jsonl has 10"):
        load_task(Component(f"jsonl:{tmp_path}/short.jsonl", benchmark="aime2024"))
    thirty = [{"problem": f"a{n}", "answer": n} for n in range(30)] * 2
    (tmp_path / "whole.jsonl").write_text("\n".join(map(json.dumps, thirty)))
    assert len(benchmark(Component(f"jsonl:{tmp_path}/whole.jsonl", benchmark="aime2024")).prompts) == 30


@pytest.mark.parametrize("row", [{"prompt": "q", "answer": "1"}, {"problem": "q", "answer": "x+1"}])
def test_a_row_of_another_schema_names_its_line(tmp_path, row):
    (tmp_path / "odd.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="row 1: .*aime2024"):
        load_task(Component(f"jsonl:{tmp_path}/odd.jsonl", benchmark="aime2024"))


def test_the_hub_is_read_by_datasets_and_its_absence_says_what_to_do(monkeypatch):
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        return [{"problem": f"a{n}", "answer": str(n), "id": str(n)} for n in range(30)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert len(benchmark(Component("jsonl:aime2025", benchmark="aime2025")).prompts) == 30
    assert asked == [("math-ai/aime25", "default", "test")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="--data aime2025=FILE"):
        load_task(Component("jsonl:aime2025", benchmark="aime2025"))


def test_answers_that_are_the_same_integer_vote_together(tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"question": "q", "answer": "42"}))
    task = load_task(Component(f"jsonl:{tmp_path}/pairs.jsonl", match="integer"))
    assert task.votes(task.lines[0], ["\\boxed{42}", "so 042", "43", "none"]) == [0, 0, 2, None]


def test_math_verify_is_a_metric_beside_the_reward():
    rows = pd.DataFrame({"problem": [0, 0], "sample": [1, 2], "reward": [1.0, 0.0], "vote": [1, 2], "truncated": 0.0})
    rows["response_tokens"] = 3.0
    assert "math_verify" not in of_problems(rows)
    assert of_problems(rows.assign(math_verify=[1.0, 1.0]))["math_verify"] == {0: 1.0}


@pytest.mark.parametrize(
    "answer, completion, right",
    [
        ("12345678901234567", r"\boxed{12345678901234599}", False),
        ("1219326311370217952237463801111263526900", "1219326311370217952237463801111263000000", False),
        ("23", r"\boxed{2,3}", False),
        ("1234", r"\boxed{1{,}234}", True),
        ("33", r"\boxed{\frac{7}{33}}", False),
        ("3", r"\boxed{3} or \boxed{\frac{\sqrt{\frac{1}{2}}}{5}}", False),
        ("-5", r"\boxed{−5}", True),
        ("18", r"\boxed{\$18 \text{ dollars}}", True),
        ("18", "so 18.0", True),
        ("18", "#### 18.", True),
        ("18", r"\boxed{18", False),
        ("42", "It is \\boxed{042}", True),
        ("42", "40+2", False),
        ("1200", "So #### 1,200", True),
        ("7", "\\boxed{\\text{7 apples}}", True),
        ("7", "\\boxed{8} after 7", False),
        ("-7", "\\boxed{7}", False),
        ("seven", "none", False),
    ],
)
def test_a_box_is_the_number_and_nothing_else(answer, completion, right):
    assert integer(answer, completion) is right
