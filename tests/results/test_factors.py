"""A metric against a factor, the points where half of it is lost, and the figures that studies name."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from moe_rl.errors import ConfigError
from moe_rl.results import figures, plots, stats
from moe_rl.results.summary import MAIN, against
from moe_rl.results.tables import short_table, study_tables
from moe_rl.storage.frames import Frames, load_study, settings_of
from tests.results.test_summary import with_curves

ROOT = Path(__file__).parents[2]
LR = (1e-4, 2e-4, 4e-4, 8e-4)
HEIGHTS = {"grpo": (0.8, 0.8, 0.0, 0.0), "gspo": (0.8, 0.8, 0.8, 0.0)}
"""Half is lost half way from the last 0.8 to the first 0: √2 above 2e-4 and above 4e-4."""
DECLARED = {
    "name": "sweep",
    "arms": [{"name": "grpo"}, {"name": "gspo"}],
    "endpoint": MAIN.name,
    "comparisons": [],
    "figures": ["learning", "against:optimizer.lr"],
    "further_endpoints": [],
    "metrics": [],
    "conditions": {},
    "factors": {"optimizer.lr": list(LR)},
}


def sweep(
    heights: dict[str, tuple[float, ...]] = HEIGHTS,
    seeds: int = 3,
    factor: str = "optimizer.lr",
    values: tuple = LR,
    also: str = "",
) -> Frames:
    """Flat curves of 4 steps; seed s lies s per cent above the height."""
    parts = []
    for i, value in enumerate(values):
        curves = {
            (arm, s): [h[i] * (1 + 0.01 * s)] * 4 for (arm, h), s in itertools.product(heights.items(), range(seeds))
        }
        frames = with_curves(curves)
        parts.append([f.assign(condition=f"{factor}={value}{also}") for f in (frames.runs, frames["steps"])])
    runs, steps = (pd.concat(tables, ignore_index=True) for tables in zip(*parts, strict=True))
    return Frames(runs, {"steps": steps})


def test_a_combination_of_factors_is_read_as_numbers_and_words():
    got = settings_of("optimizer.lr=0.0004,mini_batches=8,task=a_b,x=1e-05")
    assert got == {"optimizer.lr": 4e-4, "mini_batches": 8.0, "task": "a_b", "x": 1e-5} and settings_of("base") == {}


def test_one_number_per_run_in_increasing_order_of_the_factor():
    table = against(sweep(values=LR[::-1], heights={"grpo": (0.1, 0.2, 0.3, 0.4)}), "optimizer.lr", MAIN)
    assert table.query("seed == 0")["x"].to_list() == sorted(LR)
    assert table.query("seed == 2")["value"].to_list() == pytest.approx([0.408, 0.306, 0.204, 0.102])


def test_the_figure_draws_every_seed_and_the_mean_over_seeds_on_a_log_axis():
    figure = figures.draw("against:optimizer.lr", MAIN.name)(sweep(seeds=4), ["grpo", "gspo"])
    ax, differences = figure.axes
    lines = {line.get_gid(): line for line in ax.lines}
    assert lines["gspo seed=2 value"].get_xdata().tolist() == list(LR)
    assert lines["gspo seed=2 value"].get_ydata() == pytest.approx(np.array(HEIGHTS["gspo"]) * 1.02)
    assert lines["gspo mean value"].get_ydata() == pytest.approx(np.array(HEIGHTS["gspo"]) * 1.015)
    gaps = {line.get_gid(): line for line in differences.lines}
    assert gaps["gspo − grpo mean value"].get_ydata() == pytest.approx([0, 0, 0.8 * 1.015, 0])
    assert gaps["gspo − grpo seed=3 value"].get_ydata() == pytest.approx([0, 0, 0.8 * 1.03, 0])
    assert ax.get_xlabel() == differences.get_xlabel() == "learning rate"
    assert to_hex(lines["gspo mean value"].get_color()).upper() == plots.COLOURS[2]
    assert ax.get_xscale() == "log" and [t.get_text() for t in ax.get_xticklabels()] == [f"{v:g}" for v in LR]
    words = [t.get_text() for t in figure.findobj(lambda o: hasattr(o, "get_text"))]
    assert any("n = 4 seeds" in w and "95% Student t, logit scale" in w for w in words)


def test_named_conditions_beside_a_factor_are_told_apart():
    halves = {"dense": sweep(), "sparse": sweep(heights={"grpo": (0.4,) * 4, "gspo": (0.2,) * 4})}
    runs, steps = (
        pd.concat([of(half).assign(condition=f"{name}," + of(half)["condition"]) for name, half in halves.items()])
        for of in (lambda half: half.runs, lambda half: half["steps"])
    )
    frames = Frames(runs, {"steps": steps})
    table = against(frames, "optimizer.lr", MAIN).query("seed == 0 and arm == 'gspo' and x == 4e-4")
    assert table.set_index("others")["value"].to_dict() == {"dense": 0.8, "sparse": 0.2}
    axes = figures.draw("against:optimizer.lr", MAIN.name)(frames, ["grpo", "gspo"]).axes
    assert {"dense", "sparse"} <= {ax.get_title(where) for ax in axes for where in ("left", "center")}


def test_what_was_gained_has_no_level_before_training():
    metric_of = "greedy exact match, gained since the start"
    frames = sweep()
    first = frames["steps"].query("step == 1").assign(step=0)
    steps = pd.concat([frames["steps"], first]).assign(eval_exact_greedy=lambda rows: rows["reward"])
    (ax, *_) = figures.draw(f"against:optimizer.lr:{metric_of}", MAIN.name)(
        Frames(frames.runs, {"steps": steps}), ["grpo", "gspo"]
    ).axes
    assert not [line for line in ax.lines if str(line.get_gid()).startswith("before RL") and len(line.get_xdata())]


def test_a_study_of_many_combinations_draws_what_spans_them_once_and_the_rest_only_when_asked():
    names, conditions = ["clipping", "learning", "against:optimizer.lr"], ["a=1", "a=2"]
    together = [("learning", None), ("against:optimizer.lr", None)]
    assert figures.plan_figures(names, conditions) == together
    each = [("clipping", "a=1"), ("clipping", "a=2")]
    assert figures.plan_figures(names, conditions, every=True) == together + each
    assert figures.plan_figures(["learning", "clipping"], ["base"]) == [("learning", None), ("clipping", "base")]
    assert figures.file_name("against:optimizer.lr:own") == "against_optimizer.lr_own"


def test_pairs_of_a_sweep_are_compared_only_where_they_are_named():
    assert len(study_tables(sweep(), DECLARED)) == 1
    short, table = study_tables(sweep(), DECLARED | {"comparisons": [["gspo", "grpo"]]})
    assert len(table.rows) == 4 and "Holm over the 4 rows" in table.note
    assert len(study_tables(sweep(), DECLARED, every=True)) == 1 + len(LR)
    fewer = sweep()._where(lambda rows: (rows["arm"] != "gspo") | (rows["condition"] != sweep().conditions[0]))
    (first,) = [
        table for table in study_tables(fewer, DECLARED, every=True) if table.title.endswith(sweep().conditions[0])
    ]
    assert not any("gspo" in heading for heading in first.header), "an arm that was not run in a condition"
    both = study_tables(sweep(), DECLARED | {"comparisons": [["gspo", "grpo"]], "further_endpoints": ["reward"]})
    assert [t.rows for t in both[1:]] == [table.rows] * 2


def test_the_short_table_has_a_row_for_each_arm_of_each_combination():
    """Seeds earn .8, .808, .816 and .824 where nothing is lost. At 4e-4 gspo earns that, grpo nothing."""
    frames = sweep(seeds=4)
    shown = short_table(frames, DECLARED)
    rows = [row for row in shown.rows if row[1]]
    assert [row[0] for row in shown.rows[::3]] == [f"optimizer.lr={lr}" for lr in LR] and len(rows) == 8
    assert rows[4][:3] == ("  grpo", "0.000 [0.000, 0.000]", "–")
    assert rows[5][1:3] == ("0.81 [0.80, 0.83]",) * 2 and rows[1][2] == "equal"
    assert "n = 4 seeds" in shown.note and "difference\nfrom grpo" in shown.header
    alone = short_table(frames, DECLARED | {"arms": [{"name": "grpo"}]})
    assert not any("difference" in name for name in alone.header)
    assert {len(row) for row in alone.rows} == {len(alone.header)}


def test_the_short_table_counts_collapses_and_shows_what_was_measured():
    fallen = with_curves({("grpo", 0): [0.8] * 20 + [0.0] * 30, ("grpo", 1): [0.8] * 50})
    fallen.tables["steps"] = fallen["steps"].assign(token_ess=0.9)
    shown = short_table(fallen, DECLARED)
    assert shown.header[2:] == ("token\nESS", "collapsed") and shown.rows[0][2:] == ("0.90", "1 of 2")


def test_tables_have_a_number_for_each_factor_and_lose_no_column():
    steps = sweep().to_pandas("steps")
    assert steps["optimizer.lr"].dtype == float and set(steps["optimizer.lr"]) == set(LR)
    assert all(one["condition"].unique() == [f"optimizer.lr={lr:g}"] for lr, one in steps.groupby("optimizer.lr"))
    stored = load_study(ROOT / "studies/routing_replay")
    assert list(stored.to_pandas("updates").columns[:6]) == ["study", "arm", "condition", "seed", "code", "lag"]
    lags = stored.to_pandas("lags")
    assert (lags["lag"] == stored["lags"]["lag"]).all(), "the column of the table is not that of the factor"
    assert lags["condition.lag"].unique().tolist() == [2] and "lag" not in stored.runs
    assert stored.to_pandas().groupby("lag").size().to_dict() == {0: 9, 2: 9}
    with pytest.raises(ConfigError, match="'step'"):
        stored.to_pandas("step")


def test_a_table_for_latex_has_intervals_from_four_seeds_on_and_escapes_names():
    curves = {(arm, s): [0.5 + 0.1 * (arm == "a_b") + 0.01 * s] * 8 for arm in ("grpo", "a_b") for s in range(4)}
    frames = with_curves(curves)
    text = frames.to_latex("reward, second half", "reward", arms=["a_b", "grpo"])
    first, grpo = text.splitlines()[5:7]
    found = re.fullmatch(r"a\\_b & \$(\S+)\\ \[(\S+), (\S+)\]\$ & .* \\\\", first)
    want = stats.interval([0.6, 0.61, 0.62, 0.63])
    assert [float(x) for x in found.groups()] == pytest.approx([want.mean, want.low, want.high], abs=6e-3)
    assert "n = 4" in text.splitlines()[0] and grpo.startswith("grpo & $0.52")
    few = frames._where(lambda rows: rows["seed"] < 3)
    assert "$0.61$" in few.to_latex() and "[" not in few.to_latex() and "none below n = 4" in few.to_latex()
