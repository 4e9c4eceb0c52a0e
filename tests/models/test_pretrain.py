"""Pretraining ends when loss and load have settled, ends alike after a kill, and says what it wrote."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from moe_rl.cli import main
from moe_rl.config import ModelConfig, Pretraining, folder_of
from moe_rl.errors import ConfigError
from moe_rl.models import supervised
from moe_rl.models.load import load
from moe_rl.models.supervised import measure, pretrain
from moe_rl.models.tokens import encode_prompts
from moe_rl.objectives.losses import LossInputs
from moe_rl.objectives.router import load_balance
from moe_rl.registry import Component
from moe_rl.routing.inputs import RouterInputs
from moe_rl.tasks.base import held_out, load_task

SETTINGS = Pretraining(
    task=Component("running_sums", digits=3, modulus=3),
    model=ModelConfig(overrides={"hidden_size": 32, "num_hidden_layers": 2, "num_experts": 4}),
    lr=1e-2, batch_size=16, micro_batch=12, warmup=5, every=4, held_out=6, max_steps=12, patience=1)


def quiet(text):
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "whole"
    return folder, *pretrain(SETTINGS, folder, quiet)


def test_what_is_written_is_what_was_measured_last(whole):
    folder, rows, goals = whole
    assert [row["step"] for row in rows] == [4, 8, 12, 13]  # a fifth of 12 more: at step 14 the rate is 0
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {x.dtype for x in load_file(folder / "model.safetensors").values()} == {torch.float16}
    loaded = load(ModelConfig(name=str(folder)), 0)
    prompts = encode_prompts(held_out(load_task(SETTINGS.task), 6), loaded.tokenizer)
    again = measure(loaded, prompts, 2)
    assert again == pytest.approx({key: rows[-1][key] for key in again}, abs=1e-5)
    record = json.loads((folder / "pretraining.json").read_text())
    assert record["rows"] == rows and record["goals"] == goals
    assert pretrain(SETTINGS, folder, pytest.fail) == (rows, goals)


@pytest.mark.parametrize("at", [4, 12])
def test_a_killed_pretraining_ends_with_the_same_bits(whole, tmp_path, monkeypatch, at):
    def kill(*args, real=supervised._keep):
        real(*args)
        if args[4] == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(supervised, "_keep", kill)
    with pytest.raises(KeyboardInterrupt):
        pretrain(SETTINGS, tmp_path / "killed", quiet)
    monkeypatch.undo()
    folder, rows, goals = whole
    with pytest.raises(ConfigError, match="lr was 0.01, is 0.02"):
        pretrain(SETTINGS.replace(lr=0.02), tmp_path / "killed", quiet)
    assert pretrain(SETTINGS, tmp_path / "killed", quiet) == (rows, goals)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "killed", folder))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(ConfigError, match="lr was 0.01, is 0.02"):
        pretrain(SETTINGS.replace(lr=0.02), folder, quiet)


def test_the_balance_of_a_site_is_that_of_the_term_of_objectives():
    torch.manual_seed(0)
    logits, real = torch.randn(3, 5, 8), torch.arange(5) < torch.tensor([5, 2, 4])[:, None]
    ids = logits.topk(2).indices
    weights = real / real.sum()
    used = torch.where(real[..., None], ids, -1)[:, :, None]
    router = RouterInputs(logits=(logits,), used=used, preferred=used, old_log_probs=(logits.log_softmax(-1),),
                          old_used=used, weights=weights)
    zeros = torch.zeros(3, 5)
    inputs = LossInputs(logprobs=zeros, old_logprobs=zeros, advantages=zeros, mask=real, weights=weights, router=router)
    expected = load_balance(inputs, coef=1.0).item()
    assert supervised._balance(logits, ids, real).item() == pytest.approx(expected, rel=1e-6)


def test_balancing_evens_the_load(tmp_path):
    uneven, even = (pretrain(SETTINGS.replace(load_balance=c, max_steps=40, every=40), tmp_path / str(c), quiet)[0][-1]
                    for c in (0.0, 0.3))
    assert even["load_entropy"] > uneven["load_entropy"]
    assert even["load_max_violation"] < uneven["load_max_violation"]


def test_goals_by_hand():
    even = {"load_entropy": 0.96, "load_max_violation": 0.9, "load_dead_experts": 0.0}
    rows = [{"loss": loss, **even} for loss in (2.0, 1.0, 0.99, 0.985)]
    settings = Pretraining(patience=2)
    assert settings.goals(rows) == {"flat": True, "balanced": True}  # 0.985 is less than 2 % below 1
    assert not settings.goals(rows[:3])["flat"]  # 0.99 is far below 2
    assert not settings.goals(rows[:1])["flat"]
    for worse in ({"load_entropy": 0.94}, {"load_max_violation": 1.0}, {"load_dead_experts": 1.0}):
        assert not settings.goals([*rows, {**rows[-1], **worse}])["balanced"]


def test_the_command_says_what_did_not_settle(tmp_path, capsys):
    assert main(["checkpoint", "pretrain", str(tmp_path / "base"), "--task", "running_sums",
                 "--task", "reasoning_gym:spell_backward", "--set", "max_steps=1", "--set", "batch_size=2",
                 "--set", "held_out=2", "--set", "every=1", "--set", "model.overrides.num_hidden_layers=1"]) == 1
    assert "1 steps; not flat and not balanced" in capsys.readouterr().out
    assert main(["checkpoint", "pretrain", str(tmp_path / "base"), "--set", "learning_rate=1"]) == 2
    assert "learning_rate" in capsys.readouterr().err


def test_the_checkpoint_of_the_package_loads_by_its_name_and_its_load_is_what_it_says():
    """Of fewer prompts than its record is of; routers that had not been kept would be far from even."""
    name = "qwen3_moe-fine-pretrained"
    record = json.loads((folder_of(name) / "pretraining.json").read_text())
    assert all(record["goals"].values())
    loaded = load(ModelConfig(name=name), 0)
    assert sum(p.numel() for p in loaded.model.parameters()) < 4e6
    task = load_task(Pretraining.from_dict(record["settings"]).task)
    found = measure(loaded, encode_prompts(held_out(task, 256)[:48], loaded.tokenizer), 24)
    said = record["rows"][-1]
    assert found["load_entropy"] == pytest.approx(said["load_entropy"], abs=0.02)
    assert found["loss"] == pytest.approx(said["loss"], rel=0.3)
