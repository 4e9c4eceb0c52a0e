"""Steps from rewards to advantages, each by a loop or by hand, in the orders that make sense, and across a kill."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moe_rl.build import build
from moe_rl.config import Arm
from moe_rl.errors import ConfigError, RunError
from moe_rl.objectives import advantage_of
from moe_rl.objectives.advantages import ADVANTAGES
from moe_rl.registry import Component
from tests.objectives import peers
from tests.objectives.examples import advantages_of, rewarded
from tests.test_trainer import TINY, carry_out, whole_and_cut

LENGTHS = [3, 1, 5, 2, 4, 0]
MASK = np.array([[0] + [t < n for t in range(6)] for n in LENGTHS], dtype=bool)
REWARDS, PROMPT = np.array([0.25, 1.0, 0.0, 0.5, 0.75, 0.75]), np.array([4, 4, 4, 9, 9, 9])


def made(*steps, rewards=REWARDS, prompt=PROMPT, mask=MASK, **further):
    """Per token, float64."""
    batch = rewarded(rewards, prompt, mask, torch.float64, **further)
    return advantages_of(batch, *steps).numpy()


def per_row(*steps, **given):
    """One number per row: the same at each of its tokens."""
    found = made(*steps, mask=np.ones((len(given.get("rewards", REWARDS)), 2), dtype=bool), **given)
    np.testing.assert_array_equal(found[:, 0], found[:, 1])
    return found[:, 0]


def tight(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------- per row
@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("scale", ["group", "batch", "running", "none"])
@pytest.mark.parametrize("center", ["group", "batch", "running", "none"])
def test_normalised_by_loops(center, scale, eps):
    rng = np.random.default_rng(0)
    advantage = advantage_of(Arm(name="a", advantage=Component("normalized", center=center, scale=scale, eps=eps)))
    seen = []
    for _ in range(3):
        rewards = rng.normal(size=6)
        seen += list(rewards)
        expected = []
        for i, reward in enumerate(rewards):
            of = {
                "group": [r for r, p in zip(rewards, PROMPT, strict=True) if p == PROMPT[i]],
                "batch": list(rewards),
                "running": seen,
            }
            mean = np.mean(of[center]) if center != "none" else 0
            std = np.std(of[scale], ddof=1) + eps if scale != "none" else 1
            expected.append((reward - mean) / std)
        tight(advantage.attach_advantages(rewarded(rewards, PROMPT, dtype=torch.float64)).advantages[:, 0], expected)


@pytest.mark.parametrize("center", ["group", "batch", "running", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "running", "none"])
def test_equal_rewards_and_a_single_one_are_no_signal(center, scale):
    for rewards, prompt in ([0.1 + 0.2, 0.3, 0.3], [0, 0, 0]), ([0.7], [0]):
        found = per_row(Component("normalized", center=center, scale=scale), rewards=rewards, prompt=prompt)
        if center == "none" and scale == "none":
            np.testing.assert_array_equal(found, rewards)
        elif scale != "none" or center != "running":
            assert found.tolist() == [0.0] * len(rewards)
        assert np.isfinite(found).all() and (center == "none" or np.abs(found).max() < 1e-15)


def test_group_is_normalised_by_its_group_and_nothing_else_changed_its_bits():
    rng = np.random.default_rng(1)
    rewards, prompt = rng.random(64), rng.integers(0, 9, 64)
    for dtype in (torch.float32, torch.float64):
        batch = rewarded(rewards, prompt, dtype=dtype)
        expected = torch.zeros(64, dtype=dtype)
        for one in set(prompt):
            rows = torch.as_tensor(prompt == one)
            values = batch.rewards[rows].double().sort().values
            if len(values) > 1 and values[-1] - values[0] > 1e-6:
                expected[rows] = ((batch.rewards[rows].double() - values.mean()) / values.std()).to(dtype)
        for steps in (("group",), ("normalized",)):
            assert torch.equal(advantages_of(batch, *steps)[:, 0], expected)


def test_leave_one_out_compares_with_the_others():
    """{.25, 1, 0}: .25 − .5, 1 − .125, 0 − .625; and n/(n − 1) times what the mean alone would give."""
    expected = [-0.25, 0.875, -0.625, -0.25, 0.125, 0.125]
    tight(per_row("leave_one_out"), expected)
    tight(per_row(Component("normalized", scale="none")) * 1.5, expected)
    assert per_row("leave_one_out", rewards=[0.3, 0.1 + 0.2, 1.0], prompt=[0, 0, 1]).tolist() == [0, 0, 0]


def test_opo_weighs_its_baseline_by_length():
    """(3·.25 + 1·1 + 5·0) / 9 and (2·.5 + 4·.75 + 0) / 6; at equal lengths the mean."""
    found = made("opo")
    tight(found[[0, 1, 2, 3, 4], 1], REWARDS[:5] - np.repeat([1.75 / 9, 4 / 6], [3, 2]))
    tight(per_row("opo"), per_row(Component("normalized", scale="none")))


def test_overlong_is_dapos_soft_punishment():
    """Limit 5, buffer 2: 0 up to 3 tokens, −1/2 at 4, −1 from 5 on."""
    found = made(Component("overlong", limit=5, buffer=2))
    tight([found[i, 1] for i in range(5)], REWARDS[:5] - [0, 0, 1, 0, 0.5])
    tight(made(Component("overlong", limit=3, buffer=3))[2, 1], -1.0)
    first = made(Component("overlong", limit=5, buffer=2), Component("normalized", scale="none"))
    assert first[2, 1] == pytest.approx(-1 - (0.25 + 1 - 1) / 3)


def test_difficulty_mask_leaves_prompts_that_are_neither_too_easy_nor_too_hard():
    rewards, prompt = [1.0, 1, 0, 0.1, 0, 1], [0, 0, 1, 1, 2, 2]
    kept = per_row("group", "difficulty_mask", rewards=rewards, prompt=prompt) != 0
    assert kept.tolist() == [False] * 4 + [True] * 2
    mean_on_the_bound = per_row(Component("difficulty_mask", low=0.5, high=0.95), rewards=[0.0, 1], prompt=[0, 0])
    assert not mean_on_the_bound.any()


def test_clipping_comes_where_it_is_said():
    tight(per_row(Component("clipped", at=0.5)), np.clip(REWARDS, -0.5, 0.5))
    tight(per_row("group", Component("clipped", at=0.5)), np.clip(per_row("group"), -0.5, 0.5))
    tight(per_row(Component("clipped", at=0.5), "group"), per_row("group", rewards=np.clip(REWARDS, -0.5, 0.5)))


# ---------------------------------------------------------------------- per token
@pytest.fixture
def policies():
    rng = np.random.default_rng(2)
    old, reference = -rng.exponential(size=MASK.shape), -rng.exponential(size=MASK.shape)
    outside = np.where(MASK, 0, math.nan)
    return {"old_logprobs": old + outside, "ref_logprobs": reference + outside}


def test_whitening_is_over_response_tokens_so_long_responses_weigh_more():
    values = np.repeat(REWARDS, LENGTHS)
    expected = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    tight(made("whitened")[MASK], expected)
    assert not made("whitened")[~MASK].any()
    tight(made(Component("whitened", eps=0.5))[MASK], (values - values.mean()) / np.sqrt(values.var(ddof=1) + 0.5))
    assert made("whitened", rewards=[1.0], prompt=[0], mask=np.ones((1, 1), dtype=bool)).tolist() == [[0.0]]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_a_kl_in_the_reward(policies, estimator):
    """Per token it is rewards, of which returns makes what is still to come; per row their sum."""
    d = np.where(MASK, policies["old_logprobs"] - policies["ref_logprobs"], 0)
    k = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d, "abs": abs(d)}[estimator]
    penalty = Component("kl_penalty", coef=0.3, estimator=estimator)
    expected = np.zeros(MASK.shape)
    for i in range(len(MASK)):
        for t in np.flatnonzero(MASK[i]):
            rest = [u for u in np.flatnonzero(MASK[i]) if u >= t]
            expected[i, t] = sum(0.9 ** (u - t) * ((u == rest[-1]) * REWARDS[i] - 0.3 * k[i, u]) for u in rest)
    tight(made(penalty, Component("returns", gamma=0.9), **policies), expected)
    whole = made(Component("kl_penalty", coef=0.3, estimator=estimator, per_token=False), **policies)
    tight(whole, np.where(MASK, (REWARDS - 0.3 * k.sum(1))[:, None], 0))


def test_returns_discount_by_response_tokens_and_step_over_what_a_tool_wrote():
    mask = np.array([[0, 1, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0]], dtype=bool)
    found = made(Component("returns", gamma=0.5), rewards=[1.0, 2.0], prompt=[0, 0], mask=mask)
    assert found.tolist() == [[0, 0.25, 0.5, 0, 0, 1], [0, 0, 2, 0, 0, 0]]
    np.testing.assert_array_equal(made("returns"), np.where(MASK, REWARDS[:, None], 0))


@pytest.mark.parametrize(
    "steps, message",
    [
        (("whitened", "group"), "normalized takes one value per row"),
        (("whitened", Component("overlong", limit=3, buffer=1)), "overlong takes one value per row"),
        (("whitened", "returns"), "whitened cannot come before returns"),
        (("gae", "returns"), "gae cannot come before returns"),
        (("whitened", "gae"), "whitened cannot come before gae"),
        (("gae", "group"), "normalized takes one value per row"),
        (("group", Component("kl_penalty", coef=0.1)), "before the end"),
        ((Component("kl_penalty", coef=0.1), "whitened"), "before whitened"),
    ],
)
def test_steps_that_make_no_sense_are_refused_before_a_run(steps, message):
    with pytest.raises(ConfigError, match=message):
        advantage_of(Arm(name="a", advantage=steps))


@pytest.mark.parametrize("step", ADVANTAGES)
def test_every_step_keeps_padding_out_and_float32_in(step, policies):
    options = {"overlong": {"limit": 4, "buffer": 2}, "clipped": {"at": 1.0}, "kl_penalty": {"coef": 0.1}}.get(step, {})
    steps = (Component(step, **options), *(["returns"] if step in ("kl_penalty", "turn_rewards") else []))
    given = policies | {"values": policies["old_logprobs"]}
    batch = rewarded(REWARDS, PROMPT, MASK, **{k: v.astype(np.float32) for k, v in given.items()})
    found = advantages_of(batch, *steps)
    assert found.dtype == torch.float32 and found.isfinite().all() and not found[~batch.response_mask].any()


# ---------------------------------------------------------------------- memory
def test_two_running_steps_remember_by_themselves(tmp_path):
    """The second sees what the first made, of both batches: its statistics are not the first's."""
    steps = (
        Component("normalized", center="running", scale="none"),
        Component("normalized", center="none", scale="running"),
    )
    advantage = advantage_of(Arm(name="a", advantage=steps))
    first, second = np.array([0.0, 1.0]), np.array([1.0, 3.0])
    for rewards in (first, second):
        found = advantage.attach_advantages(rewarded(rewards, [0, 0], dtype=torch.float64)).advantages[:, 0]
    centred = [*(first - 0.5), *(second - 1.25)]
    tight(found, (second - 1.25) / np.std(centred, ddof=1))
    advantage.save(tmp_path)
    resumed = advantage_of(Arm(name="a", advantage=steps))
    resumed.load(tmp_path)
    assert resumed.memory == advantage.memory == torch.load(tmp_path / "advantage.pt", weights_only=True)


RUNNING = Arm(
    name="running", advantage=(Component("normalized", center="running", scale="running"), "returns", "whitened")
)


def test_a_killed_run_with_running_statistics_ends_identical(tmp_path):
    """Killed at step 3, after a commit at step 2; and its memory is of all four steps."""
    whole_and_cut(TINY.replace(arm=RUNNING), tmp_path)
    kept = [
        torch.load(next((tmp_path / name).glob("commit/*/checkpoint/advantage.pt")), weights_only=True)
        for name in ("whole", "cut")
    ]
    assert kept[0] == kept[1] and kept[0]["0"]["running"][0] == 4 * 16


def test_a_kl_in_the_reward_goes_through_a_run(tmp_path):
    """At the first step π_old is the reference, so the penalty is 0; later it is not."""
    arm = Arm(name="kl", advantage=("group", Component("kl_penalty", coef=5.0), "returns"))
    free = arm.replace(advantage=("group", Component("kl_penalty", coef=0.0), "returns"))
    kl, none = (carry_out(TINY.replace(arm=a, steps=2), tmp_path / str(i)) for i, a in enumerate((arm, free)))
    first, later = (abs(kl["updates"]["loss"] - none["updates"]["loss"])[kl["updates"]["step"] == n] for n in (1, 2))
    assert first.max() < 1e-4 and later.max() > 1e-3
    assert build(TINY.replace(arm=arm), tmp_path / "b", tmp_path).reference is not None


# ---------------------------------------------------------------------- other frameworks
@pytest.mark.parametrize("name", peers.CASES)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_advantages_of_trl(scale, name):
    x = peers.case(name)
    found = per_row(Component("normalized", scale=scale, eps=1e-4), rewards=x["rewards"], prompt=x["groups"])
    tight(found, peers.output(name, f"trl/adv.scale_{scale}"))


@pytest.mark.parametrize("name", peers.CASES)
def test_the_overlong_punishment_of_trl(name):
    """Rows without a response have length 0 here and there."""
    x = peers.case(name)
    found = made(Component("overlong", limit=24, buffer=8), rewards=np.zeros(8), prompt=x["groups"], mask=x["mask"])
    tight(found.min(1), peers.output(name, "trl/overlong"))


def test_whitening_what_does_not_differ_gives_exactly_0():
    for values in (0.0, 0.1, 0.3, 0.7):
        found = made(Component("whitened", eps=0.0), rewards=[values] * len(REWARDS))
        assert bool((found == 0).all())
        assert bool((made("whitened", rewards=[values] * len(REWARDS)) == 0).all())


def group_advantages(rewards, group):
    """One per row, of an arm that names no other step."""
    return advantages_of(rewarded(rewards, group, dtype=rewards.dtype))[:, 0]


def test_the_order_of_rows_changes_no_bit():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(64, generator=generator, dtype=torch.float64)
    group = torch.randint(0, 9, (64,), generator=generator)
    expected = group_advantages(rewards, group)
    for _ in range(20):
        order = torch.randperm(64, generator=generator)
        assert torch.equal(group_advantages(rewards[order], group[order]), expected[order])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_an_error(value):
    with pytest.raises(RunError, match="reward of row 1"):
        group_advantages(torch.tensor([0.0, value]), torch.tensor([0, 0]))
