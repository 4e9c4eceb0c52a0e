"""Aggregations by loops over sequences and tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.objectives import policy_loss
from moe_rl.objectives.weights import AGGREGATIONS
from moe_rl.registry import Component
from tests.objectives import peers
from tests.objectives.examples import case

HORIZON = {"seq_mean_token_sum_norm": {"horizon": 24}}
ROWS = ("seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
PPO = Component("grpo", clip_low=0.2, clip_high=0.28)
HOLES = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]], dtype=bool)


def by_loops(name, mask, rows):
    """From the denominators of the equations; `mask` is looked at one token at a time."""
    lengths = [sum(bool(token) for token in row) for row in mask]
    sequences = len(lengths) if rows == "all" else sum(length > 0 for length in lengths)
    found = np.zeros(mask.shape)
    for i, t in zip(*np.nonzero(mask), strict=True):
        found[i, t] = {
            "seq_mean_token_mean": 1 / sequences / lengths[i],
            "token_mean": 1 / sum(lengths),
            "seq_mean_token_sum": 1 / sequences,
            "seq_mean_token_sum_norm": 1 / sequences / 24,
            "token_sum": 1.0,
        }[name]
    return found


@pytest.mark.parametrize("mask", [HOLES, case()[3], np.ones((2, 3), dtype=bool)])
@pytest.mark.parametrize("rows", ["live", "all"])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_weights_are_those_of_the_equation(name, rows, mask):
    options = HORIZON.get(name, {}) | ({"rows": rows} if name in ROWS else {})
    weights = AGGREGATIONS[name](torch.tensor(mask), **options)
    assert weights.dtype == torch.float64
    np.testing.assert_allclose(weights, by_loops(name, mask, rows), rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_mini_batch_without_a_response_token_weighs_nothing(name):
    assert not AGGREGATIONS[name](torch.zeros(3, 4, dtype=torch.bool), **HORIZON.get(name, {})).any()


def of(name, arm, **changes):
    """Loss and gradient of an arm on a case of the peers, its corrections and filters included."""
    x = peers.case(name)
    logprobs = torch.tensor(x["logprobs"], requires_grad=True)
    given = {k: torch.tensor(x[k]) for k in ("rollout_logprobs", "ref_logprobs", "entropy")} | changes
    loss = policy_loss(
        arm,
        logprobs=logprobs,
        old_logprobs=torch.tensor(x["old_logprobs"]),
        advantages=torch.tensor(x["advantages"]),
        mask=torch.tensor(x["mask"]),
        **given,
    ).loss
    loss.backward()
    return loss.item(), logprobs.grad.numpy()


def assert_equal(found, expected, within=1e-12):
    for a, b in zip(found, expected, strict=True):
        assert np.all(np.abs(a - b) <= within * np.maximum(1, np.abs(b))), (a, b)


def rows(x, index):
    """Some rows of `LossInputs`."""
    return replace(x, **{name: value[index] for name, value in vars(x).items() if value is not None})


@pytest.mark.parametrize("rows_, sequences", [("live", 2), ("all", 3)])
def test_a_filtered_row_counts_among_all_rows_and_not_among_the_live(rows_, sequences):
    """Row 2 was cut off: its tokens leave the loss, |y| and, unless all rows count, N."""
    mask = torch.ones(3, 2, dtype=torch.bool)
    zeros = torch.zeros(3, 2, dtype=torch.float64)
    arm = Arm(name="a", loss=PPO, aggregate=Component("seq_mean_token_mean", rows=rows_), filters=("finished",))
    done = torch.tensor([[True], [True], [False]]).expand(3, 2)
    loss = policy_loss(
        arm,
        logprobs=zeros,
        old_logprobs=zeros,
        advantages=torch.tensor([1.0, 2.0, 50.0]).double(),
        mask=mask,
        finished=done,
    ).loss
    assert loss.item() == pytest.approx(-3 / sequences)
