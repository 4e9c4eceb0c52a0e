"""What any layer would refuse later is refused before compute is spent."""

from __future__ import annotations

import pytest

from moe_rl import build as execute
from moe_rl.config import Arm, Measure, ModelConfig, Optimizer, RouterNoise
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.objectives.methods import arm as spelled_arm
from moe_rl.registry import Component
from moe_rl.trainer import warn_void
from tests.conftest import pretend_installed
from tests.test_trainer import TINY


def arm(**parts) -> dict:
    return {"arm": Arm(name="a", **parts)}


REFUSED = [
    (arm(loss="gpro"), "gpro"),
    (arm(ratio_routes="old_polcy"), "did you mean old_policy"),
    (arm(ratio_routes="random_share"), "needs share"),
    ({"engine": "vllm(int8=true)"}, "int8"),
    ({"engine": "perturbed(dtype=bf16)"}, "dtype='bf16'"),
    ({"engine": "perturbed(router_noise=nan)"}, "router_noise=nan"),
    ({"batches": "lagged(lag=0, partial_tokens=2)"}, "partial_tokens=2"),
    ({"batches": "lagged(lag=1, partial_tokens=6)"}, "partial_tokens=6 .*max_new_tokens=6"),
    ({"batches": "dynamic(refills=-1)"}, "refills=-1"),
    ({"task": "runing_sums"}, "runing_sums"),
    ({"policy": "megatorn"}, "megatorn"),
    ({"engine": Component("hf", routes="off"), **arm(ratio_routes="rollout")}, "engine.routes='off'"),
    ({"model": ModelConfig(name="no/such/checkpoint")}, "no/such/checkpoint"),
    ({"optimizer": Optimizer(loss_free_bias=1e-3)}, "Qwen3MoeTopKRouter.*e_score_correction_bias"),
    ({"model": ModelConfig(overrides={"num_experts_per_tok": 99})}, "no router can be .*num_experts=16, top_k=99"),
    (arm(routes=Component("by_layer", first=1, last=1)), "by_layer takes exactly one"),
    (arm(routes=Component("by_layer", first=None)), "by_layer takes exactly one"),
    (arm(routes="shuffled") | {"prompts_per_step": 1}, "prompts_per_step of at least 2"),
    (arm(routes=Component("recall", base="rollout")), "reports no combine weights"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_carried_out_is_refused_before_anything_is_loaded(changes, message, tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "load", lambda *_: pytest.fail("weights were made before the run was checked"))
    run = TINY.replace(**changes)
    for refuse in (lambda: execute.check(run), lambda: execute.build(run, tmp_path, tmp_path)):
        with pytest.raises((ConfigError, RoutingError), match=message):
            refuse()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": Component("perturbed", int8=True)}, "copies the model of policy='hf'"),
        (arm(terms=(Component("z_loss", coef=1e-3),)), "arm 'a'"),
        (arm(routes=Component("soft", ratio=0.5)), "routes=soft"),
        (arm(ratio_routes="recall"), "recall"),
        ({"model": ModelConfig(router_dtype="float32")}, "in float32 anyway"),
        ({"optimizer": Optimizer(loss_free_bias=1e-3)}, "has no e_score_correction_bias"),
        ({"measure": Measure(gradient_cosine=True)}, "gradient_cosine=True"),
        ({"router_noise": RouterNoise(scale=1.0)}, "router_noise.scale"),
    ],
)
def test_megatron_refuses_settings_that_it_would_ignore(changes, message, monkeypatch):
    pretend_installed(monkeypatch, "megatron.core")
    with pytest.raises(ConfigError, match=message):
        execute.check(TINY.replace(policy="megatron", **changes))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grpo+rollout", "rollout replays the routes of old_policy"),
        ("grpo+soft(ratio=0.5,base=rollout)", "replays the routes of old_policy"),
        ("tis", "every weight of truncated(cap=2.0) is 1"),
        ("grpo+filters=rejected(high=2.0)", "every weight of rejected(high=2.0) is 1"),
        ("grpo+anchor=engine", "anchor='engine' is anchor='policy'"),
        ("grpo+kl(coef=0)", "kl(coef=0) does nothing"),
        ("grpo+random_share(share=0)", "random_share(share=0) replays nothing"),
        ("grpo+by_layer(first=2)", "by_layer(first=2) is old_policy"),
        ("grpo+by_margin(below=0)", "by_margin(below=0) replays nothing"),
        ("grpo+soft(ratio=1.0)", "soft(ratio=1.0) replays nothing"),
        ("grpo+soft(ratio=0.0)", "soft(ratio=0.0) is old_policy"),
    ],
)
def test_a_part_of_an_arm_that_does_nothing_is_said(text, words):
    run = TINY.replace(arm=spelled_arm(text))
    (said,) = warn_void(run)
    assert words in said
    if "own weights and numerics" in said:
        for change in (
            {"batches": Component("lagged", lag=2)},
            {"model.dtype": "bfloat16"},
            {"engine": Component("perturbed", dtype="bfloat16")},
        ):
            assert warn_void(run.replace(**change)) == [], "there it may do something"


@pytest.mark.parametrize("routes", ["shuffled", "by_layer(last=2)", "old_policy"])
def test_routers_are_not_moved_where_all_routes_are_replayed(routes):
    noise = {"router_noise.scale": 1.0, "router_noise.target": "choice"}
    assert "replays all routes" in warn_void(TINY.replace(arm=spelled_arm(f"grpo+{routes}"), **noise))[-1]
    assert not warn_void(TINY.replace(arm=spelled_arm("grpo+by_layer(last=1)"), **noise))


def test_a_checkpoint_beyond_the_last_step_is_said():
    (said,) = execute.check(TINY.replace(steps=4, hf_checkpoints=(2, 99)))
    assert "hf_checkpoints=(99,)" in said


def test_what_would_make_a_comparison_void_is_said_in_sentences():
    wide = arm(loss=Component("gspo", clip_low=0.2, clip_high=0.27))
    found = execute.check(TINY.replace(mini_batches=1, group_size=1, **wide))
    assert len(found) == 3 and all("\n" not in one for one in found)
    for one, words in zip(found, ("one update per step", "group_size=1", "never clips"), strict=True):
        assert words in one
    assert execute.check(TINY) == []
