"""A configuration as data: what a table says of a run is enough to make it again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs import settings_page
from moe_rl.config import Arm, ModelConfig, Optimizer, RunConfig, fields_of, same_value
from moe_rl.errors import ConfigError
from moe_rl.registry import Component

CONFIGS = [
    RunConfig(arm=Arm(name="grpo")),
    RunConfig(
        arm=Arm(name="gspo", loss=Component("gspo", clip_low=0.01, clip_high=0.013)),
        seed=3,
        task=Component("running_sums", digits=12, names=["a", "b"]),
        model=ModelConfig(overrides={"num_experts": 32}),
        optimizer=Optimizer(lr=1e-4, betas=(0.9, 0.95)),
        engine="perturbed(dtype=bfloat16)",
        policy="megatron(dp=2, ep=1)",
        stop=("\n",),
        hf_checkpoints=(10, 20),
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_survives_json_with_its_hash(config):
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.hash == config.hash and again.to_dict() == config.to_dict()
    assert again == config == config.replace()


def test_what_is_kept_to_be_read_makes_no_other_run():
    assert CONFIGS[0].replace(**{"measure.rollouts": 0}).hash == CONFIGS[0].hash
    assert CONFIGS[0].replace(**{"measure.responses": 7}).hash != CONFIGS[0].hash


def test_settings_that_came_later_take_their_defaults_and_lost_ones_are_named():
    old = CONFIGS[0].to_dict()
    del old["engine"], old["optimizer"]["router_lr_scale"]
    assert RunConfig.from_dict(old) == CONFIGS[0]
    for content, lost in (
        (old | {"optimizer": {"nesterov": True}}, "optimizer.nesterov"),
        (old | {"parallel": {"dp": 1}}, "parallel"),
    ):
        with pytest.raises(ConfigError, match=rf"^{lost}=.*0\.1\.0"):
            RunConfig.from_dict(content)


@pytest.mark.parametrize(
    "key, value",
    [
        ("optimizer.lr", "fast"),
        ("optimizer.lr", float("inf")),
        ("optimizer.lr", -1),
        ("optimizer.betas", 0.9),
        ("stop", "abc"),
        ("measure.full", 1),
        ("group_size", 4.0),
        ("steps", True),
        ("arm.terms", "kl"),
        ("temperature", 0.0),
        ("top_p", 1.5),
    ],
)
def test_a_value_of_another_type_or_range_is_refused(key, value):
    with pytest.raises(ConfigError, match="^" + re.escape(f"{key}={value!r}: ")):
        CONFIGS[0].replace(**{key: value})


def test_the_committed_page_of_settings_is_the_generated_one():
    text = settings_page.format_page()
    assert (Path(__file__).parents[2] / "docs" / "settings.md").read_text() == text, "run `make docs/settings.md`"
    named = set(re.findall(r"^\| `([\w.]+)`", text, re.MULTILINE))
    assert {key for key, _ in fields_of(RunConfig)} <= named
    assert "| `optimizer.lr` | `float` | `0.0002` | ≥ 0 |  |" in text


def test_changes_are_checked_together_and_in_their_order():
    run = CONFIGS[0].replace(mini_batches=512, prompts_per_step=64)  # either alone: more mini-batches than rollouts
    assert (run.mini_batches, run.prompts_per_step) == (512, 64)
    lr = CONFIGS[0].replace(**{"optimizer.lr": 1e-3, "optimizer": Optimizer(warmup=3)}).optimizer
    assert lr == Optimizer(warmup=3)
    task = CONFIGS[0].replace(**{"task": "guessing", "task.turns": 4, "task.a.b": 1}).task
    assert task == Component("guessing", **{"turns": 4, "a.b": 1})
    assert CONFIGS[0].replace(stop=["a"]).stop == ("a",), "JSON has lists"


@pytest.mark.parametrize(
    "key, one, other",
    [
        ("optimizer.lr", 1, 1.0),
        ("optimizer.betas", (0, 0.9), (-0.0, 0.9)),
        ("arm.corrections", (Component("truncated", cap=2),), (Component("truncated", cap=2.0),)),
        (
            "arm.loss",
            Component("rspo", options={"a": [1, {"b": 0}]}),
            Component("rspo", options={"a": [1.0, {"b": -0.0}]}),
        ),
        ("task", Component("running_sums", digits=12), Component("running_sums", digits=12.0)),
        ("engine", "perturbed(router_noise=1)", "perturbed(router_noise=1.0)"),
        ("model.overrides", {"rope_theta": 10000}, {"rope_theta": 10000.0}),
    ],
)
def test_equal_numbers_make_one_run_and_true_is_no_number(key, one, other):
    a, b = (CONFIGS[0].replace(**{key: value}) for value in (one, other))
    assert a.hash == b.hash and same_value(a.to_dict(), b.to_dict())
    assert CONFIGS[0].replace(task=Component("a:b", x=True)).hash != CONFIGS[0].replace(task=Component("a:b", x=1)).hash
    seeds = [CONFIGS[0].replace(**{"arm.routes": Component("a:b", seed=2**60 + n)}).hash for n in (0, 1)]
    assert seeds[0] != seeds[1], "as floats they are one"


def test_every_wrong_value_is_named():
    with pytest.raises(ConfigError) as raised:
        Optimizer(lr=-1, warmup=True, rate=3)
    values = [line.partition(":")[0] for line in str(raised.value).splitlines()]
    assert values == ["optimizer.lr=-1", "optimizer.warmup=True", "optimizer.rate=3"]
    with pytest.raises(ConfigError, match="^arm: "):
        RunConfig()


def test_a_schedule_falls_from_the_rate_to_nothing():
    """Hand-worked: a warm-up of 2, then 4 updates of which the last has a rate above 0."""
    for name, shares in {
        "constant": [0.5, 1, 1, 1, 1, 1],
        "linear": [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0, 0],
        "cosine": [0.5, 1, 0.9045, 0.6545, 0.3455, 0.0955, 0],
    }.items():
        settings = Optimizer(lr=2.0, warmup=2, schedule=name, decay_until=0 if name == "constant" else 6)
        assert [settings.lr_at(i) for i in range(1, len(shares) + 1)] == pytest.approx(
            [2 * s for s in shares], abs=1e-4
        )


@pytest.mark.parametrize(
    "changes, value",
    [
        ({"optimizer.schedule": "linear"}, "linear"),
        ({"optimizer.schedule": "linear", "optimizer.decay_until": 40, "optimizer.warmup": 40}, "40"),
        ({"optimizer.decay_until": 400}, "400"),
        ({"optimizer.schedule": "linear", "optimizer.decay_until": 399}, "399"),
        ({"optimizer.schedule": "polynomial"}, "polynomial"),
    ],
)
def test_a_schedule_that_would_not_be_followed_is_refused(changes, value):
    run = CONFIGS[0].replace(steps=50, mini_batches=8, epochs=1)
    with pytest.raises(ConfigError, match=value):
        run.replace(**changes)


def test_a_setting_that_release_0_1_lacked_leaves_hashes_as_they_were():
    run = CONFIGS[0].replace(steps=50, mini_batches=8, epochs=1)
    fallen = run.replace(**{"optimizer.schedule": "cosine", "optimizer.decay_until": 400})
    assert not {"schedule", "decay_until"} & run.to_dict()["optimizer"].keys()
    assert RunConfig.from_dict(fallen.to_dict()) == fallen and fallen.hash != run.hash
