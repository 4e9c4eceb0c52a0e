"""`moe-rl list`, `--version` and `--settings`."""

from __future__ import annotations

import argparse

import pytest

from moe_rl import cli
from moe_rl.cli.listing import LISTS, WIDTH
from moe_rl.cli.running import _with_settings
from moe_rl.config import Arm, RunConfig, parse_settings
from moe_rl.errors import ConfigError
from moe_rl.registry import import_component
from moe_rl.study.routing_replay import study

HAS = {
    "tasks": ("reasoning_gym:<dataset>", "<package.module>:<Class>"),
    "models": ("qwen3_moe-tiny", "qwen3_moe-fine-pretrained"),
    "settings": ("optimizer.lr", "measure.detail_every"),
    "columns": ("expert_change_rate{,_prompt}", "reward_*"),
    "methods": ("gspo", "trl:gspo"),
    "figures": ("learning", "against:<factor>[:<metric>]"),
}


@pytest.mark.parametrize("what", LISTS)
def test_a_list_names_all_in_lines_that_fit(capsys, what):
    assert cli.main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    names = [line.partition(" ")[0] for line in lines if line[:1] != " "]
    assert len({*names}) == len(names) and {*HAS[what]} <= {*names} | {" ".join(line.split()[:3]) for line in lines}


def read(tmp_path, text, *settings):
    (tmp_path / "own.toml").write_text(text)
    return parse_settings(RunConfig(arm=Arm(name="a")), settings, tmp_path / "own.toml")


def test_a_file_gives_typed_settings_which_set_overrides(tmp_path):
    text = """
    top_p = 1
    hf_checkpoints = [1, 2]
    "task.reward" = "mine:f"
    [optimizer]
    lr = 1e-4
    betas = [0.8, 0.9]
    [task]
    digits = 4
    [model]
    dtype = "bfloat16"
    overrides = {num_experts = 8}
    """
    typed = read(tmp_path, text, "optimizer.lr=1e-5", "min_p=0.1")
    assert typed.pop("optimizer.lr") == 1e-5
    assert typed == {
        "top_p": 1,
        "hf_checkpoints": [1, 2],
        "task.reward": "mine:f",
        "optimizer.betas": [0.8, 0.9],
        "task.digits": 4,
        "model.dtype": "bfloat16",
        "model.overrides.num_experts": 8,
        "min_p": 0.1,
    }
    lr = read(tmp_path, "optimizer.lr = 1e-4")["optimizer.lr"]
    assert (lr, type(lr)) == (1e-4, float) and read(tmp_path, "optimizer.lr = '1e-4'") == {"optimizer.lr": 1e-4}


@pytest.mark.parametrize(
    "text, said",
    [
        ("[optimiser]\nlr = 1", "own.toml: .*'optimiser.lr'"),
        ("optimizer.lr = -1", "own.toml: optimizer.lr=-1: "),
        ("seed = 3", "own.toml: seed"),
        ("optimizer.lr = 1e", "own.toml: .* Write TOML"),
    ],
)
def test_an_error_of_a_file_names_it_and_the_key(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, text)


def test_a_command_takes_the_file(tmp_path, capsys):
    (tmp_path / "own.toml").write_text("prompts_per_stepp = 3")
    for words in ("run routing_replay --dry-run", "checkpoint evaluate none --task running_sums"):
        assert cli.main([*words.split(), "--settings", str(tmp_path / "own.toml")]) == 2
        assert "'prompts_per_stepp'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, task", [('task = "corrected_sums"', "running_sums"), ("[task]\ndigits = 7", "running_sums(digits=7)")]
)
def test_the_task_of_the_command_line_wins_and_takes_the_options_of_the_file(tmp_path, text, task):
    (tmp_path / "own.toml").write_text(text)
    options = argparse.Namespace(
        task="running_sums", policy=None, file=tmp_path / "own.toml", settings=[], condition=[]
    )
    assert str(_with_settings(study, options).base.task) == task


def test_a_preset_is_listed_with_its_size(capsys):
    cli.main(["list", "models"])
    tiny = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("qwen3_moe-tiny "))
    assert "0.7 M parameters, 6 MoE layers, top-2 of 16" in tiny


@pytest.mark.parametrize(
    "words, says",
    [
        (["run", "routing_replay", "--dryrun"], "--dry-run"),
        (["run", "routing_replay", "more"], "'more'"),
        (["run", "routing_replay", "--", "--dry-run"], "too many"),
        (["--quiet", "run", "routing_replay"], "'--quiet'"),
    ],
)
def test_what_a_command_does_not_take_is_named_with_what_it_has(capsys, words, says):
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert says in said and "usage:" not in said


def test_every_argument_of_every_command_has_help():
    for module_and_name, _ in cli.COMMANDS.values():
        command = import_component("command", module_and_name, module_and_name)
        assert all(settings.get("help") for _, settings in command.arguments), module_and_name
