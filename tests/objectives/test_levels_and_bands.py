"""Corrections by loops over tokens, against TRL, OpenRLHF and open-instruct, and as filters."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import CorrectionInputs, correction_weights, objective_of, policy_loss
from moe_rl.objectives.weights import CORRECTIONS, cis, m2po, masked, opsm, rejected, truncated, vaco
from moe_rl.registry import Component, needs_of
from tests.objectives import peers
from tests.objectives.examples import case, inputs
from tests.objectives.test_aggregate import PPO, assert_equal, of, rows
from tests.policies.test_hf import make_batch

MASK = np.array(
    [[0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 1, 0]],
    dtype=bool,
)
"""Whole, two turns, empty, one token, every token a turn."""


def drawn(seed=0, spread=0.6):
    """log ρ, and inputs whose padding is NaN."""
    rng = np.random.default_rng(seed)
    log_rho = np.where(MASK, spread * rng.normal(size=MASK.shape), 0)
    old = np.where(MASK, -rng.exponential(size=MASK.shape), math.nan)
    new = old + np.where(MASK, 0.3 * rng.normal(size=MASK.shape), 0)
    advantages = np.array([1.0, -0.5, 2.0, -1.5, 0.0])
    return log_rho, inputs(new, old, advantages, MASK, rollout_logprobs=old - log_rho)


def at_level(values, level):
    """Value of a level at each response token: sum, means over sequence or run, or the token's own."""
    found = np.zeros(MASK.shape)
    for i in range(len(MASK)):
        tokens = [t for t in range(MASK.shape[1]) if MASK[i, t]]
        for t in tokens:
            turn = [t]
            while turn[0] - 1 in tokens:
                turn.insert(0, turn[0] - 1)
            while turn[-1] + 1 in tokens:
                turn.append(turn[-1] + 1)
            found[i, t] = {
                "token": values[i, t],
                "segment": sum(values[i, u] for u in turn) / len(turn),
                "geometric": sum(values[i, u] for u in tokens) / len(tokens),
                "product": sum(values[i, u] for u in tokens),
            }[level]
    return found


LEVELS = ("token", "segment", "geometric", "product")


def same(found, expected):
    np.testing.assert_allclose(found.numpy()[MASK], expected[MASK], rtol=1e-12, atol=0)
    assert not found.isnan().any()


@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_bands_at_every_level(level):
    log_rho, x = drawn()
    rho = np.exp(at_level(log_rho, level))
    same(truncated(x, cap=1.3, level=level), np.minimum(rho, 1.3))
    same(truncated(x, cap=1.3, low=0.8, level=level), np.clip(rho, 0.8, 1.3))
    inside = (rho >= 0.7) & (rho <= 1.4)
    assert inside[MASK].any() and not inside[MASK].all()
    same(masked(x, low=0.7, high=1.4, level=level), np.where(inside, rho, 0))
    same(rejected(x, low=0.7, high=1.4, level=level), inside * 1.0)


@pytest.mark.parametrize("statistic", ["k2", "k3", "abs"])
@pytest.mark.parametrize("level", LEVELS)
def test_rejection_by_an_estimate_of_the_kl(statistic, level):
    log_rho, x = drawn()
    value = at_level({"k2": log_rho**2 / 2, "k3": np.exp(log_rho) - 1 - log_rho, "abs": abs(log_rho)}[statistic], level)
    high = np.median(value[MASK])
    same(rejected(x, high=high, statistic=statistic, level=level), (value <= high) * 1.0)


def test_level_max_keeps_a_sequence_whose_every_token_is_inside():
    log_rho, x = drawn()
    expected = np.array([[all(0.6 <= r <= 1.6 for r in np.exp(log_rho[i][MASK[i]]))] * 7 for i in range(5)])
    assert expected[[0, 1, 3, 4], 0].any() and not expected[[0, 1, 3, 4], 0].all()
    same(rejected(x, low=0.6, high=1.6, level="max"), expected * 1.0)
    largest = np.array([[max([*abs(log_rho[i][MASK[i]]), 0])] * 7 for i in range(5)])
    same(rejected(x, high=0.5, statistic="abs", level="max"), (largest <= 0.5) * 1.0)


def test_bounds_are_inside_the_band():
    x = inputs(
        *(torch.zeros(1, 3).double(),) * 2,
        torch.ones(1).double(),
        torch.ones(1, 3, dtype=torch.bool),
        rollout_logprobs=torch.tensor([[math.log(2), 0.0, -math.log(2)]]).double(),
    )
    low, high = (x.log_ratio - x.rollout_logprobs)[0, [0, 2]].exp().tolist()
    assert masked(x, low=low, high=high).tolist() == [[low, 1.0, high]]
    assert rejected(x, low=1.0, high=high, level="token").tolist() == [[0, 1, 1]]
    assert masked(x, low=0.6, high=1.9).tolist() == [[0, 1, 0]]


OPTIONS = {
    "truncated": {},
    "cis": {},
    "masked": {"low": 0.5, "high": 5.0},
    "rejected": {"low": 0.99, "high": 1.01},
    "m2po": {},
    "vaco": {"bound": 0.1},
    "opsm": {"delta": 0.01},
}


def test_batch_normalised_weights_have_mean_one_over_tokens_or_sequences():
    log_rho, x = drawn()
    for level in ("token", "product"):
        rho = np.minimum(np.exp(at_level(log_rho, level)), 1.5)
        mean = rho[MASK].mean() if level == "token" else np.mean([rho[i][MASK[i]].mean() for i in (0, 1, 3, 4)])
        same(truncated(x, cap=1.5, level=level, batch_normalized=True), rho / mean)


def test_m2po_by_hand_and_by_dropping_one_token_after_the_other():
    """(log ρ)² = 1, 4, 9, 16: without 16 and 9 the mean is 2.5, without 4 it is 1."""
    d = torch.tensor([[1.0, -2.0, 3.0, -4.0]]).double()
    x = inputs(d, d, torch.ones(1).double(), torch.ones(1, 4, dtype=torch.bool), rollout_logprobs=0 * d)
    for threshold, kept in {100: 4, 7.5: 3, 4.6: 2, 2.5: 1, 2.4: 1, 1.0: 0}.items():
        assert m2po(x, threshold=threshold).tolist() == [[1.0] * kept + [0.0] * (4 - kept)], threshold
    log_rho, x = drawn(spread=0.4)
    squares = sorted(log_rho[MASK] ** 2)
    while np.mean(squares) >= 0.04:
        squares.pop()
    assert 0 < len(squares) < MASK.sum()
    same(m2po(x), (log_rho**2 <= squares[-1]) * 1.0)


def test_equal_tokens_go_together_so_the_order_of_rows_changes_nothing():
    d = torch.tensor([[0.1, 0.3], [-0.3, 0.1]]).double()  # without one of the two .09s the mean would be below .04
    x = inputs(d, d, torch.ones(2).double(), torch.ones(2, 2, dtype=torch.bool), rollout_logprobs=0 * d)
    assert m2po(x).tolist() == [[1, 0], [0, 1]]


def test_vaco_leaves_out_what_would_take_a_far_sequence_further():
    log_rho, x = drawn()
    off = at_level(abs(np.exp(log_rho) - 1), "geometric")
    bound = np.median(off[MASK])
    expected = 1 - ((off > bound) & (x.advantages.numpy() * log_rho > 0))
    assert 0 < expected[MASK].sum() < MASK.sum()
    same(vaco(x, bound=bound), expected)


@pytest.mark.parametrize("against", ["engine", "old"])
def test_opsm_masks_sequences_of_negative_advantage_that_the_policy_has_left(against):
    log_rho, x = drawn()
    sampler = x.rollout_logprobs if against == "engine" else x.old_logprobs
    behind = at_level(np.where(MASK, (sampler - x.logprobs).numpy(), 0), "geometric")
    for delta in (-0.1, 0.05, math.inf):
        expected = 1 - ((x.advantages.numpy() < 0) & (behind > delta))
        same(opsm(x, delta=delta, against=against), expected * 1.0)
    assert not opsm(x, delta=-5.0)[1].any()
    own = replace(x, ratio_logprobs=x.old_logprobs)
    assert opsm(own, delta=0.0, against="old").all(), "it is π_θ under the routes of the ratio"


# ---------------------------------------------------------------------- at the update
STATIC = [Component(name, **OPTIONS[name]) for name in ("truncated", "masked", "rejected", "m2po", "vaco")]
STATIC += [Component("truncated", level="product", batch_normalized=True)]


def test_what_reads_the_policy_is_applied_at_the_update_and_once():
    """Parts of a weighed mini-batch and the whole, in a loop of one's own: the same loss, with importance_weights or
    without."""
    log_rho, x = drawn()
    arm = Arm(name="a", loss=PPO, corrections=("truncated", Component("opsm", delta=-0.1)))
    objective = objective_of(arm)
    expected = objective.of(x).loss
    both = truncated(x) * opsm(x, delta=-0.1)
    assert (both == 0).any()
    plain = objective_of(Arm(name="b", loss=PPO)).of(replace(x, weights=x.weights * both))
    torch.testing.assert_close(expected, plain.loss, rtol=1e-12, atol=0)
    parts = [objective.of(rows(replace(x, importance_weights=truncated(x)), r)).loss for r in (slice(1), slice(1, 5))]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-12, atol=0)


def test_a_filter_leaves_the_lengths_and_the_sequences_and_a_correction_keeps_them():
    """Ratios 1, advantages 1 and 3. Two tokens of row 0 and all of row 1 are out: 1 as filter, over 2 · 3 else."""
    log_rho = torch.tensor([[0.0, 2.0, 2.0], [2.0, 2.0, 2.0]]).double()
    zeros, mask = torch.zeros(2, 3).double(), torch.ones(2, 3, dtype=torch.bool)
    part = Component("masked", high=2.0)
    for where, loss in (("filters", -1.0), ("corrections", -1 / 6)):
        found = policy_loss(
            Arm(name="a", loss=PPO, **{where: (part,)}),
            logprobs=zeros,
            old_logprobs=zeros,
            rollout_logprobs=-log_rho,
            advantages=torch.tensor([1.0, 3.0]).double(),
            mask=mask,
        )
        assert found.loss.item() == pytest.approx(loss)


# ---------------------------------------------------------------------- what is refused, and what overflows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "part",
    [
        Component("truncated", cap=math.inf),
        Component("truncated", cap=math.inf, level="product"),
        Component("masked", high=math.inf, level="product"),
        *STATIC,
    ],
    ids=str,
)
def test_log_ratios_that_overflow_give_no_nan(part, dtype):
    mask = torch.ones(4, 3, dtype=torch.bool)
    log_rho = torch.tensor([[2e3, 0, 0], [-2e3, 0, 0], [900.0, 900.0, 900.0], [0.0, 0.1, 0.2]], dtype=dtype)
    zeros = torch.zeros(4, 3, dtype=dtype)
    x = inputs(zeros, log_rho, torch.tensor([0.0, 1.0, -1.0, 0.5], dtype=dtype), mask, rollout_logprobs=zeros)
    factors = CORRECTIONS[part.name](x, **part.options)
    assert factors.isfinite().all() and not (factors * x.advantages).isnan().any()


@pytest.mark.parametrize("where", ["corrections", "filters"])
@pytest.mark.parametrize("name", [name for name in CORRECTIONS if "engine" in needs_of(CORRECTIONS[name])])
def test_with_the_engine_as_anchor_there_is_nothing_to_correct(name, where):
    with pytest.raises(ConfigError, match=f"every weight of {name} is 1"):
        objective_of(Arm(name="a", anchor="engine", **{where: (Component(name, **OPTIONS[name]),)}))


def test_the_engine_as_anchor_may_still_be_masked_by_opsm_but_not_filtered():
    objective_of(Arm(name="a", anchor="engine", corrections=(Component("opsm", delta=0.1),)))
    with pytest.raises(ConfigError, match="opsm.*reads π_θ"):
        objective_of(Arm(name="a", filters=(Component("opsm", delta=0.1),)))


@pytest.mark.parametrize("name", ["truncated", "cis"])
def test_a_filter_that_is_never_zero_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is never 0"):
        objective_of(Arm(name="a", filters=(name,)))


def test_finished_needs_to_know():
    with pytest.raises(ConfigError, match="finished"):
        CORRECTIONS["finished"](drawn()[1])


def test_responses_that_were_cut_off_leave_the_mini_batch():
    batch = make_batch()
    batch = replace(batch, old_logprobs=batch.rollout_logprobs, finished=torch.arange(len(batch)) % 2 == 0)
    weighed = objective_of(Arm(name="a", filters=("finished",))).attach_weights(batch)
    assert not weighed.mask[1::2].any() and torch.equal(weighed.mask[::2], batch.response_mask[::2])
    assert weighed.weights[::2].sum().item() == pytest.approx(1)


# ---------------------------------------------------------------------- other frameworks
WEIGHTS = {
    "token_truncate.None_1.5": Component("truncated", cap=1.5),
    "token_mask.0.7_1.5": Component("masked", low=0.7, high=1.5),
    "sequence_truncate.None_1.5": Component("truncated", cap=1.5, level="product"),
    "sequence_mask.None_3.0": Component("masked", high=3.0, level="product"),
    "sequence_mask.0.5_2.0": Component("masked", low=0.5, high=2.0, level="product"),
}


@pytest.mark.parametrize("name", peers.CASES)
@pytest.mark.parametrize("mode", WEIGHTS)
def test_the_weights_of_trl(mode, name):
    x = peers.loss_inputs(name)
    part = WEIGHTS[mode]
    found = CORRECTIONS[part.name](x, **part.options)
    expected = np.broadcast_to(peers.output(name, f"trl/is.{mode}"), found.shape)
    np.testing.assert_allclose(found.numpy()[x.mask], expected[x.mask], rtol=1e-12, atol=0)
    arm = Arm(name="a", loss=PPO, aggregate=Component("seq_mean_token_mean", rows="all"), corrections=(part,))
    assert_equal(of(name, arm), peers.expected(name, f"trl/grpo+is.{mode}"))


OTHERS = {
    "openrlhf/is.tis": (Component("truncated", low=0.7, cap=1.5),),
    "openrlhf/is.icepop": (Component("masked", low=0.7, high=1.5),),
    "openrlhf/is.seq-mask-tis": (Component("rejected", low=0.95, high=1.05), Component("truncated", cap=math.inf)),
    "openinstruct/rho_clamp": (Component("truncated", cap=1.5),),
    "openinstruct/rho_mask": (Component("masked", low=0.7, high=1.5),),
    "openinstruct/rho_mask.sequence": (Component("masked", low=0.95, high=1.05, level="geometric"),),
    "openinstruct/rho_mask.tv": (Component("vaco", bound=1.05), Component("truncated", cap=math.inf)),
}


@pytest.mark.parametrize("name", peers.CASES)
@pytest.mark.parametrize("key", OTHERS)
def test_the_corrected_loss_of_others(key, name):
    if "extreme" in name and (key.startswith("openrlhf") or key.endswith(("rho_clamp", "rho_mask.tv"))):
        pytest.skip("OpenRLHF clamps log-ratios at ±20, open-instruct log ρ at ±10")
    arm = Arm(name="a", loss=PPO, aggregate="token_mean", corrections=OTHERS[key])
    assert_equal(of(name, arm), peers.expected(name, key))


@pytest.mark.parametrize("name", peers.CASES)
@pytest.mark.parametrize("key", ["trl/grpo.opsm", "trl/grpo.opsm.old", "trl/grpo.opsm.kl", "trl/grpo+is+kl"])
def test_sequence_masks_and_corrections_of_trl_leave_its_kl(key, name):
    """Where TRL is given no log-probs of an engine, the sampler is π_old."""
    kl = (Component("kl", coef=0.05),) if key.endswith("kl") else ()
    correction = (
        WEIGHTS["token_truncate.None_1.5"]
        if "+is" in key
        else Component("opsm", delta=0.03, against="engine" if key == "trl/grpo.opsm" else "old")
    )
    arm = Arm(
        name="a", loss=PPO, aggregate=Component("seq_mean_token_mean", rows="all"), terms=kl, corrections=(correction,)
    )
    assert_equal(of(name, arm), peers.expected(name, key))


WIDE = Component("grpo", clip_low=9.0, clip_high=9.0)


def test_with_routes_of_its_own_for_the_ratio_a_token_still_weighs_what_the_old_policy_and_the_engine_say():
    """π_old / π_engine = 3/2 whatever the ratio's and the gradient's routes make of π_θ: loss −(3/2 · 2), gradient
    the same, since the ratio is 2 and A = 1."""

    def row(*values):
        return torch.tensor([values], dtype=torch.float64)

    logprobs = row(0.0, -7.0).requires_grad_()
    x = inputs(
        logprobs,
        row(0.0, -1.0),
        row(1.0, 1.0),
        torch.tensor([[False, True]]),
        rollout_logprobs=row(0.0, -1.0 - math.log(1.5)),
        ratio_logprobs=row(0.0, -1.0 + math.log(2)),
    )
    output = objective_of(Arm(name="a", loss=WIDE, corrections=(Component("truncated", cap=2.0),))).of(x)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-3.0, rel=1e-12)
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -3.0], rel=1e-12)


def test_without_the_engines_log_probs_there_is_nothing_to_weigh():
    with pytest.raises(ConfigError, match="rollout_logprobs"):
        truncated(inputs(*case()))


def per_row(x):
    return torch.ones(len(x.mask))


def nan_outside(x):
    return torch.where(x.mask, 1.0, math.nan)


@pytest.mark.parametrize("level", ["token", "product"])
def test_where_filters_leave_nothing_a_normalised_weight_is_no_nan(level):
    batch = make_batch()
    batch = replace(batch, old_logprobs=batch.rollout_logprobs, finished=torch.zeros(len(batch), dtype=torch.bool))
    arm = Arm(
        name="a", filters=("finished",), corrections=(Component("truncated", level=level, batch_normalized=True),)
    )
    objective = objective_of(arm)
    part = objective.attach_weights(batch)
    assert objective(part, batch.rollout_logprobs, 0 * batch.rollout_logprobs).loss.item() == 0


def test_what_a_correction_says_of_padding_reaches_no_loss():
    batch = make_batch()
    batch = replace(batch, old_logprobs=batch.rollout_logprobs, advantages=batch.response_mask.float())
    plain, own = objective_of(Arm(name="a")), objective_of(Arm(name="a", corrections=(f"{__name__}:nan_outside",)))
    logprobs = batch.rollout_logprobs
    one, other = (o(o.attach_weights(batch), logprobs, 0 * logprobs).loss for o in (plain, own))
    assert torch.equal(one, other) and one != 0


def test_factors_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match=r"shape \(1,\)"):
        objective_of(Arm(name="a", corrections=(f"{__name__}:per_row",)))


def test_the_cap_of_cis_falls_as_the_trainer_grows_certain():
    """1 + 2.3 · (1 − π_old): 2.15 at π_old = 1/2; 1 + 2.3 · 0.005 at 1, where 1 − π_old is below the floor; ρ = 1.2."""
    old, engine = torch.tensor([[0.5, 0.5, 1.0, 0.6]]).log(), torch.tensor([[0.1, 0.4, 0.5, 0.5]]).log()
    mask = torch.ones_like(old, dtype=torch.bool)
    x = CorrectionInputs(old_logprobs=old, rollout_logprobs=engine, mask=mask, advantages=torch.zeros_like(old))
    assert cis(x)[0].tolist() == pytest.approx([2.15, 1.25, 1.0115, 1.2], rel=1e-6)
    torch.testing.assert_close(cis(x, lam=math.inf), truncated(x, cap=math.inf))
    torch.testing.assert_close(cis(x, lam=1.5, floor=1.0), truncated(x, cap=2.5))


def test_carm_takes_out_a_response_whose_log_ratios_cancel_in_the_mean():
    """log ρ of ±0.1: their mean is 0, which geo_rs keeps, and their mean size 0.1."""
    old, engine = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.1, -0.9]])
    inputs = {"old_logprobs": old, "rollout_logprobs": engine, "mask": old < 0, "advantages": torch.zeros_like(old)}
    assert correction_weights("carm", **inputs).tolist() == [[0, 0]]
    assert correction_weights("geo_rs", **inputs).tolist() == [[1, 1]]
