"""Checkpoints: what is incomplete is refused, never completed with random weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError
from moe_rl.integrations.shards import outline
from moe_rl.models.load import (
    INDEX,
    WHOLE,
    check_weights,
    load,
    load_config,
    load_tokenizer,
    may_exist,
    save_checkpoint,
)
from moe_rl.models.tokens import byte_tokenizer
from tests.conftest import FAMILIES, build


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "fine"
    save_checkpoint(build("qwen3_moe", vocab_size=258), byte_tokenizer(), folder)
    return folder


def without_a_router(folder):
    weights = load_file(folder / WHOLE)
    del weights["model.layers.1.mlp.gate.weight"]
    save_file(weights, folder / WHOLE, {"format": "pt"})


def a_larger_router(folder):
    weights = load_file(folder / WHOLE)
    weights["model.layers.1.mlp.gate.weight"] = torch.zeros(9, 32)
    save_file(weights, folder / WHOLE, {"format": "pt"})


def a_shard_that_never_arrived(folder):
    (folder / WHOLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))


@pytest.mark.parametrize(
    "damage, says", [(without_a_router, "layers.1.mlp.gate"), (a_larger_router, "other shapes of 1 ")]
)
def test_weights_that_would_be_random_are_refused(saved, tmp_path, damage, says):
    shutil.copytree(saved, tmp_path / "damaged")
    load(ModelConfig(name=str(tmp_path / "damaged")), 0)
    damage(tmp_path / "damaged")
    with pytest.raises(ConfigError, match=says):
        load(ModelConfig(name=str(tmp_path / "damaged")), 0)


@pytest.mark.parametrize(
    "damage, says",
    [
        (a_shard_that_never_arrived, "model-00001-of-00001.safetensors is missing"),
        (lambda folder: (folder / WHOLE).write_bytes(b"torn" * 9), "model.safetensors is missing or damaged"),
        (lambda folder: (folder / WHOLE).unlink(), "no weights"),
    ],
)
def test_files_that_are_missing_or_damaged_are_found_by_their_headers(saved, tmp_path, damage, says):
    shutil.copytree(saved, tmp_path / "damaged")
    assert check_weights(str(tmp_path / "damaged")) == [tmp_path / "damaged" / WHOLE]
    damage(tmp_path / "damaged")
    with pytest.raises(ConfigError, match=says):
        check_weights(str(tmp_path / "damaged"))


@pytest.mark.parametrize("router_dtype", [None, "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FAMILIES, "tied"])
def test_an_outline_reads_the_weights_and_buffers_that_a_whole_model_has(family, dtype, router_dtype, tmp_path):
    tied = family == "tied"
    model = build("qwen3_moe" if tied else family, vocab_size=258, tie_word_embeddings=tied)
    model.generation_config.eos_token_id = [3, 5]
    save_checkpoint(model, byte_tokenizer(), tmp_path)
    config = ModelConfig(name=str(tmp_path), dtype=dtype, router_dtype=router_dtype)
    whole, random = load(config, 0), torch.get_rng_state()
    found = outline(config)
    assert torch.equal(random, torch.get_rng_state())
    assert found.model.generation_config.eos_token_id == [3, 5]
    ours, theirs = found.weights(), whole.weights()
    assert set(ours) == set(theirs) and all(p.is_meta for p in found.model.parameters())
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype, name
        assert torch.equal(ours[name], weight), name


@pytest.mark.parametrize(
    "damage, says",
    [
        (a_larger_router, "stores 'model.layers.1.mlp.gate.weight' .* other shapes"),
        (a_shard_that_never_arrived, "is missing or damaged"),
    ],
)
def test_an_outline_refuses_a_damaged_checkpoint(saved, tmp_path, damage, says):
    shutil.copytree(saved, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    with pytest.raises(ConfigError, match=says):
        dict(outline(ModelConfig(name=str(tmp_path / "damaged"))).weights())


def test_what_cannot_be_read_weight_by_weight_has_no_outline(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "lacks")
    without_a_router(tmp_path / "lacks")
    assert outline(ModelConfig(name=str(tmp_path / "lacks"))) is None and outline(ModelConfig()) is None


def test_tied_weights_are_saved_once_and_not_missed(tmp_path):
    model = build("qwen3_moe", vocab_size=258, tie_word_embeddings=True)
    save_checkpoint(model, byte_tokenizer(), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WHOLE)
    again = load(ModelConfig(name=str(tmp_path)), 0).model
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_folder_that_is_no_checkpoint_says_what_it_lacks(tmp_path):
    with pytest.raises(ConfigError, match="config.json"):
        load_tokenizer(str(tmp_path))


def test_a_folder_that_is_not_there_is_not_asked_of_the_hub():
    """With the slash that a shell completes, too, which is no name on the hub."""
    for name in ("none/", "/none", "none", "one/two/three"):
        assert not may_exist(name)
        with pytest.raises(ConfigError, match=name):
            load_config(name)
    assert may_exist("Qwen/Qwen3-30B-A3B")
