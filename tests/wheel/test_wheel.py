"""The package as others install it: a wheel, in an environment without this checkout. `make test-wheel`.

The environments are new; what the package needs they borrow from the one that runs the tests: all of it, or what the
wheel without extras asks for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from moe_rl.registry import STUDY

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif("MOE_RL_WHEEL" not in os.environ, reason="the wheel is tested by `make test-wheel`")


TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
ALONE = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built of what git tracks."""
    root = tmp_path_factory.mktemp("wheel")
    for name in filter(None, TRACKED):  # what a build leaves behind stays here, and what one left there stays out
        (root / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / "source" / name)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root), str(root / "source")]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, cwd=root)
    return next(root.glob("*.whl"))


def installed(wheel: Path, root: Path) -> Path:
    """The folder of packages of a new environment at `root`, with the wheel alone in it."""
    venv.create(root / "env", with_pip=True)
    install = [root / "env/bin/python", "-m", "pip", "install", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, env=ALONE, cwd=root)
    (root / "empty").mkdir()
    return next((root / "env" / "lib").glob("python*/site-packages"))


def program(root: Path, *words: str, cwd: str = ".") -> subprocess.CompletedProcess:
    """Run a program of that environment in an empty folder."""
    return subprocess.run(
        [root / "env/bin" / words[0], *words[1:]], cwd=root / "empty" / cwd, env=ALONE, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """Runs a program of an environment with everything; what it printed."""
    root = tmp_path_factory.mktemp("whole")
    folder = installed(wheel, root)
    (folder / "borrowed.pth").write_text(sysconfig.get_path("purelib"))  # not its .pth files: no editable install

    def run(*words: str, cwd: str = ".") -> str:
        done = program(root, *words, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def small(wheel, tmp_path_factory):
    """An environment with what the wheel requires without extras, and what that requires, as links."""
    root = tmp_path_factory.mktemp("small")
    folder = installed(wheel, root)
    found = {}
    wanted = PathDistribution(next(folder.glob("moe_rl-*.dist-info"))).requires
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in found or requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        found[requirement.name] = distribution(requirement.name)
        wanted += found[requirement.name].requires or []
    for package in found.values():
        for top in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(package.locate_file(top))
    return root


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("moe_rl/")}
    assert inside == {name for name in TRACKED if name.startswith("moe_rl/")}


def test_the_default_study_runs_by_its_name(command):
    assert "site-packages/moe_rl" in command("python", "-c", "import moe_rl; print(moe_rl.__file__)")
    planned = command("moe-rl", "run", "routing_replay", "--dry-run")
    assert "gspo_short/lag=2/seed=2  waiting 0/32" in planned
    small = [
        word
        for setting in ("cold_start.target=0", "prompts_per_step=4", "eval_prompts=4", "mini_batches=2")
        for word in ("--set", setting)
    ]
    ended = command("moe-rl", "run", "routing_replay", "--quick", *small)
    assert "sampled exact" in ended and "second half" in ended
    version = '"0.2.0+'
    run = "runs/routing_replay-quick/gspo_short/lag=0/seed=0"
    assert version in command("moe-rl", "runs", "show", run)
    assert "report.html" in command("moe-rl", "report", "runs/routing_replay-quick")


def test_a_new_study_passes_its_tests_and_plans(command):
    command("moe-rl", "new", "mine")
    assert "OK" in command("python", "-m", "unittest", cwd="mine")
    assert "12 runs, 480 steps to go" in command("moe-rl", "run", "mine.py", "--dry-run", cwd="mine")


def test_a_trainer_of_someone_else_needs_the_small_install_alone(small):
    """Its numbers are in `tests/test_small_install.py`."""
    names = sorted(STUDY - {"filelock", "jinja2", "rich"})  # torch and transformers bring these three
    done = program(small, "python", str(Path(__file__).with_name("trainer.py")), *names)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["installed"] == [] and [row["coverage"] for row in found["rows"]] == [1, 1]
    assert found["expert_change_rate"] > 0


def test_a_study_names_the_extra_that_it_needs(small):
    done = program(small, "moe-rl", "run", "routing_replay", "--dry-run")
    assert done.returncode == 2 and "pip install 'moe_rl[study]'" in done.stderr
