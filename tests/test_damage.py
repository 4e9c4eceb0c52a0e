"""What somebody else did to files: said with the file's name, before anything is computed or overwritten."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moe_rl import cli
from moe_rl.errors import ConfigError, RunError
from moe_rl.storage import lock
from moe_rl.storage.folder import RunFolder
from moe_rl.study.declaration import load_study_file, read_declaration, write_declaration
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
def test_a_checkpoint_that_is_not_what_was_written_is_refused(half, tmp_path, file, damage):
    path = tmp_path / "run"
    shutil.copytree(half, path)
    (damaged,) = path.glob(f"commit/*/checkpoint/{file}")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 255
    damaged.write_bytes(bytes(content[:500]) if damage == "cut" else bytes(content))
    with pytest.raises(RunError, match="checkpoint is not"):
        carry_out(TINY.replace(steps=6), path)


def test_a_refused_run_overwrites_nothing(out, tmp_path, capsys):
    before = read_declaration(out / "fake")
    manifest = next(out.glob("fake/grpo/*/seed=0/manifest.json"))
    manifest.write_text(manifest.read_text().replace('"hash": "', '"hash": "f'))
    file = tmp_path / "mine_of_that_name.py"
    file.write_text(
        "from dataclasses import replace\nfrom tests.test_damage import STUDY\n"
        "study = replace(STUDY, question='another')\n"
    )
    assert cli.main(["run", str(file), "--out", str(out)]) == 2
    assert "another configuration" in capsys.readouterr().err
    assert read_declaration(out / "fake") == before


@pytest.mark.parametrize("name", ["types", "moe_rl"])
def test_a_study_file_that_would_hide_a_module_is_refused(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("study = 1\n")
    with pytest.raises(ConfigError, match=name):
        load_study_file(str(tmp_path / f"{name}.py"))


def test_the_folder_of_a_run_that_diverged_and_then_finished_no_longer_says_so(tmp_path):
    with RunFolder.open(tmp_path / "run", TINY.to_dict(), TINY.hash) as folder:
        folder.add("steps", [{"step": 0, "eval_n": 1}])
        folder.commit(0, lambda path: None)
        folder.finish("step 1: the gradient norm is nan")
        folder.finish()
        assert "diverged" not in folder.manifest


# ---------------------------------------------------------------------- half copies, edits, two at once
@pytest.mark.parametrize("number", ["EROFS", "ENOLCK"])
@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_finished_run_on_a_disk_that_can_only_be_read_is_listed_as_finished(out, monkeypatch, capsys, number, call):
    def refuse(*arguments):
        raise OSError(code := getattr(errno, number), os.strerror(code), "lock")

    if call == "flock":
        monkeypatch.setattr(lock.fcntl, "flock", refuse)
    else:
        real = Path.open
        monkeypatch.setattr(
            Path,
            "open",
            lambda file, *how, **more: refuse() if file.name == "lock" and not how else real(file, *how, **more),
        )
    assert cli.main(["runs", "list", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.count(" finished ") == 3 and "running" not in said


def test_a_finished_run_without_its_checkpoint_does_not_begin_anew(out, monkeypatch, capsys, forked_workers):
    monkeypatch.setattr("moe_rl.study.declaration.load_study_file", lambda name: STUDY)
    shutil.rmtree(out / "fake" / "gspo" / "base" / "seed=0" / "commit")
    assert cli.main(["run", "fake", "--seeds", "1", "--out", str(out)]) == 0, "its numbers are there"
    assert cli.main(["run", "fake", "--seeds", "1", "--out", str(out), "--steps", "6"]) == 2
    assert "its checkpoint is missing" in capsys.readouterr().err


def test_tables_are_not_collected_into_a_folder_of_other_things(out, capsys):
    (out / "other").mkdir()
    (out / "other" / "readme.txt").touch()
    before = sorted(out.rglob("*"))
    assert cli.main(["runs", "collect", str(out / "fake"), "--out", f"{out}/other"]) == 2
    assert "readme.txt" in capsys.readouterr().err and before == sorted(out.rglob("*"))
