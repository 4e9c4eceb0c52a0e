"""The numbers of a study: one per run, intervals over runs, what became of each, and the comparisons asked for."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest

from moe_rl.errors import ConfigError
from moe_rl.objectives.methods import arm as spelled_arm
from moe_rl.results import stats
from moe_rl.results.summary import (
    ENGINE,
    MAIN,
    METRICS,
    compare,
    family,
    metric,
    outcomes,
    per_run,
    summarise,
    verdict_of,
)
from moe_rl.results.tables import comparison_table, short_table, summary_table, untrained, without_effect
from moe_rl.storage.frames import Frames
from tests import fake_study
from tests.results.test_plots import ARMS, frames_of


@pytest.fixture(scope="module")
def frames() -> Frames:
    return frames_of(seeds=4, steps=24)


def with_curves(
    curves: dict[tuple[str, int], list[float]], diverged: tuple[str, int] | None = None, steps: int = 0
) -> Frames:
    """Runs whose rewards are given, from step 1 on."""
    runs = [
        {
            "arm": arm,
            "condition": "base",
            "seed": seed,
            "step": len(y),
            "steps": steps or len(y),
            "state": "diverged" if (arm, seed) == diverged else "finished",
        }
        for (arm, seed), y in curves.items()
    ]
    rows = [
        {"arm": arm, "condition": "base", "seed": seed, "step": t, "reward": reward}
        for (arm, seed), y in curves.items()
        for t, reward in enumerate(y, 1)
    ]
    return Frames(pd.DataFrame(runs), {"steps": pd.DataFrame(rows)})


def test_the_summary_reduces_each_run_to_a_number_and_puts_intervals_over_seeds(frames):
    table = summarise(frames, ARMS)
    reward = frames["steps"].query("arm == 'gspo' and step > 12").groupby("seed")["reward"].mean()
    got, want = table.loc["reward, second half", "gspo"], stats.interval(reward.to_list())
    assert (got.mean, got.low, got.high) == pytest.approx((want.mean, want.low, want.high), abs=1e-14)
    assert (got.n, got.method) == (4, "95% Student t")
    last = frames["steps"].query("arm == 'grpo' and step == 20")["eval_exact_greedy"]
    assert table.loc["greedy exact match, end", "grpo"] == stats.interval(last.to_list())
    assert table.loc["lasting collapses", "gspo"] == table.loc["recovered collapses", "gspo"] == stats.rate(0, 4)


def test_the_engines_gap_is_shown_over_the_whole_run_where_it_is_more_than_rounding(frames):
    steps, names = frames["steps"], [one.name for one in ENGINE]
    rounding = steps.assign(engine_kl_k3=1e-13, engine_any_change_rate=0.0)
    near_tie = rounding.assign(engine_kl_k3=rounding["engine_kl_k3"].where(steps["step"] != 5, 1.5e-4))
    for same in (rounding, near_tie):
        assert not set(names) & set(summarise(dataclasses.replace(frames, tables={"steps": same}), ARMS).index)
    detail = steps["step"] % 8 == 0
    other = steps.assign(engine_kl_k3=steps["step"] / 1000, engine_kl_k3_replayed=(steps["step"] / 1e6).where(detail))
    table = summarise(dataclasses.replace(frames, tables={"steps": other}), ARMS)
    kl, replayed = (next(x.name for x in ENGINE if x.column == f"engine_kl_k3{end}") for end in ("", "_replayed"))
    assert table.loc[kl, "grpo"].mean == pytest.approx(np.arange(1, 25).mean() / 1000)
    assert table.loc[replayed, "grpo"].mean == pytest.approx(16e-6)


UP, DOWN = [1.0] * 40, [0.0] * 30
FATES = {("grpo", 0): UP + DOWN, ("grpo", 1): UP + DOWN + UP, ("grpo", 2): UP + [0.0] * 10, ("grpo", 3): UP}


def test_lasting_and_recovered_collapses_are_told_apart():
    found = outcomes(with_curves(FATES)).set_index("seed")
    assert found["fate"].to_dict() == {0: "lasting", 1: "recovered", 2: "stable", 3: "stable"}
    table = summarise(with_curves(FATES), ["grpo"])["grpo"]
    assert table["lasting collapses"] == table["recovered collapses"] == stats.rate(1, 4)


def test_a_diverged_run_has_collapsed_for_good_and_earns_nothing_from_then_on():
    frames = with_curves({("gspo", 0): [1.0] * 60, ("gspo", 1): [1.0] * 60}, diverged=("gspo", 1), steps=100)
    found = outcomes(frames).set_index("seed")
    assert found["fate"].to_dict() == {0: "stable", 1: "lasting"}
    assert per_run(frames, MAIN)["gspo"].to_dict() == {0: 1.0, 1: 0.2}, "10 of the steps 51 to 100"
    late = with_curves({("gspo", 0): UP + DOWN + UP}, diverged=("gspo", 0), steps=200)
    assert outcomes(late).loc[0, "fate"] == "lasting"


def test_a_run_that_diverged_in_its_first_step_earns_nothing_and_is_counted():
    frames = with_curves({("gspo", 0): [0.4] * 4, ("gspo", 1): [0.6] * 4, ("gspo", 2): []}, ("gspo", 2), steps=4)
    assert per_run(frames, MAIN)["gspo"].to_dict() == {0: 0.4, 1: 0.6, 2: 0.0}
    assert ("gspo", 2) not in per_run(frames, metric("expert_change_rate")), "nobody measured it in any run"


def test_what_a_diverged_run_no_longer_has_is_missing(frames):
    runs = frames.runs.copy()
    runs.loc[(runs["arm"] == "gspo") & (runs["seed"] == 0), ["state", "steps"]] = ["diverged", 40]
    found = summarise(dataclasses.replace(frames, runs=runs), ARMS)
    assert np.isnan(found.loc["expert slots changed", "gspo"].mean)
    assert per_run(dataclasses.replace(frames, runs=runs), METRICS[1])["gspo", 0] == 0


def test_seeds_that_a_comparison_leaves_out_are_counted_below_it():
    """Of four pairs two have a run that diverged, of which the rewards are 0 and the entropy is nothing."""
    curves = {(arm, seed): [0.5 + 0.1 * (arm == "a")] * 8 for arm in "ab" for seed in range(4)}
    frames = with_curves(curves, steps=10)
    died = (frames.runs["arm"] == "b") & (frames.runs["seed"] < 2)
    frames = Frames(
        frames.runs.assign(state=frames.runs["state"].mask(died, "diverged")),
        {"steps": frames["steps"].assign(entropy=frames["steps"]["reward"])},
    )
    declared = {"arms": [{"name": "a"}, {"name": "b"}], "comparisons": [["a", "b"]], "conditions": {}, "factors": {}}
    (shown,) = comparison_table(frames, ["a", "b"], metric("entropy"), declared)
    assert shown.rows[0][2] == "2" and "a − b: 2 of 4." in shown.note
    (whole,) = comparison_table(frames, ["a", "b"], MAIN, declared)
    assert whole.rows[0][2] == "4" and "left out" not in whole.note
    at_once = (frames["steps"]["arm"] == "b") & (frames["steps"]["seed"] == 0)
    sooner = Frames(frames.runs, {"steps": frames["steps"][~at_once]})
    (shown,) = comparison_table(sooner, ["a", "b"], metric("entropy"), declared)
    assert shown.rows[0][2] == "2" and "a − b: 2 of 4." in shown.note, "one of them in its first step"
    all_died = dataclasses.replace(frames, runs=frames.runs.assign(state="diverged"))
    (none,) = comparison_table(all_died, ["a", "b"], metric("entropy"), declared)
    short = short_table(frames, declared | {"name": "s", "endpoint": MAIN.name, "metrics": ["entropy"]})
    assert [row[3] for row in short.rows] == ["0.6", "0.5 (n = 2)"] and "n = 4 seeds" in short.note
    assert none.rows == [] and none.note.startswith("Seeds left out") and "a − b: 4 of 4." in none.note


def test_arms_are_compared_within_seeds_and_adjusted_for_their_number(frames):
    found = compare(frames, ARMS)
    assert [(c.a, c.b) for c in found] == [("grpo-replay", "grpo"), ("gspo", "grpo"), ("gspo", "grpo-replay")]
    values = per_run(frames, MAIN)
    assert found[1].result.difference.mean == pytest.approx((values["gspo"] - values["grpo"]).mean())
    assert found[1].result.p == 0.125 and found[1].p_holm == 0.375


def test_a_part_of_a_study_is_adjusted_for_all_that_it_declares(frames):
    """Of three pairs in two conditions one is here, p = 0.125: Holm over six, and over four where a condition runs two
    arms."""
    declared = {
        "arms": [{"name": arm} for arm in ARMS],
        "comparisons": [],
        "conditions": {"a": {}, "b": {}},
        "factors": {},
    }
    two = dataclasses.replace(
        frames,
        runs=frames.runs.query("arm != 'grpo-replay'"),
        tables={"steps": frames["steps"].query("arm != 'grpo-replay'")},
    )
    for asked, m in (
        (declared, 6),
        (declared | {"conditions": {"a": {"arms": ["grpo", "gspo"]}, "b": {}}}, 4),
        (declared | {"comparisons": [["gspo", "grpo"]]}, 2),
        (declared | {"conditions": {}, "factors": {"optimizer.lr": [1, 2, 3]}}, 9),
    ):
        assert family(asked) == m
        (shown,) = comparison_table(two, ["grpo", "gspo"], MAIN, asked)
        assert shown.rows[0][3:5] == ("0.125", f"{min(0.125 * m, 1):.3g}") and len(shown.rows) == 1
    (whole,) = comparison_table(frames, ARMS, MAIN, declared | {"conditions": {}})
    assert "Holm over the 3 rows" in whole.note and whole.rows[0][4] == "0.375"


def test_contrasts_at_every_combination_of_factors_share_one_adjustment(frames):
    def at(lr: float, gain: float) -> list[pd.DataFrame]:
        runs, steps = (frame.assign(condition=f"optimizer.lr={lr:g}") for frame in (frames.runs, frames["steps"]))
        return [runs, steps.assign(reward=steps["reward"] + gain * (steps["arm"] == "gspo"))]

    runs, steps = (pd.concat(pair, ignore_index=True) for pair in zip(at(1e-4, 0.0), at(2e-4, 0.5), strict=True))
    both = Frames(runs, {"steps": steps})
    found = compare(both, ARMS, [("gspo", "grpo")])
    assert [c.condition for c in found] == ["optimizer.lr=0.0001", "optimizer.lr=0.0002"]
    gain = found[1].result.difference.mean - found[0].result.difference.mean
    assert gain == pytest.approx(0.5) and [c.p_holm for c in found] == [0.25, 0.25]


def test_a_metric_is_known_by_its_name_its_column_or_as_any_column_of_steps():
    assert metric("reward") is metric("reward, second half") is MAIN
    assert metric("token_ess").reduce(np.array([1, 2]), np.array([0.0, 1.0])) == 1.0
    for name in ("margin_q50", "rewards"):
        with pytest.raises(ConfigError, match=f"no metric is called '{name}'"):
            metric(name)


def evaluated(points: dict[int, float], state: str = "finished", steps: int = 40) -> Frames:
    """One run of some steps, evaluated at some of them."""
    rows = [{"arm": "a", "condition": "base", "seed": 0, "step": t, "eval_exact_greedy": y} for t, y in points.items()]
    run = {"arm": "a", "condition": "base", "seed": 0, "step": max(points), "steps": steps, "state": state}
    return Frames(pd.DataFrame([run]), {"steps": pd.DataFrame(rows)})


def test_what_was_gained_is_counted_from_the_model_before_the_first_step():
    gained = metric("greedy exact match, gained since the start")
    assert per_run(evaluated({0: 0.7, 20: 0.9, 40: 0.6}), gained)["a", 0] == pytest.approx(-0.1)
    assert per_run(evaluated({0: 0.7, 20: 0.9}, "diverged"), gained)["a", 0] == pytest.approx(-0.7)
    assert per_run(evaluated({20: 0.9, 40: 0.6}), gained).empty, "nobody knows where it began"
    known = evaluated({0: 0.7, 40: 0.6})
    for state in ("finished", "diverged"):  # a second run, which nobody has evaluated
        runs = pd.concat([known.runs, known.runs.assign(seed=1, state=state)])
        assert per_run(Frames(runs, known.tables), gained).index.to_list() == [("a", 0)]
    names = list(summarise(evaluated({0: 0.7, 40: 0.6}), ["a"]).index)
    assert names.index(gained.name) == names.index("greedy exact match, end") + 1


@pytest.mark.parametrize(("diverged", "mean"), [(5, 0.0), (55, 0.0), (65, 0.12), (85, 0.36), (95, 0.48), (99, 0.48)])
def test_a_diverged_run_lacks_evaluations_and_not_steps(diverged, mean):
    """Of the evaluations after steps 60, 70, …, 100, those that were, at .6, and 0 for each that was not."""
    frames = evaluated(dict.fromkeys(range(0, diverged, 10), 0.6), "diverged", steps=100)
    assert per_run(frames, metric("greedy exact match, second half"))["a", 0] == pytest.approx(mean)


def test_the_second_half_of_the_evaluations_is_that_of_the_steps():
    """Step 15 of 20 is the last evaluation before the end; without one before the first step none is passed over."""
    half = metric("greedy exact match, second half")
    for points, mean in (({0: 0.9, 5: 0.9, 15: 0.2, 20: 0.4}, 0.3), ({11: 0.2, 20: 0.4}, 0.3), ({20: 0.4}, 0.4)):
        assert per_run(evaluated(points, steps=20), half)["a", 0] == pytest.approx(mean)


def worst_reward(run: Frames) -> float:
    """A metric of a user's own."""
    return run["steps"]["reward"].min()


def test_a_metric_of_ones_own_is_asked_for_each_run(frames):
    own = metric(f"{__name__}:worst_reward")
    want = frames["steps"].groupby(["arm", "seed"])["reward"].min()
    assert own.name == "worst reward" and per_run(frames, own).to_dict() == want.to_dict()
    assert compare(frames, ARMS, [("gspo", "grpo")], own)[0].result.difference.mean == pytest.approx(
        (want["gspo"] - want["grpo"]).mean()
    )
    assert "worst reward" in [row[0] for row in summary_table(frames, ARMS, "fake", [f"{__name__}:worst_reward"]).rows]
    with pytest.raises(ConfigError, match="'best_reward'"):
        metric(f"{__name__}:best_reward")


def test_runs_that_are_measured_at_different_steps_or_differ_in_length_are_named(frames):
    """A mean over evaluations of every step is not that over the last alone."""

    def note(**columns) -> str:
        return summary_table(dataclasses.replace(frames, runs=frames.runs.assign(**columns)), ARMS, "fake").note

    changed = [json.dumps(json.loads(frames.runs["config"][0]) | {"eval_every": 7}), *frames.runs["config"][1:]]
    assert ", 7, " in note(config=changed) and "eval_every" not in note()
    shorter = [json.dumps(json.loads(frames.runs["config"][0]) | {"steps": 12}), *frames.runs["config"][1:]]
    assert "[(12, " in note(config=shorter)
    assert "differ" not in note(config=shorter, condition=["short", *["long"] * 11])


def test_where_no_group_ever_had_a_signal_that_is_said(frames):
    steps = frames["steps"]
    assert untrained(frames) == ""
    none = dataclasses.replace(frames, tables={"steps": steps.assign(zero_variance_groups=1.0)})
    assert untrained(none).startswith("no gradient in 12 of 12 runs")
    one = (steps["arm"] == "gspo") & (steps["seed"] == 1)
    some = steps.assign(zero_variance_groups=steps["zero_variance_groups"].mask(one, 1.0))
    assert "in 1 of 12 runs (gspo seed=1)" in untrained(dataclasses.replace(frames, tables={"steps": some}))


def test_parts_that_never_acted_and_arms_with_equal_rows_are_a_caution(frames):
    arms = ("grpo", "tis", "grpo+old_policy", "reinforce")
    runs, steps = (
        pd.concat([f[f["arm"] == "grpo"].assign(arm=arm) for arm in arms], ignore_index=True)
        for f in (frames.runs, frames["steps"])
    )
    config = {arm: json.dumps(fake_study.study.base.replace(arm=spelled_arm(arm)).to_dict()) for arm in arms}
    steps.loc[steps["arm"].isin(["tis", "reinforce"]), "clip_tokens"] = 0.0
    steps.loc[steps["arm"] != "grpo", "grad_norm"] += steps["arm"].map({"tis": 1.0, "reinforce": 2.0}).fillna(0.0)
    for arm, zero in (("grpo", 0.0), ("grpo+old_policy", -0.0)):  # of the same row
        steps.loc[steps.index[steps["arm"] == arm][0], "reward"] = zero
    updates = steps[["arm", "condition", "seed", "step"]].assign(
        corrected_tokens=np.where(steps["arm"] == "tis", 0.0, np.nan),
        pull=np.where(steps["arm"] == "grpo+old_policy", 0.0, np.nan),
    )
    made = Frames(runs.assign(config=runs["arm"].map(config)), {"steps": steps, "updates": updates})
    declared = {"endpoint": "reward, second half"}
    said = without_effect(made, declared)
    assert [text.split(": ")[-2:][0] for text in said.split(". An arm")[0].split("; ")] == [
        "tis",
        "tis",
        "grpo+old_policy",
        "grpo and grpo+old_policy",
    ]
    steps.loc[steps.index[steps["arm"] == "tis"][3], "clip_tokens"] = 1e-6
    updates.loc[:, ["corrected_tokens", "pull"]] += 1.0
    steps.loc[steps.index[steps["arm"] == "grpo"][3], "reward"] += 1e-9
    assert without_effect(made, declared) == ""


def by_hand(frames: Frames) -> list[str]:
    return [f"{len(frames.runs)} runs"]


def one_sentence(frames: Frames) -> str:
    return "GSPO helps."


def test_a_study_carries_its_verdict(frames):
    assert verdict_of(frames, {"name": "fake", "verdict": f"{__name__}:by_hand"}) == ["12 runs"]
    assert verdict_of(frames, {"name": "fake", "verdict": f"{__name__}:one_sentence"}) == ["GSPO helps."]
    assert verdict_of(frames, {"name": "fake", "verdict": ""}) == []
    assert "no module 'nowhere'" in verdict_of(frames, {"name": "fake", "verdict": "nowhere:rule"})[0]
    fails = verdict_of(dataclasses.replace(frames, tables={}), {"name": "fake", "verdict": f"{__name__}:worst_reward"})
    assert "KeyError: 'steps'" in fails[0], "the tables are shown all the same"


def test_a_number_that_a_loss_returns_is_averaged_over_the_updates_of_each_step():
    """Two updates a step; of 4 steps the last two count: (5 + 7)/2 and (1 + 2)/2 make 6 and 1.5, so 3.75."""
    frames = with_curves({("a", 0): [0.5] * 4}, steps=4)
    labels = {"arm": "a", "seed": 0, "condition": frames.conditions[0], "step": [1, 1, 2, 2, 3, 3, 4, 4]}
    updates = pd.DataFrame(labels | {"own_pull": [9.0, 9.0, 9.0, 9.0, 5.0, 7.0, 1.0, 2.0]})
    frames = Frames(frames.runs, {"steps": frames["steps"], "updates": updates})
    assert per_run(frames, metric("own_pull")).tolist() == [3.75]
    gone, half = (
        Frames(frames.runs, {"steps": frames["steps"], "updates": rows})
        for rows in (updates[updates["step"] != 3], updates.replace({"own_pull": {5.0: math.nan}}))
    )
    assert per_run(half, metric("own_pull")).equals(per_run(gone, metric("own_pull"))), "half a step would be biased"
    declared = {"arms": [{"name": "a"}], "comparisons": [], "conditions": {}, "factors": {}, "name": "s", "metrics": []}
    assert "n = 1 seed." in short_table(frames, declared | {"endpoint": "own_pull"}).note
    assert "'own_pul'" in short_table(frames, declared | {"endpoint": "own_pul"}).note
