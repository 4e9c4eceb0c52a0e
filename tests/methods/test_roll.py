"""ROLL's names of options: what each becomes, in ROLL's order, and what is refused, since it does nothing there."""

from __future__ import annotations

import pytest

from moe_rl.errors import ConfigError
from moe_rl.lookup import Use
from moe_rl.methods import from_roll, spelled

PAGE = {
    "adv_estimator": "reinforce", "importance_sampling": "seq", "rollout_batch_size": 64,
    "num_return_sequences_in_group": 8, "prompt_length": 2048, "response_length": 4096, "ppo_epochs": 1,
    "use_kl_loss": True, "kl_loss_coef": 0.001, "loss_agg_mode": "seq-mean-token-sum", "whiten_advantages": True,
    "advantage_clip": 2.0, "dual_clip_loss": True, "reward_clip": 10, "reward_norm": None, "reward_shift": False,
    "reward_scale": False, "add_token_level_kl": False,
}  # fmt: skip
"""All names of ROLL's page on GSPO."""


def test_the_configuration_of_rolls_page_on_gspo():
    arm, run = from_roll(PAGE)
    assert spelled(arm) == (
        "grpo(clip_low=0.2,clip_high=0.2,level=sequence,dual=1.4)+seq_mean_token_sum+kl(coef=0.001,clamp=10.0)"
        "+advantage=clipped(at=10.0)+advantage=whitened+advantage=clipped(at=2.0)+name=roll"
    )
    assert run == {"prompts_per_step": 64, "group_size": 8, "max_new_tokens": 4096, "epochs": 1}


def test_defaults_are_rolls():
    arm, run = from_roll({"adv_estimator": "grpo"})
    assert arm.loss == Use("grpo", clip_low=0.2, clip_high=0.2) and arm.aggregate == Use("seq_mean_token_mean")
    assert arm.advantage == (Use("normalized", center="group", scale="group", eps=1e-6),)
    assert (arm.terms, arm.corrections, run) == ((), (), {})


@pytest.mark.parametrize("options, steps", [
    ({}, ()),
    ({"norm_mean_type": "batch", "norm_std_type": "batch"},
     (Use("normalized", center="batch", scale="batch", eps=1e-6),)),
    ({"norm_mean_type": "group", "reward_clip": 3}, (Use("normalized", center="group", scale="none", eps=1e-6),
                                                     Use("clipped", at=3.0))),
    ({"norm_mean_type": "running", "norm_std_type": "running", "add_token_level_kl": True, "gamma": 0.9,
      "whiten_advantages": True, "advantage_clip": 1},
     (Use("normalized", center="running", scale="running", eps=1e-6), Use("kl_penalty", coef=0.2),
      Use("returns", gamma=0.9), Use("whitened"), Use("clipped", at=1.0))),
])  # fmt: skip
def test_rewards_become_advantages_in_rolls_order(options, steps):
    assert from_roll({"adv_estimator": "reinforce", **options})[0].advantage == steps


@pytest.mark.parametrize("options, loss", [
    ({"pg_clip": 0.1}, {"clip_low": 0.1, "clip_high": 0.1}),
    ({"pg_clip_low": 0.1, "pg_clip_high": 0.3}, {"clip_low": 0.2, "clip_high": 0.2}),
    ({"pg_clip_low": 0.1, "pg_clip_high": 0.3, "use_pg_clip_range": True, "dual_clip_loss": True},
     {"clip_low": 0.1, "clip_high": 0.3, "dual": 1.4}),
])  # fmt: skip
def test_ranges_count_where_roll_reads_them(options, loss):
    assert from_roll({"adv_estimator": "grpo", **options})[0].loss == Use("grpo", **loss)


@pytest.mark.parametrize("options, words", [
    ({"reward_norm": "group"}, "norm_mean_type: group, norm_std_type: group"),
    ({"reward_norm": "batch", "reward_shift": True}, "norm_mean_type: batch, norm_std_type: null"),
    ({"reward_norm": "running", "reward_scale": True}, "norm_mean_type: null, norm_std_type: running"),
    ({"reward_scale": True}, "leave it out"),
    ({"use_reward_scaling": True, "add_len_reward": True}, "add_len_reward: True, use_reward_scaling: True"),
    ({"adv_estimator": "gae"}, "needs a critic"),
    ({"adv_estimator": "gigpo"}, "choose reinforce or grpo"),
    ({"importance_sampling": "sequence"}, "choose token or seq"),
    ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "not by the number of sequences"),
    ({"loss_agg_mode": "token_mean"}, "choose token-mean"),
    ({"adv_estimator": "reinforce", "norm_std_type": "group"}, "use group for both"),
    ({"advantage_klip": 2}, "Did you mean advantage_clip"),
])  # fmt: skip
def test_what_does_nothing_in_roll_or_cannot_be_an_arm_is_refused(options, words):
    with pytest.raises(ConfigError) as refused:
        from_roll({"adv_estimator": "grpo", **options})
    assert words in str(refused.value)


@pytest.mark.parametrize("option, value", [
    ("use_kl_loss", "false"), ("kl_loss_coef", "1e-3"), ("pg_clip", True), ("reward_clip", "ten"), ("gamma", "1"),
    ("importance_sampling", ["seq"]), ("whiten_advantages", 1),
])  # fmt: skip
def test_values_of_another_type_are_refused(option, value):
    with pytest.raises(ConfigError, match=option):
        from_roll({"adv_estimator": "grpo", option: value})
