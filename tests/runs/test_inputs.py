"""What a run is made from beside the package: noticed when it changed, recorded, and never read through torch."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.runs import folder as runs
from moe_rl.study.collect import collect
from moe_rl.config import Arm, ModelConfig, RunConfig
from moe_rl.errors import RunError
from moe_rl.runs.frames import load_study
from moe_rl.runs.inputs import inputs_of
from moe_rl.lookup import Use
from moe_rl.runs.folder import RunFolder
from moe_rl.study.declaration import Planned, write_declaration
from moe_rl.study.workers import check_code
from tests import fake_study


@pytest.fixture
def config(tmp_path, monkeypatch) -> RunConfig:
    """A run that takes everything from outside: data, a task's file, a loss, a route source, a checkpoint."""
    (tmp_path / "data.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("raise ImportError('nothing is imported for a digest')\n")
    (tmp_path / "own" / "loss.py").write_text("import torch\n")
    (tmp_path / "own_routes.py").write_text("import torch\n")
    (tmp_path / "model" / "nested").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "nested" / "weights.bin").write_bytes(bytes(3_000_000))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return fake_study.study.base.replace(
        task=f"jsonl:{tmp_path}/data.jsonl", model=ModelConfig(name=f"{tmp_path}/model"),
        arm=Arm(name="mine", loss="own.loss:mine", routes="own_routes:mine"))


def planned(root: Path, config: RunConfig, seed: int = 0) -> Planned:
    return Planned(root / "runs" / "fake" / "mine" / "base" / f"seed={seed}", config.replace(seed=seed))


def train(p: Planned) -> None:
    with RunFolder.open(p.path, p.config.to_dict(), p.config.hash, trainer="own_routes:train") as folder:
        fake_study.train(p.config.replace(task="running_sums"), folder, cache=p.path)


EDITS = {
    "data.jsonl": "data.jsonl", "own.loss": "own/loss.py", "own_routes": "own_routes.py",
    "model": "model/nested/weights.bin",
}


def test_a_run_names_all_it_takes_from_outside(config, tmp_path):
    found = inputs_of(config.to_dict(), trainer="own_trainer:train")
    assert set(found) == {f"{tmp_path}/data.jsonl", "own.loss", "own_routes", f"{tmp_path}/model"}
    assert all(len(value) == 64 for value in found.values())
    assert inputs_of(fake_study.study.base.to_dict(), trainer="moe_rl.execute:execute") == {}
    user = config.replace(task=Use("own_routes:Task", file=str(tmp_path / "data.jsonl"), digits=3))
    assert inputs_of(user.to_dict())[f"{tmp_path}/data.jsonl"] == found[f"{tmp_path}/data.jsonl"]


@pytest.mark.parametrize("name, file", EDITS.items())
def test_what_was_edited_since_a_run_began_is_named_when_it_goes_on(config, tmp_path, name, file):
    p = planned(tmp_path, config)
    train(p)
    check_code(p.path, mix_code=False)
    with (tmp_path / file).open("ab") as edited:
        edited.write(b"#\n")
    with pytest.raises(RunError, match=rf"{name},? .*changed.*--mix-code"):
        check_code(p.path, mix_code=False)
    check_code(p.path, mix_code=True)
    train(Planned(p.path, p.config.replace(steps=15)))
    before, after = next(v for k, v in runs.read_manifest(p.path)["inputs"].items() if k.endswith(name)).split(" then ")
    assert before != after
    with pytest.raises(RunError, match="changed"):
        check_code(p.path, mix_code=False)


def test_what_is_gone_counts_as_changed(config, tmp_path):
    p = planned(tmp_path, config)
    train(p)
    (tmp_path / "data.jsonl").unlink()
    with pytest.raises(RunError, match=r"data\.jsonl, .*changed"):
        check_code(p.path, mix_code=False)


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


def test_a_run_from_before_there_were_digests_goes_on(config, tmp_path):
    p = planned(tmp_path, config)
    train(p)
    file = p.path / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["inputs"]
    file.write_text(json.dumps(manifest))
    check_code(p.path, mix_code=False)
    assert load_study(p.path).runs["inputs"].item() is None
    train(Planned(p.path, p.config.replace(steps=15)))
    assert len(runs.read_manifest(p.path)["inputs"]) == 4


def test_collected_rows_keep_when_a_run_was_made_and_from_what(config, tmp_path):
    p = planned(tmp_path, config)
    train(p)
    write_declaration(fake_study.study, tmp_path / "runs")
    collect(tmp_path / "runs" / "fake", tmp_path / "results")
    row, manifest = load_study(tmp_path / "results").runs.iloc[0], runs.read_manifest(p.path)
    assert json.loads(row["inputs"]) == manifest["inputs"] and len(manifest["inputs"]) == 4
    assert (row["created"], row["finished_at"]) == (manifest["created"], manifest["finished_at"])


def test_digests_are_made_without_torch_and_without_importing_what_is_hashed(config, tmp_path):
    code = ("import json, sys; from moe_rl.runs.inputs import inputs_of; n = len(inputs_of(json.load(sys.stdin))); "
            "assert n == 4, n; assert not {'torch', 'own', 'own_routes'} & set(sys.modules)")
    path = os.pathsep.join([str(tmp_path), str(Path(runs.__file__).parents[2])])
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(config.to_dict()), text=True,
                          env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0, done.stderr
