"""The recipes for pretrained models: those for one GPU run on a random checkpoint of the family, two narrow layers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteMoeConfig

from moe_rl.cli import main
from moe_rl.models.load import save_checkpoint
from moe_rl.models.memory import estimate_memory
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.storage.frames import load_study
from moe_rl.study.declaration import load_study_file
from tests.models.test_memory import OLMOE, QWEN, sizes_of

RECIPES = Path(__file__).parents[2] / "studies" / "recipes"
FULL = {
    "one_gpu": GraniteMoeConfig(
        hidden_size=1024,
        intermediate_size=512,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=32,
        num_experts_per_tok=8,
        vocab_size=49155,
        tie_word_embeddings=True,
    ),
    "real_model": OLMOE,
    "one_node": QWEN,
}
"""granite-3.0-1b-a400m, OLMoE-1B-7B and Qwen3-30B-A3B."""
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
SHORT = {
    "model.device": "cpu",
    "policy": "hf",
    "prompts_per_step": 4,
    "mini_batches": 2,
    "micro_batch_tokens": 512,
    "max_new_tokens": 6,
    "eval_prompts": 4,
    "measure.responses": 4,
    "measure.detail_every": 1,
    "task.digits": 4,
    "task.partial": True,
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with questions, and a checkpoint of a family for each recipe."""
    lines = [{"question": f"{a}+{b}=", "answer": f"{a}{b} #### {a + b}"} for a in range(8) for b in range(8)]
    for name in ("gsm8k", "math"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cut(name, folder):
    """A random checkpoint of the recipe's family."""
    tokenizer = byte_tokenizer(300)
    config = type(FULL[name])(**{**FULL[name].to_dict(), **SMALL, "vocab_size": len(tokenizer), "head_dim": 16})
    config.intermediate_size, config.moe_intermediate_size = 16, 16
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.layer_types = None
    torch.manual_seed(0)
    save_checkpoint(AutoModelForCausalLM.from_config(config), tokenizer, folder)
    return str(folder)


def settings(values):
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("name", ["one_gpu", "real_model"])
def test_a_recipe_for_one_gpu_trains_two_steps(place, name):
    words = settings({**SHORT, "model.name": cut(name, place / "model")})
    short = ["--steps", "2", "--seeds", "1", "--jobs", "1", "--task", "running_sums"]
    assert main(["run", str(RECIPES / f"{name}.py"), *short, *words]) == 0
    frames = load_study(place / "runs" / name)
    assert len(frames.runs) == 3 and set(frames.runs["state"]) == {"finished"}
    assert (frames["updates"].groupby("arm")["weights_changed"].max() > 0).all(), "bfloat16, with masters"
    assert len([*place.glob("runs/*/*/*/*/checkpoints/step=000002/config.json")]) == 3


@pytest.mark.parametrize("name", ["one_gpu", "real_model", "one_node"])
def test_a_dry_run_prints_memory_and_seconds(place, name, capsys):
    words = settings({"model.name": cut(name, place / "model"), "eval_prompts": 4})
    assert main(["run", str(RECIPES / f"{name}.py"), "--dry-run", *words]) == 0
    printed = capsys.readouterr().out
    assert "update: " in printed and "TFLOP/s" in printed


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_recipe_for_verl_has_float32_weights_and_bfloat16_products(place, capsys, nodes):
    words = settings({"model.name": cut("one_node", place / "model"), "eval_prompts": 4, "verl.trainer.nnodes": nodes})
    assert main(["run", str(RECIPES / "verl_nodes.py"), "--trainer", "verl", "--dry-run", *words]) == 0
    printed = "".join(capsys.readouterr().out.split()).replace('"', "")
    for word in ("fsdp_config.model_dtype=fp32", "rollout.dtype=bfloat16", f"trainer.nnodes={nodes}"):
        assert word in printed


@pytest.mark.parametrize("name, ranks, gigabytes", [("one_gpu", 1, 31), ("real_model", 1, 130), ("one_node", 7, 82)])
def test_the_page_states_the_memory_of_each_recipe(name, ranks, gigabytes):
    run = load_study_file(str(RECIPES / f"{name}.py")).base
    phases = estimate_memory(run, sizes_of(FULL[name]), 256 + run.max_new_tokens, ranks)
    assert max(sum(terms.values()) for terms in phases.values()) / 1e9 == pytest.approx(gigabytes, abs=1)
    assert len((RECIPES / f"{name}.py").read_text().splitlines()) <= 60


def test_the_page_states_the_memory_of_olmoe_with_8_bit_moments():
    run = load_study_file(str(RECIPES / "real_model.py")).base
    run = run.replace(policy="hf(master_weights=False)", optimizer=run.optimizer.replace(name="adamw_8bit"))
    phases = estimate_memory(run, sizes_of(FULL["real_model"]), 256 + run.max_new_tokens)
    assert max(sum(terms.values()) for terms in phases.values()) / 1e9 == pytest.approx(47, abs=1)
