"""How a mini-batch is cut changes no loss, and those with statistics of all of it are their equations."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.objectives import objective_of
from moe_rl.objectives.losses import LEVELS, LOSSES, clip_surrogate
from moe_rl.objectives.weights import AGGREGATIONS
from moe_rl.registry import Component
from tests.objectives import peers
from tests.objectives.examples import TIGHT, inputs, ranged, rewarded

CHOICES = [
    *(Component(name, **ranged(LOSSES[name])) for name in LOSSES if name not in ("clip_cov", "kl_cov", "sat")),
    *(Component("grpo", level=level, dual=2.0, log_clamp=1.0) for level in LEVELS),
    *(Component("clip_cov", share=share, low=0.0, high=math.inf, seed=3) for share in (0.0, 1e-9, 0.3, 1.0)),
    *(Component("kl_cov", share=share, coef=0.5) for share in (0.0, 1e-9, 0.3, 1.0)),
    *(Component("sat", base=base, quantile=q) for base in ("grpo", "gspo") for q in (0.5, 0.9)),
]
CUTS = [[[0, 1, 2], [3, 4, 5, 6, 7]], [[5], [0, 3], [7, 6, 4, 2], [1]]]


def batch_of(name, **changes):
    """A peers' case as a mini-batch, and log π_θ and entropy of it."""
    x = peers.case(name)
    advantages = torch.as_tensor(np.broadcast_to(x["advantages"][:, None], x["mask"].shape).copy())
    batch = rewarded(
        x["rewards"],
        x["groups"],
        x["mask"],
        torch.float64,
        advantages=advantages,
        old_logprobs=x["old_logprobs"],
        rollout_logprobs=x["rollout_logprobs"],
        lag=np.arange(x["mask"].size).reshape(x["mask"].shape) % 4,
    )
    ends = torch.arange(24)[None] <= batch.response_mask.long().cumsum(1).argmax(1, keepdim=True)
    return replace(batch, attention_mask=ends, **changes), torch.tensor(x["logprobs"]), torch.as_tensor(x["entropy"])


def in_parts(loss, name, cut, **parts):
    """(loss, gradient, clipped_by) of a mini-batch in parts, as the trainer has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        objective = objective_of(Arm(name="a", loss=loss, **parts))
    batch, logprobs, entropy = batch_of(name)
    batch = objective.attach_weights(batch)
    if "mini_batch" in objective.needs:
        batch = objective.attach_statistics(batch, logprobs, entropy)
    logprobs.requires_grad_()
    total, clipped_by = 0.0, torch.zeros(logprobs.shape)
    for rows in cut:
        part = batch.rows(torch.tensor(rows))
        time = part.tokens.shape[1]
        output = objective(part, logprobs[rows][:, :time], entropy[rows][:, :time])
        total = total + output.loss
        clipped_by[rows, :time] = output.clipped_by.float()
    return total.item(), torch.autograd.grad(total, logprobs)[0].numpy(), clipped_by


@pytest.mark.parametrize("name", ["main-wide-0", "empty-wide-0", "holes-wide-0", "main-narrow-0"])
@pytest.mark.parametrize("loss", CHOICES, ids=str)
def test_how_a_mini_batch_is_cut_changes_nothing(loss, name):
    whole = in_parts(loss, name, [list(range(8))])
    assert whole[1].any()
    for cut in CUTS:
        parts = in_parts(loss, name, cut)
        np.testing.assert_allclose(parts[0], whole[0], **TIGHT)
        np.testing.assert_allclose(parts[1], whole[1], **TIGHT)
        assert torch.equal(parts[2], whole[2])


BANDS = (Component("masked", high=1.1), Component("rejected", high=1.01), "m2po", Component("vaco", bound=0.1))
PARTS = [
    *({"aggregate": Component(name, **({"horizon": 24} if "norm" in name else {}))} for name in AGGREGATIONS),
    *({where: (part,)} for part in BANDS for where in ("corrections", "filters")),
    {"corrections": ("truncated", Component("opsm", delta=-0.02))},
    {"corrections": (Component("truncated", level="product", batch_normalized=True),)},
]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_nor_does_it_with_other_weights(parts):
    whole, bare = (in_parts("grpo", "holes-wide-0", [list(range(8))], **more) for more in (parts, {}))
    assert "seq_mean_token_mean" in str(parts) or abs(whole[1] - bare[1]).max() > 1e-4, "the part did nothing"
    for cut in CUTS:
        found = in_parts("grpo", "holes-wide-0", cut, **parts)
        np.testing.assert_allclose(found[0], whole[0], **TIGHT)
        np.testing.assert_allclose(found[1], whole[1], **TIGHT)


def keeps_early(x):
    return (torch.arange(x.mask.shape[1]) % 5 != 3).expand(x.mask.shape).double()


@pytest.mark.parametrize(
    "loss", [Component("clip_cov", share=0.3, low=0.0), Component("kl_cov", share=0.3), "sat", "gmpo"]
)
def test_nor_does_it_where_a_filter_takes_tokens_out(loss):
    filtered = {"filters": (f"{__name__}:keeps_early",), "corrections": ("truncated",)}
    whole, parts = (in_parts(loss, "holes-wide-0", cut, **filtered) for cut in ([list(range(8))], CUTS[0]))
    np.testing.assert_allclose(parts[0], whole[0], **TIGHT)
    np.testing.assert_allclose(parts[1], whole[1], **TIGHT)
    gone = torch.arange(24) % 5 == 3
    assert not whole[1][:, gone].any() and not whole[2][:, gone].any()


# ------------------------------------------------------------------------------------------------------------ clip_cov
def covariances(x):
    """By hand; NaN outside the response."""
    mask, a = x["mask"], np.broadcast_to(x["advantages"][:, None], x["mask"].shape)
    p = x["logprobs"]
    return np.where(mask, (a - a[mask].mean()) * (p - p[mask].mean()), np.nan)


def run(loss, case, **options):
    logprobs = torch.tensor(peers.case(case)["logprobs"], requires_grad=True)
    x = peers.loss_inputs(case, logprobs)
    output = LOSSES[loss](x, **options)
    return x, output, torch.autograd.grad(output.loss, logprobs)[0]


@pytest.mark.parametrize("case", ["main-wide-0", "holes-wide-0", "empty-wide-0"])
@pytest.mark.parametrize("share", [1e-9, 0.05, 1.0])
def test_clip_cov_takes_a_share_of_the_tokens_in_its_band_that_the_range_kept(case, share):
    x, output, gradient = run("clip_cov", case, share=share, low=0.2, high=1.5)
    plain = clip_surrogate(x, x.log_ratio, 0.2, 0.2)
    kept = torch.autograd.grad(plain.loss, x.logprobs)[0]
    cov = covariances(peers.case(case))
    band = torch.as_tensor((cov > 0.2) & (cov < 1.5)) & (plain.clipped_by == 0)
    gone = output.batch_statistics > 0
    assert (gone <= band).all() and int(gone.sum()) == min(int(band.sum()), max(1, int(share * int(x.mask.sum()))))
    torch.testing.assert_close(gradient, kept.masked_fill(gone, 0), **TIGHT)
    value = -(x.weights * x.log_ratio.exp() * x.advantages).detach()[gone].sum()
    torch.testing.assert_close(output.loss, plain.loss - value, **TIGHT)
    assert torch.equal(output.clipped_by[gone].double(), x.advantages[gone].sign())
    assert torch.equal(output.clipped_by[~gone], plain.clipped_by[~gone])


def test_the_draw_is_a_function_of_seed_and_inputs_alone():
    taken = [
        run("clip_cov", case, share=0.2, low=0.0, seed=seed)[1].batch_statistics
        for case, seed in [("main-wide-0", 0), ("main-wide-0", 0), ("main-wide-0", 1)]
    ]
    torch.rand(3)
    assert torch.equal(taken[0], taken[1]) and not torch.equal(taken[0], taken[2])


# -------------------------------------------------------------------------------------------------------------- kl_cov
@pytest.mark.parametrize("case", ["main-wide-0", "holes-wide-0", "empty-wide-0"])
@pytest.mark.parametrize("share", [1e-9, 0.05, 1.0])
def test_kl_cov_pulls_the_tokens_of_highest_covariance_back(case, share):
    x, output, gradient = run("kl_cov", case, share=share, coef=0.3)
    raw, mask = peers.case(case), peers.case(case)["mask"]
    cov = covariances(raw)[mask]
    count = max(1, int(share * mask.sum()))
    chosen = np.zeros_like(mask)
    chosen[mask] = cov >= np.sort(cov)[-count]
    assert np.array_equal(output.batch_statistics.numpy() > 0, chosen) and chosen.sum() == count
    ratio = np.exp(np.where(mask, raw["logprobs"] - raw["old_logprobs"], 0))
    a, weights = raw["advantages"][:, None], x.weights.numpy()
    away = np.where(chosen, 0.3 * np.log(ratio), 0)
    np.testing.assert_allclose(output.loss.item(), -(weights * (ratio * a - abs(away))).sum(), **TIGHT)
    np.testing.assert_allclose(gradient, -weights * (ratio * a - 0.3 * np.sign(away)), **TIGHT)


def test_of_equal_covariances_the_first_are_taken():
    ones = torch.zeros(2, 3, dtype=torch.float64)
    output = LOSSES["kl_cov"](inputs(ones, ones, torch.ones(2).double(), ones == 0), share=0.5)
    assert output.batch_statistics.tolist() == [[1, 1, 1], [0, 0, 0]]


# ----------------------------------------------------------------------------------------------------------------- sat
@pytest.mark.parametrize("case", ["main-wide-0", "holes-wide-0", "empty-wide-0"])
@pytest.mark.parametrize("base", ["grpo", "gspo"])
def test_sat_contracts_the_bound_on_the_side_of_the_gap(case, base):
    bounds = {"clip_low": 0.004, "clip_high": 0.006} if base == "gspo" else {"clip_low": 0.2, "clip_high": 0.3}
    x, output, gradient = run("sat", case, base=base, quantile=0.7, **bounds)
    raw, mask = peers.case(case), peers.case(case)["mask"]
    gap = np.where(mask, raw["logprobs"] - raw["rollout_logprobs"], 0)
    q = np.quantile(abs(gap[mask]), 0.7)
    assert np.allclose(output.batch_statistics, q, rtol=1e-12)
    loss, slopes, sides = 0.0, np.zeros(mask.shape), np.zeros(mask.shape, dtype=int)
    for i, t in zip(*mask.nonzero(), strict=True):
        hill = 1.0 if abs(gap[i, t]) <= q else 1 / (1 + (abs(gap[i, t]) / q) ** 2)
        high = 1 + bounds["clip_high"] * (hill if gap[i, t] > 0 else 1)
        low = 1 - bounds["clip_low"] * (hill if gap[i, t] < 0 else 1)
        own = (raw["logprobs"] - raw["old_logprobs"])[i]
        ratio, a = math.exp(own[t] if base == "grpo" else own[mask[i]].mean()), raw["advantages"][i]
        weight = x.weights[i, t].item()
        loss -= weight * min(ratio * a, min(max(ratio, low), high) * a)
        sides[i, t] = 1 if a > 0 and ratio > high else -1 if a < 0 and ratio < low else 0
        slopes[i, t] = 0 if sides[i, t] else -weight * ratio * a
    np.testing.assert_allclose(output.loss.item(), loss, **TIGHT)
    np.testing.assert_allclose(gradient, slopes, **TIGHT)
    np.testing.assert_array_equal(output.clipped_by, sides)
    assert sides.any()


@pytest.mark.parametrize("sign", [1, -1])
def test_sat_by_hand(sign):
    """Gaps of 1, 2 and ±4, whose median is 2: h = 1 / (1 + 2²) = .2 makes the range [.9, 1.5], or [.5, 1.1], of the
    last token, whose ratio is 1 ± .2; the others' is 1."""
    old = torch.tensor([[-3.0, -3.0, -3.0]], dtype=torch.float64)
    new = (old + torch.tensor([[0, 0, math.log(1 + 0.2 * sign)]]).double()).requires_grad_()
    engine = new.detach() - torch.tensor([[1.0, -2.0, 4.0 * sign]])
    x = inputs(new, old, torch.tensor([float(sign)]).double(), torch.ones(1, 3, dtype=torch.bool))
    output = LOSSES["sat"](replace(x, rollout_logprobs=engine), clip_low=0.5, clip_high=0.5, quantile=0.5)
    output.loss.backward()
    assert output.clipped_by.tolist() == [[0, 0, sign]] and output.batch_statistics.tolist() == [[2, 2, 2]]
    assert output.loss.item() == pytest.approx(-sign * (2 + 1 + 0.1 * sign) / 3)
    np.testing.assert_allclose(new.grad, [[-sign / 3, -sign / 3, 0]], **TIGHT)


def test_an_engine_that_agrees_contracts_nothing():
    x = peers.loss_inputs("main-wide-0")
    output = LOSSES["sat"](replace(x, rollout_logprobs=x.logprobs))
    assert not output.batch_statistics.any()
    assert torch.equal(output.clipped_by, LOSSES["grpo"](x, clip_high=0.2).clipped_by)
