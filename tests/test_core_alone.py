"""The core without `moe_rl/analysis` and `moe_rl/integrations`: it imports, passes its own tests, and a component that
is in neither is refused in one line.

Everything runs in a copy of the repository that lacks both folders. The whole core suite passes there, too:
`python tests/test_core_alone.py FOLDER` makes the copy, then `python -m pytest -m "not ranks" tests` in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = ("analysis", "integrations")
"""Folders of the package, and of the tests, that the copy lacks."""
COPIED = ("moe_rl", "tests", "notebooks", "studies", "docs", "pyproject.toml", "README.md", "Makefile", "CHANGELOG.md")
TESTED = [
    "tests/routing/test_hooks.py", "tests/routing/test_sources.py", "tests/objectives/test_compose.py",
    "tests/objectives/test_losses.py", "tests/test_epochs.py",
    "tests/test_trainer.py::test_an_interrupted_run_ends_identical",
]  # fmt: skip
"""Routing, objectives, the loop, and a whole tiny run."""
DRY = "run routing_replay --quick --dry-run"
MISSING = {
    f"{DRY} --policy megatron": "policy 'megatron' needs the folder moe_rl/integrations",
    f"{DRY} --policy fsdp": "policy 'fsdp' needs the folder moe_rl/integrations",
    f"{DRY} --set engine=vllm": "engine 'vllm' needs the folder moe_rl/integrations",
    f"{DRY} --launcher slurm": "launcher 'slurm' needs the folder moe_rl/integrations",
    f"{DRY} --trainer verl": "trainer 'verl' needs the folder moe_rl/integrations",
    f"{DRY} --track wandb": "tracker 'wandb' needs the folder moe_rl/integrations",
    "runs export a --to wandb": "tracker 'wandb' needs the folder moe_rl/integrations",
    "runs export a --to wandb=logs": "tracker 'wandb' needs the folder moe_rl/integrations",
    "runs import a --to b": "command 'runs import' needs the folder moe_rl/integrations",
    "checkpoint compare a b --data x": "command 'checkpoint compare' needs the folder moe_rl/analysis",
    "checkpoint evaluate a --data x": "command 'checkpoint evaluate' needs the folder moe_rl/analysis",
    "checkpoint view a b": "command 'checkpoint view' needs the folder moe_rl/analysis",
    "diagnose a b": "command 'diagnose' needs the folder moe_rl/analysis",
}
"""Commands, and what each prints that the installation lacks."""
WITHOUT_EDITABLE = """import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""
"""`sitecustomize.py` of the copy: an editable installation would find the missing folders where the package is."""


def copy_core(to: Path) -> Path:
    """The repository without LEFT_OUT and without the tables of studies."""
    for name in COPIED:
        source = ROOT / name
        if source.is_file():
            shutil.copy(source, to / name)
            continue
        left_out = LEFT_OUT if name in ("moe_rl", "tests") else ("results",)
        shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", *left_out))
    (to / "moe_rl" / "integrations" / "cpu_kernels" / "__pycache__").mkdir(parents=True)  # as git checkout leaves it
    (to / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    return to


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    return copy_core(tmp_path_factory.mktemp("core"))


def run_python(core: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An interpreter in the copy, whose package comes first."""
    environment = os.environ | {"PYTHONPATH": str(core), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run([sys.executable, *arguments], cwd=core, env=environment, capture_output=True, text=True)


def test_every_core_module_imports(core):
    modules = [".".join(file.relative_to(core).with_suffix("").parts).removesuffix(".__init__")
               for file in sorted((core / "moe_rl").rglob("*.py"))
               if file.name != "__main__.py" and "new_study" not in file.parts]  # written by `moe-rl new`, not imported
    done = run_python(core, "-c", f"import importlib\nfor m in {modules}: importlib.import_module(m)\n"
                                  "import moe_rl; print(moe_rl.__file__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(core / "moe_rl" / "__init__.py") and len(modules) > 80


def test_a_part_of_the_core_suite_passes(core):
    done = run_python(core, "-m", "pytest", "-p", "no:cacheprovider", *TESTED)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"\d{2,} passed", done.stdout) and "failed" not in done.stdout


def test_a_component_that_is_not_there_is_refused_in_one_line(core):
    done = run_python(core, "-c", f"from moe_rl.cli import main\nprint([main(x.split()) for x in {[*MISSING]}])")
    assert done.stdout.splitlines()[-1:] == [str([2] * len(MISSING))], done.stdout + done.stderr
    for line, missing in zip(done.stderr.splitlines(), MISSING.values(), strict=True):
        assert line.startswith(f"moe-rl: the {missing}, which this installation of moe_rl lacks"), line


if __name__ == "__main__":
    copy_core(Path(sys.argv[1]))
