"""Figures show the numbers of the tables, in the colours of the study's order, the same bytes every time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from moe_rl.errors import RunError
from moe_rl.results import figures, plots, stats
from moe_rl.results.figures import attribution
from moe_rl.results.summary import MAIN, per_run
from moe_rl.storage.frames import Frames
from tests import fake_study

ARMS = [arm.name for arm in fake_study.study.arms]
DRAWN = [*figures.FIGURES]
"""Figures over steps, mini-batches and MoE layers, which say of every seed what it measured."""


def frames_of(seeds: int, steps: int) -> Frames:
    tables, runs = {name: [] for name in ("steps", "updates", "layers")}, []
    for arm in fake_study.study.arms:
        for seed in range(seeds):
            run = fake_study.study.base.replace(arm=arm, seed=seed, steps=steps, prompts_per_step=2, group_size=5)
            rows = fake_study.fake_tables(run)
            labels = {"study": "fake", "arm": arm.name, "condition": "base", "seed": seed, "code": "1"}
            config = json.dumps(run.to_dict())
            runs.append(labels | {"state": "finished", "step": steps, "steps": steps, "config": config})
            for name in tables:
                tables[name].append(pd.DataFrame(rows[name]).assign(**labels))
    return Frames(pd.DataFrame(runs), {name: pd.concat(tables[name], ignore_index=True) for name in tables})


@pytest.fixture(scope="module")
def frames() -> Frames:
    return frames_of(seeds=3, steps=24)


EIGHT = ["grpo", *(f"a-method-with-a-long-name-{i}" for i in range(7))]


@pytest.fixture(scope="module")
def eight() -> Frames:
    """Eight arms on four seeds: the most that each have a look of their own."""
    one = frames_of(seeds=4, steps=10)
    grpo = one.of_arms(["grpo"])
    tables = {"runs": grpo.runs, **grpo.tables}
    tables["layers"] = tables["layers"].assign(load_max_violation=0.4)
    every = {name: pd.concat([t.assign(arm=arm) for arm in EIGHT], ignore_index=True) for name, t in tables.items()}
    every["steps"]["reward"] += 0.01 * every["steps"]["arm"].map(EIGHT.index)
    return Frames(every.pop("runs"), every)


def line(ax, gid: str) -> tuple[np.ndarray, np.ndarray]:
    found = [one for one in ax.lines if one.get_gid() == gid]
    assert len(found) == 1, gid
    return found[0].get_data()


def test_learning_draws_every_seed_and_their_mean_from_the_table(frames):
    figure = figures.learning(frames, ARMS)
    for ax, column in zip(figure.axes[:3], ("reward", "eval_exact_greedy", "eval_exact_sampled"), strict=True):
        for arm in ARMS:
            table = (
                frames["steps"]
                .query("arm == @arm")
                .dropna(subset=[column])
                .pivot(index="seed", columns="step", values=column)
            )
            for seed in range(3):
                x, y = line(ax, f"{arm} seed={seed} {column}")
                assert (x == table.columns).all() and (y == table.loc[seed]).all()
            assert np.allclose(line(ax, f"{arm} mean {column}")[1], table.mean(), rtol=0, atol=1e-15)


def test_the_band_is_the_interval_over_seeds_on_the_scale_of_a_share():
    four = frames_of(seeds=4, steps=12)
    ax = figures.learning(four, ARMS[:1]).axes[1]
    table = four["steps"].query("arm == 'grpo'").dropna(subset=["eval_exact_greedy"])
    (band,) = [c.get_paths()[0].vertices for c in ax.collections]
    for step, rows in table.groupby("step")["eval_exact_greedy"]:
        want = stats.band(rows.to_numpy()[:, None], scale="logit")
        heights = band[band[:, 0] == step, 1]
        assert heights.min() == pytest.approx(want.low[0]) and heights.max() == pytest.approx(want.high[0])


@pytest.mark.parametrize(
    ("seeds", "arms", "bands", "lines"),
    [(3, 3, False, True), (4, 3, True, True), (9, 3, True, False), (8, 4, True, False)],
)
def test_seeds_are_drawn_one_by_one_where_they_are_few_and_bands_where_there_is_an_interval(seeds, arms, bands, lines):
    rows = [
        {"arm": f"a{a}", "seed": s, "step": t, "reward": 0.3 + 0.01 * s + 0.1 * a}
        for a in range(arms)
        for s in range(seeds)
        for t in range(3)
    ]
    _, (ax,) = plots.new_figure(1, "")
    note = plots.curves(ax, pd.DataFrame(rows), "reward", "step", [f"a{a}" for a in range(arms)])
    assert bool(ax.collections) == bands == ("band:" in note)
    assert any(" seed=" in one.get_gid() for one in ax.lines) == lines == ("thin lines" in note)
    assert all(tick == int(tick) for tick in ax.get_xticks())


def test_no_band_leaves_the_range_of_its_quantity():
    near = pd.DataFrame(
        [
            {"arm": "a", "seed": s, "step": 1, "reward": r, "token_log_ratio_var": 9 * r, "own_x": r}
            for s, r in enumerate((0.0, 0.01, 0.02, 0.6))
        ]
    )
    limits = {}
    for column in ("reward", "token_log_ratio_var", "own_x"):
        _, (ax,) = plots.new_figure(1, "")
        plots.curves(ax, pd.concat([near, near.assign(step=2)]), column, "step", ["a"])
        limits[column] = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert limits["own_x"].min() < 0, "nobody knows what it may be"
    assert limits["reward"].min() > 0 and limits["reward"].max() < 1
    assert limits["token_log_ratio_var"].min() > 0


def test_a_condition_whose_runs_have_only_begun_has_an_empty_panel(frames):
    begun = Frames(
        pd.concat([frames.runs.assign(condition="a=1"), frames.runs.assign(condition="a=2", step=0)]),
        {name: table.assign(condition="a=1") for name, table in frames.tables.items()},
    )
    first, *_, last = (ax.lines for ax in figures.learning(begun, ARMS).axes)
    assert first and not last


def test_differences_within_seeds_stand_beside_the_levels(frames):
    ax = figures.learning(frames, ARMS, comparisons=[("gspo", "grpo")]).axes[3]
    values = per_run(frames, MAIN)
    want = values["gspo"] - values["grpo"]
    assert sorted(line(ax, "gspo − grpo seeds")[0]) == pytest.approx(sorted(want))
    assert line(ax, "gspo − grpo mean")[0] == pytest.approx([want.mean()])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["gspo − grpo"]
    assert len(figures.learning(frames, ARMS[:1]).axes) == 3, "one arm has nothing to differ from"


def test_rows_of_other_arms_and_seeds_are_in_the_legend_and_in_the_note():
    few, more = frames_of(seeds=2, steps=8), frames_of(seeds=3, steps=8)

    def condition(frames: Frames, name: str, arms: list[str]) -> list[pd.DataFrame]:
        return [t[t["arm"].isin(arms)].assign(condition=name) for t in (frames.runs, *frames.tables.values())]

    parts = zip(condition(few, "quiet", ARMS[:2]), condition(more, "moved", ARMS[2:]), strict=True)
    runs, *tables = (pd.concat(both, ignore_index=True) for both in parts)
    figure = figures.learning(Frames(runs, dict(zip(few.tables, tables, strict=True))), ARMS)
    legend = figure.legends[0]
    assert set(ARMS) <= {text.get_text() for text in legend.get_texts()}
    note = " ".join(legend.get_title().get_text().split())
    assert "quiet: mean over n = 2" in note and "moved: mean over n = 3" in note


def test_long_curves_are_means_over_windows_and_say_so():
    long = frames_of(seeds=2, steps=60)
    figure = figures.learning(long, ARMS)
    table = long["steps"].query("arm == 'gspo' and seed == 1").sort_values("step")
    x, y = line(figure.axes[0], "gspo seed=1 reward")
    assert len(x) == 20 and x[0] == 2 and y[0] == pytest.approx(table["reward"][:3].mean(), abs=1e-15)
    assert y[-1] == pytest.approx(table["reward"][-3:].mean(), abs=1e-15)
    assert "mean of 3 steps" in figure.axes[0].get_xlabel()
    assert "mean of" not in figures.learning(frames_of(2, 25), ARMS).axes[0].get_xlabel()


def test_spread_and_shares_pool_sums_before_they_divide():
    # two steps of unlike size: pooled Var(D) = (2 + 90) / (2 + 8) = 9.2, not the mean of 1 and 11.25
    sums = [
        {"n": 2, "d": 0, "r": 0, "dd": 2, "rr": 0.5, "jj": 1.5, "rj": 0},
        {"n": 8, "d": 0, "r": 0, "dd": 90, "rr": 45.5, "jj": 136.5, "rj": -46},
    ]
    updates = pd.DataFrame(
        [
            {"step": i, "update": 2, "arm": "grpo", "seed": 0, "attribution_n": s.pop("n")}
            | {f"attribution_sum_{k}": float(v) for k, v in s.items()}
            for i, s in enumerate(sums)
        ]
    )
    row = attribution(updates, by=["update"]).iloc[0]
    assert row["unconstrained_std"] == pytest.approx(9.2**0.5) and row["replayed_std"] == pytest.approx(4.6**0.5)
    assert [row[k] for k in figures.SHARES] == pytest.approx([0.5, 1.5, -1.0])


def test_a_method_has_one_colour_and_symbol_whatever_the_study():
    orders = (["grpo", "grpo-bounded", "grpo-replay", "gspo"], ["gspo", "m2po", "grpo-r3", "grpo-replay", "grpo"])
    for method, place in (("grpo", 0), ("grpo-replay", 1), ("gspo", 2)):
        assert {plots.colour_of(method, arms) for arms in orders} == {plots.COLOURS[place]}
    for arms in orders:
        assert len({plots.colour_of(arm, arms) for arm in arms}) == len(arms)
    assert plots.colour_of("gspo", ["gspo_short", "grpo"]) == plots.COLOURS[2], "of a comparison with an arm not shown"
    together = ["grpo", "gspo", "gspo_short", "m2po"]
    assert len({(plots.colour_of(arm, together), plots.symbol_of(arm, together)) for arm in together}) == 4
    assert [plots.symbol_of(name) for name in ("grpo", "gspo", "gspo − grpo", "m2po")] == ["o", "^", "^", "o"]


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_names_n_and_interval_and_labels_its_axes(name):
    figure = figures.FIGURES[name](frames_of(seeds=4, steps=12), ARMS)
    words = [t.get_text() for t in figure.findobj(lambda o: hasattr(o, "get_text"))]
    assert any("n = 4 seeds" in w and "95% Student t" in w for w in words)
    assert figure.axes[0].get_ylabel() and all(ax.get_xlabel() or ax.get_xticklabels() for ax in figure.axes)
    assert all(arm in words for arm in ARMS)


@pytest.mark.parametrize("width", [3.25, 6.75])
@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_for_a_paper_has_its_width_small_type_and_nothing_cut(eight, name, width):
    few = eight if width < 4 else eight.of_arms(EIGHT[:3])
    with plots.using(plots.Look(width, paper=True)):
        figure = figures.FIGURES[name](few, EIGHT)
        figure.draw_without_rendering()
    drawn = figure.get_tightbbox()
    assert figure.get_figwidth() == width
    assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= figure.get_figheight()
    texts = [t for t in figure.findobj(Text) if t.get_text()]
    assert {t.get_fontsize() for t in texts} <= {7, 8} and figure.get_suptitle() == ""
    assert not any("?" in t.get_text() for t in texts) and "n = 4 seeds" in figure.get_label()
    for ax in figure.axes:
        named = ax.get_ylabel() or ax.get_yticklabels() or not ax.get_subplotspec().is_first_col()
        assert named and ax.get_window_extent().height > 0.5 * figure.dpi
        for side in (ax.get_xticklabels(), ax.get_yticklabels()):
            boxes = [t.get_window_extent() for t in side if t.get_text() and not t.get_rotation()]
            assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes)), [t.get_text() for t in side]


def test_a_pdf_is_a_page_of_its_width_with_embedded_fonts(frames, tmp_path):
    with plots.using(plots.Look(3.25, paper=True)):
        figure = figures.clipping(frames, ARMS)
        (file,) = plots.save(figure, tmp_path, "clipping", ["pdf"])
    page = file.read_bytes()
    (left, bottom, width, height) = map(float, re.search(rb"/MediaBox \[([^]]*)\]", page)[1].split())
    assert (left, bottom, width) == (0, 0, 234) and height == pytest.approx(72 * figure.get_figheight())
    assert b"/CIDFontType2" in page and b"/FontFile2" in page and b"/Type3" not in page


def test_eight_arms_have_each_a_colour_that_is_seen_on_white_and_a_marker(eight):
    looks = {(plots.colour_of(arm, EIGHT), plots.symbol_of(arm, EIGHT)) for arm in EIGHT}
    colours, markers = zip(*looks, strict=True)
    assert len({*colours}) == len({*markers}) == 8
    for colour in colours:
        light = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in to_rgb(colour)]
        assert 1.05 / (np.dot(light, (0.2126, 0.7152, 0.0722)) + 0.05) > 3, colour
    figure = figures.learning(eight, EIGHT, comparisons=[(EIGHT[5], "grpo")])
    means = [
        line(figure.axes[1], f"{EIGHT[5]} mean eval_exact_greedy"),
        line(figure.axes[3], f"{EIGHT[5]} − grpo mean"),
    ]
    assert len(means) == 2
    lines = [one for ax in figure.axes for one in ax.lines if re.match(rf"{EIGHT[5]}.* mean", str(one.get_gid()))]
    assert {one.get_marker() for one in lines} - {""} == {plots.symbol_of(EIGHT[5], EIGHT)}
    assert {one.get_color() for one in lines} == {plots.colour_of(EIGHT[5], EIGHT)}


def test_ratios_and_layers_draw_what_was_measured_of_each_condition(frames):
    """Without a measured load there is no panel of it."""
    both = Frames(
        *(pd.concat([t, t.assign(condition="lag=2")]) for t in (frames.runs,)),
        {name: pd.concat([t, t.assign(condition="lag=2")]) for name, t in frames.tables.items()},
    )
    drawn = figures.layers(both, ARMS)
    assert [ax.get_title(loc="left") for ax in drawn.axes] == ["base\nExpert change", "lag=2\nExpert change"]
    table = frames["layers"].query("arm == 'gspo'").groupby("moe_layer")["expert_change_rate"].mean()
    assert np.allclose(line(drawn.axes[1], "gspo mean expert_change_rate")[1], table)
    titles = [ax.get_title(loc="left") for ax in figures.ratios(frames, ARMS).axes]
    assert titles == ["Spread of log-ratios", "Clipping"]
    with pytest.raises(RunError, match="load_max_violation"):
        figures.layers(Frames(frames.runs, {"layers": frames["layers"][["arm", "seed", "step", "condition"]]}), ARMS)


def test_the_same_tables_give_the_same_bytes(frames, tmp_path):
    formats = ["png", "svg", "pdf"]
    first, again = (plots.save(figures.clipping(frames, ARMS), tmp_path / d, "clipping", formats) for d in "ab")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]


def test_a_seed_that_ended_early_is_drawn_to_its_end_and_the_mean_stops_there(frames):
    cut = frames["steps"].query("not (arm == 'grpo' and seed == 1 and step > 10)")
    ax = figures.learning(dataclasses.replace(frames, tables={"steps": cut}), ARMS).axes[0]
    assert line(ax, "grpo seed=1 reward")[0][-1] == 10 and line(ax, "grpo seed=0 reward")[0][-1] == 24
    assert line(ax, "grpo mean reward")[0][-1] == 10
