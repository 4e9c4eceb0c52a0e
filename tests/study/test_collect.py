"""Collected tables: small, read like a folder of runs, and enough to make every run again."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moe_rl import cli
from moe_rl.errors import ConfigError, RunError
from moe_rl.storage.columns import COLUMNS
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import Frames, load_study
from moe_rl.study import collect as collecting
from moe_rl.study.collect import KEPT, collect
from moe_rl.study.declaration import read_declaration, write_declaration
from tests import fake_study

STUDY = dataclasses.replace(
    fake_study.study,
    factors={"optimizer.lr": (1e-4, 2e-4, 4e-4)},
    seeds=(0, 1, 5),
    figures=("expert_change", "clipping", "against:optimizer.lr"),
    comparisons=(("gspo", "grpo"),),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A finished study of 3 arms × 3 learning rates × 3 seeds."""
    out = tmp_path_factory.mktemp("runs")
    for planned in STUDY.runs(out):
        with RunFolder.open(planned.path, planned.config.to_dict(), planned.config.hash) as run:
            fake_study.train(planned.config, run, cache=out)
    write_declaration(STUDY, out)
    return out / STUDY.name


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("results") / "fake"
    collect(folder, out, mix_code=True)
    return out


def same(a: Frames, b: Frames) -> bool:
    """Equal rows, in order, for the columns that b has; its floats are those of a, as float32."""
    for name in ("steps", "updates", "layers"):
        x, y = a[name], b[name]
        for column in y.columns.drop("code"):  # of whoever ran it
            want = x[column].astype("float32") if x[column].dtype == "float64" else x[column]
            if not np.array_equal(want.to_numpy(), y[column].to_numpy(), equal_nan=want.dtype.kind == "f"):
                return False
    return True


def test_the_collected_tables_are_the_rows_of_the_runs_in_float32(folder, results):
    there, here = load_study(folder, mix_code=True), load_study(results, mix_code=True)
    assert same(there, here) and len(here["updates"]) == 27 * 12 * 4
    assert here["steps"]["reward"].dtype == "float64", "sums over rows must not be taken in single precision"
    assert {"reward", "eval_exact_greedy"} <= set(here["steps"]) and "attribution_sum_dd" in here["updates"]
    assert not any(c.startswith(("seconds_", "memory_")) for c in here["steps"])
    assert here.runs["seconds"].to_list() == there.runs["seconds"].to_list(), "what each run cost is kept"
    assert here.runs["path"].iloc[0] == "grpo/optimizer.lr=0.0001/seed=0"


def test_the_same_runs_give_the_same_bytes_whatever_the_folder(folder, results, tmp_path):
    shutil.copytree(folder, tmp_path / "fake")
    command = ["runs", "collect", str(tmp_path / "fake"), "--out", str(tmp_path / "again"), "--mix-code"]
    assert cli.main(command) == 0
    for file in results.glob("*.parquet"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_an_arm_a_condition_or_a_run_of_collected_tables_can_be_read(results):
    arm = load_study(results / "gspo", mix_code=True)
    assert len(arm.runs) == 9 and set(arm["steps"]["arm"]) == {"gspo"}
    one = load_study(results / "gspo" / "optimizer.lr=0.0002" / "seed=5", mix_code=True)
    assert len(one.runs) == 1 and len(one["steps"]) == 12 and set(one["layers"]["seed"]) == {5}
    with pytest.raises(RunError, match="contain no run"):
        load_study(results / "gspo" / "optimizer.lr=0.0002" / "seed=7")


def test_further_columns_are_kept_on_request_and_a_pattern_without_match_is_refused(folder, tmp_path):
    collect(folder, tmp_path / "a", also=["loss"], mix_code=True)
    assert "loss" in load_study(tmp_path / "a", mix_code=True)["updates"] and "loss" not in KEPT["updates"]
    with pytest.raises(ConfigError, match="--also los"):
        collect(folder, tmp_path / "b", also=["los"], mix_code=True)
    assert not (tmp_path / "b").exists()


def test_a_table_without_values_is_not_written_and_an_unfinished_run_is_named(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "fake")
    begun = STUDY.runs(tmp_path, seeds=[9])[0]
    with RunFolder.open(begun.path, begun.config.to_dict(), begun.config.hash):
        pass
    collect(copy, tmp_path / "results", mix_code=True)
    assert not (tmp_path / "results" / "lags.parquet").exists(), "no run has a lag"
    frames = load_study(tmp_path / "results", mix_code=True)
    assert len(frames.runs) == 27 and frames["lags"].empty
    (text,) = read_declaration(tmp_path / "results")["left_out"]
    assert text.startswith("grpo/optimizer.lr=0.0001/seed=9 (interrupted")


@pytest.mark.parametrize("where", [".", "../..", "gspo"])
def test_tables_are_not_written_where_they_would_hide_runs(folder, tmp_path, where):
    copy = Path(shutil.copytree(folder, tmp_path / "deep" / "runs" / folder.name))
    out = copy / where
    with pytest.raises(ConfigError, match="hide the runs"):
        collect(copy, out, mix_code=True)
    assert not list(tmp_path.glob("**/runs.parquet"))


def test_tables_of_another_study_are_not_overwritten(folder, results, tmp_path):
    out, other = shutil.copytree(results, tmp_path / "results"), shutil.copytree(folder, tmp_path / "other")
    declared = json.loads((other / "study.json").read_text())
    (other / "study.json").write_text(json.dumps(declared | {"name": "other"}))
    with pytest.raises(ConfigError, match="'other'"):
        collect(other, out, mix_code=True)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == {f.name: f.read_bytes() for f in results.iterdir()}
    collect(folder, out, mix_code=True)


@pytest.fixture
def part(folder, tmp_path) -> Path:
    """Collected tables of one seed of three."""
    few = shutil.copytree(folder, tmp_path / "few" / folder.name)
    for seed in (1, 5):
        for run in few.glob(f"*/*/seed={seed}"):
            shutil.rmtree(run)
    collect(few, tmp_path / "part", mix_code=True)
    return tmp_path / "part"


@pytest.mark.parametrize("after", [0, 3])
def test_a_kill_while_tables_are_written_leaves_the_earlier_ones(folder, results, part, monkeypatch, after):
    before, count, write = {f.name: f.read_bytes() for f in part.iterdir()}, itertools.count(), collecting._write

    def killed(frame, file):
        if next(count) == after:
            raise KeyboardInterrupt
        write(frame, file)

    monkeypatch.setattr(collecting, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        collect(folder, part, mix_code=True)
    assert {f.name: f.read_bytes() for f in part.iterdir() if f.is_file()} == before
    monkeypatch.undo()
    collect(folder, part, mix_code=True)
    assert {f.name: f.read_bytes() for f in part.iterdir()} == {f.name: f.read_bytes() for f in results.iterdir()}


def test_after_a_kill_while_tables_are_replaced_those_of_two_times_cannot_be_read(
    folder, results, tmp_path, monkeypatch
):
    out, rename = shutil.copytree(results, tmp_path / "out"), Path.rename

    def killed(file, to):
        if to.name == "updates.parquet":
            raise KeyboardInterrupt
        return rename(file, to)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        collect(folder, out, mix_code=True)
    with pytest.raises(RunError, match="no finished run"):
        load_study(out, mix_code=True)
    monkeypatch.undo()
    collect(folder, out, mix_code=True)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == {f.name: f.read_bytes() for f in results.iterdir()}


def test_runs_are_read_even_where_tables_lie_beside_or_above_them(folder, results, tmp_path):
    copy = shutil.copytree(folder, tmp_path / folder.name)
    shutil.rmtree(copy / "gspo")
    for above in (copy, tmp_path):
        shutil.copytree(results, above, dirs_exist_ok=True)
        assert set(load_study(copy, mix_code=True).runs["arm"]) == {"grpo", "grpo-replay"}


def test_every_pattern_of_what_is_kept_names_a_column():
    for table, patterns in KEPT.items():
        listed = [name for name, column in COLUMNS.items() if table in column.tables.split()]
        assert [p for p in patterns.split() if not fnmatch.filter(listed, p)] == [], table


def test_every_column_that_a_study_decides_by_or_draws_is_kept(folder, tmp_path):
    declared = json.loads((folder / "study.json").read_text())
    shutil.copytree(folder, tmp_path / "fake")
    (tmp_path / "fake" / "study.json").write_text(
        json.dumps(
            declared
            | {
                "endpoint": "seconds_step, second half",
                "further_endpoints": ["memory_peak_mb"],
                "figures": ["against:optimizer.lr:noise_floor_kl_k3"],
            }
        )
    )
    collect(tmp_path / "fake", tmp_path / "tables", mix_code=True)
    steps = load_study(tmp_path / "tables", mix_code=True)["steps"]
    assert {"seconds_step", "memory_peak_mb", "noise_floor_kl_k3"} <= {*steps}
