"""Reward functions of one's own: what they are called with, what they may return, and what becomes of it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from moe_rl.config import Arm, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.models.tokens import byte_tokenizer, encode_prompts
from moe_rl.recorder import evaluate
from moe_rl.registry import Component
from moe_rl.rollouts.batches import Collector, Queue
from moe_rl.storage.commits import check_rows
from moe_rl.tasks.base import load_task, rewards_of
from moe_rl.tasks.environments import compute_rewards
from moe_rl.tasks.rewards import LATE, Limited, columns_of
from moe_rl.types import Rollout, Sampling
from tests.conftest import python_block

SOURCE = """
import asyncio, math, time
SEEN = []

def correct(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]
def short(completions, **kwargs):
    return [None if c == "?" else -1.0 if len(c) > 3 else 1 for c in completions]
async def later(prompts, completions, level, trainer_state=1, **kwargs):
    SEEN.append({"prompts": prompts, "completions": completions, "level": level, "state": trainer_state, **kwargs})
    await asyncio.sleep(0)
    return [len(c) / 8 for c in completions]
def slow(completions, **kwargs):
    for c in completions:
        while c == "loop":
            pass
    return [1.0] * len(completions)
def std(completions, **kwargs): return [1.0]
def nan(completions, **kwargs): return [math.nan for _ in completions]
def text(completions, **kwargs): return ["1" for _ in completions]
def one_text(completions, **kwargs): return "1"
def fewer(completions, **kwargs): return [1.0] * (len(completions) - 1)
def silent(completions, **kwargs): return [None for _ in completions]
def old(prompt, completion): return 1.0
def lacks(completions, solution, **kwargs): return [1.0]
def placed(completions, /, **kwargs): return [1.0]
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes the task of a file of four lines with these options."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    (tmp_path / "own_rewards.py").write_text(SOURCE)
    lines = [{"question": f"{n}+1=", "answer": str(n + 1), "prompt": "left out", "level": n} for n in range(4)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return lambda **options: load_task(Component(f"jsonl:{tmp_path}/pairs.jsonl", **options))


def own(*names):
    return [f"own_rewards:{name}" for name in names]


def test_functions_get_all_completions_at_once_by_the_keywords_of_trl(made):
    task = made(reward="own_rewards:later")
    prompts = encode_prompts(task.lines[:2], byte_tokenizer(300))
    assert rewards_of(task, prompts, ["1", "22"], [[1], [2, 2]]) == [1 / 8, 2 / 8]
    chatting = [replace(prompt, chat=True) for prompt in prompts]
    rewards_of(task, chatting, ["1" * 7, ""], [[1], []])
    import own_rewards

    plain, chat = own_rewards.SEEN
    assert plain == {
        "prompts": ["0+1=", "1+1="],
        "completions": ["1", "22"],
        "completion_ids": [[1], [2, 2]],
        "question": ["0+1=", "1+1="],
        "answer": ["1", "2"],
        "level": [0, 1],
        "state": None,
    }
    assert chat["prompts"] == [[{"role": "user", "content": "0+1="}], [{"role": "user", "content": "1+1="}]]
    assert [c[0] for c in chat["completions"]] == [
        {"role": "assistant", "content": "1" * 7},
        {"role": "assistant", "content": ""},
    ]


def test_several_functions_are_weighed_and_columns_of_their_own(made):
    task = made(rewards=own("later", "short"), reward_weights=[0.5, 0.5], reward_range=[-0.5, 1.5])
    rewards = rewards_of(task, task.lines[:3], ["12", "12345678", "?"])
    assert rewards == [(0.5 / 4 + 0.5 + 0.5) / 2, (0.5 - 0.5 + 0.5) / 2, (0.5 / 8 + 0.5) / 2]
    assert [reward.parts for reward in rewards] == [
        {"reward_later": 0.25, "reward_short": 1.0},
        {"reward_later": 1.0, "reward_short": -1.0},
        {"reward_later": 0.125, "reward_short": None},
    ]
    assert columns_of(rewards) == {"reward_later": 1.375 / 3, "reward_short": 0.0}


def test_a_completion_that_no_function_scores_gets_0_and_a_warning(made):
    task = made(reward="own_rewards:short", reward_range=[-1, 1])
    with pytest.warns(UserWarning, match="no function scored 1 of 3 completions"):
        rewards = rewards_of(task, task.lines[:3], ["?", "12", "1234"])
    assert rewards == [0.0, 1.0, 0.0]
    with pytest.warns(UserWarning):
        assert columns_of(rewards_of(task, task.lines[:1], ["?"])) == {}


@pytest.mark.parametrize(
    "name, said",
    [
        ("nan", "own_rewards:nan returned nan for '1'. Return a finite number"),
        ("text", "own_rewards:text returned '1' for '1'. Return a finite number"),
        ("one_text", "own_rewards:one_text returned '1'"),
        ("fewer", r"own_rewards:fewer returned \[1.0\]"),
        ("short", r"own_rewards:short gave -1 for '1234', .* Set task.reward_range"),
    ],
)
def test_what_is_no_reward_names_the_function(made, name, said):
    task = made(reward=f"own_rewards:{name}")
    with pytest.raises(ConfigError, match=said):
        rewards_of(task, task.lines[:2], ["1", "1234"])


@pytest.mark.parametrize(
    "options, said",
    [
        ({"reward": "own_rewards:old"}, r"own_rewards:old must take \*\*kwargs"),
        ({"reward": "own_rewards:placed"}, r"own_rewards:placed must take \*\*kwargs"),
        ({"reward": "own_rewards:lacks"}, "own_rewards:lacks"),
        ({"reward": "own_rewards:correct", "match": "math"}, "Set one of the three"),
        ({"reward_timeout": 2.0}, "a time limit need reward"),
        ({"rewards": own("correct", "correct")}, "different names"),
        ({"rewards": own("std")}, "none of them std"),
        ({"rewards": own("correct", "short"), "reward_weights": [1.0]}, "give 2 finite weights"),
        ({"reward": "own_rewards:correct", "reward_range": [1, 1]}, "the lower end first"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_called(made, options, said):
    with pytest.raises(ConfigError, match=said):
        made(**options)


def test_a_call_beyond_the_limit_is_ended_and_counted_for_its_completion_alone(made):
    task = made(rewards=own("slow", "correct"), reward_weights=[0, 1], reward_timeout=2.0)
    try:
        rewards = rewards_of(task, task.lines[:3], ["1", "loop", "3"])
    finally:
        pools = [call for _, _, call in task._own.parts]
        [call.pool.terminate() for call in pools if call.pool]
    assert rewards == [1.0, 0.0, 1.0]
    assert [reward.parts["reward_slow"] for reward in rewards] == [1.0, None, 1.0]
    assert columns_of(rewards) == {"reward_slow": 1.0, "reward_correct": 2 / 3, "reward_timeouts": 1.0}


def test_the_function_of_the_page_runs(made, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    (tmp_path / "page_reward.py").write_text(python_block(page, "def correct"))
    task = made(reward="page_reward:correct", reward_range=[-1, 1])
    with pytest.warns(UserWarning, match="1 of 3"):
        assert rewards_of(task, task.lines[:3], ["1", "7", "?"]) == [1.0, 0.0, 0.0]


def test_columns_reach_the_rows_of_a_step_and_of_an_evaluation(made):
    """From a batch source and from `evaluate`, as a run has them."""

    def answer(prompts, group_size, *, key, sampling, reply=None):
        asked = [prompt for prompt in prompts for _ in range(group_size)]
        return [Rollout(p, (5,), torch.zeros(1), p.answer, finished=True) for p in asked]

    tokenizer = byte_tokenizer(300)
    task = made(rewards=own("correct", "later"), reward_weights=[1, 0])
    engine = SimpleNamespace(reports_routes=False, generate=answer, load=lambda weights: None, close=lambda: None)
    prompts = encode_prompts(task.lines[:1], tokenizer)
    config = RunConfig(arm=Arm(name="a"), prompts_per_step=2, group_size=2, mini_batches=1)
    collector = Collector(run=config, task=task, engine=engine, tokenizer=tokenizer, held_out=prompts)
    source = Queue()
    assert source.next(collector, 1).rewards.tolist() == [1.0] * 4
    assert source.row == {"reward_correct": 1.0, "reward_later": 1 / 8}
    check_rows("steps", [{"step": 1, **source.row}])
    rows = [row for row, _ in evaluate(engine, task, prompts, Sampling(), key=(0,))]
    assert [(row["reward"], row["reward_later"]) for row in rows] == [(1.0, 1 / 8)] * 2
    check_rows("evaluations", [{"step": 0, "benchmark": "held_out", **row} for row in rows])


def test_a_mixture_scores_each_prompt_by_its_own_task(made, tmp_path):
    file = {"name": f"jsonl:{tmp_path}/pairs.jsonl", "options": {"reward": "own_rewards:later"}}
    task = load_task(Component("mixture", tasks=(file, "running_sums")))
    prompts = task.prompts(20, 0)
    rewards = compute_rewards(task, [Rollout(p, (1,), torch.zeros(1), p.answer, finished=True) for p in prompts])
    kinds = [prompt.entry["task"] for prompt in prompts]
    (first, *_) = (replace(prompt, chat=True) for prompt in prompts if prompt.entry["task"] == 0)
    task.reward(first, "12")
    assert sys.modules["own_rewards"].SEEN[-1]["completions"] == [[{"role": "assistant", "content": "12"}]]
    assert {0, 1} == {*kinds} and [1 / 8 if kind == 0 else 1.0 for kind in kinds] == rewards
    assert columns_of(rewards) == {"reward_later": 1 / 8}


def test_a_function_that_only_this_process_can_import_is_an_error(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "here_alone.py").write_text("import multiprocessing\nassert not multiprocessing.parent_process()")
    with pytest.raises(AssertionError):
        Limited("here_alone:reward", 3.0)(completions=["a"])


def test_what_a_late_function_started_ends_with_it(tmp_path, monkeypatch):
    source = """
import subprocess
def late(completions, **kwargs):
    child = subprocess.Popen(["sleep", "600"])
    open("child", "w").write(str(child.pid))
    child.wait()
"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "starts.py").write_text(source)
    assert Limited("starts:late", 3.0)(completions=["a"]) == [LATE]
    pid = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # a killed process runs until it is scheduled
            assert time.monotonic() < deadline
            time.sleep(0.01)
