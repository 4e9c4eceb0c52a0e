"""Before compute is spent: what is shown of a run, and what breaks on a toy batch."""

from __future__ import annotations

import json
import sys

import pytest

from moe_rl.config import Arm, ModelConfig
from moe_rl.errors import ConfigError
from moe_rl.models.load import load, save_checkpoint
from moe_rl.registry import Component
from moe_rl.study import rehearsal
from moe_rl.study.rehearsal import preview, previews, rehearse
from tests.test_trainer import TINY

CODE = '''
import torch
from moe_rl.types import Prompt

def fine(x, *, scale=1.0):
    return scale * (x.weights * x.log_ratio).sum()

def broken(x):
    if len(x.mask) > 1:  # one token goes well
        return x.no_such_field
    return x.logprobs.sum()

def infinite(x):
    return (x.weights * x.logprobs).sum() * float("inf")

def wrong(batch, natural):
    return 3

class Words:
    def __init__(self, fault=""):
        self.fault = fault
    def prompts(self, count, seed):
        if self.fault == "prompts":
            raise KeyError("question")
        return [Prompt(f"word {i % 50}", answer="yes" * (1 + i % 3)) for i in range(count)]
    def reward(self, prompt, completion):
        right = completion == prompt.answer
        if self.fault == "reward":
            return 1 / (not right) if right else 2.0
        return 0.5 * right if self.fault == "low" else float(right)
'''


@pytest.fixture(scope="module", autouse=True)
def own_code(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "rehearsed.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield
    sys.modules.pop("rehearsed", None)


def with_arm(**parts):
    return TINY.replace(task="running_sums", arm=Arm(name="mine", **parts))


@pytest.mark.parametrize("parts, words", [
    ({"terms": ("rehearsed:broken",)}, "arm 'mine' on a toy batch .*rehearsed.py, line 10, in broken: AttributeError"),
    ({"routes": "rehearsed:wrong"}, "arm 'mine' on a toy batch .*rehearsed:wrong.*: AttributeError: 'int' object"),
])  # fmt: skip
def test_own_parts_that_break_are_named_with_their_line(parts, words):
    with pytest.raises(ConfigError, match=words) as error:
        rehearse(with_arm(**parts))
    assert "\n" not in str(error.value)


def test_own_parts_that_work_are_passed_and_those_of_the_package_not_even_tried(monkeypatch):
    assert rehearse(with_arm(terms=(Component("rehearsed:fine", scale=0.5),), routes="old_policy")) == []
    (caution,) = rehearse(with_arm(terms=("rehearsed:infinite",)))
    assert caution.startswith("arm 'mine' on a toy batch: the gradient norm is nan")
    monkeypatch.setattr(rehearsal, "build", lambda *_: pytest.fail("nothing here is anybody's own"))
    assert rehearse(with_arm(loss="gspo")) == []


def test_a_task_that_breaks_or_rewards_too_much_is_refused():
    with pytest.raises(ConfigError, match="rehearsed.py, line 24, in prompts: KeyError: 'question'"):
        preview(TINY.replace(task=Component("rehearsed:Words", fault="prompts")))
    with pytest.raises(ConfigError, match="rehearsed.py, line 29, in reward: ZeroDivisionError"):
        preview(TINY.replace(task=Component("rehearsed:Words", fault="reward")))
    with pytest.raises(ConfigError, match="arm 'grpo' on a toy batch: Words.reward returned 2.0"):
        rehearse(TINY.replace(task=Component("rehearsed:Words", fault="reward")))


def test_a_preview_shows_prompt_answer_reward_and_what_fits():
    shown = preview(TINY.replace(task="rehearsed:Words", max_new_tokens=6))
    lines = dict(shown.lines)
    assert list(lines) == ["task", "prompts", "prompt", "answer", "answers"]
    assert lines["prompt"] == "'word 0', 6 tokens"
    assert lines["answer"] == "'yes', 4 tokens with its end; its reward is 1"
    assert lines["answers"] == (
        "342 of 512 fit into max_new_tokens=6, the longest has 10 tokens with its end; 512 of 512 earn 1")
    (caution,) = shown.cautions
    assert "170 of 512 reference answers do not fit into max_new_tokens=6" in caution and "max_new_tokens=10" in caution


def test_reference_answers_that_are_not_right_are_a_caution():
    (caution,) = preview(TINY.replace(task=Component("rehearsed:Words", fault="low"), max_new_tokens=9)).cautions
    assert "512 of 512 reference answers have a reward below 1" in caution and "'yes' to 'word 0' has 0.5" in caution


def test_a_prompt_is_shown_in_its_chat_template_and_a_small_file_with_its_repeats(tmp_path):
    loaded = load(TINY.model, 0)
    loaded.tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} [/]{% endfor %}"
    save_checkpoint(loaded.model, loaded.tokenizer, tmp_path / "chatty")
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps({"question": f"q{i}", "answer": "a"}) + "\n" for i in range(8)))
    run = TINY.replace(task=f"jsonl:{file}", prompts_per_step=7, eval_prompts=2,
                       model=ModelConfig(name=str(tmp_path / "chatty")))
    shown = preview(run)
    assert dict(shown.lines)["prompt"].startswith("'[user] q") and "[/]'" in dict(shown.lines)["prompt"]
    assert "a step samples 7 prompts, but only 6 different ones" in shown.cautions[0]


def test_data_that_a_warm_up_may_memorise_are_a_caution(tmp_path):
    """10 questions are held out, 64 say when the warm-up ends, and the others are left."""
    def cautions(lines, **changes):
        file = tmp_path / f"{lines}.jsonl"
        file.write_text("".join(json.dumps({"question": f"q{i}", "answer": "a"}) + "\n" for i in range(lines)))
        run = TINY.replace(task=f"jsonl:{file}", eval_prompts=10, **{"cold_start.target": 0.3} | changes)
        return [text for text in preview(run).cautions if "memorise" in text]

    assert cautions(1074) == [] and cautions(40, **{"cold_start.target": 0.0}) == []
    (caution,) = cautions(1073)
    assert "the supervised warm-up trains on 999 different prompts." in caution
    assert "Use more data" in caution and "cold_start.target=0" in caution


def test_runs_that_differ_in_a_seed_alone_are_previewed_once():
    run = TINY.replace(task="running_sums")
    seeds = [run.replace(seed=seed, **{"cold_start.seed": seed}) for seed in range(3)]
    assert len(previews(seeds)) == 1
    assert len(previews([*seeds, run.replace(task=Component("running_sums", digits=3))])) == 2
