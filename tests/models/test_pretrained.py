"""The checkpoint that comes with the package loads, and the load of its experts is what its record says."""

from __future__ import annotations

import json

import pytest
import torch

from moe_rl.config import ModelConfig, folder_of
from moe_rl.metrics.volatility import load_statistics
from moe_rl.models.load import load
from moe_rl.models.supervised import answer_logprobs, encode_answers
from moe_rl.models.tokens import encode_prompts
from moe_rl.registry import Component
from moe_rl.routing import record_routing
from moe_rl.tasks.base import held_out, load_task

TASK = Component(
    "mixture",
    tasks=(
        Component("running_sums", digits=48),
        "reasoning_gym:spell_backward",
        Component("reasoning_gym:caesar_cipher", min_words=1, max_words=3, min_rotation=3, max_rotation=3),
    ),
)
"""What it was trained on."""


def test_the_checkpoint_of_the_package_loads_by_its_name_and_its_experts_are_evenly_used():
    """Of fewer prompts than its record is of; routers that had not been kept would be far from even."""
    name = "qwen3_moe-fine-pretrained"
    record = json.loads((folder_of(name) / "pretraining.json").read_text())
    loaded = load(ModelConfig(name=name), 0)
    assert all(record["goals"].values()) and sum(p.numel() for p in loaded.model.parameters()) < 4e6
    prompts = encode_prompts(held_out(load_task(TASK), 256)[:48], loaded.tokenizer)
    answers = encode_answers(loaded, prompts)
    with torch.no_grad(), record_routing(loaded.model) as recording:
        logprobs = answer_logprobs(loaded, prompts, answers, 1.0)
    lengths = torch.tensor([len(p.tokens) + len(a) for p, a in zip(prompts, answers, strict=True)])
    ids = recording.take().unflatten(0, (len(prompts), -1))
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    rows = load_statistics(ids, [layer.num_experts for layer in recording.layout.moe_layers], real).moe_layer_rows()
    said = record["rows"][-1]
    assert min(row["load_entropy"] for row in rows) == pytest.approx(said["load_entropy"], abs=0.02)
    assert -logprobs.sum().item() / sum(map(len, answers)) == pytest.approx(said["loss"], rel=0.3)
