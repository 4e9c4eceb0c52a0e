"""An inference engine made of a Hugging Face model: what the adapters are tested with where no other engine runs."""

from __future__ import annotations

import base64
import io
import tempfile
import threading
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from moe_rl.config import Optimizer
from moe_rl.integrations.shards import describe
from moe_rl.models.load import LoadedModel
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.policies.hf import HFPolicy
from moe_rl.rollouts.hf import HFEngine
from moe_rl.types import Prompt, Rollout, Sampling
from tests.conftest import build

SIZES = {"vocab_size": 258, "eos_token_id": 256, "pad_token_id": 257}
ONE_LOADS = threading.Lock()
"""transformers turns the tying of weights off for the whole process while it loads a model."""
PROMPTS = [Prompt("", tokens=tuple(row)) for row in ([65, 66, 67], [68, 69], [70, 71, 72, 73, 74])]


def small(family: str = "qwen3_moe") -> LoadedModel:
    return LoadedModel(build(family, **SIZES), byte_tokenizer())


def policy_of(loaded: LoadedModel, temperature: float = 1.0) -> HFPolicy:
    return HFPolicy(loaded.model, Optimizer(lr=1e-3), temperature=temperature)


class FakeEngine:
    """Serves the model described in `folder`, from weights of its own until some are pushed."""

    def __init__(self, folder: Path, loaded: LoadedModel):
        self.folder = folder
        describe(loaded.model, loaded.tokenizer, folder)
        self.engine = HFEngine(build(loaded.model.config.model_type, seed=9, **SIZES), loaded.tokenizer)
        self.pushes = 0

    def reload(self, weights: dict[str, torch.Tensor]) -> None:
        """As an engine reads them: from a checkpoint on disk."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            describe(self.engine.model, self.engine.tokenizer, folder)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            with ONE_LOADS:
                fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=self.engine.model.dtype)
        self.engine.model.load_state_dict(fresh.state_dict())
        self.pushes += 1

    def complete(self, tokens: list[int], temperature: float, length: int, seed: int, stop: list[str]) -> Rollout:
        greedy = temperature == 0
        sampling = Sampling(1.0 if greedy else temperature, length, tuple(stop), greedy)
        prompts = [Prompt("", tokens=tuple(tokens))]
        return self.engine.generate(prompts, 1, key=(seed,), sampling=sampling)[0]


def routes_of(rollout: Rollout) -> np.ndarray:
    """As vLLM writes them: [tokens - 1, layers, k], uint8, in no particular order within a row."""
    return rollout.routes.experts[0].numpy().astype(np.uint8)[..., ::-1].copy()


def as_base64(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()
