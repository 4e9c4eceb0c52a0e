"""Tables from elsewhere, run again: what they name is listed before it runs, and nothing leaves the output folder."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from moe_rl import cli
from moe_rl.config import Arm
from moe_rl.errors import ConfigError, RunError
from moe_rl.registry import Component
from moe_rl.storage import folder as runs
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import load_study, read_table
from moe_rl.storage.provenance import HARDWARE
from moe_rl.study import workers
from moe_rl.study.collect import collect
from moe_rl.study.declaration import write_declaration
from moe_rl.study.rerun import _study_file, outside_code, rerun, verdict
from tests import fake_study

pytestmark = pytest.mark.usefixtures("forked_workers")
TRAINER = "import fake_study\n\n\ndef train(*arguments, **settings):\n    fake_study.train(*arguments, **settings)\n"


@pytest.fixture
def results(tmp_path) -> Path:
    """Collected tables of one run, below the folder that holds the study's own trainer."""
    study = dataclasses.replace(fake_study.study, name="mine", trainer="own_trainer:train", seeds=(0,))
    study = dataclasses.replace(study, arms=study.arms[:1], base=study.base.replace(steps=3))
    (planned,) = study.runs(tmp_path / "runs")
    with RunFolder.open(planned.path, planned.config.to_dict(), planned.config.hash) as folder:
        fake_study.train(planned.config, folder, cache=tmp_path)
    write_declaration(study, tmp_path / "runs")
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "own_trainer.py").write_text(TRAINER)
    (tmp_path / "studies" / "fake_study.py").write_text(Path(fake_study.__file__).read_text())
    collect(tmp_path / "runs" / "mine", tmp_path / "studies" / "results" / "mine", mix_code=True)
    return tmp_path / "studies" / "results" / "mine"


def change(results: Path, config: dict | None = None, **columns) -> None:
    """Write other values into the tables' only row."""
    frame = pd.read_parquet(results / "runs.parquet")
    if config:
        found = json.loads(frame["config"][0])
        for key, value in config.items():
            *path, name = key.split(".")
            node = found
            for part in path:
                node = node[part]
            node[name] = value
        columns["config"] = json.dumps(found, sort_keys=True)
    frame.assign(**columns).to_parquet(results / "runs.parquet")


def again(results: Path, out: Path, trusted: bool = True) -> list:
    return rerun(results, out, jobs=1, console=Console(file=io.StringIO()), trusted=lambda code: trusted)


def said(results: Path, out: Path, **options) -> str:
    """What a rerun prints, as one line."""
    console = Console(record=True, width=1000)
    assert rerun(results, out, jobs=1, console=console, trusted=lambda code: True, **options) == []
    return " ".join(console.export_text().split())


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder without the study's modules, and a search path of its own."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p).name not in ("tests", "studies")])


def test_code_from_outside_is_listed_and_runs_only_when_trusted(results, tmp_path, elsewhere, capsys):
    assert cli.main(["rerun", str(results), "--out", str(tmp_path / "again")]) == 2
    err = capsys.readouterr().err
    assert "own_trainer:train" in err and "--trust" in err and not (tmp_path / "again").exists()
    with pytest.raises(ConfigError, match="own_trainer:train"):
        again(results, tmp_path / "again", trusted=False)


@pytest.fixture
def new_interpreters(monkeypatch):
    """Workers that have imported nothing yet."""
    monkeypatch.setattr(workers, "subprocess", subprocess)


def test_a_studys_own_modules_are_found_above_its_results(results, tmp_path, elsewhere, new_interpreters, capsys):
    assert cli.main(["rerun", str(results), "--out", str(tmp_path / "again"), "--jobs", "1", "--trust"]) == 0
    out = capsys.readouterr().out
    assert "the same weights and optimizer state, bit for bit" in out.replace("\n", " ")


def test_a_terminal_is_asked(results, tmp_path, elsewhere, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert cli.main(["rerun", str(results), "--out", str(tmp_path / "again"), "--jobs", "1"]) == 2
    assert not (tmp_path / "again").exists()
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert cli.main(["rerun", str(results), "--out", str(tmp_path / "again"), "--jobs", "1"]) == 0
    capsys.readouterr()


def test_every_place_that_can_name_code_is_looked_at():
    base = fake_study.study.base
    assert outside_code([base], "moe_rl.build:execute") == []
    arm = Arm(name="a", loss="mine.losses:one", routes="partial(mine:two, share=0.5)", ratio_routes="mine:three")
    own = base.replace(arm=arm, task="subprocess:Popen")
    assert outside_code([own, own], "trainers:go") == [
        "mine.losses:one", "mine:three", "mine:two", "subprocess:Popen", "trainers:go"]
    for task in ("jsonl:C:/data.jsonl", "reasoning_gym:spell_backward", "running_sums"):
        assert outside_code([base.replace(task=task)], "moe_rl.build:execute") == []
    assert outside_code([base.replace(task="moe_rl_evil:Task")], "moe_rl.build:execute") == ["moe_rl_evil:Task"]
    server = base.replace(engine=Component("server", url="http://elsewhere"))  # prompts would be sent there
    assert outside_code([server], "moe_rl.build:execute") == [str(server.engine)]


@pytest.mark.parametrize("label, value", [
    ("arm", "../../x"), ("arm", ".."), ("factors", "/tmp/x"), ("factors", "a/../../x"), ("study", "../x"),
    ("factors", "..\\x"), ("arm", ""), ("seed", "0/../../../x"),
])
def test_labels_that_would_leave_the_output_folder_are_refused(results, tmp_path, elsewhere, label, value):
    for name in ("runs", "steps", "updates", "layers"):
        pd.read_parquet(results / f"{name}.parquet").assign(**{label: value}).to_parquet(results / f"{name}.parquet")
    with pytest.raises(ConfigError, match="name of a folder"):
        again(results, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_figures_of_a_combination_that_is_a_path_are_refused(results, tmp_path, elsewhere, capsys):
    for name in ("runs", "steps", "updates", "layers"):
        frame = pd.read_parquet(results / f"{name}.parquet").assign(factors="../../../../x")
        pd.concat([frame, frame.assign(factors="base")]).to_parquet(results / f"{name}.parquet")
    assert cli.main(["plot", str(results), "--all", "--mix-code"]) == 2
    assert "name of a folder" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_values_of_a_row_are_checked_like_those_of_a_study(results, tmp_path, elsewhere):
    change(results, config={"optimizer.grad_clip": -1.0})
    with pytest.raises(ConfigError, match="uphill"):
        again(results, tmp_path / "again")


def test_the_run_of_a_trusted_row_lands_in_the_output_folder(results, tmp_path, elsewhere):
    assert again(results, tmp_path / "again") == []
    assert [p.relative_to(tmp_path / "again").as_posix() for p in runs.run_folders(tmp_path / "again")] == [
        "mine/grpo/base/seed=0"]


# ---------------------------------------------------------------------- found by what the row recorded
@pytest.fixture
def far(results, tmp_path, elsewhere) -> Path:
    """Tables that do not lie below their study, which is in a checkout around the current folder, and is recorded."""
    (tmp_path / ".git").mkdir()
    studies, out = tmp_path / "studies", tmp_path / "runs-2"
    (studies / "mine.py").write_text("import settings\nfrom moe_rl.study import Study\n")
    (studies / "settings.py").write_text("STEPS = 3\n")
    sys.path.insert(0, str(studies))
    study = dataclasses.replace(fake_study.study, name="mine", trainer="own_trainer:train", seeds=(0,))
    study = dataclasses.replace(study, arms=study.arms[:1], base=study.base.replace(steps=3), file=studies / "mine.py")
    (planned,) = study.runs(out)
    with RunFolder.open(planned.path, planned.config.to_dict(), planned.config.hash, trainer=study.trainer,
                        study_file=planned.study_file) as folder:
        fake_study.train(planned.config, folder, cache=tmp_path)
    sys.path.remove(str(studies))
    write_declaration(study, out)
    collect(out / "mine", tmp_path / "tables" / "mine", mix_code=True)
    return tmp_path / "tables" / "mine"


def test_own_modules_are_found_beside_the_study_file_that_a_row_names(far, tmp_path, new_interpreters):
    row = load_study(far).runs.iloc[0]
    assert json.loads(row["declared"])["file"] == "studies/mine.py"
    assert set(json.loads(row["inputs"])) == {"own_trainer"}
    text = said(far, tmp_path / "again")
    assert "bit for bit" in text and "warning" not in text


@pytest.mark.parametrize("file, words", [
    ("own_trainer.py", "warning own_trainer changed since the rows of mine ran, or is missing"),
    ("mine.py", "warning mine.py beside"),
])
def test_what_is_not_what_the_row_ran_with_is_named(far, tmp_path, file, words):
    with (tmp_path / "studies" / file).open("a") as edited:
        edited.write("# edited\n")
    assert words in said(far, tmp_path / "again")


def test_a_study_file_that_is_gone_is_named(far, tmp_path):
    for file in ("own_trainer.py", "fake_study.py", "settings.py"):
        (tmp_path / "studies" / file).rename(tmp_path / "elsewhere" / file)
    (tmp_path / "studies" / "mine.py").unlink()
    assert "warning the study file studies/mine.py of mine is not in or above" in said(far, tmp_path / "again")


@pytest.mark.parametrize("name", ["../studies/mine.py", "/studies/mine.py", "studies/mine.txt"])
def test_a_study_file_that_is_no_path_in_a_checkout_is_refused(far, tmp_path, name):
    change(far, declared=json.dumps({"file": name, "sources": {}}))
    with pytest.raises(ConfigError, match="table was edited"):
        again(far, tmp_path / "again")


def test_a_study_file_among_the_tables_is_not_used(tmp_path):
    """Git runs commands that the settings of a checkout name, and is asked about the folder of a study file."""
    sent = tmp_path / "sent" / "study.py"
    sent.parent.mkdir()
    sent.touch()
    assert _study_file("sent/study.py", sent.parent) is None
    (tmp_path / "study.py").touch()
    assert _study_file("sent/study.py", sent.parent) == tmp_path / "study.py"


def test_an_older_table_is_read_and_says_what_it_does_not_know(results, tmp_path, elsewhere):
    frame = pd.read_parquet(results / "runs.parquet")
    frame.drop(columns=["inputs", "declared", "created", "finished_at"]).to_parquet(results / "runs.parquet")
    row = load_study(results).runs.iloc[0]
    assert row[["inputs", "declared", "created", "finished_at"]].isna().all()
    text = said(results, tmp_path / "again")
    assert "unknown with which version of their code they ran" in text and "bit for bit" in text


def test_rows_of_different_settings_are_run_again_each_as_it_says(results, tmp_path, elsewhere):
    """Which were pooled knowingly; a rerun compares run by run, and pools nothing."""
    tables = {name: pd.read_parquet(results / f"{name}.parquet") for name in ("runs", "steps", "updates", "layers")}
    change(results, {"seed": 1, "optimizer.lr": 0.03}, seed=1, created=0.0)
    for name, there in tables.items():
        second = pd.read_parquet(results / "runs.parquet") if name == "runs" else there.assign(seed=1)
        pd.concat([there, second], ignore_index=True).to_parquet(results / f"{name}.parquet")
    with pytest.raises(RunError, match="different settings"):
        load_study(results)
    said(results, tmp_path / "again")
    again = load_study(tmp_path / "again", mix_code=True).runs
    assert [json.loads(text)["optimizer"]["lr"] for text in again["config"]] == [2e-4, 0.03]


# ---------------------------------------------------------------------- the first steps alone
def test_the_first_steps_alone_are_run_and_compared(results, tmp_path, elsewhere, capsys):
    assert cli.main(["rerun", str(results), "--out", str(tmp_path / "a"), "--trust", "--steps", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "another checkpoint, because it ran 2 of 3 steps, equal values in all" in text
    assert "as they should be" in text and "processor" not in text
    run = tmp_path / "a" / "mine" / "grpo" / "base" / "seed=0"
    assert read_table(run, "steps")["step"].to_list() == [1, 2]
    assert cli.main(["rerun", str(results), "--out", str(tmp_path / "b"), "--trust", "--steps", "0"]) == 2
    assert "steps=0" in capsys.readouterr().err


def test_values_that_part_are_named_even_where_the_weights_are_the_same(results, tmp_path, elsewhere):
    frame = pd.read_parquet(results / "steps.parquet")
    frame.loc[1, "reward"] += 1e-3
    frame.to_parquet(results / "steps.parquet")
    text = said(results, tmp_path / "again")
    assert "bit for bit" not in text and "the same weights and optimizer state, values differ in 1 of " in text
    assert "columns (steps.reward, …), from step 2 on" in text and "the table may have been edited" in text
    frame.assign(own_number=1.0).drop(columns="reward").to_parquet(results / "steps.parquet")
    text = said(results, tmp_path / "again")
    assert "bit for bit, and 1 columns of the row are missing now (steps.own_number, …)" in text


@pytest.mark.parametrize("kept", [("one", "DEFAULT"), ("one", None), (None, None)])
def test_values_that_part_on_another_processor_are_not_blamed_on_the_table(results, tmp_path, elsewhere, kept):
    """Of an older row neither is known, or not both."""
    said(results, tmp_path / "again")
    run = tmp_path / "again" / "mine" / "grpo" / "base" / "seed=0"
    here = runs.read_manifest(run)["packages"]
    known = {name: value for name, value in zip(HARDWARE, kept, strict=True) if value}
    change(results, packages=json.dumps({name: here[name] for name in here if name not in HARDWARE} | known))
    row = load_study(results)
    assert "bit for bit" in verdict(row, run), "equal values need no explanation"
    moved = row["steps"].assign(reward=row["steps"]["reward"] + 1)
    text = verdict(dataclasses.replace(row, tables={**row.tables, "steps": moved}), run)
    for name in HARDWARE:
        assert f"{name} {known.get(name, 'not recorded')} there, {here[name]} here" in text
    assert "another processor or instruction set alone can change these values" in text and "edited" not in text


def test_from_which_step_on_and_by_how_much_values_part(results, tmp_path, elsewhere):
    said(results, tmp_path / "again", steps=2)
    run, row = tmp_path / "again" / "mine" / "grpo" / "base" / "seed=0", load_study(results)

    def compared(**columns) -> str:
        steps = row["steps"].assign(**columns)
        return verdict(dataclasses.replace(row, tables={**row.tables, "steps": steps}), run)

    entropy = row["steps"]["entropy"]
    moved = entropy + entropy[:2].max() / 8 * (row["steps"]["step"] > 1)  # an eighth, exact in float32
    share = (moved[1] - entropy[1]) / moved[:2].max()
    text = compared(entropy=moved)
    assert "differ in 1 of " in text and f"columns (steps.entropy, …), from step 2 on, by at most {share:.1g}" in text
    assert "steps.entropy" not in compared(entropy=entropy.where(row["steps"]["step"] != 2)), "what it had not measured"
    assert "equal values" in compared(entropy=entropy + (row["steps"]["step"] == 3)), "steps that only the row has"
    gone = row["steps"].drop(index=0)
    text = verdict(dataclasses.replace(row, tables={**row.tables, "steps": gone}), run)
    assert "steps, its rows" in text and "from step 1 on, by at most inf" in text
    text = compared(own_number=1.0)
    assert "equal values" in text and "1 columns of the row are missing now (steps.own_number, …)" in text
    assert "missing now" not in compared()
