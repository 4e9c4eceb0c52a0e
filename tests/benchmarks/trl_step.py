"""CPU-seconds per step of TRL's `GRPOTrainer`, tuned for one CPU thread. Runs in TRL's own environment.

Prints one JSON object. Standalone on purpose: it must import neither `moe_rl` nor anything beside it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import tempfile
import time

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, MINI_BATCHES = 32, 8, 6, 16, 4
MODEL = {
    "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "intermediate_size": 256,
    "norm_topk_prob": True, "max_position_embeddings": 256,
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, 64 of them, ids 0 and 1 for padding and end."""
    characters = [chr(code) for code in range(ord("0"), ord("0") + 62)]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def prompts(count: int) -> list[str]:
    digits = torch.randint(0, 10, (count, PROMPT_TOKENS - 1), generator=torch.Generator().manual_seed(0))
    return ["".join(map(str, row)) + "=" for row in digits.tolist()]


def config(folder: str, steps: int) -> GRPOConfig:
    """Every choice that makes TRL cheaper on a CPU than its defaults, and none that changes what is computed."""
    return GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, router_aux_loss_coef=0.0,
        loss_type="grpo", beta=0.0, learning_rate=1e-5, lr_scheduler_type="constant",
        num_generations=GROUP, max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        per_device_train_batch_size=PROMPTS * GROUP // MINI_BATCHES, gradient_accumulation_steps=1,
        steps_per_generation=MINI_BATCHES, max_steps=steps * MINI_BATCHES,
        report_to="none", save_strategy="no", logging_steps=10**6, disable_tqdm=True, seed=0,
    )  # fmt: skip


class Clock(TrainerCallback):
    """Process time at the end of every rollout step (that is, every `MINI_BATCHES` optimizer steps)."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.marks.append(time.process_time())

    def on_step_end(self, args: object, state: object, *_: object, **__: object) -> None:
        if state.global_step % MINI_BATCHES == 0:
            self.marks.append(time.process_time())


def timed(owner: object, name: str, seconds: dict[str, float], label: str) -> None:
    """Add up the process time of a method under `label`."""
    method = getattr(owner, name)

    def run(*args: object, **kwargs: object) -> object:
        start = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[label] = seconds.get(label, 0.0) + time.process_time() - start

    setattr(owner, name, run)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=3, help="timed steps")
    options.add_argument("--warmup", type=int, default=2, help="steps before the clock counts")
    options = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL, pad_token_id=0, eos_token_id=1))
    tokens: list[tuple[int, int]] = []

    def reward(prompts: list, completions: list, completion_ids: list, **_: object) -> list[float]:
        tokens.append((len(completion_ids), sum(map(len, completion_ids))))
        return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]

    steps = options.warmup + options.steps
    clock, seconds = Clock(), {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model, reward, args=config(folder, steps), processing_class=tokenizer(), callbacks=[clock],
            train_dataset=Dataset.from_dict({"prompt": prompts(PROMPTS * steps)}),
        )  # fmt: skip
        timed(trainer, "_generate_single_turn", seconds, "generate")
        timed(trainer, "_generate_and_score_completions", seconds, "generate_and_score")
        trainer.train()
    assert model.config._experts_implementation == "grouped_mm", model.config._experts_implementation
    assert tokens == [(PROMPTS * GROUP, PROMPTS * GROUP * NEW_TOKENS)] * steps, tokens
    each = [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)][options.warmup :]
    print(json.dumps({
        "what": "trl", "cpu_seconds": each, "parameters": sum(p.numel() for p in model.parameters()),
        "sequences": PROMPTS * GROUP, "prompt_tokens": PROMPT_TOKENS, "new_tokens": tokens[-1][1],
        "phases_mean_all_steps": {
            "sample": seconds["generate"] / steps,
            "score": (seconds["generate_and_score"] - seconds["generate"]) / steps,
        },
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
