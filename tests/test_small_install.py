"""`pip install moe_rl` without the extra `study`: what works there, and what the command line prints. `make test-wheel`
does the first in a real environment."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import torch

from moe_rl.registry import STUDY

ROOT = Path(__file__).parents[1]
TRAINER = str(ROOT / "tests" / "wheel" / "trainer.py")
ABSENT = sorted(STUDY - {"filelock", "jinja2"})
"""Torch and transformers cannot be imported without the other two."""
WITHOUT = f"""
import runpy, sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


def without_study(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run in an interpreter that does not find the packages of the extra."""
    return subprocess.run([sys.executable, "-c", WITHOUT + code, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_a_trainer_gets_the_same_numbers_from_the_small_install(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [TRAINER])
    with torch.random.fork_rng():
        runpy.run_path(TRAINER, run_name="__main__")
    whole = json.loads(capsys.readouterr().out)
    done = without_study(f"runpy.run_path({TRAINER!r}, run_name='__main__')", *ABSENT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == whole | {"installed": []}
    first, second = whole["rows"]
    assert first["pull"] == first["token_log_ratio_var"] == 0 and first["coverage"] == second["coverage"] == 1
    assert second["pull"] > 0 and second["token_log_ratio_var"] > 0 and first["expert_change_rate"] > 0


def test_a_verb_of_studies_names_the_extra_that_it_lacks():
    refused = [
        "run routing_replay --dry-run",
        "report runs",
        "runs list",
        "checkpoint compare a b --data x",
        "diagnose a b",
    ]
    done = without_study(f"from moe_rl.cli import main\nprint([main(x.split()) for x in {refused}])")
    assert done.stdout == f"{[2] * len(refused)}\n", done.stderr
    needs = [
        re.fullmatch(r"moe-rl.* needs (\w+)(?:, which is not installed)?: pip install 'moe_rl\[study\]'", x)
        for x in done.stderr.splitlines()
    ]
    assert len(needs) == len(refused) and all(needs), done.stderr
    assert {found[1] for found in needs} <= {*ABSENT}


def test_the_extra_has_what_the_command_line_names():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in extras["study"]} == STUDY
