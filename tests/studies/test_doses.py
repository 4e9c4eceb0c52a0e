"""What the declared rules of router_noise_low, ratio_gradient and lag_natural say of tables whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import lag_natural
import lag_natural_verdicts as lags
import numpy as np
import pandas as pd
import pytest
import ratio_gradient
import ratio_gradient_verdicts as factorial
import router_noise_low
import router_noise_low_verdicts as low
from ratio_gradient import moved
from router_noise_low import OTHERS, ROUTERS

from moe_rl.errors import RunError
from moe_rl.storage.frames import Frames

SEEDS = range(12)
LEVEL, START = 0.6, 0.5
"""Exact match without noise, and before the first step."""
Values = Callable[[str, str, int], dict[str, float]]


def frames_of(cells: Sequence[str], arms: Sequence[str], values: Values, spread: float = 0.004) -> Frames:
    """Two steps and the start; `values` maps a cell, an arm and a seed to columns of the steps: differences of exact
    match from LEVEL, and anything else as it is. Sampled match scatters over seeds around its mean."""
    rng, runs, steps, updates = np.random.default_rng(0), [], [], []
    for cell in cells:
        for arm in arms:
            scatter = rng.normal(0, 1, len(SEEDS))
            scatter = spread * (scatter - scatter.mean())
            for seed in SEEDS:
                key = {"arm": arm, "factors": cell, "seed": seed}
                found = {"sampled": 0.0, "greedy": 0.0, "token_kl_k3": 0.1, "token_ess": 1.0, "clip_tokens": 0.2,
                         **values(cell, arm, seed)}
                found["sampled"] += scatter[seed]
                exact = {f"eval_exact_{how}": found.pop(how) for how in ("sampled", "greedy")}
                runs.append({**key, "state": "finished", "step": 2, "steps": 2})
                steps.append({**key, "step": 0, **dict.fromkeys(exact, START)})
                steps += [{**key, "step": t, **{name: LEVEL + x for name, x in exact.items()}, **found} for t in (1, 2)]
                updates.append({**key, "update": 8, "fresh_expert_change_rate": 0.1})
    return Frames(pd.DataFrame(runs), {"steps": pd.DataFrame(steps), "updates": pd.DataFrame(updates)})


def the(lines: Sequence[str], start: str) -> str:
    """The one line that begins so."""
    (line,) = [line for line in lines if line.startswith(start)]
    return line


# ---------------------------------------------------------------------- router_noise_low
KL = dict(zip(low.SCALES, (1.0, 0.1, 0.05, 0.02, 0.01), strict=True))
"""Scale in routers → KL. The first two are a factor of ten apart."""
PLACE = {name: ("routers", s) for s, name in ROUTERS.items()} | {name: ("beside", s) for s, name in OTHERS.items()}


def low_frames(harm: Callable[[str, str, float], float], greedy: float | None = None, kl_beside: float = 1.0,
               spread: float = 0.004, without_noise: float = 0.0) -> Frames:
    """`harm` maps an arm, a place and a scale to what noise does to both endpoints; `greedy` to the secondary one."""
    def values(cell: str, arm: str, seed: int) -> dict[str, float]:
        place, scale = PLACE.get(cell, ("", 0.0))
        first = harm(arm, place, scale) if place else without_noise
        kl = KL.get(scale, 0.01) * (kl_beside if place == "beside" else 1)
        return {"sampled": first, "greedy": first if greedy is None or not place else greedy, "token_kl_k3": kl}

    return frames_of(list(router_noise_low.study.cells), low.ARMS, values, spread)


def test_an_arm_is_harmed_down_to_its_lowest_decided_scale():
    """GRPO is harmed at .7 and .4, in both places: a harm of noise, and none of routing. Others are not harmed."""
    said = low.verdict(low_frames(lambda arm, place, s: -0.05 if arm == "grpo" and s >= 0.4 else 0.0))
    assert the(said, "grpo: lowest").endswith("σ = 0.4, KL 0.100")
    assert the(said, "gspo: lowest").endswith("none")
    assert the(said, "grpo, σ = 0.7").startswith("grpo, σ = 0.7 − no noise: harm (-0.050")
    assert "no difference that matters" in the(said, "grpo, σ = 0.2") and "Holm p 1;" in the(said, "grpo, σ = 0.1 ")
    assert the(said, "grpo, slope").startswith("grpo, slope of in routers − beside: no difference that matters (0.000")
    assert said[0] == "not finished: 12 of 24 declared seeds"


def test_a_scale_below_the_first_that_is_not_decided_is_not_tested():
    """Harmed at .7 and at .1, not at .4: .1 does not count, and nor does the scatter at .4 say that nothing matters."""
    said = low.verdict(low_frames(lambda arm, place, s: -0.05 if s in (0.7, 0.1) else 0.0))
    assert all("σ = 0.7, KL 1.000" in the(said, f"{arm}: lowest") for arm in low.ARMS)
    assert ": undecided (-0.050" in the(said, "grpo, σ = 0.1 ") and "Holm p 1;" in the(said, "grpo, σ = 0.1 ")
    wide = low.verdict(low_frames(lambda arm, place, s: 0.0, spread=0.1))
    assert ": undecided" in the(wide, "grpo, σ = 0.4")


@pytest.mark.parametrize("first, second, said", [
    (-0.05, 0.05, "undecided (-0.050"), (0.05, 0.0, "undecided (0.050"), (-0.05, 0.0, "harm (-0.050")])
def test_neither_a_gain_nor_what_the_secondary_endpoint_opposes_is_a_harm(first, second, said):
    lines = low.verdict(low_frames(lambda arm, place, s: first, greedy=second))
    assert f"σ = 0.7 − no noise: {said}" in the(lines, "grpo, σ = 0.7")
    assert the(lines, "grpo: lowest").endswith("σ = 0.05, KL 0.010" if first < 0 and not second else "none")


def test_holm_passes_on_the_share_of_an_arm_that_is_harmed_at_every_scale():
    """Ten of twelve signs agree: p = 2 · 79 / 4096 = .0386 where values are of one size, not decided among two."""
    def frames(harmed: int) -> Frames:
        def values(cell: str, arm: str, seed: int) -> dict[str, float]:
            place, scale = PLACE.get(cell, ("", 0.0))
            if place != "routers":
                return {}
            if arm == "grpo":
                return {"sampled": 0.05 if seed < 2 else -0.05} if scale == 0.7 else {}
            return {"sampled": -0.1 if low.ARMS.index(arm) <= harmed else 0.0}
        return frames_of(list(router_noise_low.study.cells), low.ARMS, values, spread=0)

    for harmed, holm_p in ((0, 4 * 158 / 4096), (2, 2 * 158 / 4096), (3, 158 / 4096)):
        first = low.harms(frames(harmed))["grpo"][0]
        assert first.primary.p == pytest.approx(158 / 4096) and first.adjusted == pytest.approx(holm_p)
        assert (first.sign < 0) == (harmed == 3)


@pytest.mark.parametrize("inside, beside, said", [
    (-0.05, 0.0, "the harm is specific to routing"), (0.0, 0.05, "undecided"),
    (-0.05, -0.15, "noise beside the routers harms more"), (-0.05, -0.05, "no difference that matters")])
def test_harm_is_specific_to_routing_if_it_grows_more_with_kl_than_harm_beside(inside, beside, said):
    """Harm at .7 alone, where KL is ten times that at .4."""
    at = {"routers": inside, "beside": beside}
    frames = low_frames(lambda arm, place, s: at[place] if s == 0.7 else 0.0)
    assert the(low.verdict(frames), "gspo, slope").startswith(f"gspo, slope of in routers − beside: {said} (")


def test_a_slope_by_hand_is_per_factor_of_ten_in_kl():
    """A difference of −.03 · log10 KL, whatever the seed."""
    frames = low_frames(lambda arm, place, s: -0.03 * math.log10(KL[s]) if place == "routers" else 0.0, spread=0)
    found = low.specificity(frames)["grpo"]
    assert [test.difference.mean for test in (found.primary, found.secondary)] == pytest.approx([-0.03, -0.03])
    assert low.log_kl(frames) == pytest.approx([math.log10(kl) for kl in KL.values()])


def test_without_matched_kl_nothing_is_concluded_about_routing_and_without_a_gain_nothing_at_all():
    def harm(arm: str, place: str, scale: float) -> float:
        return -0.05 if place == "routers" else 0.0

    said = low.verdict(low_frames(harm, kl_beside=1.3))
    assert the(said, "routing: ").endswith("nothing is concluded, KL is not matched at σ = 0.7, 0.4, 0.2, 0.1, 0.05")
    assert ": nothing is concluded (" in the(said, "gspo, slope")
    assert not any(low.NOTHING in line for line in low.verdict(low_frames(harm, kl_beside=1.2)))
    (void,) = low.verdict(low_frames(harm, without_noise=START - LEVEL - 0.1))
    assert void.startswith("void: GRPO without noise does not end above its cold start, gained -0.1")
    assert {words for _, words in low.judged(low_frames(harm, without_noise=START - LEVEL - 0.1))} == {"void"}
    with pytest.raises(RunError, match=f"needs runs of grpo in {OTHERS[0.7]}"):
        low.verdict(low_frames(harm)._where(lambda frame: frame["factors"] != OTHERS[0.7]))


# ---------------------------------------------------------------------- ratio_gradient
def factorial_frames(harm: dict[tuple[str, str], float], greedy: dict[tuple[str, str], float] | None = None,
                     spread: float = 0.004, clipped: float = 0.2, slope: float = 1.0) -> Frames:
    """`harm` by arm and part, mean of both σ: `slope` times as much at σ = 1, and the rest at .4."""
    def values(cell: str, arm: str, seed: int) -> dict[str, float]:
        places = {moved(part, s): (part, slope if s == 1 else 2 - slope) for part in factorial.MOVED
                  for s in factorial.SIGMAS}
        part, times = places.get(cell, ("", 0.0))
        first = harm.get((arm, part), 0.0)
        return {"sampled": first * times, "greedy": first if greedy is None else greedy.get((arm, part), 0.0),
                "clip_tokens": clipped if arm == factorial.MATCHED else 0.2}

    return frames_of(list(ratio_gradient.study.cells), factorial.ARMS, values, spread)


PARTS = {"ratio": ("grpo", "ratio"), "gradient": ("grpo", "gradient"), "both": ("grpo", "both")}


@pytest.mark.parametrize("both, said, means", [
    (-0.1, ": an effect (0.100", "harm less than the sum"), (-0.3, ": an effect (-0.100", "harm more than the sum"),
    (-0.2, ": no difference that matters (", "the two harms add up")])
def test_interaction_is_harm_of_both_minus_both_harms(both, said, means):
    frames = factorial_frames({PARTS["ratio"]: -0.1, PARTS["gradient"]: -0.1, PARTS["both"]: both}, slope=1.4)
    line = the(factorial.verdict(frames), factorial.INTERACTION)
    assert said in line and line.endswith(means)


@pytest.mark.parametrize("gspo, said", [
    (0.0, "GSPO is harmed less"), (-0.2, "GSPO is harmed more"), (-0.1, "GSPO protects from nothing")])
def test_protection_is_grpos_harm_of_the_ratio_minus_gspos(gspo, said):
    frames = factorial_frames({PARTS["ratio"]: -0.1, ("gspo", "ratio"): gspo})
    assert the(factorial.verdict(frames), factorial.PROTECTION).endswith(said)


def test_protection_may_be_opposed_or_undecided():
    opposed = factorial_frames({PARTS["ratio"]: -0.1}, greedy={PARTS["ratio"]: 0.1})
    line = the(factorial.verdict(opposed), factorial.PROTECTION)
    assert ": opposed" in line and line.endswith("): undecided")
    assert the(factorial.verdict(factorial_frames({}, spread=0.2)), factorial.PROTECTION).endswith("): undecided")


@pytest.mark.parametrize("matched, said", [
    (-0.1, "it does not close GSPO's gap"), (0.0, "it closes GSPO's gap"), (-0.01, "it closes GSPO's gap"),
    (0.1, "it is better than GSPO")])
def test_clip_matched_grpo_closes_the_gap_within_the_margin(matched, said):
    """−.01 is decided, and within ±.02."""
    frames = factorial_frames({PARTS["ratio"]: -0.1, (factorial.MATCHED, "ratio"): matched}, spread=0.001)
    assert the(factorial.verdict(frames), factorial.CLOSED).endswith(said)
    *_, third = factorial.compared(frames, factorial.MEANS)
    assert third.sign == (matched < 0) - (matched > 0)


def test_the_third_comparison_needs_a_gap_and_matched_clipping():
    no_gap = factorial.verdict(factorial_frames({}))
    assert the(no_gap, factorial.CLOSED).endswith("nothing is concluded, GSPO has no gap to GRPO")
    for clipped, matched in ((0.13, False), (0.14, True), (0.29, True), (0.31, False)):
        said = factorial.verdict(factorial_frames({PARTS["ratio"]: -0.1}, clipped=clipped))
        assert the(said, factorial.CLOSED).endswith("not matched") != matched


def test_the_factorial_needs_all_its_runs_and_a_gain():
    frames = factorial_frames({})
    with pytest.raises(RunError, match="needs runs of gspo in router_noise.applied_to=both,router_noise.scale=1, "):
        factorial.verdict(frames._where(lambda f: (f["arm"] != "gspo") | (f["factors"] != moved("both", 1))))
    low_start = factorial_frames({("grpo", ""): -0.2})
    (void,) = factorial.verdict(low_start)
    assert void.startswith("void: GRPO without noise")
    assert {words for _, words in factorial.judged(low_start)} == {"void"}


# ---------------------------------------------------------------------- lag_natural
LAG_ARMS = [arm.name for arm in lag_natural.study.arms]


def lag_frames(gain: dict[str, float], greedy: dict[str, float] | None = None, live: float = 0.85,
               replayed: float = 0.97, spread: float = 0.004) -> Frames:
    """`gain` of an arm at lag 1 and at lag 2, mean of both; at lag 2 it is three times that of lag 1, at lag 0 −1."""
    def values(cell: str, arm: str, seed: int) -> dict[str, float]:
        half = cell.startswith(lag_natural.HALF)
        name, lag = lags.HALF_RATE if half else arm, int(cell[-1])
        first, times = gain.get(name, 0.0), (0.0, 0.5, 1.5)[lag]
        second = first if greedy is None else greedy.get(name, 0.0)
        exact = {"sampled": first * times, "greedy": second * times}
        ess = {2: {"grpo": live, "grpo-replay": replayed}}.get(lag, {}).get(name, 0.5)
        return {**(exact if lag else {"sampled": -0.4, "greedy": -0.4}), "token_ess": ess}

    return frames_of(list(lag_natural.study.cells), LAG_ARMS, values, spread)


@pytest.mark.parametrize("gain, said", [
    ({"sequence-token": 0.05}, "the weight"), ({"token-sequence": 0.05}, "the clip"),
    ({"sequence-token": 0.05, "token-sequence": 0.05}, "both"), ({"gspo": 0.05}, "undecided"),
    ({"sequence-token": -0.05}, "undecided")])
def test_which_part_of_gspo_helps_by_itself(gain, said):
    lines = lags.verdict(lag_frames(gain))
    assert lines[-1] == f"of GSPO's parts, what helps by itself: {said}"
    for arm, value in gain.items():
        assert the(lines, f"{arm} − grpo: ").startswith(f"{arm} − grpo: an effect ({value:.3f}")
    assert the(lines, "grpo-replay − grpo").startswith("grpo-replay − grpo: no difference that matters")


def test_all_seven_comparisons_are_made_on_the_mean_of_both_lags():
    lines = lags.verdict(lag_frames({"grpo-replay": 0.03, "gspo": 0.1, lags.HALF_RATE: -0.1}))
    assert len(lines) == 2 + 7 + 1 and lines[1] == "not finished: 12 of 32 declared seeds"
    assert the(lines, "gspo − grpo-replay").startswith("gspo − grpo-replay: an effect (0.070")
    assert the(lines, "grpo, half").startswith("grpo, half the rate − grpo: an effect (-0.100")


def test_lag_natural_may_be_opposed_or_undecided():
    opposed = lags.verdict(lag_frames({"gspo": 0.05}, greedy={"gspo": -0.05}))
    assert the(opposed, "gspo − grpo: ").startswith("gspo − grpo: opposed")
    assert the(lags.verdict(lag_frames({}, spread=0.1)), "gspo − grpo: ").startswith("gspo − grpo: undecided")


@pytest.mark.parametrize("live, replayed, passed", [
    (0.85, 0.97, True), (0.895, 0.955, True), (0.91, 0.97, False), (0.85, 0.94, False)])
def test_the_gate_asks_for_spread_ratios_that_replay_restores(live, replayed, passed):
    frames = lag_frames({}, live=live, replayed=replayed)
    line, *rest = lags.verdict(frames)
    assert [words for one, words in lags.judged(frames) if "grpo-replay" in one.name] == [
        "no difference that matters" if passed else "nothing is concluded"] * 2
    about_replay = [found for found in rest if "grpo-replay" in found]
    assert [found.endswith(": nothing is concluded about replay") for found in about_replay] == [not passed] * 2
    assert line.startswith(f"gate: {'passed' if passed else 'failed'} (token ESS at lag 2: GRPO {live:.3f}")
    with pytest.raises(RunError, match="needs runs of rate=half,lag=1, which"):
        lags.verdict(lag_frames({})._where(lambda frame: frame["factors"] != "rate=half,lag=1"))


# ---------------------------------------------------------------------- the declarations
def test_figures_show_every_arm():
    """Drawn from made-up tables, as nobody sees one before the runs are made."""
    figure = low.draw(low_frames(lambda arm, place, s: -0.05))
    assert {text for arm in low.ARMS for text in (f"{arm}, in routers", f"{arm}, beside")} <= {
        label for ax in figure.axes for label in ax.get_legend_handles_labels()[1]}
    *_, harm = factorial.draw(factorial_frames({})).axes
    assert harm.get_legend_handles_labels()[1] == factorial.ARMS


def test_runs_seeds_and_cells_of_both_studies():
    for study, runs in ((router_noise_low.study, 11 * 4 * 24), (ratio_gradient.study, 7 * 5 * 24)):
        planned = study.runs(Path("runs"))
        assert len(planned) == runs and f"{runs} runs" in study.cost
        assert {one.config.steps for one in planned} == {60} and len(study.seeds) == 24
        assert f"{runs * 60 * study.seconds_per_step / 3600:.1f} CPU-hours" in study.cost
