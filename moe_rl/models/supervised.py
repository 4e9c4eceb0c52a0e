"""The cold start: supervised warm-up on prompts with answers before reinforcement learning, up to a success rate."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial, reduce
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.metrics.rounding import number
from moe_rl.models.load import LoadedModel, load_weights, no_progress_bars, save_checkpoint
from moe_rl.models.master_weights import TrainedWeights
from moe_rl.models.tokens import completion_tokens, demonstrated, encode_prompts
from moe_rl.seeds import derive
from moe_rl.tasks.base import RIGHT, AnyTask, Split, draw, held_out, split_of
from moe_rl.tasks.environments import compute_rewards, sample_rollouts
from moe_rl.types import Prompt, Rollout, Sampling

Sample = Callable[..., list[Rollout]]
"""sample(model, tokenizer, prompts, group_size, *, key, sampling) → one rollout per prompt and group member."""
Progress = Callable[[Mapping[str, Any]], None]
"""Called about once a second with `step` of at most `steps`, `rate` of `target`, and `seconds_left` at most; or with
`waiting`, while another process makes this cold start."""
Alone = Callable[[Path, Progress], AbstractContextManager[Any]]
"""alone(folder, progress): a lock on that name among processes, for the block."""

TRAINING, STOPPING, NOISE = 101, 102, 103  # random streams of this file
CHUNK = 8  # batches drawn from the task at a time
GRAD_CLIP = 1.0
STOP_SAMPLES = 4
WARM_UP = 50  # steps of rising learning rate
SAMPLE_EVERY = 200  # steps; more often near the target
SAMPLE_GAP = 5  # steps between two samplings, at least


# ---------------------------------------------------------------------- training steps
def add_gradient(loaded: LoadedModel, batch: list[Prompt], micro_batch: int, temperature: float) -> tuple[float, float]:
    """Add the gradient of the cross-entropy of (prompt, answer, EOS), mean over the batch's answer tokens. Returns the
    cross-entropy in nats and the mean probability of the answers."""
    answers = encode_answers(loaded, batch)
    total, loss, chance = sum(map(len, answers)), 0.0, 0.0
    for i in range(0, len(batch), micro_batch):
        rows = slice(i, i + micro_batch)
        logprobs = answer_logprobs(loaded, batch[rows], answers[rows], temperature)
        share = -logprobs.sum() / total
        share.backward()
        loss += share.item()
        chance += logprobs.detach().sum(1).exp().sum().item() / len(batch)
    return loss, chance


def answer_logprobs(
    loaded: LoadedModel, prompts: list[Prompt], answers: list[list[int]], temperature: float
) -> Float[Tensor, "batch time"]:
    """Log-probabilities of the answer tokens at `temperature`, in nats, 0 elsewhere; column t belongs to token t+1.

    Rows are right-padded and need no attention mask, since attention is causal.
    """
    rows = [[*p.tokens, *answer] for p, answer in zip(prompts, answers, strict=True)]
    tokens = torch.full((len(rows), max(map(len, rows))), loaded.tokenizer.pad_token_id)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for b, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        tokens[b, : len(row)] = torch.tensor(row)
        mask[b, len(prompt.tokens) : len(row)] = True
    tokens, mask = tokens.to(loaded.model.device), mask.to(loaded.model.device)
    logits = loaded.model(input_ids=tokens, use_cache=False).logits[:, :-1].float() / temperature
    logprobs = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return logprobs.masked_fill(~mask[:, 1:], 0.0)


def encode_answers(loaded: LoadedModel, prompts: list[Prompt]) -> list[list[int]]:
    """The tokens of each answer, EOS included."""
    return [completion_tokens(p.answer or "", loaded.tokenizer) for p in prompts]


def draw_batches(
    task: AnyTask, loaded: LoadedModel, size: int, excluding: set[str], stream: int, seed: int
) -> Iterator[list[Prompt]]:
    """Encoded prompts with answers, `size` at a time without end, without the texts of `excluding`."""
    for chunk in count():
        prompts = encode_examples(task, draw(task, CHUNK * size, derive(stream, seed, chunk), excluding), loaded)
        for i in range(CHUNK):
            yield prompts[i * size : (i + 1) * size]


def encode_examples(task: AnyTask, prompts: list[Prompt], loaded: LoadedModel) -> list[Prompt]:
    """Prompts to train on, encoded. Raises ConfigError for one without an answer."""
    examples = demonstrated(task, encode_prompts(prompts, loaded.tokenizer), loaded.tokenizer)
    if any(p.answer is None for p in examples):
        raise ConfigError(
            f"{type(task).__name__} has prompts without a reference answer. Use a trained checkpoint with "
            "cold_start.target=0."
        )
    return examples


# ---------------------------------------------------------------------- the cold start
def cold_start(
    loaded: LoadedModel,
    task: AnyTask,
    run: RunConfig,
    cache_root: Path,
    sample: Sample,
    report: Callable[[str], None] = print,
    progress: Progress = lambda now: None,
    *,
    alone: Alone,
    inputs: Mapping[str, str] | None = None,
) -> Path | None:
    """Train `loaded.model` in place until the share of right completions (reward 1) reaches `run.cold_start.target`.

    Answer-only cross-entropy of (prompt, answer, EOS) at the run's temperature, mean over answer tokens, AdamW with a
    constant rate after a warm-up, on prompts that are neither the evaluation's nor those that decide when to stop. The
    result is cached under `<cache_root>/cold_starts/<hash of all that determines it>/`; `inputs` are digests of the
    task's own code and data, which are part of that. `sample` draws the completions that decide when to stop. Returns
    the folder of the Hugging Face checkpoint, None where the target is 0. Raises ConfigError when the answers do not
    fit into max_new_tokens, and RunError when `max_steps` did not suffice.
    """
    settings = run.cold_start
    if settings.target == 0:
        return None
    split = split_of(task, run.eval_prompts)
    evaluation = {p.text for p in held_out(task, run.eval_prompts)}
    stop_prompts = draw(task, split.stopping, derive(STOPPING, settings.seed, 0), evaluation)
    stop_prompts = encode_prompts(stop_prompts, loaded.tokenizer)
    excluding = evaluation | {p.text for p in stop_prompts}
    batches = draw_batches(task, loaded, settings.batch_size, excluding, TRAINING, settings.seed)
    first = list(islice(batches, CHUNK))
    examples = list(chain.from_iterable(first))
    _check_reachable(examples, loaded, run)

    identity = _identity(loaded, task, run, stop_prompts + examples) | {"inputs": dict(inputs or {})}
    folder = Path(cache_root) / "cold_starts" / _digest(identity)[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.with_suffix(".lock"), progress):
        if folder.exists():
            _from_cache(folder, loaded, report)
        else:
            report(f"supervised warm-up: {split}")
            record = _train(loaded, task, run, chain(first, batches), stop_prompts, split, sample, report, progress)
            _write(folder, loaded, record | {"determined_by": identity})
    return folder


def _check_reachable(examples: list[Prompt], loaded: LoadedModel, run: RunConfig) -> None:
    lengths = [len(answer) - 1 for answer in encode_answers(loaded, examples)]
    fit = sum(n <= run.max_new_tokens for n in lengths) / len(lengths)
    if fit < run.cold_start.target:
        raise ConfigError(
            f"cold_start.target={run.cold_start.target}, but only {fit:.0%} of the answers fit into max_new_tokens="
            f"{run.max_new_tokens} (the longest has {max(lengths)} tokens). Raise max_new_tokens, or lower the target."
        )


def _train(
    loaded: LoadedModel,
    task: AnyTask,
    run: RunConfig,
    batches: Iterator[list[Prompt]],
    stop_prompts: list[Prompt],
    split: Split,
    sample: Sample,
    report: Callable[[str], None],
    progress: Progress,
) -> dict[str, Any]:
    """The loop, and what it reached. The probability of a batch's answers predicts the success rate at no cost;
    sampling then decides."""
    settings = run.cold_start
    weights = TrainedWeights(loaded.model)
    trained = weights.parameters()
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0, fused=True)
    started, sampled, best = time.process_time(), 0, 0.0
    begun, reported = time.monotonic(), 0.0
    for step, batch in enumerate(islice(batches, settings.max_steps), 1):
        optimizer.param_groups[0]["lr"] = settings.lr * min(1.0, step / WARM_UP)
        loss, predicted = add_gradient(loaded, batch, run.micro_batch, run.temperature)
        torch.nn.utils.clip_grad_norm_(trained, GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        weights.write_back()
        if (now := time.monotonic()) - reported > 1:
            reported, left = now, (now - begun) / step * (settings.max_steps - step)
            state = {"step": step, "steps": settings.max_steps, "rate": best, "target": settings.target}
            progress(state | {"seconds_left": left})
        near = predicted >= settings.target and step - sampled >= SAMPLE_GAP
        if near or step % SAMPLE_EVERY == 0 or step == settings.max_steps:
            rate, sampled = _success_rate(loaded, task, run, stop_prompts, sample, step), step
            best = max(best, rate)
            samples = len(stop_prompts) * STOP_SAMPLES
            report(
                f"supervised warm-up: step {step}, loss {number(loss, '.3f')}, success {rate:.1%} of {samples} samples"
            )
            if rate >= settings.target:
                weights.release()
                return {"rate": rate, "steps": step, "seconds": time.process_time() - started}
    raise RunError(
        f"the supervised warm-up of {run.model.name!r} on {run.task} reached {best:.1%} success in "
        f"{settings.max_steps} steps, below the target of {settings.target:.0%}; it knows {predicted:.0%} of its last "
        f"batch. Raise cold_start.max_steps, lower cold_start.target, use more data ({split}) or an easier task."
    )


def _success_rate(
    loaded: LoadedModel, task: AnyTask, run: RunConfig, prompts: list[Prompt], sample: Sample, step: int
) -> float:
    """Share of full rewards among some completions per prompt, sampled as the run will sample."""
    sampling = Sampling(temperature=run.temperature, max_new_tokens=run.max_new_tokens, stop=run.stop)
    key = (NOISE, run.cold_start.seed, step)
    generate = partial(sample, loaded.model, loaded.tokenizer)
    rollouts = sample_rollouts(generate, task, prompts, STOP_SAMPLES, key=key, sampling=sampling)
    return sum(reward >= RIGHT for reward in compute_rewards(task, rollouts)) / len(rollouts)


def _identity(loaded: LoadedModel, task: AnyTask, run: RunConfig, prompts: list[Prompt]) -> dict[str, Any]:
    """All that determines the result: settings, initial weights, encoded prompts, the code of this file and of the
    task. Torch and the machine are left out, so that a cache can be copied."""
    weights = hashlib.sha256()
    for name, tensor in loaded.model.state_dict().items():
        weights.update(name.encode())
        weights.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    described = run.to_dict()
    keys = ("cold_start", "model", "task", "temperature", "max_new_tokens", "stop")
    return {
        **{key: described[key] for key in keys},
        "micro_batch": run.micro_batch,
        "eval_prompts": run.eval_prompts,
        "weights": weights.hexdigest(),
        "prompts": _digest([[p.tokens, p.answer] for p in prompts]),
        "code": _digest([Path(__file__).read_text(encoding="utf-8"), _source(type(task))]),
    }


def _source(cls: type) -> str:
    """The file that defines a class; its name where there is none, as in a notebook."""
    try:
        return Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    except (TypeError, OSError):
        return cls.__qualname__


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write(folder: Path, loaded: LoadedModel, record: dict[str, Any]) -> None:
    """The checkpoint and its record appear together or not at all."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while it wrote
    save_checkpoint(loaded.model, loaded.tokenizer, partial)
    (partial / "cold_start.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
    os.replace(partial, folder)


def _from_cache(folder: Path, loaded: LoadedModel, report: Callable[[str], None]) -> None:
    """Give the model the cached weights."""
    record = json.loads((folder / "cold_start.json").read_text(encoding="utf-8"))
    with no_progress_bars():
        widest = reduce(torch.promote_types, (x.dtype for x in loaded.model.parameters()))  # routers may be wider
        loaded.model.load_state_dict(load_weights(str(folder), widest).state_dict())
    report(f"supervised warm-up: success {record['rate']:.1%} after {record['steps']} steps, from {folder}")
