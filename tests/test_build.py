"""What any layer would refuse later is refused before compute is spent."""

from __future__ import annotations

import importlib.util

import pytest

from moe_rl import build as execute
from moe_rl.config import Arm, ModelConfig, Optimizer
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.registry import Component
from tests.conftest import pretend_installed
from tests.test_trainer import TINY


def arm(**parts) -> dict:
    return {"arm": Arm(name="a", **parts)}


REFUSED = [
    (arm(loss="gpro"), "no loss is called 'gpro'"),
    (arm(loss=Component("grpo", clip_low=-1.0)), "must be at least 0"),
    (arm(aggregate="mean"), "no aggregation is called 'mean'"),
    (arm(corrections=("truncate",)), "no correction is called 'truncate'"),
    (arm(corrections=("truncated",), anchor="engine"), "every weight of truncated is 1"),
    (arm(terms=("kl",)), "the term 'kl' needs coef"),
    (arm(advantage="groups"), "no advantage is called 'groups'"),
    (arm(routes="old_polcy"), "no route source is called 'old_polcy': did you mean old_policy"),
    (arm(ratio_routes="old_polcy"), "no route source is called 'old_polcy': did you mean old_policy"),
    (arm(ratio_routes="random_share"), "the route source 'random_share' needs share"),
    ({"task": "runing_sums"}, "no task is called 'runing_sums'"),
    ({"policy": "megatorn"}, "no policy is called 'megatorn'"),
    ({"engine": Component("hf", routes="off"), **arm(routes="rollout")}, "records none"),
    ({"engine": Component("hf", routes="off"), **arm(ratio_routes="rollout")}, "records none"),
    ({"model": ModelConfig(name="no/such/checkpoint")}, "no/such/checkpoint"),
    (
        {"engine": Component("hf", routes="off"), **arm(routes=Component("soft", ratio=0.5, base="rollout"))},
        "records none",
    ),
    (arm(loss=Component("rspo", base="grpo", floor=2.0)), r"rspo\(floor=2\)"),
    (arm(terms=("z_loss",)), "the term 'z_loss' needs coef"),
    (arm(routes="soft"), "the route source 'soft' needs ratio"),
    ({"optimizer": Optimizer(loss_free_bias=1e-3)}, "Qwen3MoeTopKRouter.*has no e_score_correction_bias"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_carried_out_is_refused_before_anything_is_loaded(changes, message, tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "load", lambda *_: pytest.fail("weights were made before the run was checked"))
    run = TINY.replace(**changes)
    for refuse in (lambda: execute.check(run), lambda: execute.build(run, tmp_path, tmp_path)):
        with pytest.raises(ConfigError, match=message):
            refuse()


def test_an_anchor_that_is_none_is_refused_where_the_arm_is_declared():
    with pytest.raises(ConfigError, match="arm 'a': arm.anchor='enigne': choose policy or engine"):
        Arm(name="a", anchor="enigne")


@pytest.mark.parametrize(("changes", "message"), [
    ({"engine": Component("perturbed", int8=True)}, "copies the model of policy='hf'"),
    (arm(terms=(Component("z_loss", coef=1e-3),)), "cannot do this: arm 'a' looks at routers"),
    (arm(routes=Component("soft", ratio=0.5)), "routes=soft, because RouterReplay"),
    (arm(ratio_routes="recall"), "recall.*, because RouterReplay"),
    ({"model": ModelConfig(router_dtype="float32")}, "in float32 anyway"),
    ({"optimizer": Optimizer(loss_free_bias=1e-3)}, "has no e_score_correction_bias"),
])  # fmt: skip
def test_megatron_refuses_settings_that_it_would_ignore(changes, message, monkeypatch):
    pretend_installed(monkeypatch, "megatron.core")
    with pytest.raises(ConfigError, match=message):
        execute.check(TINY.replace(policy="megatron", **changes))


def test_megatron_that_is_not_installed_is_named_with_its_cure(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'moe_rl\[megatron\]'"):
        execute.check(TINY.replace(policy="megatron"))


@pytest.mark.parametrize(("changes", "message"), [
    (arm(routes=Component("random_share", share=2.0)), "from 0 to 1, not 2"),
    (arm(ratio_routes=Component("by_layer", share=1.5)), "from 0 to 1, not 1.5"),
    (arm(routes=Component("false_flips", share=-0.5)), "from 0 to 1, not -0.5"),
    ({"model": ModelConfig(overrides={"num_experts_per_tok": 99})}, "no router can be .*num_experts=16, top_k=99"),
    ({"model": ModelConfig(overrides={"num_experts": 1})}, "no router can be .*num_experts=1, top_k=2"),
])  # fmt: skip
def test_what_fails_in_the_first_step_is_refused_before(changes, message):
    with pytest.raises((ConfigError, RoutingError), match=message):
        execute.check(TINY.replace(**changes))


def test_a_dose_of_none_is_said():
    (said,) = execute.check(TINY.replace(**arm(routes=Component("random_share", share=0.0))))
    assert said == "random_share(share=0) replays nothing. Use routes=live for a run without replay."


def test_a_checkpoint_beyond_the_last_step_is_said():
    (said,) = execute.check(TINY.replace(steps=4, hf_checkpoints=(2, 99)))
    assert "hf_checkpoints=(99,) are beyond the last step, 4" in said


def test_what_would_make_a_comparison_void_is_said_in_sentences():
    wide = arm(loss=Component("gspo", clip_low=0.2, clip_high=0.27))
    found = execute.check(TINY.replace(mini_batches=1, group_size=1, **wide))
    assert len(found) == 3 and all("\n" not in one for one in found)
    for one, words in zip(found, ("one update per step", "group_size=1", "never clips"), strict=True):
        assert words in one
    assert execute.check(TINY) == []
