"""Before compute is spent: what is shown of a run, and what breaks on a toy batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moe_rl.config import Arm
from moe_rl.errors import ConfigError, MoeRlError
from moe_rl.models.load import hf_config
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.registry import Component
from moe_rl.study import Study, rehearsal
from moe_rl.study.declaration import Planned
from moe_rl.study.rehearsal import on_this_machine, preview, rehearse
from moe_rl.study.workers import preflight
from tests.test_trainer import TINY

CODE = """
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

def wrong(batch, unconstrained):
    return 3

class Words:
    def __init__(self, fault=""):
        self.fault = fault
    def prompts(self, count, seed):
        if self.fault == "prompts":
            raise KeyError("question")
        if self.fault == "few" and count > 600:
            raise ValueError("Sample larger than population")
        return [Prompt(f"word {i % 50}", answer="yes" * (1 + i % 3)) for i in range(count)]
    def reward(self, prompt, completion):
        right = completion == prompt.answer
        if self.fault == "reward":
            return 1 / (not right) if right else 2.0 * bool(completion)
        return {"low": 0.5, "rounded": 1 - 1e-9}.get(self.fault, 1.0) * right

def narrow(batch, unconstrained):
    return unconstrained.routes.rows(slice(0, 1))

def number(x):
    return 0.5

def nowhere(x):
    return x.values * float("nan")

class Lazy(Words):
    def prompts(self, count, seed):
        yield from super().prompts(count, seed)

class Nothing:
    row = {}
    def next(self, collector, step):
        return None
    def save(self, folder):
        pass
    load = save
"""


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


@pytest.mark.parametrize(
    "parts, words",
    [
        (
            {"terms": ("rehearsed:broken",)},
            "'mine' .*rehearsed.py, line 10.*AttributeError",
        ),
        ({"routes": "rehearsed:wrong"}, "rehearsed:wrong.*'mine'"),
    ],
)
def test_own_parts_that_break_are_named_with_their_line(parts, words):
    with pytest.raises(ConfigError, match=words) as error:
        rehearse(with_arm(**parts))
    assert "\n" not in str(error.value)


def test_own_parts_that_work_are_passed_and_those_of_the_package_not_even_tried(monkeypatch):
    assert rehearse(with_arm(terms=(Component("rehearsed:fine", scale=0.5),), routes="old_policy")) == []
    (caution,) = rehearse(with_arm(terms=("rehearsed:infinite",)))
    assert "'mine'" in caution and "nan" in caution
    monkeypatch.setattr(rehearsal, "build", lambda *_: pytest.fail("nothing here is anybody's own"))
    assert rehearse(with_arm(loss="gspo")) == []


def test_a_task_that_breaks_or_rewards_too_much_is_refused():
    with pytest.raises(ConfigError, match="rehearsed.py, line 24.*'question'"):
        preview(TINY.replace(task=Component("rehearsed:Words", fault="prompts")))
    with pytest.raises(ConfigError, match="rehearsed.py, line 31.*ZeroDivisionError"):
        preview(TINY.replace(task=Component("rehearsed:Words", fault="reward")))
    with pytest.raises(ConfigError, match="Words.reward returned 2.0"):
        rehearse(TINY.replace(task=Component("rehearsed:Words", fault="reward")))


def test_a_preview_shows_prompt_and_answer_and_what_does_not_fit():
    """Answers have 4, 7 and 10 tokens with their end; a third of 512 is too long."""
    lines, (caution,) = preview(TINY.replace(task="rehearsed:Words", max_new_tokens=6))
    assert dict(lines)["prompt"] == "'word 0', 6 tokens" and dict(lines)["answer"] == "'yes'"
    assert "170 of 512" in caution and "max_new_tokens=10" in caution


def test_reference_answers_that_are_not_right_are_a_caution():
    _, (caution,) = preview(TINY.replace(task=Component("rehearsed:Words", fault="low"), max_new_tokens=9))
    assert "512 of 512" in caution and "'yes' to 'word 0' has 0.5" in caution
    assert preview(TINY.replace(task=Component("rehearsed:Words", fault="rounded"), max_new_tokens=9))[1] == []


@pytest.mark.parametrize("limit", [{}, {"reward_timeout": 30.0}])
def test_answers_that_nothing_scores_are_not_called_wrong(limit, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scores_some.py").write_text(
        "def small(completions, answer, **kwargs):\n"
        "    return [float(a == '1') if int(a) < 3 else None for a in answer]\n"
    )
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f'{{"question": "{n}=", "answer": "{n}"}}\n' for n in range(1, 9)))
    task = Component(f"jsonl:{file}", reward="scores_some:small", **limit)
    _, (unscored, wrong) = preview(TINY.replace(task=task, eval_prompts=2, **{"cold_start.target": 0.0}))
    assert unscored.startswith("6 of 8 ") and wrong.startswith("1 of 8 ")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"loss": "rehearsed:number"}, "loss number .*float"),
        ({"terms": ("rehearsed:number",)}, "term number .*float"),
        ({"corrections": ("rehearsed:number",)}, "correction number .*float"),
        ({"aggregate": "rehearsed:number"}, "aggregation number .*float"),
        ({"advantage": "rehearsed:number"}, "rehearsed:number .*float"),
        ({"advantage": "rehearsed:nowhere"}, "rehearsed:nowhere .*row 0"),
        ({"routes": "rehearsed:narrow"}, r"shape \(1, .*\(8, "),
    ],
)
def test_what_a_component_of_ones_own_must_return_is_said_with_its_name(changes, words):
    with pytest.raises(MoeRlError, match=words):
        rehearse(with_arm(**changes))


def test_an_own_batch_source_is_tried_too():
    with pytest.raises(ConfigError, match="rehearsed:Nothing.*None"):
        rehearse(TINY.replace(task="running_sums", batches="rehearsed:Nothing"))


@pytest.mark.parametrize("name", ["Words", "Lazy"])
def test_a_task_with_few_prompts_fails_before_it_runs(name):
    """512 are enough to be shown, and 600 of them for a step; the warm-up draws 8 batches of 128."""
    run = TINY.replace(task=Component(f"rehearsed:{name}", fault="few"), max_new_tokens=10)
    assert preview(run.replace(**{"cold_start.target": 0.0}))
    with pytest.raises(ConfigError, match=rf"{name}.prompts\(1024, .*Sample larger.*repeat some"):
        preview(run.replace(**{"cold_start.target": 0.3, "cold_start.batch_size": 128}))


def test_runs_for_another_machine_are_tried_on_this_processor_and_the_device_is_named():
    run = TINY.replace(task="running_sums")
    here, cautions = on_this_machine(
        [Planned(Path("x"), run.replace(**{"model.device": device})) for device in ("cpu", "cuda:99")]
    )
    assert [p.config for p in here] == [run, run] and len(cautions) == 1 and "'cuda:99'" in cautions[0]
    away = {"model.device": "cuda:99", "model.dtype": "bfloat16"}
    megatron, hf = (Planned(Path("x"), run.replace(policy=name, **away)) for name in ("megatron", "hf"))
    assert [p.config.model.dtype for p in on_this_machine([megatron, hf])[0]] == ["float32", "bfloat16"]
    with pytest.raises(ConfigError, match="'cudda' is unknown"):
        on_this_machine([Planned(Path("x"), run.replace(**{"model.device": "cudda"}))])


def test_a_plan_needs_a_checkpoint_s_configuration_and_runs_its_weights(tmp_path):
    hf_config(TINY.model).save_pretrained(tmp_path / "bare")
    byte_tokenizer(512).save_pretrained(tmp_path / "bare")
    run = TINY.replace(task="running_sums", **{"model.name": str(tmp_path / "bare"), "model.overrides": {}})
    study = Study(name="bare", question="?", hypothesis="?", arms=("grpo",), base=run, seeds=(0,))
    planned = study.runs(tmp_path)
    assert any("holds no weights" in caution for caution in preflight(study, planned, elsewhere=True))
    with pytest.raises(ConfigError, match="holds no weights"):
        preflight(study, planned)
