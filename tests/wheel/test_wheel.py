"""The package as others install it: a wheel, in an environment without this checkout. `make test-wheel`.

The environment is new; what the package needs it borrows from the one that runs the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif("MOE_RL_WHEEL" not in os.environ, reason="the wheel is tested by `make test-wheel`")


TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
ALONE = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs a program of the new environment in an empty folder; what it printed."""
    root = tmp_path_factory.mktemp("wheel")
    for name in filter(None, TRACKED):  # what a build leaves behind stays here, and what one left there stays out
        (root / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / "source" / name)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root), str(root / "source")]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, cwd=root)
    venv.create(root / "env", with_pip=True)
    (wheel,) = root.glob("*.whl")
    install = [root / "env/bin/python", "-m", "pip", "install", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, env=ALONE, cwd=root)
    (site,) = (root / "env" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))  # not its .pth files: no editable install
    (root / "empty").mkdir()

    def run(*words: str, cwd: str = ".") -> str:
        done = subprocess.run([root / "env/bin" / words[0], *words[1:]], cwd=root / "empty" / cwd, env=ALONE,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run.wheel = wheel
    return run


def test_every_file_of_the_package_is_in_the_wheel(command):
    inside = {name for name in zipfile.ZipFile(command.wheel).namelist() if name.startswith("moe_rl/")}
    assert inside == {name for name in TRACKED if name.startswith("moe_rl/")}


def test_the_default_study_runs_by_its_name(command):
    assert "site-packages/moe_rl" in command("python", "-c", "import moe_rl.cli; print(moe_rl.cli.__file__)")
    planned = command("moe-rl", "run", "routing_replay", "--dry-run")
    assert "runs/routing_replay/gspo/volatile/seed=2  waiting 0/40" in planned
    small = [word for setting in ("cold_start.target=0", "prompts_per_step=4", "eval_prompts=4", "mini_batches=2")
             for word in ("--set", setting)]
    assert "reward, second half" in command("moe-rl", "run", "routing_replay", "--quick", *small)
    version = '"0.1.0+'
    assert version in command("moe-rl", "show", "runs/routing_replay-quick/gspo/quiet/seed=0")
    assert "report.html" in command("moe-rl", "report", "runs/routing_replay-quick")


def test_a_new_study_passes_its_tests_and_plans(command):
    command("moe-rl", "new", "mine")
    assert "OK" in command("python", "-m", "unittest", cwd="mine")
    assert "9 runs, 360 steps to go" in command("moe-rl", "run", "mine.py", "--dry-run", cwd="mine")
