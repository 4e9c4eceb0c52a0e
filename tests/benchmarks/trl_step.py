"""CPU-seconds per step of TRL's `GRPOTrainer`, tuned for one CPU thread. Runs in TRL's own environment.

Prints one JSON object, last. A step is what one batch of rollouts costs: sampling, old log-probs, the updates.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
import time

import workload
from workload import GROUP, MINI_BATCHES, NEW_TOKENS, PROMPT_TOKENS, PROMPTS  # sets the environment first

from datasets import Dataset  # isort: skip
from transformers import TrainerCallback  # isort: skip
from trl import GRPOConfig, GRPOTrainer  # isort: skip


def config(folder: str, steps: int, shipped: bool) -> GRPOConfig:
    """Every choice that makes TRL cheaper on a CPU than its defaults, and none that changes what is computed.

    `shipped` leaves the three expensive defaults on: activation checkpointing, bf16, auxiliary loss.
    """
    cheap = {} if shipped else {"bf16": False, "gradient_checkpointing": False, "router_aux_loss_coef": 0.0}
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        **cheap,
        loss_type="grpo",
        beta=0.0,
        learning_rate=workload.LR,
        lr_scheduler_type="constant",
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        per_device_train_batch_size=PROMPTS * GROUP // MINI_BATCHES,
        gradient_accumulation_steps=1,
        steps_per_generation=MINI_BATCHES,
        max_steps=steps * MINI_BATCHES,
        report_to="none",
        save_strategy="no",
        logging_steps=10**6,
        disable_tqdm=True,
        seed=0,
    )


class Clock(TrainerCallback):
    """Process time at the start and after every `MINI_BATCHES` optimizer steps."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.marks.append(time.process_time())

    def on_step_end(self, args: object, state: object, *_: object, **__: object) -> None:
        if state.global_step % MINI_BATCHES == 0:
            self.marks.append(time.process_time())


def timed(owner: object, name: str) -> list[float]:
    """The process times of the calls of a method, filled while it runs."""
    method, times = getattr(owner, name), []

    def run(*args: object, **kwargs: object) -> object:
        start = time.process_time()
        result = method(*args, **kwargs)
        times.append(time.process_time() - start)
        return result

    setattr(owner, name, run)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock counts")
    parser.add_argument("--shipped", action="store_true", help="TRL's own defaults instead of the tuned ones")
    options = parser.parse_args()
    steps, tokenizer = options.warmup + options.steps, workload.tokenizer()
    model, texts, drawn = workload.model(), workload.prompts(PROMPTS * steps), []

    def reward(prompts: list, completions: list, completion_ids: list, **_: object) -> list[float]:
        drawn.append((len(completion_ids), sum(map(len, completion_ids))))
        return [workload.reward(text) for text in completions]

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            reward,
            args=config(folder, steps, options.shipped),
            processing_class=tokenizer,
            callbacks=[clock],
            train_dataset=Dataset.from_dict({"prompt": texts}),
        )
        sample = timed(trainer, "_generate_single_turn")
        prepare = timed(trainer, "_generate_and_score_completions")
        trainer.train()
    assert model.config._experts_implementation == "grouped_mm", model.config._experts_implementation
    assert {len(ids) for ids in tokenizer(texts)["input_ids"]} == {PROMPT_TOKENS}
    assert drawn == [(PROMPTS * GROUP, PROMPTS * GROUP * NEW_TOKENS)] * steps, drawn
    whole = [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)]
    phases = {
        "sample": sample,
        "score": [p - s for p, s in zip(prepare, sample, strict=True)],
        "update": [w - p for w, p in zip(whole, prepare, strict=True)],
    }
    result = {"step": whole, **phases}
    print(
        json.dumps(
            {
                "seconds": {name: values[options.warmup :] for name, values in result.items()},
                "new_tokens": drawn[-1][1],
                "parameters": model.num_parameters(),
                "versions": {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")},
            }
        )
    )


if __name__ == "__main__":
    main()
