"""Several epochs: every one trains on all rollouts of the step, in a split of its own, and its updates are rows."""

from __future__ import annotations

import pytest
import torch

from moe_rl.build import build
from moe_rl.config import Arm, Measure, Optimizer, RouterNoise
from moe_rl.registry import Component
from moe_rl.seeds import SPLIT, derive
from moe_rl.trainer import split_into_mini_batches, split_rows, warn_void
from tests.test_trainer import TINY, carry_out

TWICE = TINY.replace(epochs=2, mini_batches=2, steps=2, measure=Measure(responses=4, detail_every=1))


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    return carry_out(TWICE, tmp_path_factory.mktemp("twice") / "run")


def test_the_first_epoch_is_split_as_ever_and_every_other_by_itself():
    first, *later = (split_into_mini_batches(TINY.replace(epochs=n), 7, 16) for n in (1, 3))
    expected = split_rows(16, 4, derive(TINY.seed, SPLIT, 7))
    assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=True))
    passes = [later[0][i : i + 4] for i in (0, 4, 8)]
    assert all(torch.equal(a, b) for a, b in zip(passes[0], expected, strict=True))
    for one in passes:
        assert sorted(torch.cat(one).tolist()) == list(range(16))
    assert len({tuple(torch.cat(one).tolist()) for one in passes}) == 3
    assert len({tuple(torch.cat(split_into_mini_batches(TWICE, step, 16)[2:]).tolist()) for step in (1, 2, 3)}) == 3


def test_with_one_mini_batch_the_first_epoch_is_on_policy_and_the_second_is_not(tmp_path):
    run = TINY.replace(epochs=2, mini_batches=1, steps=2)
    assert not warn_void(run), "two updates per step"
    updates = carry_out(run, tmp_path / "run")["updates"].set_index(["epoch", "update"])
    assert list(updates.index) == [(1, 1), (2, 2)] * 2
    assert (updates.loc[1, "token_log_ratio_max"] < 1e-5).all()
    assert (updates.loc[2, "token_log_ratio_max"] > 1e-4).all()


def test_rows_are_per_update_and_a_step_pools_all_of_its_epochs(twice):
    updates, steps = twice["updates"], twice["steps"].query("step > 0")
    assert updates["update"].tolist() == [1, 2, 3, 4] * 2 and updates["epoch"].tolist() == [1, 1, 2, 2] * 2
    for step, rows in updates.groupby("step"):
        (row,) = steps[steps["step"] == step].to_dict("records")
        assert row["token_n"] == rows["token_n"].sum() and row["sequence_n"] == 2 * 16
        assert rows.query("epoch == 1")["token_n"].sum() == rows.query("epoch == 2")["token_n"].sum()
        for column in ("token_log_ratio_mean", "clip_tokens_all"):
            pooled = (rows[column] * rows["token_n"]).sum() / rows["token_n"].sum()
            assert row[column] == pytest.approx(pooled, rel=1e-5, abs=1e-9)
        assert row["token_log_ratio_max"] == pytest.approx(rows["token_log_ratio_max"].max())
        assert row["grad_norm"] == pytest.approx(rows["grad_norm"].mean())
        assert row["first_update_log_ratio_max"] < 1e-5


def test_the_probe_is_of_the_first_epoch_and_every_later_mini_batch_has_its_attribution(twice):
    assert (twice["steps"].query("step > 0")["measured_responses"] == 4).all(), "each response once, not once per epoch"
    measured = twice["updates"].set_index(["step", "update"])["attribution_n"]
    assert measured.notna().groupby("update").all().to_dict() == {1: False, 2: True, 3: True, 4: True}
    assert twice["updates"]["expert_change_rate"].notna().all()


def test_attribution_is_of_the_mini_batch_about_to_be_updated(tmp_path):
    """All of it is measured: the variance of its unconstrained log-ratios is that of the update's own."""
    run = TWICE.replace(measure=Measure(full=True))
    updates = carry_out(run, tmp_path / "run")["updates"].query("update > 1")
    mean = updates["attribution_sum_d"] / updates["attribution_n"]
    assert (updates["attribution_n"] == updates["token_n"]).all()
    for found, expected in zip(mean, updates["token_log_ratio_mean"], strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-7)


def test_warm_up_counts_the_updates_of_all_epochs(tmp_path):
    run = TWICE.replace(optimizer=Optimizer(lr=1e-3, warmup=8))
    updates = carry_out(run, tmp_path / "run")["updates"]
    assert updates["lr"].tolist() == pytest.approx([1e-3 * n / 8 for n in range(1, 9)])
    parts = build(run, tmp_path, tmp_path)
    parts.policy.load(next((tmp_path / "run").glob("commit/*/checkpoint")))
    assert parts.policy.updates == 8


def test_the_dose_of_noise_grows_over_all_updates_of_a_step(tmp_path):
    updates = carry_out(TWICE.replace(router_noise=RouterNoise(scale=0.3), steps=1), tmp_path / "run")["updates"]
    assert updates["noise_scale"].tolist() == pytest.approx([0, 0.1, 0.2, 0.3])


def test_a_runs_clip_fractions_are_of_tokens_that_no_filter_took_out(tmp_path):
    """A clipped sequence is clipped, though its filtered tokens have lost nothing."""
    arm = Arm(name="a", filters=(f"{__name__}:every_second",), loss=Component("gspo", clip_low=0.0, clip_high=0.0))
    tables = carry_out(TINY.replace(arm=arm, steps=1, epochs=2), tmp_path / "run")
    assert tables["updates"].iloc[-1]["clip_sequences"] > 0.5
    for row in (tables["updates"].iloc[-1], tables["steps"].iloc[-1]):
        assert row["clip_sequences"] == row["clip_tokens"] > 0


def every_second(x):
    return (x.mask.cumsum(1) % 2).float()
