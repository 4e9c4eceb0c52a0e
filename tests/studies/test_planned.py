"""What the declared rules of router_noise_low, ratio_gradient and lag_natural say of tables whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import depth.study as depth
import lag_natural.study as lags
import numpy as np
import pandas as pd
import pytest
import ratio_gradient.study as factorial
import router_noise_low.study as low
from contrasts import NOTHING, VOID
from router_noise_low.study import OTHERS, ROUTERS

from moe_rl.results.summary import verdict_of
from moe_rl.storage.frames import Frames, load_study
from moe_rl.study.declaration import read_declaration

SEEDS = range(12)
LEVEL, START = 0.6, 0.5
"""Exact match without noise, and before the first step."""
Values = Callable[[str, str, int], dict[str, float]]


def frames_of(conditions: Sequence[str], arms: Sequence[str], values: Values, spread: float = 0.004) -> Frames:
    """Two steps and the start; `values` maps a condition, an arm and a seed to columns of the steps: differences of
    exact match from LEVEL, and anything else as it is. Sampled match scatters over seeds around its mean."""
    rng, runs, steps = np.random.default_rng(0), [], []
    for condition in conditions:
        for arm in arms:
            scatter = rng.normal(0, 1, len(SEEDS))
            scatter = spread * (scatter - scatter.mean())
            for seed in SEEDS:
                key = {"arm": arm, "condition": condition, "seed": seed}
                one = {"sampled": 0.0, "greedy": 0.0, "token_kl_k3": 0.1, "token_ess": 1.0, "clip_tokens_mean": 0.2}
                one |= values(condition, arm, seed)
                one["sampled"] += scatter[seed]
                exact = {f"eval_exact_{how}": one.pop(how) for how in ("sampled", "greedy")}
                of_run = {"clip_tokens_mean": one.pop("clip_tokens_mean"), "fresh_expert_change_rate": 0.1}
                runs.append({**key, "state": "finished", "step": 2, "steps": 2, **of_run})
                steps.append({**key, "step": 0, **dict.fromkeys(exact, START)})
                steps += [{**key, "step": t, **{name: LEVEL + x for name, x in exact.items()}, **one} for t in (1, 2)]
    return Frames(pd.DataFrame(runs), {"steps": pd.DataFrame(steps)})


def words_of(judged: Sequence) -> dict[str, str]:
    """Name of a comparison → the words of the rule."""
    return {one.name: words for one, words in judged}


# ---------------------------------------------------------------------- router_noise_low
KL = dict(zip(low.SCALES, (1.0, 0.1, 0.05, 0.02, 0.01), strict=True))
"""Scale in routers → KL. The first two are a factor of ten apart."""
PLACE = {name: ("routers", s) for s, name in ROUTERS.items()} | {name: ("beside", s) for s, name in OTHERS.items()}


def low_frames(
    harm: Callable[[str, str, float], float],
    kl_beside: float = 1.0,
    spread: float = 0.004,
    without_noise: float = 0.0,
) -> Frames:
    """`harm` maps an arm, a place and a scale to what noise does to both endpoints."""

    def values(condition: str, arm: str, seed: int) -> dict[str, float]:
        place, scale = PLACE.get(condition, ("", 0.0))
        first = harm(arm, place, scale) if place else without_noise
        kl = KL.get(scale, 0.01) * (kl_beside if place == "beside" else 1)
        return {"sampled": first, "greedy": first, "token_kl_k3": kl}

    return frames_of(list(low.study.conditions), low.ARMS, values, spread)


def test_a_harm_of_noise_at_both_places_is_no_harm_of_routing():
    said = low.judged(low_frames(lambda arm, place, s: -0.05 if arm == "grpo" and s >= 0.4 else 0.0))
    harmed = [name for name, words in words_of(said).items() if words == "harm"]
    assert harmed == ["grpo, σ = 0.7 − no noise", "grpo, σ = 0.4 − no noise"]
    assert set(words_of(said).values()) == {"harm", "no difference that matters"} and len(said) == 4 * 5 + 4


def test_a_scale_below_the_first_that_is_not_decided_is_not_tested():
    """Harmed at .7 and at .1, not at .4: .1 does not count, and nor does the scatter at .4 say that nothing matters."""
    said = low.judged(low_frames(lambda arm, place, s: -0.05 if s in (0.7, 0.1) else 0.0))
    assert {one.adjusted for one, _ in said if "σ = 0.1 " in one.name} == {1.0}
    assert [words_of(said)[f"grpo, σ = {s} − no noise"] for s in (0.7, 0.1)] == ["harm", "undecided"]
    wide = low.judged(low_frames(lambda arm, place, s: 0.0, spread=0.1))
    assert words_of(wide)["grpo, σ = 0.4 − no noise"] == "undecided"


def test_holm_passes_on_the_share_of_an_arm_that_is_harmed_at_every_scale():
    """Ten of twelve signs agree: p = 2 · 79 / 4096 = .0386 where values are of one size, not decided among two."""

    def frames(harmed: int) -> Frames:
        def values(condition: str, arm: str, seed: int) -> dict[str, float]:
            place, scale = PLACE.get(condition, ("", 0.0))
            ladder = [arm == "grpo" and scale == 0.7, 0 < low.ARMS.index(arm) <= harmed]
            sampled = (0.05 if seed < 2 else -0.05) * ladder[0] - 0.1 * ladder[1]
            return {"sampled": sampled * (place == "routers"), "token_kl_k3": KL.get(scale, 0.01)}

        return frames_of(list(low.study.conditions), low.ARMS, values, spread=0)

    for harmed, holm_p in ((0, 4 * 158 / 4096), (2, 2 * 158 / 4096), (3, 158 / 4096)):
        first, words = low.judged(frames(harmed))[0]
        assert first.primary.p == pytest.approx(158 / 4096) and first.adjusted == pytest.approx(holm_p)
        assert (words == "harm") == (harmed == 3)


def test_a_slope_by_hand_is_per_factor_of_ten_in_kl():
    """A difference of −.03 · log10 KL, whatever the seed."""
    frames = low_frames(lambda arm, place, s: -0.03 * math.log10(KL[s]) if place == "routers" else 0.0, spread=0)
    found = low.slope_rule(frames).outcomes(frames)["slopes"][0]
    assert [test.difference.mean for test in (found.primary, found.secondary)] == pytest.approx([-0.03, -0.03])


def test_without_matched_kl_nothing_is_concluded_about_routing_and_without_a_gain_nothing_at_all():
    def harm(arm: str, place: str, scale: float) -> float:
        return -0.05 if place == "routers" else 0.0

    for beside, unmatched in ((1.3, True), (1.2, False)):
        said = words_of(low.judged(low_frames(harm, kl_beside=beside)))
        assert {name for name, words in said.items() if words == NOTHING} == {
            f"{arm}, slope of in routers − beside" for arm in low.ARMS if unmatched
        }
    assert {words for _, words in low.judged(low_frames(harm, without_noise=START - LEVEL - 0.1))} == {VOID}
    with pytest.raises(KeyError, match="grpo"):
        low.judged(low_frames(harm)._where(lambda frame: frame["condition"] != OTHERS[0.7]))


# ---------------------------------------------------------------------- ratio_gradient
FACTORIAL_ARMS = [arm.name for arm in factorial.study.arms]
MATCHED = factorial.matched.name


def factorial_frames(
    harm: dict[tuple[str, str], float],
    clipped: float = 0.2,
    slope: float = 1.0,
) -> Frames:
    """`harm` by arm and part, mean of both σ: `slope` times as much at σ = 1, and the rest at .4."""

    def values(condition: str, arm: str, seed: int) -> dict[str, float]:
        places = {
            factorial.moved(part, s): (part, slope if s == 1 else 2 - slope)
            for part in factorial.MOVED
            for s in factorial.SIGMAS
        }
        part, times = places.get(condition, ("", 0.0))
        first = harm.get((arm, part), 0.0)
        return {
            "sampled": first * times,
            "greedy": first,
            "clip_tokens_mean": clipped if arm == MATCHED else 0.2,
        }

    return frames_of(list(factorial.study.conditions), FACTORIAL_ARMS, values)


RATIO, GRADIENT, BOTH = (("grpo", part) for part in factorial.MOVED)


@pytest.mark.parametrize(
    "both, mean, said",
    [
        (-0.1, 0.1, "both together harm less"),
        (-0.3, -0.1, "both together harm more"),
        (-0.2, 0, "the two harms add up"),
    ],
)
def test_interaction_is_harm_of_both_minus_both_harms(both, mean, said):
    frames = factorial_frames({RATIO: -0.1, GRADIENT: -0.1, BOTH: both}, slope=1.4)
    one, words = factorial.judged(frames)[0]
    assert one.primary.difference.mean == pytest.approx(mean, abs=1e-12) and words.startswith(said)


def test_the_third_comparison_needs_a_gap_and_matched_clipping():
    assert words_of(factorial.judged(factorial_frames({})))[factorial.CLOSED].startswith(NOTHING)
    for clipped, matched in ((0.13, False), (0.14, True), (0.29, True), (0.31, False)):
        said = words_of(factorial.judged(factorial_frames({RATIO: -0.1}, clipped=clipped)))
        assert said[factorial.CLOSED].startswith(NOTHING) != matched


# ---------------------------------------------------------------------- lag_natural
def lag_frames(
    gain: dict[str, float],
    live: float = 0.85,
    replayed: float = 0.97,
) -> Frames:
    """`gain` of an arm at lag 1 and at lag 2, mean of both; at lag 2 it is three times that of lag 1, at lag 0 −1."""

    def values(condition: str, arm: str, seed: int) -> dict[str, float]:
        name, lag = lags.HALF_RATE if condition.startswith(lags.HALF) else arm, int(condition[-1])
        first, times = gain.get(name, 0.0), (0.0, 0.5, 1.5)[lag]
        exact = {"sampled": first * times, "greedy": first * times}
        ess = {2: {"grpo": live, "grpo-replay": replayed}}.get(lag, {}).get(name, 0.5)
        return {**(exact if lag else {"sampled": -0.4, "greedy": -0.4}), "token_ess": ess}

    return frames_of(list(lags.study.conditions), [arm.name for arm in lags.study.arms], values)


def test_all_seven_comparisons_are_made_on_the_mean_of_both_lags():
    found = lags.judged(lag_frames({"grpo-replay": 0.03, "gspo_short": 0.1, lags.HALF_RATE: -0.1}))
    means = {one.name: one.primary.difference.mean for one, _ in found}
    assert len(found) == 7 and means["gspo_short − grpo-replay"] == pytest.approx(0.07)
    assert means["grpo, half the rate − grpo"] == pytest.approx(-0.1)
    assert words_of(found)["gspo_short − grpo-replay"] == "an effect"


@pytest.mark.parametrize(
    "live, replayed, passed", [(0.85, 0.97, True), (0.895, 0.955, True), (0.91, 0.97, False), (0.85, 0.94, False)]
)
def test_the_gate_asks_for_spread_ratios_that_replay_restores(live, replayed, passed):
    said = words_of(lags.judged(lag_frames({}, live=live, replayed=replayed)))
    assert [name for name, words in said.items() if words == NOTHING] == (
        [] if passed else ["grpo-replay − grpo", "gspo_short − grpo-replay"]
    )


STORED = sorted(file.parent for file in (Path(low.__file__).parents[1]).glob("*/study.json"))


@pytest.mark.parametrize("folder", STORED, ids=lambda folder: folder.name)
def test_the_verdict_of_a_committed_study_can_be_shown(folder):
    declared = read_declaration(folder, trust=True)
    sentences = verdict_of(load_study(folder), declared)
    assert bool(sentences) == bool(declared["verdict"]) and not any("none from" in one for one in sentences)


# ---------------------------------------------------------------------- depth
def depth_frames(kl: dict[str, float]) -> Frames:
    """A KL for each condition, and slots that change as its root: by an update a quarter as many as by a step."""
    rng, runs, steps, updates = np.random.default_rng(0), [], [], []
    for condition, value in kl.items():
        for seed in range(8):
            key = {"arm": "grpo", "condition": condition, "seed": seed, "step": 20}
            slots = 0.4 * value**0.5 * np.exp(rng.normal(0, 0.01))
            runs.append({**key, "state": "finished", "steps": 20})
            steps.append({**key, "token_kl_k3": value, "expert_change_rate": slots})
            updates.append({**key, "update": 1, "expert_change_rate": slots / 4})
    return Frames(pd.DataFrame(runs), {"steps": pd.DataFrame(steps), "updates": pd.DataFrame(updates)})


def depth_kl(grows: float, at_24: float = 1.0) -> dict[str, float]:
    """At one rate a KL that grows with a power of the depth, and at rates of equal KL one that is equal but at 24."""
    equal = {here.name: 0.01 * (at_24 if layers == 24 else 1) for layers, here in depth.EQUAL_KL.items()}
    return equal | {here.name: 0.01 * (layers / 6) ** grows for layers, here in depth.EQUAL_RATE.items()}


def test_slots_that_follow_the_root_of_the_kl_change_with_depth_at_one_rate_alone():
    rate, kl = depth.judged(depth_frames(depth_kl(grows=0.25)))
    assert rate[1] == "an effect" and kl[1] == "no difference that matters"
    assert rate[0].primary.difference.mean == pytest.approx(0.125 * math.log(2), abs=0.01)


def test_nothing_is_said_of_an_equal_kl_that_is_not_equal():
    assert depth.judged(depth_frames(depth_kl(grows=0.25, at_24=1.6)))[1][1] == VOID
    assert depth.judged(depth_frames(depth_kl(grows=0.25, at_24=1.4)))[1][1] == "no difference that matters"
