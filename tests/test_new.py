"""`moe-rl new`: a folder that runs as it is. The page about it shows its files, piece by piece."""

from __future__ import annotations

import io
import re
import sys
import unittest
from pathlib import Path

import pytest

from moe_rl import cli
from moe_rl.cli.new import TEMPLATE
from moe_rl.storage.frames import load_study

ROOT = Path(__file__).parents[1]
FILES = ROOT / "moe_rl" / "cli" / "new_study"
PAGE = (ROOT / "docs" / "studies.md").read_text().split("\n## ")[1]
TINY = [
    word
    for setting in ("cold_start.target=0", "prompts_per_step=4", "eval_prompts=4", "mini_batches=2")
    for word in ("--set", setting)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Made elsewhere under another name, and the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("new"))
        patch.setattr(sys, "path", list(sys.path))
        assert cli.main(["new", "below/other_name"]) == 0
        patch.chdir("below/other_name")
        yield Path.cwd()


def test_the_folder_has_a_study_its_parts_and_tests_under_the_given_name(folder):
    names = {f.name for f in folder.iterdir()}
    assert names == {"README.md", "other_name.py", "other_name_parts.py", "test_other_name.py"}
    assert not any(TEMPLATE in f.read_text() for f in folder.iterdir())


def test_its_own_tests_pass(folder):
    """As `python -m unittest` finds and runs them."""
    said = io.StringIO()
    done = unittest.TextTestRunner(said).run(unittest.TestLoader().discover("."))
    assert done.wasSuccessful() and "Ran 4 tests" in said.getvalue(), said.getvalue()


def test_it_plans_and_trains_with_its_own_parts(folder, capsys, forked_workers):
    assert cli.main(["run", "other_name.py", "--dry-run"]) == 0
    assert "12 runs, 480 steps to go" in capsys.readouterr().out
    arguments = ["run", "other_name.py", "--quick", "--jobs", "1", "--arms", "mine-replayed", *TINY]
    assert cli.main(arguments) == 0
    updates = load_study(folder / "runs" / "other_name-quick")["updates"]
    assert updates["step"].max() == 3 and updates["coverage"].between(0.01, 0.6).all(), "responses alone are replayed"


def test_nothing_that_is_there_is_touched_and_names_that_hide_a_module_are_refused(folder, capsys):
    (folder / "own.txt").write_text("mine")
    for name, words in (
        (str(folder), "is not empty"),
        ("my-study", "cannot be the name of a module"),
        ("json", "would hide"),
        ("numpy", "would hide"),
        ("class", "cannot be the name of a module"),
    ):
        assert cli.main(["new", name]) == 2
        assert words in capsys.readouterr().err
    assert (folder / "own.txt").read_text() == "mine"


def test_the_page_shows_the_files_as_they_are():
    files = [(FILES / name).read_text() for name in ("my_study_parts.py", "my_study.py")]
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5 and all(any(block in text for text in files) for block in blocks)
    shown = "".join(blocks)
    for text in files:
        code = [line for line in text.splitlines() if line.strip() and '"""' not in line]
        assert all(line in shown for line in code), "the page leaves nothing out"
