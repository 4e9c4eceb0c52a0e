"""What somebody else did to files: said with the file's name, before anything is computed or overwritten."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from moe_rl import cli
from moe_rl.errors import ConfigError, RunError
from moe_rl.results.printed import print_study
from moe_rl.storage import folder as runs
from moe_rl.storage import lock
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import load_study, require_whole
from moe_rl.storage.lock import Lock
from moe_rl.study.collect import collect
from moe_rl.study.declaration import load_study_file, read_declaration, write_declaration
from moe_rl.study.rerun import rerun
from moe_rl.study.workers import run_study
from tests.fake_study import study
from tests.forked import forking
from tests.test_trainer import TINY, carry_out

STUDY = replace(study, seeds=(0,), trainer="tests.fake_study:train", base=study.base.replace(steps=4))


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    path = tmp_path_factory.mktemp("ended")
    write_declaration(STUDY, path)
    with forking():
        assert not run_study(STUDY, STUDY.runs(path), cache=path / ".cache")
    return path


@pytest.fixture
def out(ended, tmp_path):
    """The study, ended; for this test alone."""
    shutil.copytree(ended, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run of four steps, extended to six and not yet gone on with."""
    path = tmp_path_factory.mktemp("half") / "run"
    carry_out(TINY, path)
    return path


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
@pytest.mark.parametrize("finished, what", [(True, "what the run finished with"), (False, "what the run wrote")])
def test_a_checkpoint_that_is_not_what_was_written_is_refused(half, tmp_path, file, damage, finished, what):
    path = tmp_path / "run"
    shutil.copytree(half, path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if finished or k != "finished"}))
    (damaged,) = path.glob(f"commit/*/checkpoint/{file}")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 255
    damaged.write_bytes(bytes(content[:500]) if damage == "cut" else bytes(content))
    with pytest.raises(RunError, match=f"checkpoint differs from {what}"):
        carry_out(TINY.replace(steps=6), path)


def test_a_checkpoint_that_cannot_be_read_is_named(half, tmp_path):
    """One of a commit that does not say what it was."""
    path = tmp_path / "run"
    shutil.copytree(half, path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "finished"}))
    (damaged,) = path.glob("commit/*/checkpoint/model.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:500])
    (damaged.parents[1] / "checkpoint.sha256").unlink()
    with pytest.raises(RunError, match="the checkpoint .*checkpoint cannot be read"):
        carry_out(TINY.replace(steps=6), path)


def test_a_finished_run_without_its_steps_is_an_error_and_no_run_without_collapse(out):
    next(out.glob("fake/grpo/*/seed=0/steps.parquet")).unlink()
    with pytest.raises(RunError, match="steps.parquet is missing, although the run has finished"):
        load_study(out / "fake")


def test_collected_tables_without_steps_are_an_error(out):
    collect(out / "fake", out / "tables")
    (out / "tables" / "steps.parquet").unlink()
    with pytest.raises(RunError, match="steps.parquet is missing beside runs.parquet"):
        load_study(out / "tables")


def test_a_progress_of_words_hides_no_run(out):
    path = next(out.glob("fake/grpo/*/seed=0"))
    (path / "progress.json").write_text('{"step": "four", "updated": "yesterday"}')
    assert runs.state(path)["state"] == "finished"


def test_a_manifest_of_other_things_is_named(out):
    path = next(out.glob("fake/grpo/*/seed=0"))
    (path / "manifest.json").write_text('{"hash": "x", "config": "x", "code": []}')
    with pytest.raises(RunError, match="manifest.json is damaged"):
        runs.state(path)


def test_a_study_of_another_question_under_the_same_name_is_said(out, capsys):
    asked = replace(STUDY, question="another", arms=STUDY.arms[:1], comparisons=())
    assert write_declaration(asked, out) == ["question", "arms"]
    assert write_declaration(asked, out) == []
    from rich.console import Console

    print_study(Console(width=200), out / "fake")
    assert "not declared grpo-replay: 1 finished runs of this arm are in no table" in capsys.readouterr().out


def test_a_refused_run_overwrites_nothing(out, tmp_path, capsys):
    before = read_declaration(out / "fake")
    manifest = next(out.glob("fake/grpo/*/seed=0/manifest.json"))
    manifest.write_text(manifest.read_text().replace('"hash": "', '"hash": "f'))
    file = tmp_path / "mine_of_that_name.py"
    file.write_text("from dataclasses import replace\nfrom tests.test_damage import STUDY\n"
                    "study = replace(STUDY, question='another')\n")
    assert cli.main(["run", str(file), "--out", str(out)]) == 2
    assert "Nothing was overwritten" in capsys.readouterr().err
    assert read_declaration(out / "fake") == before


def test_a_row_whose_labels_are_not_its_configurations_is_not_run(out, tmp_path):
    from rich.console import Console

    collect(out / "fake", out / "tables")
    rows = pd.read_parquet(out / "tables" / "runs.parquet")
    rows["config"] = rows["config"].str.replace('"seed": 0', '"seed": 77')
    rows.to_parquet(out / "tables" / "runs.parquet")
    with pytest.raises(ConfigError, match="contains the configuration of arm .* seed 77"):
        rerun(out / "tables", tmp_path / "again", jobs=1, console=Console(quiet=True), trusted=lambda code: True)


@pytest.mark.parametrize("name", ["types", "moe_rl"])
def test_a_study_file_that_would_hide_a_module_is_refused(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("study = 1\n")
    with pytest.raises(ConfigError, match="has the name of the module"):
        load_study_file(str(tmp_path / f"{name}.py"))


@pytest.mark.parametrize("text, message", [("import sys; sys.exit(3)", "SystemExit: 3"), ("x = (", "own.py:1: Syntax")])
def test_a_study_file_that_ends_the_program_or_is_no_python_is_named(tmp_path, text, message):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_study_file(str(tmp_path / "own.py"))


def test_the_folder_of_a_run_that_diverged_and_then_finished_no_longer_says_so(tmp_path):
    with RunFolder.open(tmp_path / "run", TINY.to_dict(), TINY.hash) as folder:
        folder.add("steps", [{"step": 0, "eval_n": 1}])
        folder.commit(0, lambda path: None)
        folder.finish("step 1: the gradient norm is nan")
        folder.finish()
        assert "diverged" not in folder.manifest


def test_the_folder_of_a_study_names_the_file_in_it(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.py").write_text("")
    with pytest.raises(ConfigError, match=r"mine is a folder. Give the study file in it: .*mine/mine\.py"):
        load_study_file(str(tmp_path / "mine"))


# ---------------------------------------------------------------------- half copies, edits, two at once
def edit_rows(out, change):
    """The steps of one finished run, changed."""
    path = next(out.glob("fake/grpo/*/seed=0"))
    file = next(path.glob("commit/*/steps*.parquet"), None) or next(path.rglob("steps.parquet"))
    change(pd.read_parquet(file)).to_parquet(file)



def drop_a_step(run: Path) -> None:
    rows = pd.read_parquet(run / "steps.parquet")
    rows[rows["step"] != 2].to_parquet(run / "steps.parquet")


def drop_rewards(run: Path) -> None:
    rows = pd.read_parquet(run / "steps.parquet")
    rows.assign(reward=rows["reward"].where(rows["step"] != 3)).to_parquet(run / "steps.parquet")


@pytest.mark.parametrize("damage, what", [
    (drop_a_step, "finished 4 steps, but its table lacks 1 of them"),
    (drop_rewards, "its reward is missing in 1 of its steps"),
    (lambda run: (run / "layers.parquet").unlink(), "layers.parquet is missing, although the run has finished"),
])
@pytest.mark.parametrize("steps", ["4", "6"])
def test_half_a_copy_does_not_count_as_finished(out, monkeypatch, capsys, forked_workers, damage, what, steps):
    """Nor is it extended. What is whole runs, and says how many runs there were to do."""
    monkeypatch.setattr("moe_rl.study.declaration.load_study_file", lambda name: STUDY)
    command = ["run", "fake", "--seeds", "1", "--out", str(out), "--steps", steps]
    damage(run := out / "fake" / "gspo" / "base" / "seed=0")
    before = sorted(file.stat().st_mtime_ns for file in out.rglob("*"))
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert what in said and str(run) in said and "Restore it from a copy, or delete" in said
    assert sorted(file.stat().st_mtime_ns for file in out.rglob("*")) == before, "and nothing was changed"
    shutil.rmtree(run)
    assert cli.main(command) == 0
    assert f"3 runs, {2 if steps == '4' else 0} finished" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["EROFS", "EACCES", "EPERM", "ENOLCK", "ENOTSUP", "ENOSYS"])
@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_finished_run_on_a_disk_that_can_only_be_read_is_listed_as_finished(out, monkeypatch, capsys, number, call):
    def refuse(*arguments):
        raise OSError(code := getattr(errno, number), os.strerror(code), "lock")

    if call == "flock":
        monkeypatch.setattr(lock.fcntl, "flock", refuse)
    else:
        real = Path.open
        monkeypatch.setattr(Path, "open", lambda file, *how, **more: refuse() if file.name == "lock" and not how
                            else real(file, *how, **more))
    assert cli.main(["runs", "list", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.count(" finished ") == 3 and "running" not in said


def test_a_run_at_work_is_listed_as_running(out, capsys):
    with Lock(out / "fake" / "gspo" / "base" / "seed=0" / "lock"):
        assert cli.main(["runs", "list", str(out)]) == 0
    assert capsys.readouterr().out.count(" running") == 1


def test_a_finished_run_without_its_checkpoint_does_not_begin_anew(out, monkeypatch, capsys, forked_workers):
    monkeypatch.setattr("moe_rl.study.declaration.load_study_file", lambda name: STUDY)
    shutil.rmtree(out / "fake" / "gspo" / "base" / "seed=0" / "commit")
    assert cli.main(["run", "fake", "--seeds", "1", "--out", str(out)]) == 0, "its numbers are there"
    assert cli.main(["run", "fake", "--seeds", "1", "--out", str(out), "--steps", "6"]) == 2
    assert "finished 4 steps, but its folder commit with the checkpoint is missing" in capsys.readouterr().err


@pytest.mark.parametrize("change, said", [
    (lambda rows: rows[rows["step"] != 2], "lacks 1 of them"),
    (lambda rows: rows.assign(reward=rows["reward"].where(rows["step"] != 1)),
     "its reward is missing in 1 of its steps"),
    (lambda rows: rows.assign(reward=float("nan")), "its reward is missing in every step"),
    (lambda rows: rows.assign(reward=rows["reward"].where(rows["step"] != 1, float("inf"))),
     "its reward is missing in 1 of its steps"),
    (lambda rows: rows.assign(reward=rows["reward"].astype(str)), "rewards that are no numbers"),
    (lambda rows: pd.concat([rows, rows[rows["step"] == 2].assign(reward=5.0)]), "has 1 rows twice, e.g. step 2"),
])  # fmt: skip
def test_a_finished_run_that_is_not_whole_is_refused(out, tmp_path, change, said):
    """By whatever reads it, of runs and of collected tables."""
    edit_rows(out, change)
    for read in (lambda: load_study(out / "fake"), lambda: collect(out / "fake", tmp_path / "tables")):
        with pytest.raises(RunError, match=said):
            read()


@pytest.mark.parametrize("table", ["steps", "updates", "layers"])
def test_a_row_that_is_there_twice_is_refused(out, tmp_path, table):
    """It would count twice. Of runs, of `run`, and of collected tables."""
    collect(out / "fake", tmp_path / "tables")
    run = next(out.glob("fake/grpo/*/seed=0"))
    for file in (run / f"{table}.parquet", tmp_path / "tables" / f"{table}.parquet"):
        rows = pd.read_parquet(file)
        pd.concat([rows, rows.tail(1)]).to_parquet(file)
    for read in (lambda: load_study(out / "fake"), lambda: require_whole(run),
                 lambda: load_study(tmp_path / "tables")):
        with pytest.raises(RunError, match=f"the table {table} in .* has 1 rows twice"):
            read()


def test_collected_tables_without_some_rows_are_refused(out, tmp_path):
    collect(out / "fake", tmp_path / "tables")
    file = tmp_path / "tables" / "steps.parquet"
    rows = pd.read_parquet(file)
    rows[rows["step"] != 2].to_parquet(file)
    with pytest.raises(RunError, match="lacks 1 of them"):
        load_study(tmp_path / "tables")


def test_a_trainer_that_logs_some_steps_only_is_read(out, tmp_path):
    """Every second step, or a reward in every second."""
    for change in (lambda rows: rows[rows["step"] % 2 == 0],):
        edit_rows(out, change)
        load_study(out / "fake")
        collect(out / "fake", tmp_path / "tables")
        load_study(tmp_path / "tables")


def test_a_manifest_of_a_great_many_steps_takes_no_memory(out):
    manifest = next(out.glob("fake/grpo/*/seed=0/manifest.json"))
    manifest.write_text(manifest.read_text().replace('"finished": 4', '"finished": 1000000000'))
    with pytest.raises(RunError, match="lacks 999999996 of them"):
        load_study(out / "fake", mix_code=True)


@pytest.mark.parametrize("key, value", [
    ("finished", "2"), ("finished", 2.5), ("steps", "2"), ("steps", None), ("code", [1, 2]), ("config", {"a": 1}),
    ("created", [1, 2]), ("created", "x"), ("checkpoint", 5), ("declared", 5), ("inputs", [1]), ("packages", {"a": 1}),
    ("git", "x"), ("trainer", 3), ("seed", "x"), ("diverged", True), ("threads", {}), ("device", 5),
])  # fmt: skip
def test_a_manifest_of_other_types_is_named(out, key, value):
    file = next(out.glob("fake/grpo/*/seed=0/manifest.json"))
    manifest = json.loads(file.read_text())
    (manifest["config"] if key == "steps" else manifest)[key] = value
    file.write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="manifest.json is damaged"):
        runs.state(file.parent)


def test_a_manifest_whose_settings_were_edited_is_refused(out):
    manifest = next(out.glob("fake/grpo/*/seed=0/manifest.json"))
    manifest.write_text(manifest.read_text().replace('"group_size": ', '"group_size": 1'))
    with pytest.raises(RunError, match="were changed: their hash"):
        load_study(out / "fake", mix_code=True)


def test_two_studies_are_not_collected_into_one_folder_at_once(out, tmp_path):
    with Lock(tmp_path / ".tables.collect.lock"), pytest.raises(RunError, match="another process"):
        collect(out / "fake", tmp_path / "tables")
    collect(out / "fake", tmp_path / "tables")
    assert sorted(p.name for p in tmp_path.glob(".*")) == [], "no lock stays"


@pytest.mark.parametrize("key, value", [
    ("verdict", 3), ("figures", "learning"), ("figures", [1]), ("arms", [{}]), ("arms", ["grpo"]), ("cells", []),
    ("comparisons", [["a"]]), ("metrics", {"a": 1}), ("endpoint", None), ("caution", ["x"]), ("cells", 5),
    ("cells", [1, 2]), ("cells", {"a": 5}), ("cells", {"a": {"arms": 5}}), ("cells", {"a": {"seeds": 3}}),
])  # fmt: skip
def test_a_declaration_of_other_types_is_named(out, key, value):
    write_declaration(STUDY, out)
    file = out / "fake" / "study.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(RunError, match=f"study.json is damaged: {key}"):
        read_declaration(out / "fake")


@pytest.mark.parametrize("file", ["study.json", "grpo/base/seed=0/manifest.json"])
def test_json_that_is_nested_too_deeply_is_named(out, file, capsys):
    write_declaration(STUDY, out)
    (out / "fake" / file).write_text("[" * 100_000)
    for command in (["plot"], ["runs", "collect", "--out", str(out / "tables")]):
        assert cli.main([*command, str(out / "fake")]) == 2
        assert f"{file} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("to, said", [("/", "would hide the runs of"), ("{out}/other", "readme.txt but no")])
def test_tables_are_not_collected_into_a_folder_of_other_things(out, to, said, capsys):
    (out / "other").mkdir()
    (out / "other" / "readme.txt").touch()
    before = sorted(out.rglob("*")), sorted(Path("/").iterdir())
    assert cli.main(["runs", "collect", str(out / "fake"), "--out", to.format(out=out)]) == 2
    assert said in capsys.readouterr().err
    assert before == (sorted(out.rglob("*")), sorted(Path("/").iterdir()))
