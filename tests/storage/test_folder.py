"""Run folders: what is committed survives, what differs is refused, and two runs part where they say."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from moe_rl import cli
from moe_rl.config import RunConfig
from moe_rl.errors import RunError
from moe_rl.storage import columns
from moe_rl.storage import folder as runs
from moe_rl.storage.commits import latest_commit, read_rows
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import diff, load_study, read_table, settings_that_differ
from moe_rl.study.collect import collect
from moe_rl.study.declaration import write_declaration
from moe_rl.study.rerun import verdict
from tests import fake_study

CONFIG = fake_study.study.base


def path_of(root: Path, config: RunConfig) -> Path:
    return root / "fake" / config.arm.name / "base" / f"seed={config.seed}"


def open_run(root: Path, config: RunConfig = CONFIG) -> RunFolder:
    return RunFolder.open(path_of(root, config), config.to_dict(), config.hash)


def train(root: Path, config: RunConfig = CONFIG) -> Path:
    with open_run(root, config) as folder:
        fake_study.train(config, folder, cache=root)
    return folder.path


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*")
            if p.is_file() and p.name not in (runs.LOCK, "lock.holder")}


def nothing(_: Path) -> None:
    pass


def commit(folder: RunFolder, step: int, rows: list[dict], save: Callable[[Path], None] = nothing) -> None:
    folder.add("steps", rows)
    folder.commit(step, save)


def rows_of(folder: RunFolder, table: str) -> list[dict]:
    """What is committed, without the columns that a row has no value in."""
    rows = read_rows(folder.path, table, folder.manifest.get("finished")).to_pylist()
    return [{k: v for k, v in row.items() if v is not None} for row in rows]


def test_a_commit_gives_back_exactly_its_rows_and_checkpoint(tmp_path):
    steps = [{"step": 1, "reward": 0.1 + 0.2}, {"step": 2, "reward": math.nan, "eval_n": 3}]
    updates = [{"step": 1, "update": 1, "loss": -1e-300}]
    with open_run(tmp_path) as folder:
        folder.add("steps", steps)
        folder.add("updates", updates)
        folder.commit(2, lambda p: (p / "weights").write_bytes(b"123"))
    with open_run(tmp_path) as folder:
        step, checkpoint = folder.latest()
    assert step == 2 and (checkpoint / "weights").read_bytes() == b"123"
    assert rows_of(folder, "updates") == updates and rows_of(folder, "layers") == []
    again = rows_of(folder, "steps")
    assert again[0] == steps[0] and again[1].keys() == steps[1].keys()
    assert math.isnan(again[1]["reward"]), "a measured NaN is not a missing value"


def test_before_the_first_commit_there_is_nothing(tmp_path):
    with open_run(tmp_path) as folder:
        assert folder.latest() == (0, None) and rows_of(folder, "steps") == []


def test_only_the_last_commit_is_kept(tmp_path):
    with open_run(tmp_path) as folder:
        for step in (3, 12, 100):
            commit(folder, step, [{"step": step}])
        assert [p.name for p in (folder.path / "commit").iterdir()] == ["step=000100"]
        assert folder.latest()[0] == 100 and [r["step"] for r in rows_of(folder, "steps")] == [3, 12, 100]


def test_a_column_without_an_entry_is_refused_and_nothing_is_committed(tmp_path):
    with open_run(tmp_path) as folder:
        commit(folder, 1, [{"step": 1}])
        with pytest.raises(RunError, match="no_such_column"):
            commit(folder, 2, [{"step": 1, "no_such_column": 1.0}])
        with pytest.raises(RunError, match="no table 'losses', only steps, "):
            folder.add("losses", [{"step": 1}])
        assert folder.latest()[0] == 1 and rows_of(folder, "steps") == [{"step": 1}]


def test_a_checkpoint_that_fails_half_way_leaves_the_old_commit(tmp_path):
    def broken(path: Path) -> None:
        (path / "half").write_text("x")
        raise OSError("disk full")

    with open_run(tmp_path) as folder:
        commit(folder, 1, [{"step": 1}])
        with pytest.raises(OSError, match="disk full"):
            commit(folder, 2, [{"step": 2}], broken)
    with open_run(tmp_path) as folder:
        assert folder.latest()[0] == 1 and rows_of(folder, "steps") == [{"step": 1}]
        assert not list(folder.path.rglob(".tmp-*")), "leftovers are cleaned on open"


def test_another_configuration_is_refused_with_its_keys_and_nothing_is_touched(tmp_path):
    path = train(tmp_path)
    before = files(path)
    with pytest.raises(RunError) as error:
        other = CONFIG.replace(**{"optimizer.lr": 1.0, "group_size": 9, "steps": 99})
        RunFolder.open(path, other.to_dict(), other.hash)
    assert "optimizer.lr: 0.0002 there, 1.0 now" in str(error.value)
    assert "group_size: 4 there, 9 now" in str(error.value) and "steps" not in str(error.value)
    assert files(path) == before


@pytest.mark.parametrize("name, content", [("notes.txt", "mine"), ("manifest.json", "{"), ("manifest.json", "[1]")])
def test_a_foreign_folder_is_refused_and_not_touched(tmp_path, name, content):
    path = path_of(tmp_path, CONFIG)
    path.mkdir(parents=True)
    (path / name).write_text(content)
    with pytest.raises(RunError, match="Nothing was changed"):
        open_run(tmp_path)
    assert files(path) == {name: content.encode()} and not (path / runs.LOCK).exists()


def test_two_processes_cannot_run_one_folder(tmp_path):
    with open_run(tmp_path), pytest.raises(RunError, match="another process"):
        open_run(tmp_path)
    open_run(tmp_path).__exit__()


def test_more_steps_extend_a_finished_run_to_the_same_end(tmp_path):
    long = train(tmp_path / "long", CONFIG.replace(steps=17))
    train(tmp_path / "short", CONFIG.replace(steps=7))
    short = train(tmp_path / "short", CONFIG.replace(steps=17))
    assert diff(long, short) is None
    a, b = (runs.read_manifest(p) for p in (long, short))
    assert a["checkpoint"] == b["checkpoint"] and b["config"]["steps"] == b["finished"] == 17


def test_fewer_steps_leave_a_finished_run_finished(tmp_path):
    path = train(tmp_path)
    assert runs.state(path, 5)["state"] == "finished" and runs.state(path, 13)["state"] == "interrupted"


def test_the_manifest_says_with_what_the_run_was_made(tmp_path):
    manifest = runs.read_manifest(train(tmp_path))
    assert RunConfig.hash.fget(CONFIG) == manifest["hash"] and manifest["config"]["optimizer"]["lr"] == 2e-4
    assert manifest["seed"] == 0 and manifest["device"] == "cpu" and manifest["finished"] == 12
    assert manifest["packages"]["torch"] and manifest["packages"]["python"]
    assert len(manifest["code"]) == 1 and manifest["seconds"] > 0


def test_states_from_waiting_to_finished(tmp_path):
    path = path_of(tmp_path, CONFIG)
    assert runs.state(path, 12) == {"step": 0, "state": "waiting", "steps": 12}
    with open_run(tmp_path) as folder:
        folder.progress(4, seconds_per_step=2.0)
        now = runs.state(path)
        assert (now["state"], now["step"], now["seconds_left"]) == ("running", 4, 16.0)
    assert runs.state(path)["state"] == "interrupted"
    with open_run(tmp_path) as folder:
        folder.progress(4, error="a bug")
    assert runs.state(path)["state"] == "failed"
    train(tmp_path)
    assert (runs.state(path)["state"], runs.state(path)["seconds_left"]) == ("finished", 0.0)


def test_a_diverged_run_has_ended(tmp_path):
    with open_run(tmp_path) as folder:
        commit(folder, 3, [{"step": 3}])
        folder.finish(diverged="gradients are not finite")
    assert runs.state(folder.path)["state"] == "diverged"
    assert runs.state(folder.path, steps=3)["state"] == "finished", "it had come so far"


def test_a_run_that_diverged_in_the_evaluation_at_its_end_has_diverged(tmp_path):
    with open_run(tmp_path) as folder:
        commit(folder, CONFIG.steps, [{"step": CONFIG.steps}])
        folder.finish(diverged="logits are not finite")
    assert runs.state(folder.path)["state"] == "diverged"


def commit_forever(path: Path) -> None:
    def save(folder: Path) -> None:
        for i in range(5):
            (folder / str(i)).write_text(str(step))
            time.sleep(0.005)  # most kills shall fall between two files

    with RunFolder.open(path, CONFIG.to_dict(), CONFIG.hash) as folder:
        step, _ = folder.latest()
        while True:
            step += 1
            commit(folder, step, [{"step": step}], save)


def test_sigkill_inside_commits_always_leaves_a_whole_one(tmp_path):
    path, wait = path_of(tmp_path, CONFIG), np.random.default_rng(0)
    context, step = multiprocessing.get_context("fork"), 0
    for _ in range(12):
        process = context.Process(target=commit_forever, args=(path,))
        process.start()
        while process.is_alive() and not any(int(c.name[5:]) > step for c in path.glob("commit/step=*")):
            time.sleep(0.001)
        time.sleep(wait.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        before = step
        with open_run(tmp_path) as folder:
            step, checkpoint = folder.latest()
            assert step > before and [r["step"] for r in rows_of(folder, "steps")] == list(range(1, step + 1))
            assert {(checkpoint / str(i)).read_text() for i in range(5)} == {str(step)}


def test_study_frames_say_which_run_each_row_is_from(tmp_path):
    for config in (CONFIG, CONFIG.replace(seed=3), CONFIG.replace(arm=fake_study.GSPO)):
        train(tmp_path, config)
    frames = load_study(tmp_path / "fake")
    steps = frames["steps"]
    assert set(zip(steps["arm"], steps["seed"], strict=True)) == {("grpo", 0), ("grpo", 3), ("gspo", 0)}
    assert len(frames.runs) == 3 and len(frames["steps"]) == 36 and len(frames["updates"]) == 36 * 4
    assert frames["steps"]["code"].unique().tolist() == runs.read_manifest(path_of(tmp_path, CONFIG))["code"]
    one = frames["steps"].query("arm == 'gspo'")["reward"].to_list()
    assert one == [r["reward"] for r in fake_study.fake_tables(CONFIG.replace(arm=fake_study.GSPO))["steps"]]


def test_unfinished_runs_are_left_out_and_named(tmp_path):
    train(tmp_path)
    with open_run(tmp_path, CONFIG.replace(seed=1)) as folder:
        commit(folder, 2, [{"step": 1, "reward": 0.5}])
    frames = load_study(tmp_path / "fake")
    assert frames["steps"]["seed"].unique().tolist() == [0] and "seed=1 (interrupted" in frames.left_out[0]
    assert load_study(tmp_path / "fake", unfinished=True)["steps"]["seed"].unique().tolist() == [0, 1]


def test_runs_of_different_code_are_never_pooled_silently(tmp_path, monkeypatch):
    train(tmp_path)
    monkeypatch.setattr(runs, "code_version", lambda: "0.0.1+other")
    train(tmp_path, CONFIG.replace(seed=1))
    with pytest.raises(RunError, match=r"different versions .*0\.0\.1\+other"):
        load_study(tmp_path)
    assert load_study(tmp_path, mix_code=True).runs["code"].nunique() == 2


def test_a_run_resumed_by_other_code_says_so(tmp_path, monkeypatch):
    train(tmp_path, CONFIG.replace(steps=3))
    monkeypatch.setattr(runs, "code_version", lambda: "0.0.1+other")
    path = train(tmp_path)
    assert len(runs.read_manifest(path)["code"]) == 2
    with pytest.raises(RunError, match=" then 0.0.1"):
        load_study(path)


def test_diff_names_the_first_row_and_column_in_which_runs_part(tmp_path, monkeypatch):
    a = train(tmp_path / "a")
    real = fake_study.fake_step

    def changed(config, step, weights):
        row, updates, layers = real(config, step, weights)
        if step >= 5:
            row["reward"] += 1e-16 + row["reward"] * 1e-15
            layers[3]["any_change_rate"] = 0.5
        return row, updates, layers

    monkeypatch.setattr(fake_study, "fake_step", changed)
    b = train(tmp_path / "b")
    found = diff(a, b)
    assert (found.table, found.row, found.column) == ("layers", {"step": 5, "site": 3}, "any_change_rate")
    assert (
        found.b == 0.5 and found.a == read_table(a, "layers").query("step == 5 and site == 3")["any_change_rate"].item()
    )


def test_diff_ignores_time_and_memory_and_sees_missing_values_and_rows(tmp_path):
    def run(name: str, rows: list[dict]) -> Path:
        with open_run(tmp_path / name) as folder:
            commit(folder, 2, rows)
            folder.finish()
        return folder.path

    a = run("a", [{"step": 1, "reward": math.nan, "seconds_step": 1.0}, {"step": 2, "reward": 1.0}])
    same = run("b", [{"step": 1, "reward": math.nan, "seconds_step": 9.0}, {"step": 2, "reward": 1.0}])
    value = run("c", [{"step": 1, "reward": 0.0}, {"step": 2, "reward": 1.0}])
    short = run("d", [{"step": 1, "reward": math.nan}])
    column = run("e", [{"step": 1, "reward": math.nan}, {"step": 2, "reward": 1.0, "exact": 0.0}])
    assert diff(a, same) is None
    assert (diff(a, value).row, diff(a, value).b) == ({"step": 1}, 0.0)
    assert (diff(a, short).row, diff(a, short).column, diff(a, short).a) == ({"step": 2}, None, True)
    assert (diff(a, column).row, diff(a, column).column) == ({"step": 2}, "exact")
    both = run("f", [{"step": 1, "reward": math.nan, "exact": 0.0}, {"step": 2, "reward": 5.0, "exact": 0.0}])
    assert (diff(a, both).row, diff(a, both).column) == ({"step": 2}, "reward"), "before a column that a lacks"


def test_settings_that_differ_are_named_with_both_values(tmp_path):
    a, b = train(tmp_path), train(tmp_path, CONFIG.replace(seed=4, **{"optimizer.lr": 0.5}))
    found = settings_that_differ(a, b)
    assert found["config.optimizer.lr"] == (2e-4, 0.5) and found["config.seed"] == (0, 4)
    assert set(found) == {"config.optimizer.lr", "config.seed", "checkpoint"}


def test_published_tables_are_plain_parquet_that_anyone_can_read(tmp_path):
    path = train(tmp_path)
    frame = pd.read_parquet(path / "updates.parquet", partitioning=None)
    assert frame["update"].tolist() == [1, 2, 3, 4] * 12 and json.loads((path / "manifest.json").read_text())


@pytest.mark.parametrize("stray", [".DS_Store", "step=abc", "step=000007.txt"])
def test_a_stray_file_among_the_commits_is_left_alone(tmp_path, stray):
    with open_run(tmp_path, CONFIG.replace(steps=6)) as folder:
        (folder.path / "commit").mkdir()
        (folder.path / "commit" / stray).write_text("mine")
        fake_study.train(CONFIG.replace(steps=6), folder, cache=tmp_path)
        assert folder.latest()[0] == 6
    path = train(tmp_path)
    assert (path / "commit" / stray).read_text() == "mine" and runs.state(path)["state"] == "finished"
    assert len(read_table(path, "steps")) == 12


@pytest.mark.parametrize("content", ["", '{"step": 4, "ste', "[1]"])
def test_a_damaged_progress_file_is_as_none(tmp_path, content):
    with open_run(tmp_path) as folder:
        folder.progress(4)
    (folder.path / "progress.json").write_text(content)
    assert (runs.state(folder.path)["state"], runs.state(folder.path)["step"]) == ("interrupted", 0)
    train(tmp_path)
    (folder.path / "progress.json").write_text(content)
    assert runs.state(folder.path) == {"state": "finished", "step": 12, "steps": 12, "seconds_left": 0.0}


def test_a_truncated_table_is_named_with_what_to_do(tmp_path):
    file = train(tmp_path) / "updates.parquet"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(RunError, match=r"updates\.parquet cannot be read .*run it again"):
        load_study(tmp_path / "fake")


def test_a_renamed_run_is_named_with_what_to_do(tmp_path):
    path = train(tmp_path)
    for name in ("old", "seed=0-old"):
        path = path.rename(path.with_name(name))
        with pytest.raises(RunError, match=rf"{name} .*seed=<n>"):
            load_study(path)


def test_a_commit_writes_its_own_rows_and_leaves_the_earlier_ones_as_they_are(tmp_path):
    with open_run(tmp_path) as folder:
        for step in range(1, 6):
            commit(folder, step, [{"step": step, "reward": float(step)}])
            parts = sorted((folder.path / "tables" / "steps").iterdir())
            assert [p.name for p in parts] == [f"step={n:06d}.parquet" for n in range(1, step + 1)]
            assert len(pd.read_parquet(parts[-1], partitioning=None)) == 1
            stamps = {p: p.stat().st_mtime_ns for p in parts[:-1]} | (stamps if step > 1 else {})
        assert stamps == {p: p.stat().st_mtime_ns for p in parts[:-1]}
        folder.finish()
        assert not (folder.path / "tables").exists() and len(read_table(folder.path, "steps")) == 5


def test_columns_and_types_may_differ_between_commits(tmp_path):
    with open_run(tmp_path) as folder:
        commit(folder, 1, [{"step": 1, "reward": 1}])
        commit(folder, 3, [{"step": 2, "eval_n": 7, "exact": None}, {"step": 3, "reward": 0.5}])
        folder.finish()
    steps = read_table(folder.path, "steps")
    assert list(steps) == ["step", "reward", "exact", "eval_n"] and steps["reward"].tolist()[::2] == [1.0, 0.5]
    assert steps["step"].dtype == "int64" and np.isnan(steps["reward"][1])


def test_rows_that_a_killed_commit_left_count_for_nothing(tmp_path, monkeypatch):
    whole = train(tmp_path / "whole")
    train(tmp_path / "cut", CONFIG.replace(steps=6))
    real = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name == ".tmp-9":
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut")
    monkeypatch.undo()
    path = path_of(tmp_path / "cut", CONFIG)
    orphan = path / "tables" / "layers" / "step=000009.parquet"
    orphan.write_bytes(orphan.read_bytes()[:100])
    assert read_table(path, "steps")["step"].tolist() == list(range(1, 7))
    assert diff(whole, train(tmp_path / "cut")) is None and len(read_table(path, "layers")) == 12 * fake_study.SITES


def to_earlier_format(path: Path) -> None:
    """Whole tables in the commit, and no parts, as earlier versions kept them."""
    last = latest_commit(path)
    for name in columns.TABLES:
        table = read_rows(path, name, runs.read_manifest(path).get("finished"))
        pq.write_table(table, last / f"{name}.parquet")
    shutil.rmtree(path / "tables", ignore_errors=True)


@pytest.mark.parametrize("finished", [0, 6], ids=["interrupted", "extended"])
def test_a_run_of_an_earlier_format_goes_on_to_the_same_end(tmp_path, finished):
    whole, path = train(tmp_path / "whole"), path_of(tmp_path / "cut", CONFIG)
    if finished:
        train(tmp_path / "cut", CONFIG.replace(steps=finished))
        to_earlier_format(path)
    with monkeypatched(interrupt_after(9)), pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut")
    to_earlier_format(path)
    assert read_table(path, "steps")["step"].tolist() == list(range(1, 10))
    with monkeypatched(interrupt_after(12)), pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut")
    assert read_table(path, "updates")["step"].tolist() == [s for s in range(1, 13) for _ in range(4)]
    assert diff(whole, train(tmp_path / "cut")) is None
    assert runs.read_manifest(path)["checkpoint"] == runs.read_manifest(whole)["checkpoint"]


def interrupt_after(step: int) -> Callable:
    """A commit that is followed by Ctrl-C at a step."""
    real = RunFolder.commit

    def commit(self: RunFolder, at: int, save: Callable[[Path], None]) -> None:
        real(self, at, save)
        if at == step:
            raise KeyboardInterrupt

    return commit


@contextlib.contextmanager
def monkeypatched(commit: Callable) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "commit", commit)
        yield


def test_an_interrupted_extension_leaves_what_was_finished_readable(tmp_path, capsys):
    for seed in (0, 1):
        path = train(tmp_path, CONFIG.replace(seed=seed))
    before, frame = load_study(path), read_table(path, "updates")
    with monkeypatched(interrupt_after(15)), pytest.raises(KeyboardInterrupt):
        train(tmp_path, CONFIG.replace(seed=1, steps=17))
    assert runs.state(path)["state"] == "interrupted", "it is to go on when the study is run again"
    after = load_study(path)
    pd.testing.assert_frame_equal(after["updates"], before["updates"])
    pd.testing.assert_frame_equal(after.runs, before.runs)
    assert "step 15 of 17; the 12 steps that it finished earlier are shown" in after.left_out[0]
    assert set(load_study(tmp_path / "fake")["steps"]["seed"]) == {0, 1}
    more = load_study(path, unfinished=True)
    assert more["steps"]["step"].max() == 15 and more.runs["state"].item() == "interrupted"
    assert cli.main(["runs", "list", str(path)]) == 0
    assert "interrupted, finished to 12  15/17" in capsys.readouterr().out
    write_declaration(fake_study.study, tmp_path)
    collect(tmp_path / "fake", tmp_path / "results")
    assert load_study(tmp_path / "results")["updates"].query("seed == 1").shape[0] == len(frame)
    assert diff(train(tmp_path, CONFIG.replace(seed=1, steps=17)), train(tmp_path / "b", CONFIG.replace(
        seed=1, steps=17))) is None


@pytest.mark.parametrize("published", range(3))
def test_a_kill_while_a_longer_run_is_published_doubles_and_loses_no_row(tmp_path, monkeypatch, published):
    path, real, done = train(tmp_path, CONFIG.replace(steps=6)), Path.rename, []

    def killed(self: Path, target: Path) -> Path:
        if self.suffix == ".parquet" or self.name == ".tmp-manifest.json":
            done.append(self)
        if len(done) > published + 1:  # the first was the manifest that asks for more
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    monkeypatch.undo()
    for name, per_step in (("steps", 1), ("updates", 4), ("layers", fake_study.SITES)):
        assert read_table(path, name)["step"].tolist() == [s for s in range(1, 13) for _ in range(per_step)]
        assert len(load_study(path)[name]) == 6 * per_step
    train(tmp_path)
    assert [len(load_study(path)[name]) for name in ("steps", "updates", "layers")] == [12, 48, 12 * fake_study.SITES]


@pytest.fixture
def scores(monkeypatch):
    """One more table: its entry in TABLES, and in the dictionary its columns."""
    monkeypatch.setitem(columns.TABLES, "scores", ("step", "benchmark"))
    for name in ("step", "benchmark", "exact"):
        entry = columns.Column(name, f"{columns.COLUMNS[name].tables} scores", "1", "…")
        monkeypatch.setitem(columns.COLUMNS, name, entry)


def test_one_more_table_costs_one_entry(tmp_path, scores, capsys):
    def run(name: str, exact: float) -> Path:
        for steps in (1, 2):  # interrupted and extended
            with open_run(tmp_path / name, CONFIG.replace(steps=steps)) as folder:
                folder.add("scores", [{"step": steps, "benchmark": b, "exact": exact} for b in ("amc", "math")])
                commit(folder, steps, [{"step": steps, "reward": 0.5}])
                folder.finish()
        return folder.path

    a, b = run("a", 0.5), run("b", 0.25)
    found = diff(a, b)
    assert (found.table, found.row, found.a) == ("scores", {"step": 1, "benchmark": "amc"}, 0.5)
    frames = load_study(a)
    assert frames["scores"][["step", "benchmark"]].to_numpy().tolist() == [
        [1, "amc"], [1, "math"], [2, "amc"], [2, "math"]]
    assert len(frames.cell("base")["scores"]) == 4 and len(frames.select([a])["scores"]) == 4
    assert cli.main(["runs", "show", str(a)]) == 0 and "scores: 4 rows" in capsys.readouterr().out
    assert cli.main(["runs", "export", str(a), "--to", str(tmp_path / "csv")]) == 0
    assert len(pd.read_csv(tmp_path / "csv" / "scores.csv")) == 4
    write_declaration(fake_study.study, tmp_path / "a")
    collect(tmp_path / "a" / "fake", tmp_path / "results")
    assert load_study(tmp_path / "results")["scores"]["exact"].tolist() == [0.5] * 4
    assert "scores.exact" in verdict(dataclasses.replace(load_study(tmp_path / "results"), runs=frames.runs.assign(
        checkpoint="0")), b)


def test_tables_without_rows_and_folders_from_before_a_table_can_be_read(tmp_path):
    path = train(tmp_path)
    (path / "evaluations.parquet").unlink()
    assert load_study(path)["evaluations"].empty
    write_declaration(fake_study.study, tmp_path)
    collect(tmp_path / "fake", tmp_path / "results")
    assert load_study(tmp_path / "results")["evaluations"].empty
