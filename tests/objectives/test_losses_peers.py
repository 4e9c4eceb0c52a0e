"""Losses against other frameworks' own code (`peers`), value and gradient to 1e-12; where they differ, why."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from moe_rl.objectives.losses import LOSSES
from moe_rl.objectives.weights import AGGREGATIONS
from tests.objectives import peers
from tests.objectives.examples import inputs

DAPO = {"clip_low": 0.2, "clip_high": 0.28}
GSPO = {"clip_low": 0.02, "clip_high": 0.03}


def openrlhf(mask):
    """OpenRLHF adds 1e-8 to |y|."""
    return mask / ((mask.double().sum(1, keepdim=True) + 1e-8) * mask.any(1).sum())


each_sequence, tokens = AGGREGATIONS["seq_mean_token_mean"], AGGREGATIONS["token_mean"]
each_row = functools.partial(each_sequence, rows="all")  # as TRL counts them
sums = functools.partial(AGGREGATIONS["seq_mean_token_sum"], rows="all")
constant = functools.partial(AGGREGATIONS["seq_mean_token_sum_norm"], horizon=24, rows="all")


def ours(case, name, aggregation, *, per_token=False, anchor="old_logprobs", **options):
    """(loss, gradient) with the peer's denominators."""
    x = peers.case(case)
    logprobs = torch.tensor(x["logprobs"], requires_grad=True)
    advantages = x["token_advantages" if per_token else "advantages"]
    given = inputs(logprobs, x[anchor], advantages, x["mask"], weights=aggregation(torch.as_tensor(x["mask"])))
    output = LOSSES[name](given, **options)
    output.loss.backward()
    return output.loss.item(), logprobs.grad.numpy()


def agree(found, expected):
    scale = max(1, abs(expected[0]), np.abs(expected[1]).max())
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-12 * scale)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-12 * scale)


SAME = {
    "trl/grpo": ("grpo", each_row, DAPO),
    "trl/grpo.token_advantages": ("grpo", each_row, DAPO | {"per_token": True}),
    "trl/grpo.delta": ("grpo", each_row, DAPO | {"cap": 1.4}),
    "trl/grpo.delta_below_high": ("grpo", each_row, DAPO | {"cap": 1.1}),
    "trl/bnpo": ("grpo", tokens, DAPO),
    "trl/dapo": ("grpo", tokens, DAPO),
    "trl/dr_grpo": ("grpo", constant, DAPO),
    "trl/luspo": ("grpo", sums, DAPO),
    "trl/grpo.sequence": ("gspo", each_row, GSPO),
    "trl/grpo.sequence.paper_range": ("gspo", each_row, {}),
    "trl/grpo.sequence.token_advantages": ("grpo", each_row, GSPO | {"level": "sequence", "per_token": True}),
    "trl/bnpo.sequence": ("gspo", tokens, GSPO),
    "trl/dapo.sequence": ("gspo", tokens, GSPO),
    "trl/dr_grpo.sequence": ("gspo", constant, GSPO),
    "trl/luspo.sequence": ("gspo", sums, GSPO),
    "trl/cispo.absolute_cap": ("cispo", tokens, {"clip_high": 0.28}),
    "trl/sapo": ("sapo", each_row, {}),
    "trl/sapo.sequence": ("sapo", each_row, {"level": "sequence"}),
    "openrlhf/ppo_clip.token": ("grpo", tokens, DAPO | {"log_clamp": 20}),
    "openrlhf/ppo_clip.sequence": ("grpo", openrlhf, DAPO | {"log_clamp": 20}),
    "openrlhf/dual_clip": ("grpo", tokens, DAPO | {"log_clamp": 20, "dual": 1.4}),
    "openrlhf/gspo": ("gspo", openrlhf, GSPO),
    "openinstruct/dapo": ("grpo", tokens, DAPO),
    "openinstruct/cispo": ("cispo", tokens, {"clip_high": 0.28}),
    "gmpo_authors/gmpo": ("gmpo", each_sequence, {}),
    "gmpo_authors/gmpo_noclip": ("gmpo", each_sequence, {"clip_low": math.inf, "clip_high": math.inf}),
    "gmpo_authors/gmpo_without_norm": ("gmpo", each_sequence, {"level": "product"}),
}


@pytest.mark.parametrize("case", peers.CASES)
@pytest.mark.parametrize("key", SAME)
def test_a_loss_is_the_peers(key, case):
    name, aggregation, options = SAME[key]
    agree(ours(case, name, aggregation, **options), peers.expected(case, key))


@pytest.mark.parametrize("case", peers.CASES)
@pytest.mark.parametrize(("key", "log_range"), [("trl/gmpo", (0.4, 0.4)), ("trl/gmpo.narrow", (0.003, 0.004))])
def test_gmpo_of_trl_counts_a_row_without_tokens_as_a_ratio_of_one(key, log_range, case):
    x = peers.case(case)
    found = ours(case, "gmpo", each_row, clip_low=log_range[0], clip_high=log_range[1])
    constant = -(x["advantages"] * ~x["mask"].any(1)).sum() / len(x["mask"])
    agree((found[0] + constant, found[1]), peers.expected(case, key))


@pytest.mark.parametrize("case", peers.CASES)
def test_vespo_is_trls_but_for_its_cut_of_log_ratios(case):
    """TRL cuts a token's at ±20 before it sums them: one response of the extreme case has such a token."""
    found, expected = ours(case, "vespo", tokens), peers.expected(case, "trl/vespo")
    x = peers.case(case)
    cut = (np.where(x["mask"], abs(x["logprobs"] - x["old_logprobs"]), 0) > 20).any(1)
    assert cut.any() == (case == "main-extreme-0")
    np.testing.assert_allclose(found[1][~cut], expected[1][~cut], rtol=0, atol=1e-12)
    if not cut.any():
        agree(found, expected)


@pytest.mark.parametrize("case", peers.CASES)
def test_dppo_is_prime_rls_which_adds_a_square_and_anchors_at_the_engine(case):
    x = peers.case(case)
    distance = np.where(x["mask"], x["logprobs"] - x["rollout_logprobs"], 0)
    loss, gradient = ours(case, "dppo", tokens, low=0.05, high=0.05, anchor="rollout_logprobs")
    pull = 1e-3 * x["mask"] / x["mask"].sum() * distance
    agree((loss + (pull * distance).sum(), gradient + 2 * pull), peers.expected(case, "prime/default"))
