"""Tables from elsewhere, run again: what they name is listed before it runs, and nothing leaves the output folder."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
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
from moe_rl.study.rerun import outside_code, rerun, verdict
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
    return rerun(results, out, jobs=1, console=Console(file=io.StringIO()), trust=trusted)


def said(results: Path, out: Path, **options) -> str:
    """What a rerun prints, as one line."""
    console = Console(record=True, width=1000)
    assert rerun(results, out, jobs=1, console=console, trust=True, **options) == []
    return " ".join(console.export_text().split())


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder without the study's modules, and a search path of its own."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p).name not in ("tests", "studies")])


@pytest.fixture
def new_interpreters(monkeypatch):
    """Workers that have imported nothing yet."""
    monkeypatch.setattr(workers, "CONTEXT", multiprocessing.get_context("spawn"))


def test_a_studys_own_modules_are_found_above_its_results(results, tmp_path, elsewhere, new_interpreters, capsys):
    assert cli.main(["runs", "repeat", str(results), "--out", str(tmp_path / "again"), "--jobs", "1", "--trust"]) == 0
    out = capsys.readouterr().out
    assert "bit for bit" in " ".join(out.split())


def test_every_place_that_can_name_code_is_looked_at():
    base = fake_study.study.base
    assert outside_code([base], "moe_rl.build:execute") == []
    arm = Arm(name="a", loss="mine.losses:one", routes="partial(mine:two, share=0.5)", ratio_routes="mine:three")
    own = base.replace(arm=arm, task="subprocess:Popen")
    assert outside_code([own, own], "trainers:go") == [
        "mine.losses:one",
        "mine:three",
        "mine:two",
        "subprocess:Popen",
        "trainers:go",
    ]
    for task in ("jsonl:C:/data.jsonl", "reasoning_gym:spell_backward", "running_sums"):
        assert outside_code([base.replace(task=task)], "moe_rl.build:execute") == []
    assert outside_code([base.replace(task="moe_rl_evil:Task")], "moe_rl.build:execute") == ["moe_rl_evil:Task"]
    server = base.replace(engine=Component("server", url="http://elsewhere"))  # prompts would be sent there
    assert outside_code([server], "moe_rl.build:execute") == [str(server.engine)]


@pytest.mark.parametrize(
    "label, value",
    [
        ("arm", "../../x"),
        ("condition", "/tmp/x"),
        ("study", ".."),
        ("condition", "..\\x"),
        ("arm", ""),
        ("seed", "0/../../../x"),
    ],
)
def test_labels_that_would_leave_the_output_folder_are_refused(results, tmp_path, elsewhere, label, value):
    for name in ("runs", "steps", "updates", "layers"):
        pd.read_parquet(results / f"{name}.parquet").assign(**{label: value}).to_parquet(results / f"{name}.parquet")
    with pytest.raises(ConfigError, match="name of a folder"):
        again(results, tmp_path / "again")
    assert not (tmp_path / "again").exists()


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
    with RunFolder.open(
        planned.path,
        planned.config.to_dict(),
        planned.config.hash,
        trainer=study.trainer,
        study_file=planned.study_file,
    ) as folder:
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
    assert cli.main(["runs", "repeat", str(results), "--out", str(tmp_path / "a"), "--trust", "--steps", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "another checkpoint" in text and "2 of 3 steps" in text and "equal values" in text
    run = tmp_path / "a" / "mine" / "grpo" / "base" / "seed=0"
    assert read_table(run, "steps")["step"].to_list() == [1, 2]
    assert cli.main(["runs", "repeat", str(results), "--out", str(tmp_path / "b"), "--trust", "--steps", "0"]) == 2
    assert "steps=0" in capsys.readouterr().err


def test_values_that_differ_are_named_even_where_the_weights_are_the_same(results, tmp_path, elsewhere):
    frame = pd.read_parquet(results / "steps.parquet")
    share = 1e-3 / (frame["reward"].max() + 1e-3)
    frame.loc[frame["reward"].idxmax(), "reward"] += 1e-3
    frame.to_parquet(results / "steps.parquet")
    text = said(results, tmp_path / "again")
    assert "bit for bit" not in text and "the same weights" in text
    assert f"(steps.reward) from step {frame['step'][frame['reward'].idxmax()]} on, by at most {share:.1g}" in text
    assert "the same versions" in text


@pytest.mark.parametrize("recorded", ["DEFAULT", None])
def test_values_that_differ_on_another_processor_are_not_blamed_on_the_table(results, tmp_path, elsewhere, recorded):
    said(results, tmp_path / "again")
    run = tmp_path / "again" / "mine" / "grpo" / "base" / "seed=0"
    here = runs.read_manifest(run)["packages"]
    known = dict.fromkeys(HARDWARE, recorded) if recorded else {}
    change(results, packages=json.dumps({name: here[name] for name in here if name not in HARDWARE} | known))
    row = load_study(results)
    assert "bit for bit" in verdict(row, run), "equal values need no explanation"
    moved = row["steps"].assign(reward=row["steps"]["reward"] + 1)
    text = verdict(dataclasses.replace(row, tables={**row.tables, "steps": moved}), run)
    for name in HARDWARE:
        assert f"{name} {known.get(name, 'not recorded')} there, {here[name]} here" in text
