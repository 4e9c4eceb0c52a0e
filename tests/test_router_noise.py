"""Runs with a dial: where it must change nothing, what it acts on, and what the tables say of it."""

from __future__ import annotations

import pytest
from pandas.testing import assert_frame_equal

from moe_rl.build import check
from moe_rl.config import RouterNoise
from moe_rl.errors import ConfigError
from moe_rl.storage.columns import timing
from tests.test_trainer import ARMS, TINY, carry_out, whole_and_cut

RUN = TINY.replace(steps=2, **{"measure.detail_every": 1})
"""Four updates per step; everything is measured."""


def tables(path, arm="grpo", **settings):
    """All rows of a run, without what may differ."""
    found = carry_out(RUN.replace(arm=ARMS[arm], **settings), path)
    return {name: found[name][[c for c in found[name] if not timing(c)]] for name in found}


def same(a, b, without=()):
    for name in a:
        assert_frame_equal(
            a[name].drop(columns=[c for c in without if c in a[name]]),
            b[name].drop(columns=[c for c in without if c in b[name]]),
        )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return {arm: tables(tmp_path_factory.mktemp("plain") / arm, arm) for arm in ("grpo", "replay")}


@pytest.mark.parametrize(
    ("form", "applied_to"), [("weights", "both"), ("choice", "ratio"), ("other_weights", "gradient")]
)
def test_a_dial_at_zero_is_no_dial_bit_for_bit(plain, tmp_path, form, applied_to):
    same(
        tables(tmp_path / "run", router_noise=RouterNoise(scale=0.0, target=form, applied_to=applied_to)), plain["grpo"]
    )


def test_with_one_update_per_step_there_is_no_dose(tmp_path):
    with pytest.warns(UserWarning, match="every importance ratio is exactly 1"):
        one, none = (
            tables(tmp_path / str(sigma), mini_batches=1, **{"router_noise.scale": sigma}) for sigma in (2.0, 0.0)
        )
    same(one, none, without=["noise_scale"])
    assert one["updates"]["noise_scale"].tolist() == [0.0, 0.0]


def test_replay_is_immune_to_a_choice_bit_for_bit(plain, tmp_path):
    same(
        tables(tmp_path / "run", "replay", router_noise=RouterNoise(scale=2.0, target="choice")),
        plain["replay"],
        ["noise_scale"],
    )


@pytest.mark.parametrize(
    "router_noise",
    [
        RouterNoise(scale=2.0),
        RouterNoise(scale=2.0, target="choice"),
        RouterNoise(scale=0.4, target="other_weights"),
        RouterNoise(scale=2.0, direction="last_step"),
    ],
)
def test_ratios_start_at_one_and_drift_with_the_dose(plain, tmp_path, router_noise):
    found = tables(tmp_path / "run", router_noise=router_noise)
    updates = found["updates"].groupby("update")
    assert updates["noise_scale"].mean().tolist() == pytest.approx(
        [router_noise.scale * share for share in (0, 1 / 3, 2 / 3, 1)]
    )
    assert updates["token_log_ratio_max"].max().iloc[0] < 1e-5
    assert (updates["fresh_expert_change_rate"].mean().iloc[1:] > 0.02).all()
    before = plain["grpo"]["updates"].groupby("update")["token_log_ratio_var"].mean()
    assert (updates["token_log_ratio_var"].mean().iloc[1:] > before.iloc[1:]).all()
    # What is sampled, scored under π_old and evaluated first has never met the dial.
    first = [table["steps"].loc[:1, ["reward", "entropy", "eval_reward_sampled"]] for table in (found, plain["grpo"])]
    assert_frame_equal(*first)


def test_the_moved_network_gives_the_ratio_or_the_gradient_or_both(tmp_path):
    """Right after the cold start: ratios of the first step's second update depend on the dose if the ratio is of the
    moved network, and the gradient's norm if the gradient is, even at equal ratios."""
    found = {
        a: tables(tmp_path / a, steps=1, router_noise=RouterNoise(scale=1.0, applied_to=a))["updates"].iloc[1]
        for a in ("both", "ratio", "gradient")
    }
    none = tables(tmp_path / "none", steps=1)["updates"].iloc[1]
    spread = {a: row["token_log_ratio_var"] for a, row in found.items()}
    assert spread["gradient"] == pytest.approx(none["token_log_ratio_var"], rel=1e-3)
    assert spread["ratio"] == pytest.approx(spread["both"], rel=1e-3)
    assert spread["both"] > 1.05 * spread["gradient"]
    norm = {a: row["grad_norm"] for a, row in found.items()}
    assert abs(norm["gradient"] / none["grad_norm"] - 1) > 1e-3


def test_a_killed_run_goes_on_along_the_optimizers_last_step(tmp_path):
    whole_and_cut(RUN.replace(steps=4, router_noise=RouterNoise(scale=1.0, direction="last_step")), tmp_path)


def test_noise_that_acts_on_nothing_or_on_the_reference_is_refused():
    with pytest.raises(ConfigError, match="last_step"):
        RUN.replace(**{"optimizer.router_lr_scale": 0.0, "router_noise.direction": "last_step"})
    with pytest.raises(ConfigError, match="reference"):
        check(RUN.replace(arm=ARMS["kl"], router_noise=RouterNoise(scale=1.0)))
    assert check(RUN.replace(arm=ARMS["kl"], router_noise=RouterNoise(scale=1.0, applied_to="ratio"))) == []
