"""Trust regions against `oracle.py` and their equations, worked case by case, and what they become at their limits."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import LossInputs, objective_of
from moe_rl.objectives.losses import LOSSES, crossed, gmpo, grpo, gspo
from moe_rl.registry import Component
from tests import oracle
from tests.objectives.examples import TIGHT, case, inputs, ranged

LEVELS = ("token", "sequence", "sequence_token", "segment", "product")
NAMES = ["grpo", "gspo", "gspo_token"]


def ours(name, new, old, advantages, response, **options):
    """(loss, gradient, output) in float64."""
    x = inputs(torch.tensor(new, requires_grad=True), old, advantages, response, rollout_logprobs=old)
    output = LOSSES[name](x, **options)
    return output.loss.item(), torch.autograd.grad(output.loss, x.logprobs)[0].numpy(), output


def holes(seed, spread=0.3):
    """A case with turns: holes in the mask of the longest responses; no probability beyond 1."""
    new, old, advantages, mask = case(seed, spread)
    mask = mask.copy()
    mask[0, 3:5] = mask[4, 2] = mask[5, 6] = False
    return np.minimum(new, -0.01), old, advantages, mask


# ---------------------------------------------------------------------- rules: (value, slope, side) of a token
def ppo(low, high, dual=math.inf, delta=math.inf, clamp=math.inf):
    def rule(log_ratio, a, p, old):
        clamped = min(max(log_ratio, -clamp), clamp)
        r = math.exp(clamped)
        value = min(min(r, delta) * a, min(max(r, 1 - low), 1 + high) * a)
        if a < 0:
            value = max(value, dual * a)
        lost = value != r * a or (clamped != log_ratio and a)
        return value, 0 if lost else r * a, 0 if not lost or not a else (1 if log_ratio > 0 else -1)

    return rule


def sapo(positive, negative):
    def rule(log_ratio, a, p, old):
        r, tau = math.exp(log_ratio), positive if a > 0 else negative
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return 4 / tau * gate * a, r / math.cosh(tau * (r - 1) / 2) ** 2 * a, 0

    return rule


def local(weight):
    """A · log π times a number; weight(r, a) is that and the side that took it."""

    def rule(log_ratio, a, p, old):
        w, side = weight(math.exp(log_ratio), a)
        return w * a * p, w * a, side

    rule.local = True
    return rule


def unified(low, high):
    return lambda r, a: 1 if a > 0 and r > 1 + high else -1 if a < 0 and r < 1 - low else 0


def masked(low, high, weight):
    side = unified(low, high)
    return local(lambda r, a: (0 if side(r, a) else weight(r), side(r, a)))


def dppo(kind, low, high, cap):
    def rule(log_ratio, a, p, old):
        new, was, r = math.exp(p), math.exp(old), math.exp(log_ratio)
        far = abs(new - was)
        if kind == "kl":
            far = was * math.log(was / new) + (1 - was) * math.log((1 - was) / (1 - new))
        side = 1 if a > 0 and new > was and far > high else -1 if a < 0 and new < was and far > low else 0
        return (0, 0, side) if side else (min(r, cap) * a, min(r, cap) * a, 0)

    rule.local = True
    return rule


def vespo(w, a):
    k, rate = (2, 3) if a > 0 else (3, 2)
    return w**k * math.exp(rate * (1 - w)), 0


CASES = [
    *(("grpo", {"level": level, "clip_low": 0.1, "clip_high": 0.15}, level, ppo(0.1, 0.15)) for level in LEVELS),
    ("grpo", {"dual": 1.3, "clip_low": 0.1, "clip_high": 0.15}, "token", ppo(0.1, 0.15, dual=1.3)),
    ("grpo", {"dual": 1.1, "clip_low": 0.1, "clip_high": 0.15}, "token", ppo(0.1, 0.15, dual=1.1)),
    ("grpo", {"cap": 1.3, "clip_low": 0.1, "clip_high": 0.15}, "segment", ppo(0.1, 0.15, delta=1.3)),
    ("grpo", {"cap": 1.05, "clip_low": 0.1, "clip_high": 0.15}, "token", ppo(0.1, 0.15, delta=1.05)),
    ("grpo", {"log_clamp": 0.3, "clip_low": 0.1, "clip_high": 0.5}, "token", ppo(0.1, 0.5, clamp=0.3)),
    ("sapo", {}, "token", sapo(1, 1.05)),
    ("sapo", {"tau_pos": 3.0, "tau_neg": 0.5, "level": "sequence"}, "sequence", sapo(3, 0.5)),
    ("reinforce", {}, "token", local(lambda r, a: (1, 0))),
    ("cispo", {"clip_high": 0.1}, "token", local(lambda r, a: (min(r, 1.1), 0))),
    ("cispo", {"clip_low": 0.1, "clip_high": 0.15}, "token", local(lambda r, a: (min(max(r, 0.9), 1.15), 0))),
    (
        "cispo",
        {"clip_low": 0.1, "clip_high": 0.15, "mask": "unified"},
        "token",
        masked(0.1, 0.15, lambda r: min(max(r, 0.9), 1.15)),
    ),
    ("minirl", {}, "token", masked(0.2, 0.27, lambda r: r)),
    (
        "band",
        {"low": 0.9, "high": 1.2},
        "token",
        local(lambda r, a: (r, 0) if 0.9 <= r <= 1.2 or not a else (0, 1 if r > 1 else -1)),
    ),
    ("dppo", {}, "token", dppo("tv", 0.15, 0.15, math.inf)),
    ("dppo", {"low": 0.02, "high": 0.1, "cap": 1.2}, "token", dppo("tv", 0.02, 0.1, 1.2)),
    ("dppo", {"kind": "kl"}, "token", dppo("kl", 0.05, 0.05, math.inf)),
    ("dppo", {"kind": "kl", "low": 0.01, "high": 0.002}, "token", dppo("kl", 0.01, 0.002, math.inf)),
    ("topr", {}, "product", local(lambda w, a: (1 if a > 0 else min(w, 1), 0))),
    ("topr", {"level": "token"}, "token", local(lambda w, a: (1 if a > 0 else min(w, 1), 0))),
    ("vespo", {}, "product", local(vespo)),
]


def expected(new, old, advantages, mask, level, rule):
    return oracle.trust_region(new, old, advantages, mask, level, rule)


SEEDED = [(*case, seed) for case in CASES for seed in range(5 if case[2] in ("token", "sequence_token") else 4)]


@pytest.mark.parametrize("name, options, level, rule, seed", SEEDED, ids=[f"{c[0]}-{c[1]}-{c[4]}" for c in SEEDED])
def test_value_gradient_and_clipped_tokens_are_the_equations(name, options, level, rule, seed):
    batch = holes(seed)
    if seed > 3:  # an advantage per token
        batch = (*batch[:2], np.random.default_rng(seed).normal(size=batch[3].shape), batch[3])
    if name == "grpo" and "cap" in options:
        options = options | {"level": level}
    loss, gradient, output = ours(name, *batch, **options)
    value, slopes, side = expected(*batch, level, rule)
    np.testing.assert_allclose(loss, value, **TIGHT)
    np.testing.assert_allclose(gradient, slopes, **TIGHT)
    np.testing.assert_array_equal(output.clipped_by, side)
    new, old, _, mask = batch
    cut = options.get("log_clamp", math.inf)
    ratios = [
        sum(f * (new[i, u] - old[i, u]) for u, f in oracle.reach(level, t, np.flatnonzero(mask[i])).items())
        for i, t in zip(*mask.nonzero(), strict=True)
    ]
    np.testing.assert_allclose(output.log_ratio[torch.tensor(mask)], np.clip(ratios, -cut, cut), **TIGHT)
    assert not output.log_ratio[~torch.tensor(mask)].any()


def test_the_oracles_gradients_are_those_of_its_values():
    new, old, advantages, mask = holes(1)
    for name, _, level, rule in CASES:
        if not getattr(rule, "local", False) and level != "sequence_token":
            differences = oracle.central_differences(
                lambda x, r=rule, at=level: expected(x, old, advantages, mask, at, r)[0], new
            )
            np.testing.assert_allclose(
                expected(new, old, advantages, mask, level, rule)[1], differences, rtol=0, atol=1e-8, err_msg=name
            )


def test_gmpo_by_hand():
    """Ratios e^1 and e^−0.2, A = 2, clipped at .4: exp((.4 − .2) / 2) = e^.1, of which the second token has half."""
    batch = (np.array([[1.0, -0.2]]), np.zeros((1, 2)), np.array([2.0]), np.ones((1, 2), bool))
    loss, gradient, output = ours("gmpo", *batch)
    np.testing.assert_allclose(loss, -2 * math.exp(0.1), **TIGHT)
    np.testing.assert_allclose(gradient, [[0, -math.exp(0.1)]], **TIGHT)
    np.testing.assert_allclose(output.log_ratio, [[0.1, 0.1]], **TIGHT)
    assert output.clipped_by.tolist() == [[1, 0]]


# ---------------------------------------------------------------------- at their limits
WIDE = {"clip_low": math.inf, "clip_high": math.inf}
LIMITS = [
    (("grpo", {"level": "sequence", "clip_low": 0.1, "clip_high": 0.1}), ("gspo", {"clip_low": 0.1, "clip_high": 0.1})),
    (
        ("grpo", {"level": "sequence_token", "clip_low": 0.1, "clip_high": 0.1}),
        ("gspo_token", {"clip_low": 0.1, "clip_high": 0.1}),
    ),
    (("gmpo", WIDE), ("gspo", WIDE)),
    (("gmpo", WIDE | {"level": "product"}), ("grpo", WIDE | {"level": "product"})),
    (("kl_cov", {"share": 0.0}), ("grpo", WIDE)),
    (("kl_cov", {"coef": 0.0}), ("grpo", WIDE)),
    (("clip_cov", {"share": 0.0}), ("grpo", {"clip_high": 0.2})),
    (("sat", {"quantile": 1.0}), ("grpo", {"clip_high": 0.2})),
    (("sat", {"base": "gspo", "quantile": 1.0}), ("gspo_token", {"clip_low": 0.2, "clip_high": 0.2})),
]


@pytest.mark.parametrize(("one", "other"), LIMITS, ids=str)
def test_at_its_limit_a_loss_is_another(one, other):
    a, b = (ours(name, *case(3), **options) for name, options in (one, other))
    np.testing.assert_allclose(a[0], b[0], **TIGHT)
    np.testing.assert_allclose(a[1], b[1], **TIGHT)
    assert torch.equal(a[2].clipped_by, b[2].clipped_by)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "clip_cov"])
def test_where_nothing_has_moved_every_loss_is_reinforce(name):
    """But for what a statistic of the mini-batch takes out."""
    _, old, advantages, mask = case()
    _, gradient, output = ours(name, old, old, advantages, mask)
    np.testing.assert_allclose(gradient, ours("reinforce", old, old, advantages, mask)[1], **TIGHT)
    assert not output.log_ratio.any() and not output.clipped_by.any()


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_but_log_pi_gets_a_gradient_and_padding_leaks_nowhere(name):
    new, old, advantages, mask = (torch.tensor(x) for x in holes(0))
    engine = old + 0.1
    loss, gradient, output = {}, {}, {}
    for junk in (0.0, math.nan):
        a = advantages[:, None].expand(mask.shape).masked_fill(~mask, junk)
        parts = [y.masked_fill(~mask, junk).requires_grad_() for y in (new, old, a, engine)]
        x = inputs(parts[0], parts[1], parts[2], mask, rollout_logprobs=parts[3])
        output[junk] = LOSSES[name](x, **ranged(LOSSES[name]))
        output[junk].loss.backward()
        assert all(y.grad is None for y in parts[1:]) and not parts[0].grad[~mask].any()
        loss[junk], gradient[junk] = output[junk].loss, parts[0].grad
    (a, b), (c, d) = loss.values(), gradient.values()
    assert torch.equal(a, b) and torch.equal(c, d) and c.isfinite().all() and c.any()
    one, other = output.values()
    assert torch.equal(one.log_ratio, other.log_ratio) and torch.equal(one.clipped_by, other.clipped_by)
    assert not one.log_ratio.requires_grad and not one.log_ratio[~mask].any() and not one.clipped_by[~mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_mini_batch_is_no_loss(name):
    loss, gradient, _ = ours(name, *(x[[2]] for x in case()))
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in LOSSES),
        ("dppo", {"kind": "kl"}),
        *(("grpo", {"level": level}) for level in LEVELS),
        ("sapo", {"level": "product"}),
    ],
    ids=str,
)
def test_ratios_that_overflow_make_no_nan_and_no_infinite_gradient_where_one_bound_holds(name, options, dtype):
    """e^±800: where A > 0 the upper bound holds, where A = 0 nothing counts; e^−800 is 0 under any sign."""
    log_ratio = torch.tensor([[800.0], [800.0], [-800.0], [-800.0], [0.0]], dtype=dtype)
    advantages = torch.tensor([1.0, 0.0, 1.0, -1.0, 1.0], dtype=dtype)
    new, mask = (-1.0 + log_ratio.clamp(max=0)).requires_grad_(), torch.ones(5, 1, dtype=torch.bool)
    old = new.detach() - log_ratio
    x = inputs(new, old, advantages, mask, rollout_logprobs=old)
    output = LOSSES[name](x, **options)
    gradient = torch.autograd.grad(output.loss, new)[0]
    assert gradient[1:].isfinite().all() and not gradient.isnan().any() and not output.loss.isnan()
    assert gradient.isfinite().all() or name == "kl_cov", "which has no range"
    assert output.loss.isfinite() or name in ("kl_cov", "crossed"), "whose clipped tokens keep their value"


def test_a_tie_on_every_kind_of_bound_keeps_its_gradient():
    """A ratio of exactly 2, or 1/2, on the bound of each; DPPO's probability moves by exactly 1/4."""
    log2 = math.log(2)
    for name, options, log_ratio, sign in [
        *((name, {"clip_low": 0.5, "clip_high": 1.0}, sign * log2, sign) for name in NAMES for sign in (1, -1)),
        *((name, {"clip_low": 0.0, "clip_high": 0.0}, 0.0, 1) for name in NAMES),
        ("grpo", {"dual": 2.0}, log2, -1),
        ("grpo", {"cap": 2.0, "clip_high": 3.0}, log2, 1),
        ("grpo", {"log_clamp": log2, "clip_high": 3.0}, log2, 1),
        ("minirl", {"clip_high": 1.0}, log2, 1),
        ("cispo", {"clip_high": 1.0, "mask": "unified"}, log2, 1),
        ("band", {"low": 0.5, "high": 2.0}, log2, -1),
        ("band", {"low": 0.5, "high": 2.0}, -log2, 1),
        ("gmpo", {"clip_high": log2}, log2, 1),
        ("gmpo", {"clip_low": log2}, -log2, -1),
        ("crossed", {"clip": "product", "clip_high": 1.0}, log2, 1),
    ]:
        loss, gradient, output = ours(
            name, np.array([[log_ratio]]), np.zeros((1, 1)), np.array([float(sign)]), np.ones((1, 1), bool), **options
        )
        assert not output.clipped_by.any(), (name, options)
        assert gradient[0, 0] == pytest.approx(-sign * math.exp(log_ratio)), (name, options)


def test_a_clamped_log_ratio_keeps_its_value_and_loses_its_gradient():
    """A = −1.6 of one of 2 tokens, log w = 21.5: e^20 · .8 and no gradient, where the plain loss has e^21.5 · .8."""
    batch = (np.array([[21.5, 0.0]]), np.zeros((1, 2)), np.array([-1.6]), np.ones((1, 2), bool))
    loss, gradient, output = ours("grpo", *batch, log_clamp=20.0)
    assert loss == pytest.approx(0.8 * (math.exp(20) + 1)) and gradient.tolist() == [[0.0, 0.8]]
    assert output.clipped_by.tolist() == [[1, 0]]
    assert ours("grpo", *batch)[1][0, 0] == pytest.approx(0.8 * math.exp(21.5))


def test_a_token_that_is_cut_in_a_sequence_that_is_clipped_was_clipped():
    """log w of 1.5, −3 and −3, cut at ±1: their mean is −1/3, below log .9 and above log .1."""
    batch = (np.array([[1.5, -3.0, -3.0]]), np.zeros((1, 3)), np.array([-1.0]), np.ones((1, 3), bool))
    _, gradient, output = ours("grpo", *batch, level="sequence", log_clamp=1.0, clip_low=0.1)
    assert output.clipped_by.tolist() == [[-1, -1, -1]] and not gradient.any()
    _, gradient, output = ours("grpo", *batch, level="sequence", log_clamp=1.0, clip_low=0.9)
    assert output.clipped_by.tolist() == [[1, -1, -1]] and not gradient.any()


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "loss",
    [
        Component("grpo", level="sequence"),
        Component("grpo", level="segment"),
        Component("crossed", clip="segment"),
        Component("sat", base="gspo"),
        Component("crossed", clip="sequence"),
        Component("gspo", clip_low=0.2, clip_high=0.27),
        Component("gspo_token", clip_low=0.2, clip_high=0.27),
    ],
    ids=str,
)
def test_a_range_for_tokens_on_a_mean_of_them_is_warned_about(loss):
    with pytest.warns(UserWarning, match="never clips the sequence ratio"):
        objective_of(Arm(name="a", loss=loss))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "loss",
    [
        *(name for name in LOSSES if name != "crossed"),
        Component("grpo", level="product"),
        Component("grpo", level="segment", clip_low=3e-4, clip_high=4e-4),
    ],
    ids=str,
)
def test_defaults_pass_without_a_word(loss):
    objective_of(Arm(name="a", loss=loss))


@pytest.mark.parametrize(
    "loss, beyond",
    [
        ("grpo", 100),
        (Component("grpo", level="product"), 30),
        (Component("gmpo", level="product", clip_high=math.inf), 30),
        (Component("crossed", weigh="product", clip="none"), 30),
        ("minirl", 100),
        (Component("cispo", clip_high=math.inf), 100),
        ("band", 100),
        ("dppo", 100),
        ("kl_cov", 100),
    ],
)
def test_a_token_that_a_correction_takes_out_may_have_a_ratio_that_overflows(loss, beyond):
    """Else 0 · inf would make the gradient of the whole model NaN."""
    new = torch.zeros(2, 4, requires_grad=True)
    moved = torch.tensor([[0.05], [beyond]]).expand(2, 4)
    weights = torch.tensor([[0.5], [0.0]]).double().expand(2, 4)
    mask = torch.ones(2, 4, dtype=torch.bool)
    objective = objective_of(Arm(name="a", loss=loss))
    output = objective.of(inputs(new, -moved, torch.tensor([1.0, -1.0]), mask, weights=weights))
    output.loss.backward()
    assert torch.isfinite(output.loss) and bool(torch.isfinite(new.grad).all())
    assert bool((new.grad[1] == 0).all()) and bool((new.grad[0] != 0).any())


@pytest.mark.parametrize("name", NAMES)
def test_both_bounds_clip_only_the_side_their_advantage_pushes_to(name):
    """Ratios 2, 2, 1/2, 1/2 under advantages +, -, +, -, clipped to [0.8, 1.3]: worked by hand."""
    log2 = math.log(2)
    new = np.array([[0, log2], [0, log2], [0, -log2], [0, -log2]])
    mask = np.array([[False, True]] * 4)
    loss, gradient, output = ours(
        name, new, np.zeros((4, 2)), np.array([1.0, -1.0, 1.0, -1.0]), mask, clip_low=0.2, clip_high=0.3
    )
    assert output.clipped_by[:, 1].tolist() == [1, 0, 0, -1]
    np.testing.assert_allclose(loss, -(1.3 - 2 + 0.5 - 0.8) / 4, **TIGHT)
    np.testing.assert_allclose(gradient[:, 1], [0, 2 / 4, -0.5 / 4, 0], **TIGHT)
    np.testing.assert_allclose(output.log_ratio[:, 1], [log2, log2, -log2, -log2], **TIGHT)


@pytest.mark.parametrize("loss", [gspo, gmpo])
def test_a_loss_of_sequences_refuses_advantages_that_differ_within_a_response(loss):
    mask = torch.tensor([[False, True, True], [True, True, False]])
    differ = torch.tensor([[9.0, 1.0, 1.0], [2.0, 2.5, 9.0]])
    with pytest.raises(ConfigError, match="gspo_token"):
        loss(inputs(torch.zeros(2, 3), torch.zeros(2, 3), differ, mask))
    loss(inputs(torch.zeros(1, 3), torch.zeros(1, 3), differ.masked_fill(~mask, math.nan)[:1], mask[:1]))


def test_shapes_that_would_broadcast_are_refused():
    x, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    make = inspect.unwrap(LossInputs.__init__)  # without the tests' shape checker
    for wrong in (
        {"old_logprobs": torch.zeros(2, 1)},
        {"advantages": torch.zeros(2, 1)},
        {"weights": torch.ones(2)},
        {"ref_logprobs": torch.zeros(1, 2)},
        {"entropy": torch.zeros(2, 3)},
    ):
        shapes = {"logprobs": x, "old_logprobs": x, "advantages": x, "weights": x, "mask": mask} | wrong
        with pytest.raises(ConfigError, match="one shape"):
            make(object.__new__(LossInputs), **shapes)


@pytest.fixture
def crossed_example():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(12, 7, generator=generator, dtype=torch.float64)
    old = logprobs + 0.3 * torch.randn(12, 7, generator=generator, dtype=torch.float64)
    mask = torch.arange(7) < torch.arange(12)[:, None] % 7 + 1
    return inputs(logprobs.requires_grad_(), old, torch.randn(12, generator=generator, dtype=torch.float64), mask)


def gradient(loss, x, **options):
    output = loss(x, **options)
    return output, torch.autograd.grad(output.loss, x.logprobs)[0]


@pytest.mark.parametrize("level, whole, low, high", [("token", grpo, 0.2, 0.27), ("sequence", gspo, 0.05, 0.07)])
def test_the_diagonal_is_grpo_and_gspo(level, whole, low, high, crossed_example):
    a, mine = gradient(crossed, crossed_example, weigh=level, clip=level, clip_low=low, clip_high=high)
    b, theirs = gradient(whole, crossed_example, clip_low=low, clip_high=high)
    torch.testing.assert_close(mine, theirs)
    assert torch.equal(a.clipped_by, b.clipped_by) and a.clipped_by.any()
    torch.testing.assert_close(a.log_ratio, b.log_ratio)


RATIOS = {
    "token": [2.0, 0.0, 0.5, 4.0],
    "sequence": [4 ** (1 / 3)] * 4,
    "segment": [2.0, 0.0, 2**0.5, 2**0.5],
    "product": [4.0] * 4,
    "none": [1.0] * 4,
}


"""Of one response of three tokens, ratios 2, 1/2 and 4, the first a turn of its own."""


@pytest.mark.parametrize("weigh", RATIOS)
@pytest.mark.parametrize("clip", RATIOS)
@pytest.mark.parametrize("high", [0.2, 0.5, 2.5, 9.0])
def test_a_token_weighs_what_its_row_says_and_is_clipped_by_what_its_column_says(weigh, clip, high):
    """A = 1, and 1/3 per token."""
    mask = torch.tensor([[True, False, True, True]])
    logprobs = torch.tensor([[2.0, 7.0, 0.5, 4.0]], dtype=torch.float64).log().requires_grad_()
    one = inputs(logprobs, torch.zeros(1, 4).double(), torch.ones(1).double(), mask)
    output, found = gradient(crossed, one, weigh=weigh, clip=clip, clip_low=0.2, clip_high=high)
    bounded, weight = (torch.tensor([RATIOS[level]], dtype=torch.float64) for level in (clip, weigh))
    lost = mask & (bounded > 1 + high)
    torch.testing.assert_close(found, -weight * (mask & ~lost) / 3, rtol=0, atol=1e-12)
    assert torch.equal(output.clipped_by != 0, lost)
    torch.testing.assert_close(output.log_ratio.exp()[mask], weight[mask], rtol=1e-12, atol=0)
