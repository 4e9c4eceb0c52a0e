"""Run folders: what is committed survives, what differs is refused, and two runs part where they say."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moe_rl.config import RunConfig
from moe_rl.errors import RunError
from moe_rl.storage import folder as runs
from moe_rl.storage.commits import read_rows
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import diff, load_study, read_table
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
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name not in (runs.LOCK, "lock.holder")
    }


def nothing(_: Path) -> None:
    pass


def commit(folder: RunFolder, step: int, rows: list[dict], save: Callable[[Path], None] = nothing) -> None:
    folder.add("steps", rows)
    folder.commit(step, save)


def rows_of(folder: RunFolder, table: str) -> list[dict]:
    """What is committed, without the columns that a row has no value in."""
    rows = read_rows(folder.path, table).to_pylist()
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
        with pytest.raises(RunError, match="losses"):
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
    assert "optimizer.lr: 0.0002 there, 1.0 now" in str(error.value) and "steps" not in str(error.value)
    assert files(path) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"save_every": 5, "eval_every": 4, "measure.detail_every": 1, "measure.rollouts": 0},
        {"micro_batch": 2, "micro_batch_tokens": 99, "activation_checkpointing": True, "hf_checkpoints": (8, 12)},
    ],
)
def test_a_run_goes_on_with_other_settings_that_change_no_number_and_says_so(tmp_path, changes):
    with open_run(tmp_path) as folder:
        commit(folder, 6, [{"step": 6}])
    with open_run(tmp_path, CONFIG.replace(**changes)) as folder:
        assert folder.latest()[0] == 6
        went_on, config = folder.manifest["went_on"], folder.manifest["config"]
    assert went_on.keys() == changes.keys()
    assert went_on.get("micro_batch", [64, 2]) == [64, 2] and config["save_every"] == changes.get("save_every", 3)
    load_study(tmp_path, unfinished=True, mix_code=True)  # its hash is that of its settings
    with pytest.raises(RunError, match="optimizer.lr: 0.0002 there, 1.0 now"):
        open_run(tmp_path, CONFIG.replace(**changes, **{"optimizer.lr": 1.0}))


def test_an_export_at_a_step_that_has_passed_is_refused(tmp_path):
    with open_run(tmp_path) as folder:
        commit(folder, 6, [{"step": 6}])
    with pytest.raises(RunError, match=r"hf_checkpoints: \[\] there, \[6, 12\] now"):
        open_run(tmp_path, CONFIG.replace(hf_checkpoints=(6, 12)))


@pytest.mark.parametrize("link", ["commit", "tables/steps", "commit/step=000006", "lock", ""])
def test_nothing_of_a_run_is_written_or_removed_through_a_link_out_of_its_study(tmp_path, link):
    target = "dangling" if link == "lock" else "elsewhere"
    (tmp_path / "elsewhere/step=000001").mkdir(parents=True)
    before, path = sorted((tmp_path / "elsewhere").rglob("*")), path_of(tmp_path, CONFIG)
    (path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "hop").symlink_to(tmp_path / target)
    (path / link).symlink_to(tmp_path / "hop")
    with pytest.raises(RunError, match=f"{tmp_path / target}"):
        open_run(tmp_path)
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before and not (tmp_path / "dangling").exists()


def test_a_study_may_be_a_link_and_links_inside_it_are_followed(tmp_path):
    (tmp_path / "disk/big").mkdir(parents=True)
    path = path_of(tmp_path, CONFIG)
    path.parents[2].symlink_to(tmp_path / "disk")
    open_run(tmp_path).__exit__()
    (path / "commit").symlink_to(tmp_path / "disk/big")
    train(tmp_path)
    assert list((tmp_path / "disk/big").glob("step=*/checkpoint"))


@pytest.mark.parametrize("name, content", [("notes.txt", "mine"), ("manifest.json", "{"), ("manifest.json", "[1]")])
def test_a_foreign_folder_is_refused_and_not_touched(tmp_path, name, content):
    path = path_of(tmp_path, CONFIG)
    path.mkdir(parents=True)
    (path / name).write_text(content)
    with pytest.raises(RunError, match=name):
        open_run(tmp_path)
    assert files(path) == {name: content.encode()} and not (path / runs.LOCK).exists()


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
    with pytest.raises(RunError, match=r"0\.0\.1\+other"):
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
    assert (found.table, found.row, found.column) == ("layers", {"step": 5, "moe_layer": 3}, "any_change_rate")
    assert (
        found.b == 0.5
        and found.a == read_table(a, "layers").query("step == 5 and moe_layer == 3")["any_change_rate"].item()
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
    assert (
        diff(whole, train(tmp_path / "cut")) is None and len(read_table(path, "layers")) == 12 * fake_study.MOE_LAYERS
    )


def test_an_interrupted_extension_shows_what_had_finished_and_ends_as_a_run_of_that_length(tmp_path, monkeypatch):
    real, longer = RunFolder.commit, CONFIG.replace(steps=17)

    def interrupted(self: RunFolder, at: int, save: Callable[[Path], None]) -> None:
        real(self, at, save)
        if at == 15:
            raise KeyboardInterrupt

    path = train(tmp_path)
    monkeypatch.setattr(RunFolder, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, longer)
    monkeypatch.undo()
    frames = load_study(path)
    assert frames["steps"]["step"].max() == frames.runs["step"].item() == 12 and "15 of 17" in frames.left_out[0]
    assert load_study(path, unfinished=True)["steps"]["step"].max() == 15
    assert diff(train(tmp_path, longer), train(tmp_path / "b", longer)) is None


@pytest.mark.parametrize("folder", [".", "commit/step=000006"])
def test_a_run_whose_tables_are_one_file_each_is_refused_with_the_version_that_reads_it(tmp_path, folder):
    path = train(tmp_path, CONFIG.replace(steps=6))
    pd.DataFrame({"step": [1]}).to_parquet(path / folder / "steps.parquet")
    for use in (load_study, lambda path: read_table(path, "steps"), lambda path: train(tmp_path)):
        with pytest.raises(RunError, match="moe_rl 0.1.0"):
            use(path)
