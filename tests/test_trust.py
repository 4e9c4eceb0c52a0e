"""A folder that somebody sent runs no code, whatever its files name, unless --trust is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from moe_rl import cli
from moe_rl.results import plots
from moe_rl.storage.lock import Lock
from moe_rl.study.declaration import write_declaration
from tests import fake_study
from tests.test_cli import fake_runs

PAYLOAD = """from pathlib import Path
Path(__file__).with_name("ran").touch()


def boom(*a, **k):
    return ["said"]
"""
NAMES = {
    "verdict": "payload:boom",
    "figures": ["payload:boom"],
    "metrics": ["payload:boom"],
    "further_endpoints": ["payload:boom"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = fake_runs(tmp_path_factory.mktemp("sent"))
    write_declaration(fake_study.study, folder.parent)
    return folder


@pytest.fixture
def folder(finished, tmp_path, monkeypatch):
    """Runs of a study, a module beside them and in the working directory, and a `study.json` that names it."""
    shutil.copytree(finished, tmp_path / "fake")
    (tmp_path / "payload.py").write_text(PAYLOAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name(tmp_path / "fake", **NAMES)
    yield tmp_path / "fake"
    sys.modules.pop("payload", None)


def name(folder, **what):
    declared = json.loads((folder / "study.json").read_text()) | what
    (folder / "study.json").write_text(json.dumps(declared))


COMMANDS = {
    "plot": ([], 0),
    "report": ([], 0),
    "watch": (["--once"], 0),
    "runs list": ([], 0),
    "runs show": (["{run}"], 0),
    "runs diff": (["{run}", "{other}"], 1),
    "runs read": (["{run}"], "stores no rollouts"),
    "runs export": ([], 0),
    "runs collect": (["--out", "collected"], 0),
    "runs repeat": (["--out", "again"], "name code from outside"),
    "runs export --to tensorboard": ([], "not installed"),
    "runs cancel": ([], "no run below"),
    "run": ([fake_study.__file__, "--arms", "gspo", "--mix-code", "--out", "."], 0),
    "work": (["{plan}", "0"], 2),
}
"""What follows the command, and its exit code, or what an exit code of 2 says."""


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_that_reads_a_folder_runs_what_its_files_name(folder, command, capsys, forked_workers):
    run, other = sorted(folder.glob("*/*/seed=0"))[:2]
    if command == "runs repeat":
        name(folder, trainer="payload:boom")
    follows, wanted = COMMANDS[command]
    arguments = [word.format(run=run, other=other, plan=folder / "study.json") for word in follows]
    first = [str(folder)] if command not in ("run", "work") and "{run}" not in follows else []
    words = command.split()
    code = cli.main([*words[:2], *first, *arguments, *words[2:]])
    said = capsys.readouterr()
    assert not (folder.parent / "ran").exists(), said
    assert code in (wanted, 2) and all(text == code or text in said.err for text in [wanted] if code == 2), (code, said)


def test_a_primary_endpoint_of_other_code_is_refused(folder, capsys):
    name(folder, endpoint="payload:boom")
    for command in ("plot", "report"):
        assert cli.main([command, str(folder)]) == 2
        assert "payload:boom (in" in capsys.readouterr().err
    assert not (folder.parent / "ran").exists()


def test_trusted_it_runs(folder, capsys):
    name(folder, metrics=[], further_endpoints=[])  # whose functions give a number per run
    assert cli.main(["plot", str(folder), "--trust"]) == 0
    assert (folder.parent / "ran").exists() and "said" in capsys.readouterr().out


def test_the_settings_of_a_row_run_no_code(folder, tmp_path):
    """A row may name any loss; `report` lists its settings, and calls nothing of them."""
    assert cli.main(["runs", "collect", str(folder), "--out", "tables"]) == 0
    rows = pd.read_parquet("tables/runs.parquet")
    rows["config"] = rows["config"].str.replace('"task": "running_sums"', '"task": "payload:boom"')
    rows["config"] = rows["config"].str.replace('"loss": "grpo"', '"loss": "payload:boom"')
    assert rows["config"].str.contains("payload:boom").any()
    rows.to_parquet("tables/runs.parquet")
    for command in (["plot", "tables"], ["report", "tables"], ["runs", "show", "tables"], ["runs", "list", "tables"]):
        cli.main(command)
    assert not (tmp_path / "ran").exists()


def test_a_worker_imports_nothing_from_the_folder_that_it_is_started_in(tmp_path):
    (tmp_path / "pydantic.py").write_text(PAYLOAD)
    script = """
from pathlib import Path
from moe_rl.config import Arm, RunConfig
from moe_rl.study.declaration import Planned
from moe_rl.study.workers import Worker
print(Worker(Planned(Path("a/b/c/seed=0"), RunConfig(arm=Arm(name="grpo"))), "moe_rl.build:nothing", Path()).failure())
"""
    subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    log = (tmp_path / "a/b/c/seed=0/log.txt").read_text()
    assert "moe_rl.build" in log, "a worker was there"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "trainer", ["payload", "payload:boom", "moe_rl.registry:Component", "moe_rl.build:execute(settings=['x'])"]
)
def test_a_trainer_that_is_not_the_packages_needs_trust(folder, trainer, capsys, forked_workers):
    name(folder, trainer=trainer)
    assert cli.main(["runs", "repeat", str(folder), "--out", "again"]) == 2
    assert "--trust" in capsys.readouterr().err and not (folder.parent / "ran").exists()


def test_git_is_not_asked_about_a_folder_that_was_sent(folder, tmp_path, capsys, forked_workers):
    """`git status` runs what the settings of a checkout name, such as core.fsmonitor."""
    assert cli.main(["runs", "collect", str(folder), "--out", "tables"]) == 0
    name(tmp_path / "tables", trainer="moe_rl.build:execute")
    (tmp_path / "mine.py").write_text("study = 1")
    (tmp_path / "watch").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "watch").chmod(0o755)
    for words in (["init", "-q"], ["add", "mine.py"], ["config", "core.fsmonitor", str(tmp_path / "watch")]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "ran").exists(), "as git does"
    (tmp_path / "ran").unlink()
    rows = pd.read_parquet("tables/runs.parquet").assign(declared=json.dumps({"file": "mine.py", "sources": {}}))
    rows.assign(config=rows["config"].str.replace('"running_sums"', '"unknown"')).to_parquet("tables/runs.parquet")
    assert cli.main(["runs", "repeat", "tables/gspo/base/seed=0", "--out", "again"]) == 2
    assert "is called 'unknown'" in capsys.readouterr().err and not (tmp_path / "ran").exists()


def test_nothing_is_written_through_a_link_in_a_folder(folder, tmp_path, forked_workers):
    """A page with text of the folder's, written over what a shell reads, would be a command."""
    name(folder, verdict="", figures=["learning"], metrics=[], further_endpoints=[], question="\ntouch ran\n")
    profile = tmp_path / "profile"
    profile.write_text("mine")
    (folder / "figures").mkdir()
    for run in (folder / "gspo/base/seed=0", folder / "gspo/base/seed=2"):
        run.mkdir(exist_ok=True)
        (run / "log.txt").symlink_to(profile)
    for file in ("report.html", "report.html.md", "figures/learning.png", "figures/learning.svg", ".tmp-study.json"):
        (folder / file).symlink_to(profile)
    assert cli.main(["report", str(folder)]) == 0 and cli.main(["plot", str(folder)]) == 0
    assert cli.main(["run", fake_study.__file__, "--arms", "gspo", "--seeds", "3", "--mix-code", "--out", "."]) == 0
    assert profile.read_text() == "mine" and "touch ran" in (folder / "report.html").read_text()


def test_nothing_is_written_through_a_linked_folder_or_the_holder_of_a_lock(folder, tmp_path):
    name(folder, verdict="", figures=["learning"], metrics=[], further_endpoints=[])
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for inside in ("figures", "report_rollouts"):
        (folder / inside).symlink_to(elsewhere)
    (tmp_path / "profile").write_text("mine")
    (folder / "lock.holder").symlink_to(tmp_path / "profile")
    assert cli.main(["report", str(folder)]) == 0 and cli.main(["plot", str(folder)]) == 0
    Lock(folder / "lock").release()
    assert not [*elsewhere.iterdir()] and (tmp_path / "profile").read_text() == "mine"
    assert (folder / "figures/learning.png").exists()


def test_text_of_a_study_does_not_steer_the_terminal(folder, capsys):
    name(folder, verdict="", figures=[], metrics=[], further_endpoints=[], caution="\x1b[2Jgone\u202e")
    assert cli.main(["plot", str(folder)]) == 0
    assert r"\x1b[2Jgone\u202e" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arm", ["\x1b[2J", "a/../../b"])
def test_a_name_that_steers_or_leads_elsewhere_is_refused(folder, arm, capsys):
    assert cli.main(["runs", "collect", str(folder), "--out", "tables"]) == 0
    for file in ("runs", "steps", "updates", "layers"):
        rows = pd.read_parquet(f"tables/{file}.parquet") if Path(f"tables/{file}.parquet").exists() else None
        if rows is not None:
            rows.assign(arm=rows["arm"].replace("gspo", arm)).to_parquet(f"tables/{file}.parquet")
    for command in (["plot", "tables"], ["report", "tables"], ["runs", "export", "tables"]):
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert "name of a folder" in error and "\x1b" not in error


def test_a_name_with_a_formula_that_is_none_is_drawn(tmp_path):
    with rc_context(plots.STYLE):
        ax = (figure := Figure()).subplots()
        ax.set(title=r"$\frac$", xscale="log", xlim=(1e-3, 1))
    plots.save(figure, tmp_path, "drawn")
    assert not ax.title.get_parse_math()
    assert all(text.get_parse_math() for text in ax.get_xticklabels()), "10⁻³ is a formula"
