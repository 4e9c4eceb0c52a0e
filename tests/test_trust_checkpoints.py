"""A checkpoint or a trace that somebody sent runs no code, whatever it holds, unless --trust-remote-code is said."""

from __future__ import annotations

import ast
import contextlib
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch

import moe_rl
from moe_rl import cli
from moe_rl.config import ModelConfig
from moe_rl.models.load import load, save_checkpoint

PAYLOAD = """from pathlib import Path
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

Path("ran").touch()


class Config(Qwen3MoeConfig):
    model_type = "unheard_of"


class Model(Qwen3MoeForCausalLM):
    config_class = Config


def generate(*arguments, **options):
    Path("ran").touch()
"""


class Boom:
    def __reduce__(self):
        return eval, ("__import__('pathlib').Path('ran').touch()",)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    made = load(ModelConfig(name="qwen3_moe-tiny", overrides={"num_hidden_layers": 1}), 0)
    save_checkpoint(made.model, made.tokenizer, folder := tmp_path_factory.mktemp("sent") / "whole")
    return folder


@pytest.fixture
def sent(whole, tmp_path, monkeypatch):
    """A checkpoint that brings code in each way that transformers knows, beside modules of that name on the path."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, folder := tmp_path / "sent")
    for file in (folder / "payload.py", folder / "custom_generate" / "generate.py", tmp_path / "payload.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(PAYLOAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    change(
        folder / "config.json",
        auto_map={"AutoConfig": "payload.Config", "AutoModelForCausalLM": "payload.Model"},
        quantization_config={"quant_method": "payload"},
    )
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["payload.Config", "payload.Config"]})
    change(folder / "generation_config.json", custom_generate="payload")
    yield folder
    sys.modules.pop("payload", None)


def change(file: Path, **what) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | what))


def own_class(folder: Path) -> None:
    change(folder / "config.json", model_type="unheard_of")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Boom()}, folder / "pytorch_model.bin")


def another_format(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Boom()))


def kernel(folder: Path) -> None:
    change(folder / "config.json", attn_implementation="payload/boom")


SENT = {
    None: None,
    own_class: "contains c",
    pickled: "Weights only load failed",
    another_format: "damaged",
    kernel: "kernel",
}
"""What is done to it, and what is said then; else the command runs."""
COMMANDS = {
    "diagnose rollouts.jsonl sent": 1,  # a fault: its log-probs are invented
    "checkpoint compare {whole} sent --data texts.jsonl": 0,
    "checkpoint evaluate sent --data questions.jsonl --match exact -k 1 --max-tokens 2": 0,
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("made", SENT)
def test_no_command_runs_what_a_checkpoint_brings(whole, sent, command, made, capsys):
    for file, line in (
        ("texts", {"prompt": "1+1=", "response": "2"}),
        ("questions", {"question": "1", "answer": "2"}),
        (
            "rollouts",
            {"tokens": [1, 2, 3, 4], "prompt_length": 2, "logprobs": [-1.0, -1.0], "weight_version": "payload:boom"},
        ),
    ):
        Path(f"{file}.jsonl").write_text(json.dumps(line) + "\n")
    if made is not None:
        made(sent)
    try:
        code, said = cli.main(command.format(whole=whole).split()), ""
    except Exception as error:  # transformers' own
        code, said = 2, str(error)
    said += capsys.readouterr().err
    assert not Path("ran").exists()
    assert code == (COMMANDS[command] if made is None else 2) and (SENT[made] or "") in said, said


def test_trusted_it_runs(sent, capsys):
    own_class(sent)
    Path("rollouts.jsonl").write_text('{"tokens": [1, 2, 3, 4], "prompt_length": 2, "logprobs": [-1.0, -1.0]}\n')
    with contextlib.suppress(Exception):  # its code may fail, too
        cli.main(["diagnose", "rollouts.jsonl", str(sent), "--trust-remote-code"])
    assert Path("ran").exists()


def test_nothing_in_the_package_unpickles_or_evaluates():
    """Every `torch.load` reads weights only; there is no pickle, eval or exec, and YAML is read as data."""
    found = []
    for file in Path(moe_rl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            safe = {("weights_only", "True"), ("allow_pickle", "False")} & {
                (k.arg, ast.unparse(k.value)) for k in getattr(node, "keywords", ())
            }
            imported = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if (
                called in ("eval", "exec", "compile", "yaml.load", "yaml.full_load", "yaml.unsafe_load")
                or called in ("torch.load", "np.load")
                and not safe
                or {"pickle", "marshal", "shelve", "joblib", "dill"} & {*imported}
            ):
                found.append(f"{file}:{node.lineno}")
    assert not found
