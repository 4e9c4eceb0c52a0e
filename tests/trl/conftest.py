"""Tiny models trained by the real TRL: `make test-trl` installs it and runs these tests. Skipped where it is absent."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from moe_rl.models.tokens import byte_tokenizer
from tests.conftest import build

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

NEEDS_TRL = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="tests against the real TRL are run by `make test-trl`"
)
PROMPTS = ["12+3=", "A?", "7*8*9=", "0", "ABC:", "5-5=", "HELLO", "(1)"]


def tiny(family="qwen3_moe", **settings):
    """A random model whose completions often end by themselves, with its tokenizer."""
    tokenizer = byte_tokenizer(48)
    tokenizer.padding_side = "left"
    model = build(family, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **settings)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 3
    return model, tokenizer


def reward(completion_ids, **_):
    """Any number that differs between completions."""
    return [sum(ids) % 11 / 11 for ids in completion_ids]


def make(trainer_class, folder, model=None, peft_config=None, eval_dataset=None, routing=None, **settings):
    """A trainer: two updates of two micro-batches per pass over a generation batch, two passes."""
    from datasets import Dataset
    from trl import GRPOConfig

    model, tokenizer = tiny() if model is None else model
    config = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "learning_rate": 3e-3,
        "max_completion_length": 9,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
    }
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    return trainer_class(
        model,
        reward,
        GRPOConfig(**{**config, **settings}),
        dataset,
        eval_dataset=dataset if eval_dataset else None,
        processing_class=tokenizer,
        peft_config=peft_config,
        **(routing or {}),
    )


def ours(*args, **settings):
    from moe_rl.integrations.trl import ReplayGRPOTrainer

    return make(ReplayGRPOTrainer, *args, **settings)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]
