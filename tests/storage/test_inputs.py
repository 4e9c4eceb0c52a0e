"""What a run is made from beside the package: noticed when it changed, recorded, and never read through torch."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.config import Arm, ModelConfig, RunConfig
from moe_rl.errors import RunError
from moe_rl.registry import Component
from moe_rl.storage import folder as runs
from moe_rl.storage import provenance
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import load_study
from moe_rl.storage.provenance import (
    declared_by,
    git_state,
    inputs_of,
    instruction_set,
    merged_git,
    package_versions,
    processor,
)
from moe_rl.study.declaration import Planned
from moe_rl.study.workers import unfinished
from tests import fake_study


@pytest.fixture
def config(tmp_path, monkeypatch) -> RunConfig:
    """A run that takes everything from outside: data, a task's file, a loss, a route source, a checkpoint."""
    (tmp_path / "data.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "loss.py").write_text("import torch\n")
    (tmp_path / "own_routes.py").write_text("import torch\n")
    (tmp_path / "model" / "nested").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "nested" / "weights.bin").write_bytes(bytes(3_000_000))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "own", raising=False)
    return fake_study.study.base.replace(
        task=f"jsonl:{tmp_path}/data.jsonl",
        model=ModelConfig(name=f"{tmp_path}/model"),
        arm=Arm(name="mine", loss="own.loss:mine", routes="own_routes:mine"),
    )


def planned(root: Path, config: RunConfig, seed: int = 0) -> Planned:
    return Planned(root / "runs" / "fake" / "mine" / "base" / f"seed={seed}", config.replace(seed=seed))


def train(p: Planned) -> None:
    with RunFolder.open(p.path, p.config.to_dict(), p.config.hash, trainer="own_routes:train") as folder:
        fake_study.train(p.config.replace(task="running_sums"), folder, cache=p.path)


EDITS = {
    "data.jsonl": "data.jsonl",
    "own.loss": "own/loss.py",
    "own_routes": "own_routes.py",
    "model": "model/nested/weights.bin",
}


def test_a_run_names_all_it_takes_from_outside(config, tmp_path):
    found = inputs_of(config.to_dict(), trainer="own_trainer:train")
    assert set(found) == {f"{tmp_path}/data.jsonl", "own.loss", "own_routes", f"{tmp_path}/model"}
    assert all(len(value) == 64 for value in found.values())
    assert inputs_of(fake_study.study.base.to_dict(), trainer="moe_rl.build:execute") == {}
    user = config.replace(task=Component("own_routes:Task", file=str(tmp_path / "data.jsonl"), digits=3))
    assert inputs_of(user.to_dict())[f"{tmp_path}/data.jsonl"] == found[f"{tmp_path}/data.jsonl"]


@pytest.mark.parametrize("name, file", EDITS.items())
def test_what_was_edited_since_a_run_began_is_named_when_it_goes_on(config, tmp_path, name, file):
    p = planned(tmp_path, config)
    train(p)
    unfinished([p], mix_code=False)
    with (tmp_path / file).open("ab") as edited:
        edited.write(b"#\n")
    with pytest.raises(RunError, match=rf"{name}\. .*--mix-code"):
        unfinished([p], mix_code=False)
    unfinished([p], mix_code=True)
    train(Planned(p.path, p.config.replace(steps=15)))
    before, after = next(v for k, v in runs.read_manifest(p.path)["inputs"].items() if k.endswith(name)).split(" then ")
    assert before != after
    with pytest.raises(RunError, match=name):
        unfinished([p], mix_code=False)


def test_what_other_files_a_folder_has_hidden_does_not_matter_and_names_do(config, tmp_path):
    before = inputs_of(config.to_dict())
    (tmp_path / "model" / ".cache").mkdir()
    (tmp_path / "model" / ".cache" / "downloaded").write_text("yesterday")
    assert inputs_of(config.to_dict()) == before
    (tmp_path / "model" / "config.json").rename(tmp_path / "model" / "other.json")
    assert inputs_of(config.to_dict()) != before


def test_runs_made_from_different_data_are_never_pooled_silently(config, tmp_path):
    train(planned(tmp_path, config))
    (tmp_path / "data.jsonl").write_text('{"question": "1+2=", "answer": "3"}\n')
    train(planned(tmp_path, config, seed=1))
    with pytest.raises(RunError, match=r"data\.jsonl"):
        load_study(tmp_path / "runs" / "fake")
    assert len(load_study(tmp_path / "runs" / "fake", mix_code=True).runs) == 2


# ---------------------------------------------------------------------- the study file, and what is beside it
@pytest.fixture
def study_file(tmp_path) -> Path:
    """A study file in a checkout of its own, with another file in its folder."""
    checkout = tmp_path / "checkout"
    (checkout / "studies").mkdir(parents=True)
    for name in ("mine.py", "deep.py"):
        (checkout / "studies" / name).write_text("import deep\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=checkout, check=True)
    return checkout / "studies" / "mine.py"


def test_a_run_keeps_the_commit_and_the_digests_of_its_study_file(config, study_file, tmp_path):
    commit = git_state(study_file.parent)["commit"]
    path = tmp_path / "runs" / "fake" / "mine" / "base" / "seed=0"

    def opened() -> dict:
        with RunFolder.open(path, config.to_dict(), config.hash, study_file=study_file) as folder:
            return folder.manifest["declared"]

    first = opened()
    assert first == {
        "file": "studies/mine.py",
        "sources": {"mine.py": hashlib.sha256(study_file.read_bytes()).hexdigest()},
        "git": {"commit": commit, "dirty": False},
    }
    git_state.cache_clear()  # what another process would see
    study_file.with_name("deep.py").write_text("# edited\n")
    assert opened() == first | {"git": {"commit": commit, "dirty": True}}, "which the study imports, or may import"
    study_file.write_text("# edited, too\n")
    again = opened()
    assert again["sources"]["mine.py"].startswith(f"{first['sources']['mine.py']} then ")
    git_state.cache_clear()
    with RunFolder.open(path, config.to_dict(), config.hash) as folder:
        assert folder.manifest["declared"] == again, "what goes on without its study file keeps what it knows"


def test_a_run_without_a_checkout_says_why_it_has_no_commit(tmp_path, monkeypatch):
    git_state.cache_clear()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    state = git_state(tmp_path)
    assert (state["commit"], state["dirty"]) == (None, None) and "not a git repository" in state["why"]
    (tmp_path / "lone.py").write_text("")
    assert declared_by(tmp_path / "lone.py")["file"] == "lone.py"
    git_state.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert "git" in git_state(tmp_path)["why"]
    git_state.cache_clear()


def test_a_run_that_goes_on_names_every_commit_and_stays_dirty():
    a, b = {"commit": "a", "dirty": True}, {"commit": "b", "dirty": False}
    assert merged_git(None, a) == merged_git(a, a) == a
    assert merged_git(a, b) == {"commit": "a then b", "dirty": True}
    assert merged_git({"commit": "a then b", "dirty": False}, b) == {"commit": "a then b", "dirty": False}
    unknown = {"commit": None, "dirty": None, "why": "no git"}
    assert merged_git(unknown, b) == b and merged_git(b, unknown) == {"commit": "b", "dirty": False, "why": "no git"}
    assert merged_git(None, unknown) == unknown


def test_a_run_says_on_which_processors_it_ran(tmp_path, config, monkeypatch):
    """Bits depend on them: a row that parts on another machine says why."""
    info = tmp_path / "cpuinfo"
    info.write_bytes(b"model\t: 17\nmodel name\t: Some\xae CPU\nflags\t: fpu avx2\n\nmodel\t: 18\n")
    assert processor(info) == "Some\ufffd CPU, model 17, avx2"
    info.write_text("model name\t: Some CPU\nflags\t: avx2 avx512f avx512bw\n")
    assert processor(info) == "Some CPU, avx512f"
    info.write_text("")
    assert processor(info) == platform.machine()
    for name, known in (("one", "one"), ("one", "one"), ("two", "one then two"), ("two", "one then two")):
        monkeypatch.setattr(runs, "processor", lambda name=name: name)
        with RunFolder.open(tmp_path / "run", config.to_dict(), config.hash) as folder:
            assert folder.manifest["packages"] == {
                **package_versions(),
                "processor": known,
                "instruction_set": instruction_set(),
            }


def test_the_instruction_set_is_that_in_effect_and_not_that_of_the_processor():
    code = (
        "from moe_rl.storage.provenance import instruction_set, processor; "
        "print(instruction_set(), processor(), sep='|')"
    )
    limits = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MKL_", "ONEDNN_"))}
    done = subprocess.run([sys.executable, "-c", code], env=clean | limits, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"DEFAULT, MKL_CBWR=COMPATIBLE|{processor()}"


def test_a_code_version_is_of_what_the_code_does_in_all_that_makes_numbers(tmp_path, monkeypatch):
    package = tmp_path / "moe_rl"
    (package / "integrations").mkdir(parents=True)
    monkeypatch.setattr(provenance, "PACKAGE", package)

    def version(file, text):
        (package / file).write_text(text)
        return provenance.code_version.__wrapped__()

    code = 'def f(x):\n    """One."""\n    return f"{x:{x}}" or ""\n'
    first = version("config.py", code)
    assert version("config.py", "# why\n\n" + code.replace("One", "Two")) == first
    assert version("integrations/slurm.py", "x = 1") == first != version("config.py", code.replace("x:", "y:"))
    version("config.py", code)
    assert version("seeds.py", "SPLIT = 1") not in (first, version("seeds.py", "SPLIT = 2"))
