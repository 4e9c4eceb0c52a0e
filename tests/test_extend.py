"""The page that shows where to add what: its examples are a user's module and study, and are run as they stand."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from moe_rl import cli
from moe_rl.storage.frames import load_study
from moe_rl.study.declaration import load_study_file, write_declaration
from tests.test_trainer import TINY

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SECTIONS = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
SETTINGS = "model optimizer measure prompts_per_step group_size mini_batches max_new_tokens eval_prompts save_every"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The study of the page, as small as the tests' own, run for two steps by the launcher of the page."""
    (declared,) = (block for block in BLOCKS if "study = Study(" in block)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mine"))
        patch.setattr(sys, "path", list(sys.path))
        Path("mine.py").write_text("\n".join(block for block in BLOCKS if block != declared))
        Path("my_study.py").write_text(declared)
        study = load_study_file("my_study.py")
        small = study.base.replace(steps=2, **{name: getattr(TINY, name) for name in SETTINGS.split()})
        study = dataclasses.replace(study, base=small, seeds=(0,))
        planned = study.runs(Path("runs"))
        assert cli.main(["run", "my_study.py", "--dry-run"]) == 0
        write_declaration(study, Path("runs"))
        from mine import run_here

        run_here(study, planned, cache=Path(".cache"))
        yield study
        del sys.modules["mine"], sys.modules["my_study"]


def test_every_row_of_the_table_leads_to_an_example_and_to_a_file_that_exists():
    anchors = {section.lower().replace(" ", "-") for section in SECTIONS}
    rows = re.findall(r"^\| (\[?a.*?) \| (.*?) \|", PAGE, re.MULTILINE)
    assert {link for row, _ in rows for link in re.findall(r"\(#(.*?)\)", row)} == anchors and len(rows) >= 15
    assert "(#add-to-the-package)" in PAGE and "\n## Add to the package\n" in PAGE
    for path in re.findall(r"^\|.*?`([\w/]+(?:/|\.py))`", PAGE, re.MULTILINE):
        assert (ROOT / "moe_rl" / path).exists() or (ROOT / path).exists(), path


def test_loss_advantage_aggregation_correction_term_and_dose_train(study):
    updates = load_study(Path("runs/my_study"))["updates"].set_index(["arm", "step", "update"]).sort_index()
    plain, held = updates.loc["plain"], updates.loc["held"]
    assert (plain["own_logprob"] < 0).all() and held["own_logprob"].isna().all()
    assert plain["term_stay"].isna().all() and (held.loc[(1, 2) : (1, 4), "term_stay"] > 0).all()
    assert held["coverage"].between(0.45, 0.55).all(), "one of the two MoE layers was replayed"
    assert (plain["grad_norm"] > 0).any() and (held["grad_norm"] > 0).any()


def test_a_metric_column_is_the_endpoint_of_a_study(study, capsys):
    steps = load_study(Path("runs/my_study"))["steps"]
    longest = steps[steps["step"] > 0]["own_longest"]
    assert longest.between(1, study.base.max_new_tokens).all() and len(longest) == 4
    assert cli.main(["runs", "collect", "runs/my_study", "--out", "results"]) == 0
    assert load_study(Path("results"))["steps"]["own_longest"].notna().sum() == 4
    assert cli.main(["plot", "results"]) == 0
    assert "own_longest" in capsys.readouterr().out


def test_engine_and_tracker_saw_every_completion_and_step(study):
    runs, rollouts = 2, study.base.prompts_per_step * study.base.group_size
    evaluations = 2 * 2 * study.base.eval_prompts  # greedy and sampled, before training and after it
    assert len(Path("completions.txt").read_text().splitlines()) == runs * (2 * rollouts + evaluations)
    lines = Path("tracker.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["step=0", "step=1", "step=2"] * runs


def test_figure_metric_and_verdict_of_ones_own_are_shown(study, capsys, monkeypatch):
    from moe_rl.results.figures import title_of

    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["plot", "runs/my_study", "--trust"]) == 0
    shown = capsys.readouterr().out
    assert "best reward" in shown and "undetermined" in shown
    assert (Path("runs/my_study/figures") / "mine_lengths.png").stat().st_size > 10_000
    assert title_of("mine:lengths") == "Mean response length over steps."


def test_the_verb_is_one_of_the_command_line(study, monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "best", ("mine:best", "The best reward of every run."))
    assert cli.main(["best", "runs/my_study"]) == 0
    assert {"plain", "held"} <= set(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert "best" in capsys.readouterr().out
