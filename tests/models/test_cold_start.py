"""The cold start stops at its target, comes out of the cache bit for bit, and says so when it cannot succeed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moe_rl import build as execute
from moe_rl.config import Arm, ColdStart, ModelConfig, RunConfig
from moe_rl.errors import ConfigError, RunError, Stopped
from moe_rl.models import supervised
from moe_rl.models.load import load
from moe_rl.models.supervised import _from_cache, _write, answer_logprobs
from moe_rl.models.tokens import completion_tokens, encode_prompts
from moe_rl.registry import Component
from moe_rl.storage.folder import state
from moe_rl.storage.lock import Lock
from moe_rl.study.declaration import Planned
from moe_rl.study.workers import carry_out
from moe_rl.tasks.base import held_out, load_task
from moe_rl.tasks.running_sums import RunningSums
from moe_rl.types import Prompt, Rollout
from tests.models.test_load import same_weights

cold_start = partial(supervised.cold_start, alone=execute.alone)

RUN = RunConfig(
    arm=Arm(name="grpo"),
    model=ModelConfig(overrides={"hidden_size": 32, "num_hidden_layers": 1, "num_experts": 4}),
    cold_start=ColdStart(target=0.3, max_steps=300, batch_size=16, lr=1e-2),
    max_new_tokens=3,
    eval_prompts=2,
)


class LastDigit(RunningSums):
    """Only the last digit is asked for, so that a tiny model learns it at once."""

    def prompt(self, digits):
        text = "".join(map(str, digits))
        return Prompt(text=text + "=", answer=str(digits[-1]), entry={"digits": digits})


def task() -> LastDigit:
    return LastDigit(digits=6, modulus=3)


def greedy(model, tokenizer, prompts, group_size, *, key, sampling):
    """A few lines that share nothing with the engine; the prompts here are equally long."""
    tokens = torch.tensor([p.tokens for p in prompts for _ in range(group_size)])
    for _ in range(sampling.max_new_tokens):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    rollouts = []
    for prompt, row in zip([p for p in prompts for _ in range(group_size)], tokens.tolist(), strict=True):
        made = row[len(prompt.tokens) :]
        made = made[: made.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in made else made
        rollouts.append(Rollout(prompt, tuple(made), torch.zeros(len(made)), tokenizer.decode(made), True))
    return rollouts


def start(folder: Path, run: RunConfig = RUN, sample=greedy, said=None):
    loaded = load(run.model, run.cold_start.seed)
    return loaded, cold_start(loaded, task(), run, folder, sample, (said if said is not None else []).append)


def test_it_stops_at_its_target_and_the_cache_returns_the_same_bits(tmp_path):
    said: list[str] = []
    loaded, path = start(tmp_path, said=said)
    record = json.loads((path / "cold_start.json").read_text())
    assert record["rate"] >= 0.3
    assert 0 < record["steps"] < 300
    assert f"step {record['steps']}" in said[-1]
    assert not loaded.model.training
    assert all(p.grad is None for p in loaded.model.parameters())

    def never(*args, **kwargs):
        raise AssertionError("a cached cold start samples nothing")

    again, cached = start(tmp_path, sample=never)
    assert cached == path
    assert same_weights(loaded.model, again.model)
    checkpoint = load(ModelConfig(name=str(path)), 0)
    assert same_weights(loaded.model, checkpoint.model)
    elsewhere, _ = start(tmp_path / "elsewhere")
    assert same_weights(loaded.model, elsewhere.model)


def test_other_code_or_data_of_a_task_is_another_cold_start(tmp_path, monkeypatch):
    """The module of the task, and answers beyond those that are looked at first."""
    (tmp_path / "own_task.py").write_text("full = 1.0")
    run = RUN.replace(task=Component("own_task:Task", source=str(tmp_path / "pairs.jsonl")))
    monkeypatch.syspath_prepend(tmp_path)
    seen, made = [], load(run.model, 0)
    monkeypatch.setattr(execute, "cold_start", lambda *args, inputs, **rest: seen.append(inputs))
    for file, text in (("pairs.jsonl", "{}"), ("pairs.jsonl", "[]"), ("own_task.py", "full = 0.0")):
        (tmp_path / file).write_text(text)
        execute._prepare(run, task(), made, tmp_path, print)
    assert len({str(sorted(inputs.items())) for inputs in seen}) == 3 and "own_task" in seen[0]
    folders = {
        cold_start(load(RUN.model, 0), task(), RUN, tmp_path, greedy, print, inputs=inputs)
        for inputs in (seen[0], seen[1], seen[0])
    }
    assert len(folders) == 2


def test_the_cache_returns_the_bits_of_routers_in_float32(tmp_path):
    """Else only the run that trained the cold start would have them."""
    config = ModelConfig(dtype="bfloat16", router_dtype="float32")
    first, other = load(config, 0), load(config, 1)
    with torch.no_grad():
        for parameter in first.model.parameters():
            parameter += 1e-4 * torch.randn_like(parameter)
    _write(tmp_path / "cache", first, {"rate": 1.0, "steps": 1})
    _from_cache(tmp_path / "cache", other, print)
    assert same_weights(first.model, other.model)


def test_whatever_determines_it_is_part_of_its_name(tmp_path):
    base = RUN.replace(**{"cold_start.target": 0.01})
    paths = [start(tmp_path, base)[1]]
    for change in (
        {"cold_start.seed": 1},
        {"cold_start.lr": 5e-3},
        {"model": ModelConfig(overrides={**RUN.model.overrides, "num_experts": 8})},
        {"temperature": 1.1},
        {"max_new_tokens": 2},
    ):
        paths.append(start(tmp_path, base.replace(**change))[1])
    assert len(set(paths)) == len(paths)
    for change in ({"seed": 5}, {"arm": Arm(name="gspo", loss="gspo")}, {"optimizer.lr": 1.0}, {"steps": 3}):
        assert start(tmp_path, base.replace(**change))[1] == paths[0]


def test_it_trains_on_no_prompt_that_decides_or_evaluates(tmp_path):
    asked = {}

    class Watched(LastDigit):
        def prompts(self, count, seed):
            asked.setdefault(seed, []).append(count)
            return super().prompts(count, seed)

    decided: list[str] = []

    def watch(model, tokenizer, prompts, *rest, **more):
        decided.extend(p.text for p in prompts)
        return greedy(model, tokenizer, prompts, *rest, **more)

    trained: list[str] = []
    loaded = load(RUN.model, 0)
    run_model = loaded.model.forward

    def forward(input_ids=None, **settings):
        if settings.get("use_cache") is False:
            trained.extend(loaded.tokenizer.decode(row[:7]) for row in input_ids.tolist())
        return run_model(input_ids, **settings)

    loaded.model.forward = forward
    watched = Watched(digits=6, modulus=3)
    run = RUN.replace(**{"cold_start.target": 0.01})
    cold_start(loaded, watched, run, tmp_path, watch, lambda line: None)
    evaluated = {p.text for p in held_out(watched, run.eval_prompts)}
    assert len(trained) >= run.cold_start.batch_size
    assert all(text.endswith("=") for text in trained)
    assert not set(trained) & set(decided)
    assert not (set(trained) | set(decided)) & evaluated


def test_answer_logprobs_are_those_of_each_row_alone():
    loaded = load(RUN.model, 0)
    prompts = encode_prompts([Prompt(text="1=", answer="1"), Prompt(text="1221=", answer="10")], loaded.tokenizer)
    answers = [completion_tokens(p.answer, loaded.tokenizer) for p in prompts]
    batch = answer_logprobs(loaded, prompts, answers, temperature=0.7)
    for b, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        row = torch.tensor([[*prompt.tokens, *answer]])
        expected = (loaded.model(row).logits[0].double() / 0.7).log_softmax(-1)
        first = len(prompt.tokens) - 1
        for i, token in enumerate(answer):
            assert batch[b, first + i].item() == pytest.approx(expected[first + i, token].item(), abs=1e-5)
        assert torch.count_nonzero(batch[b]) == len(answer)


def test_a_target_it_does_not_reach_says_the_rate_and_leaves_nothing_behind(tmp_path):
    run = RUN.replace(**{"cold_start.target": 1.0, "cold_start.max_steps": 2})
    with pytest.raises(RunError, match=r"in 2 steps.*100%"):
        start(tmp_path, run)
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix not in (".lock", ".holder")]


def test_answers_that_cannot_fit_are_refused_before_training(tmp_path):
    run = RUN.replace(max_new_tokens=3)
    with pytest.raises(ConfigError, match="0%.*max_new_tokens=3.*6"):
        cold_start(load(run.model, 0), RunningSums(digits=6), run, tmp_path, greedy, print)


def test_a_task_without_answers_cannot_be_imitated(tmp_path):
    class NoAnswers(LastDigit):
        def prompt(self, digits):
            return Prompt(text=super().prompt(digits).text)

    with pytest.raises(ConfigError, match="without a reference answer"):
        cold_start(load(RUN.model, 0), NoAnswers(digits=6), RUN, tmp_path, greedy, print)


@pytest.mark.parametrize("damage", ["cut short", "gone", "of another model"])
def test_no_damage_to_a_cache_goes_unnoticed_or_into_the_model(tmp_path, damage):
    run = RUN.replace(**{"cold_start.target": 0.01})
    path = start(tmp_path, run)[1] / "model.safetensors"
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "gone":
        path.unlink()
    else:
        weights = load_file(path)
        weights.pop(sorted(weights)[-1])
        save_file(weights, path, {"format": "pt"})
    loaded = load(run.model, run.cold_start.seed)
    with pytest.raises((OSError, ConfigError, SafetensorError)):
        cold_start(loaded, task(), run, tmp_path, greedy, print)
    assert same_weights(loaded.model, load(run.model, run.cold_start.seed).model)


def _race(folder: Path, queue, sample=greedy) -> None:
    torch.set_num_threads(1)
    said: list[str] = []
    _, path = start(folder, RUN.replace(**{"cold_start.target": 0.01}), sample, said)
    queue.put((said[-1].endswith(f"from {path}"), str(path)))


def _killed_at_its_end(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def test_one_trains_and_those_that_wait_read_it_unless_it_is_killed_then_one_of_them_trains(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    first, *others = (
        context.Process(target=_race, args=(tmp_path, queue, sample))
        for sample in (_killed_at_its_end, greedy, greedy, greedy)
    )
    first.start()
    while first.is_alive() and not list(tmp_path.glob("cold_starts/*.lock")):
        time.sleep(0.01)
    for other in others:
        other.start()
    results = [queue.get(timeout=600) for _ in others]
    for process in (first, *others):
        process.join()
    assert first.exitcode == -signal.SIGKILL
    assert sorted(cached for cached, _ in results) == [False, True, True]
    assert len({path for _, path in results}) == 1


def test_progress_says_step_rate_and_time_left(tmp_path):
    heard: list[dict] = []
    loaded, run = load(RUN.model, 0), RUN.replace(**{"cold_start.target": 0.01})
    cold_start(loaded, task(), run, tmp_path, greedy, lambda line: None, heard.append)
    first = heard[0]
    assert first | {"rate": 0, "seconds_left": 0} == {
        "step": 1,
        "steps": 300,
        "rate": 0,
        "target": 0.01,
        "seconds_left": 0,
    }
    assert 0 <= first["rate"] < 0.5 and first["seconds_left"] > 0


def test_a_run_that_waits_for_anothers_cold_start_can_be_told_to_stop(tmp_path, monkeypatch):
    run = RUN.replace(task=Component("running_sums", digits=3), max_new_tokens=4, **{"cold_start.target": 0.005})
    planned = Planned(tmp_path / "run", run)

    def begin():
        carry_out(planned, "moe_rl.build:execute", tmp_path, stopping=lambda: True)

    monkeypatch.setattr(supervised, "_train", lambda *rest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        begin()
    (lock,) = (tmp_path / "cold_starts").glob("*.lock")
    with Lock(lock), pytest.raises(Stopped, match="waited for .*another run"):
        begin()
    assert state(planned.path)["state"] == "interrupted"
    with pytest.raises(ZeroDivisionError):
        begin()  # as the first one, told or not


def test_with_the_real_engine_and_a_named_task(tmp_path):
    run = RUN.replace(task=Component("running_sums", digits=3), max_new_tokens=4, **{"cold_start.target": 0.005})
    task = load_task(run.task)
    path = cold_start(load(run.model, 0), task, run, tmp_path, execute.sample, report=lambda line: None)
    assert json.loads((path / "cold_start.json").read_text())["rate"] >= 0.005
