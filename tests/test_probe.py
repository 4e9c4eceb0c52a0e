"""The probe at its smallest, and that it agrees with what all tokens say."""

from __future__ import annotations

import math

import pytest

from moe_rl.config import Measure
from tests.test_trainer import TINY, carry_out


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("responses", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:one update per step", "ignore:step 1")
def test_a_probe_of_very_few_responses_measures_everything_at_a_detail_step(responses, replays, tmp_path):
    """The noise floor cuts its probe into a third and the rest: of one or two responses there is no first third."""
    arm = {"arm.routes": "rollout" if replays else "live"}
    run = TINY.replace(mini_batches=1, steps=1, measure=Measure(responses=responses, detail_every=1), **arm)
    tables = carry_out(run, tmp_path / "run")
    row = tables["steps"].iloc[-1]
    assert row["measured_responses"] == responses
    assert 0 <= row["noise_floor_logprob"] < 1e-5 and row["noise_floor_any_layer_change"] == 0
    measured = [name for name in tables["steps"].columns if name.startswith(("noise_floor", "replay_gap", "gate_mass"))]
    measured += [
        "expert_change_rate",
        "any_change_rate",
        "router_shift",
        "engine_kl_k3_unconstrained",
        "engine_kl_k3_replayed",
    ]
    assert all(math.isfinite(row[name]) for name in measured), "no column may stay empty"
    assert (tables["updates"]["expert_change_rate"] == row["expert_change_rate"]).all(), "one update is the whole step"
    assert tables["layers"]["noise_floor_any_change_rate"].tolist() == [0.0, 0.0]


def test_two_mini_batches_share_a_probe_of_one_response(tmp_path):
    """A response of every mini-batch, so that each has its attribution."""
    run = TINY.replace(mini_batches=2, steps=1, measure=Measure(responses=1, detail_every=1))
    tables = carry_out(run, tmp_path / "run")
    assert tables["steps"].iloc[-1]["measured_responses"] == 2
    assert tables["updates"].set_index("update")["attribution_n"].notna().to_dict() == {1: False, 2: True}


def test_what_an_update_changed_is_there_of_every_layer(tmp_path):
    """Every MoE layer has the same tokens, so that the mean over MoE layers is the update's own number."""
    run = TINY.replace(mini_batches=3, steps=4, measure=Measure(responses=6, detail_every=2))
    tables = carry_out(run, tmp_path / "run")
    layers, updates = tables["layers"], tables["updates"]
    followed = updates.dropna(subset="expert_change_rate")
    assert set(followed["step"]) == {2, 4} and followed["expert_change_rate"].max() > 0
    for row in followed.itertuples():
        moe_layers = layers.loc[layers["step"] == row.step, f"change_update_{row.update}"]
        assert len(moe_layers) > 1 and moe_layers.mean() == pytest.approx(row.expert_change_rate)
    assert layers.loc[layers["step"] == 3, "change_update_1"].isna().all()
