"""A configuration as data: what a table says of a run is enough to make it again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs import settings_page
from moe_rl.config import Arm, ModelConfig, Optimizer, RunConfig, fields_of
from moe_rl.errors import ConfigError
from moe_rl.registry import Component

CONFIGS = [
    RunConfig(arm=Arm(name="grpo")),
    RunConfig(
        arm=Arm(name="gspo", loss=Component("gspo", clip_low=0.01, clip_high=0.013)), seed=3,
        task=Component("running_sums", digits=12, names=["a", "b"]),
        model=ModelConfig(overrides={"num_experts": 32}), optimizer=Optimizer(lr=1e-4, betas=(0.9, 0.95)),
        engine="perturbed(dtype=bfloat16)", policy="megatron(dp=2, etp=1)", stop=("\n",), hf_checkpoints=(10, 20),
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_survives_json_with_its_hash(config):
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.hash == config.hash and again.to_dict() == config.to_dict()
    assert again.arm == config.arm and again.optimizer == config.optimizer and again.stop == config.stop


def test_what_is_kept_to_be_read_makes_no_other_run():
    assert CONFIGS[0].replace(**{"measure.rollouts": 0}).hash == CONFIGS[0].hash
    assert CONFIGS[0].replace(**{"measure.responses": 7}).hash != CONFIGS[0].hash


def test_settings_that_came_later_take_their_defaults_and_lost_ones_are_named():
    old = CONFIGS[0].to_dict()
    del old["engine"], old["optimizer"]["router_lr_scale"]
    assert RunConfig.from_dict(old) == CONFIGS[0]
    old["optimizer"]["nesterov"] = True
    with pytest.raises(ConfigError, match="Optimizer has no setting nesterov.* Release 0.1.0"):
        RunConfig.from_dict(old)


def test_a_configuration_of_release_0_1_0_names_the_release_that_reads_it():
    old = CONFIGS[0].to_dict() | {"parallel": {"dp": 1}, "lag": 2}
    with pytest.raises(ConfigError, match="parallel.* Release 0.1.0"):
        RunConfig.from_dict(old)


@pytest.mark.parametrize("key, value, words", [
    ("optimizer.lr", "fast", r"optimizer.lr='fast': .* type float"),
    ("optimizer.betas", (0.9,), r"optimizer.betas=\(0.9,\): .* type tuple\[float, float\]"),
    ("optimizer.betas", 0.9, r"optimizer.betas=0.9: .* type tuple"),
    ("optimizer", {"lr": 1.0}, "optimizer=.* type Optimizer"),
    ("stop", "abc", r"stop='abc': .* type tuple\[str, ...\]"),
    ("measure.full", 1, "measure.full=1: .* type bool"),
    ("group_size", 4.0, "group_size=4.0: .* type int"),
    ("steps", True, "steps=True: .* type int"),
    ("arm.terms", "kl", r"arm.terms='kl': .* type tuple\[str \| .*Component.*, ...\]"),
    ("arm.loss", ("grpo", 0.2), r"arm.loss: \('grpo', 0.2\) is not the name of a component. Write \"name\""),
    ("micro_batch_tokens", 1.0, r"micro_batch_tokens=1.0: .* type int \| None"),
])
def test_a_value_of_another_type_is_refused_with_the_type_that_is_needed(key, value, words):
    with pytest.raises(ConfigError, match=words):
        CONFIGS[0].replace(**{key: value})


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_with_every_kind_of_value_is_accepted(config):
    assert config.replace() == RunConfig.from_dict(config.to_dict()) == config


def test_the_committed_page_of_settings_is_the_generated_one():
    text = settings_page.format_page()
    assert (Path(__file__).parents[2] / "docs" / "settings.md").read_text() == text, "run `make docs/settings.md`"
    named = set(re.findall(r"^\| `([\w.]+)`", text, re.MULTILINE))
    assert {key for key, _ in fields_of(RunConfig)} <= named
    assert "| `optimizer.lr` | `float` | `0.0002` | ≥ 0 |  |" in text
    assert (
        "| `router_noise.target` | `str` | `'weights'` | `weights` or `choice` or `other_weights` | `weights`: gates"
        in text
    )


def test_changes_are_checked_together_and_in_their_order():
    run = CONFIGS[0].replace(mini_batches=512, prompts_per_step=64)  # either alone: more mini-batches than rollouts
    assert (run.mini_batches, run.prompts_per_step) == (512, 64)
    lr = CONFIGS[0].replace(**{"optimizer.lr": 1e-3, "optimizer": Optimizer(warmup=3)}).optimizer
    assert lr == Optimizer(warmup=3)
    task = CONFIGS[0].replace(**{"task": "guessing", "task.turns": 4, "task.a.b": 1}).task
    assert task == Component("guessing", **{"turns": 4, "a.b": 1})
    assert CONFIGS[0].replace(stop=["a"]).stop == ("a",), "JSON has lists"


def test_a_number_stays_as_it_was_given_since_1_and_1_0_have_other_hashes():
    whole, real = (CONFIGS[0].replace(**{"optimizer.lr": lr, "optimizer.betas": (lr - lr, 0.9)}) for lr in (1, 1.0))
    assert json.dumps(whole.to_dict()["optimizer"]["lr"]) == "1" != json.dumps(real.to_dict()["optimizer"]["lr"])
    assert type(whole.optimizer.betas[0]) is int and whole == real and whole.hash != real.hash


def test_every_wrong_value_is_named():
    with pytest.raises(ConfigError) as raised:
        Optimizer(lr=-1, warmup=True, rate=3)
    assert str(raised.value) == (
        "optimizer.lr=-1: a learning rate must not be negative\n"
        "optimizer.warmup=True: the setting needs a value of type int\n"
        "Optimizer has no setting rate; it has name, lr, warmup, betas, eps, weight_decay, grad_clip, router_lr_scale, "
        "loss_free_bias. Release 0.1.0 alone reads the configurations that it wrote.")
    with pytest.raises(ConfigError, match="^arm must be given$"):
        RunConfig()


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        CONFIGS[0].optimizer.lr = 1.0
