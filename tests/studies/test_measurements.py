"""What the studies with measurements of their own compute, on numbers worked by hand and on a small model."""

from __future__ import annotations

import answers_of_measures
import early_warning
import gradient_quality_trainer
import numpy as np
import pandas as pd
import per_seed
import pytest
import ratio_variance_trainer
import torch
from gradient_clipping_verdicts import verdict

from moe_rl.metrics.volatility import route_change
from moe_rl.types import response_rows
from tests.conftest import build, perturb
from tests.policies.test_hf import make_batch, policy_of


def test_a_square_takes_products_of_different_batches_only():
    """(1, 0) and (3, 4) as means of two batches: 1·3 + 0·4, not the square of their mean, 8."""
    gradients = gradient_quality_trainer.Gradients()
    gradients.add([torch.tensor([0.0, 0.0]), torch.tensor([2.0, 0.0])])
    gradients.add([torch.tensor([3.0, 4.0])])
    assert gradients.square == pytest.approx(3.0)
    assert gradients.mean.tolist() == [2.0, 2.0] and gradients.norms == [0.0, 4.0, 25.0]


def test_quality_of_noisy_gradients_is_that_of_their_distribution():
    """g = (1, 1) + noise against g* = (0, 2): cosine of the means √½, bias² |(1, −1)|² / 4, variance 2 · 0.09 / 4."""
    generator = torch.Generator().manual_seed(0)
    fresh = gradient_quality_trainer.Gradients()
    for _ in range(4000):
        fresh.add([torch.tensor([0.0, 2.0]) + torch.randn(2, generator=generator)])
    arm = gradient_quality_trainer.Gradients(reference=fresh.mean)
    for _ in range(4000):
        arm.add([torch.tensor([1.0, 1.0]) + 0.3 * torch.randn(2, generator=generator)])
    found = gradient_quality_trainer.quality(arm, fresh)
    assert found["cosine_mean"] == pytest.approx(0.5**0.5, abs=0.03)
    assert found["bias"] == pytest.approx(2 / 4, rel=0.05)
    assert found["variance"] == pytest.approx(0.18 / 4, rel=0.1)
    assert found["norm"] == pytest.approx(0.5**0.5, rel=0.05)


def test_tokens_are_compared_under_both_routes():
    batch, old, new = make_batch(), policy_of(build("qwen3_moe")), policy_of(build("qwen3_moe"))
    tokens = ratio_variance_trainer.compare(old, new, batch)
    assert len(tokens) == int(batch.response_mask.sum())
    assert not tokens.drop(columns="prompt").to_numpy().any()
    perturb(new.model)
    tokens = ratio_variance_trainer.compare(old, new, batch)
    before, after = old.score(batch), new.score(batch)
    natural = (after.logprobs - before.logprobs)[batch.response_mask].double()
    replayed = (new.score(batch, before.routes).logprobs - before.logprobs)[batch.response_mask].double()
    assert np.array_equal(tokens["d"], natural.numpy()) and np.array_equal(tokens["r"], replayed.numpy())
    assert not np.array_equal(natural, replayed) and tokens["changed"].mean() > 0
    np.testing.assert_allclose(tokens["dd"], tokens["rr"] + tokens["jj"] + 2 * tokens["rj"], atol=1e-12)
    assert (tokens["kl_natural"] > -1e-6).all() and tokens["kl_natural"].sum() > 0
    change = route_change(before.routes.ids(), after.routes.ids(), response_rows(batch)).row()
    assert tokens["expert_change_rate"].mean() == pytest.approx(change["expert_change_rate"])
    assert tokens["changed"].mean() == pytest.approx(change["any_layer_change"])
    assert not np.allclose(tokens["kl_natural"], tokens["kl_replayed"])
    assert tokens["prompt"].value_counts().to_dict() == {
        p: int(batch.response_mask[batch.prompt_index == p].sum()) for p in range(4)
    }


def test_what_replay_removes_is_a_ratio_of_sums():
    rows = pd.DataFrame({"seed": [0, 0, 1, 1], "dd": [1.0, 3.0, 2.0, 2.0], "rr": [0.5, 0.5, 0.5, 0.5],
                         "kl_natural": [1.0] * 4, "kl_replayed": [0.25] * 4})  # fmt: skip
    found = answers_of_measures.removed(rows, resamples=200)
    assert found["variance_pooled"] == 0.75 and found["variance_removed"] == pytest.approx(0.75)
    assert found["variance_low"] == found["variance_high"] == 0.75  # both seeds have the same share
    assert found["variance_by_prompt"] == "[0.67, 0.80]" and found["kl_pooled"] == 0.75
    assert per_seed.slopes(pd.DataFrame([[0, 1, 2], [3, 1, -1]]), (0, 1, 2)).tolist() == pytest.approx([1, -2])


def test_a_logistic_regression_finds_the_odds_that_made_its_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 2)) * [1, 10] + [1, 5]
    y = rng.random(20_000) < early_warning.predict(np.array([-1.0, 0.8, -0.1]), x)
    assert early_warning.fit(x, y.astype(float)) == pytest.approx([-1.0, 0.8, -0.1], abs=0.06)


def test_an_alarm_that_goes_on_is_one_alarm():
    p = np.array([0.9, 0.1, 0.6, 0.7, 0.2, 0.9, 0.9])
    soon = np.array([0, 0, 0, 0, 0, 1, 1], dtype=bool)
    assert early_warning.alarms(p, soon, 0.5) == (True, 2, 3)
    assert early_warning.alarms(p, soon, 0.95) == (False, 0, 0)


def test_the_rule_of_gradient_clipping_by_hand():
    """Variances of eight seeds whose ratios are 2, with a scatter of a percent; the ninth has no sound reference."""
    variance = {"grpo": 2.0, "token-none": 1.0, "product-none": 3.0, "sequence-none": 3.0}
    last = pd.DataFrame([{"seed": seed, "update": 8, "compared": arm, "attenuation": 0.6 if seed == 8 else 0.9,
                          "variance": value * (1 + 0.01 * (seed % 2) * (arm == "grpo")) * (1 + (seed == 8) * seed)}
                         for seed in range(9) for arm, value in variance.items()])
    first = pd.DataFrame([{"seed": 0, "update": 1, "compared": arm, "apart": 1e-7} for arm in variance])
    said = verdict(pd.concat([first, last]))
    assert said[0].startswith("clipping: it amplifies the noise, reproduced (variance, grpo / token-none 2.0")
    assert said[1].startswith("length normalisation: undetermined at n = 8")
    swapped = last.replace({"compared": {"grpo": "token-none", "token-none": "grpo"}})
    void, *said = verdict(pd.concat([first.assign(apart=2e-3), swapped]))
    assert void == "void: grpo is 2.0e-03 of a norm apart from GRPO where every ratio is 1"
    assert any(line.startswith("clipping: it damps the noise, reversed") for line in said)
