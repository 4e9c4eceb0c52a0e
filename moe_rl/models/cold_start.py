"""The cold start: supervised training until a model solves a task often enough for reinforcement learning to begin."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.metrics.rounding import number
from moe_rl.models.checkpoints import load_weights
from moe_rl.models.load import LoadedModel, no_progress_bars, save_checkpoint
from moe_rl.models.tokens import completion_tokens, demonstrated, encode_prompts
from moe_rl.seeds import derive
from moe_rl.tasks.base import AnyTask, Split, draw, held_out, split_of
from moe_rl.tasks.environments import drawn, earned
from moe_rl.types import Prompt, Rollout, Sampling

Sample = Callable[..., list[Rollout]]
"""sample(model, tokenizer, prompts, group_size, *, key, sampling) → one rollout per prompt and group member."""
Progress = Callable[[Mapping[str, Any]], None]
"""Hears about once a second how far the training is: `step` of at most `steps`, `rate` of `target`, `seconds_left` at
most; or that another process has `waiting` runs like this one use its cold start."""
Alone = Callable[[Path, Progress], AbstractContextManager[Any]]
"""alone(folder, progress): for the block, no other process works under that name; a killed one gives it back."""

TRAINING, STOPPING, NOISE = 101, 102, 103  # streams of this file, beside those of `seeds`
STOP_SAMPLES = 4
CHUNK = 8  # batches drawn from the task at a time
WARM_UP = 50  # steps of rising learning rate
GRAD_CLIP = 1.0
SAMPLE_EVERY = 200  # steps; more often once the training batches say that the target is near
SAMPLE_GAP = 5  # steps between two samplings, at least
KNOWN, PATIENCE = 0.9, 10  # memorised: the chance of the answers trained on, and samplings that do not follow it


@dataclass(frozen=True)
class ColdStartResult:
    """What the cold start reached, and where its checkpoint lies."""

    rate: float | None
    """Share of right completions, sampled at the run's temperature on prompts it did not train on; None when off."""
    steps: int
    seconds: float
    """Processor seconds of this process that the training took."""
    path: Path | None
    """The Hugging Face checkpoint, None when the cold start is off."""
    cached: bool = False


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
) -> ColdStartResult:
    """Train `loaded.model` in place until the share of right completions (reward 1) reaches `run.cold_start.target`.

    Answer-only cross-entropy of (prompt, answer, EOS) at the run's temperature, mean over answer tokens, AdamW with a
    constant rate after a warm-up, on fresh prompts that are neither the evaluation's nor those that decide when to
    stop. The result is cached under `<cache_root>/cold_starts/<hash of all that determines it>/` with the file
    `cold_start.json`, and read from there the next time; `inputs` are digests of the task's own code and data, which
    are part of that. `sample` draws the completions that say when to stop.
    Raises ConfigError when the target cannot be reached at all, RunError when `max_steps` did not suffice, or when the
    prompts it trains on are memorised and others do not follow.
    """
    settings = run.cold_start
    if settings.target == 0:
        return ColdStartResult(rate=None, steps=0, seconds=0.0, path=None)
    split = split_of(task, run.eval_prompts)
    evaluation = {p.text for p in held_out(task, run.eval_prompts)}
    stop_prompts = draw(task, split.stopping, derive(STOPPING, settings.seed, 0), evaluation)
    stop_prompts = encode_prompts(stop_prompts, loaded.tokenizer)
    later = _examples(loaded, task, run, evaluation | {p.text for p in stop_prompts})
    first = next(later)
    _check_reachable(first, loaded, run)

    identity = _identity(loaded, task, run, stop_prompts + first) | {"inputs": dict(inputs or {})}
    folder = Path(cache_root) / "cold_starts" / _digest(identity)[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.with_suffix(".lease"), progress):
        if folder.exists():
            return _from_cache(folder, loaded, report)
        report(f"cold start: {split}")
        result = _train(loaded, task, run, chain([first], later), stop_prompts, split, sample, report, progress)
        _write(folder, loaded, identity, result)
    return dataclasses.replace(result, path=folder)


def _examples(loaded: LoadedModel, task: AnyTask, run: RunConfig, excluding: set[str]) -> Iterator[list[Prompt]]:
    """Chunks of encoded training prompts, without end."""
    count, chunk = CHUNK * run.cold_start.batch_size, 0
    while True:
        prompts = draw(task, count, derive(TRAINING, run.cold_start.seed, chunk), excluding)
        yield demonstrated(task, encode_prompts(prompts, loaded.tokenizer), loaded.tokenizer)
        chunk += 1


def _check_reachable(examples: list[Prompt], loaded: LoadedModel, run: RunConfig) -> None:
    target = run.cold_start.target
    if not 0 < target <= 1:
        raise ConfigError(f"cold_start.target is {target}; it is a success rate, so choose one in [0, 1] (0 = off).")
    if any(p.answer is None for p in examples):
        raise ConfigError(
            f"task {run.task} has prompts without a reference answer, so a cold start has nothing to imitate; start "
            "from a checkpoint that knows the task, with cold_start.target=0."
        )
    lengths = [len(completion_tokens(p.answer or "", loaded.tokenizer)) - 1 for p in examples]
    fit = sum(n <= run.max_new_tokens for n in lengths) / len(lengths)
    if fit < target:
        raise ConfigError(
            f"cold_start.target is {target}, but only {fit:.0%} of the answers fit into max_new_tokens="
            f"{run.max_new_tokens} (the longest has {max(lengths)} tokens): raise max_new_tokens or lower the target."
        )


def _train(
    loaded: LoadedModel,
    task: AnyTask,
    run: RunConfig,
    examples: Iterator[list[Prompt]],
    stop_prompts: list[Prompt],
    split: Split,
    sample: Sample,
    report: Callable[[str], None],
    progress: Progress,
) -> ColdStartResult:
    """The loop. exp(sum of an answer's log-probs) is the chance of sampling that answer, so each training batch
    predicts the success rate for nothing; sampling then decides. Of prompts that all came before it predicts what is
    memorised."""
    settings, model = run.cold_start, loaded.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0, fused=True)
    batches = (
        chunk[i : i + settings.batch_size] for chunk in examples for i in range(0, len(chunk), settings.batch_size)
    )
    started, sampled, best = time.process_time(), 0, 0.0
    seen: set[str] = set()
    rate, in_vain, begun, said = 0.0, 0, time.monotonic(), 0.0
    for step, batch in zip(range(1, settings.max_steps + 1), batches, strict=False):
        optimizer.param_groups[0]["lr"] = settings.lr * min(1.0, step / WARM_UP)
        loss, predicted = _gradient(loaded, batch, run)
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        again = seen.issuperset(p.text for p in batch)
        seen.update(p.text for p in batch)
        if (now := time.monotonic()) - said > 1:
            said, left = now, (now - begun) / step * (settings.max_steps - step)
            progress({"step": step, "steps": settings.max_steps, "rate": rate if again else predicted,
                      "target": settings.target, "seconds_left": left})
        near = predicted >= settings.target and step - sampled >= SAMPLE_GAP
        if near or step % SAMPLE_EVERY == 0 or step == settings.max_steps:
            rate, sampled = _success_rate(loaded, task, run, stop_prompts, sample, step), step
            best = max(best, rate)
            samples = len(stop_prompts) * STOP_SAMPLES
            report(f"cold start: step {step}, loss {number(loss, '.3f')}, success {rate:.1%} of {samples} samples")
            if rate >= settings.target:
                return ColdStartResult(rate, step, time.process_time() - started, None)
            in_vain += again and predicted >= KNOWN and rate < settings.target / 2
            if in_vain == PATIENCE:
                raise RunError(
                    f"the cold start of {run.model.name!r} on {run.task} memorised its {len(seen)} training prompts: "
                    f"at step {step} it gives their answers in {predicted:.0%} of samples (loss "
                    f"{number(loss, '.3f')}), and right ones to other prompts in {rate:.0%}, where the target is "
                    f"{settings.target:.0%}. More steps cannot help: bring more data ({split}), an easier task, or a "
                    "checkpoint that knows it, with cold_start.target=0.")
    raise RunError(
        f"the cold start of {run.model.name!r} on {run.task} reached a success rate of {best:.1%} at best in "
        f"{settings.max_steps} steps, not the target of {settings.target:.0%}: below it too few groups would have "
        "rewards that differ. Raise cold_start.max_steps, lower cold_start.target, or make the task easier."
    )


def _gradient(loaded: LoadedModel, batch: list[Prompt], run: RunConfig) -> tuple[float, float]:
    """Add the gradient of one batch; its loss in nats per answer token and the mean chance of sampling the answer."""
    answers = [completion_tokens(p.answer or "", loaded.tokenizer) for p in batch]
    total, loss, chance = sum(map(len, answers)), 0.0, 0.0
    for i in range(0, len(batch), run.micro_batch):
        part = slice(i, i + run.micro_batch)
        logprobs = answer_logprobs(loaded, batch[part], answers[part], run.temperature)
        share = -logprobs.sum() / total
        share.backward()
        loss += share.item()
        chance += logprobs.detach().sum(1).exp().sum().item() / len(batch)
    return loss, chance


def answer_logprobs(
    loaded: LoadedModel, prompts: list[Prompt], answers: list[list[int]], temperature: float
) -> Float[Tensor, "batch time"]:
    """Log-probabilities of the answer tokens at `temperature`, in nats, 0 elsewhere; column t belongs to token t+1.

    Rows are right-padded and need no attention mask: under causal attention no token sees what comes after it, and a
    padding token's experts change no other token.
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


def _success_rate(
    loaded: LoadedModel, task: AnyTask, run: RunConfig, prompts: list[Prompt], sample: Sample, step: int
) -> float:
    """Share of full rewards among some completions per prompt, sampled as the run will sample."""
    sampling = Sampling(temperature=run.temperature, max_new_tokens=run.max_new_tokens, stop=run.stop)
    key = (NOISE, run.cold_start.seed, step)
    generate = partial(sample, loaded.model, loaded.tokenizer)
    rollouts = drawn(generate, task, prompts, STOP_SAMPLES, key=key, sampling=sampling)
    return sum(earned(task, rollout) >= 1.0 for rollout in rollouts) / len(rollouts)


def _identity(loaded: LoadedModel, task: AnyTask, run: RunConfig, prompts: list[Prompt]) -> dict[str, Any]:
    """All else that determines the result: settings, weights before it, prompts as encoded, the code of this file and
    of the task. Torch's and the machine's part in the last bits is left out, so that a cache can be copied."""
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
        "code": _digest([Path(__file__).read_text(), _source(type(task))]),
    }


def _source(cls: type) -> str:
    """The file that defines a class; its name alone where there is none, as in a notebook."""
    try:
        return Path(inspect.getfile(cls)).read_text()
    except (TypeError, OSError):
        return cls.__qualname__


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write(folder: Path, loaded: LoadedModel, identity: dict[str, Any], result: ColdStartResult) -> None:
    """The checkpoint and its record appear together or not at all."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while it wrote
    save_checkpoint(loaded.model, loaded.tokenizer, partial)
    record = {"rate": result.rate, "steps": result.steps, "seconds": result.seconds, "determined_by": identity}
    (partial / "cold_start.json").write_text(json.dumps(record, indent=2))
    os.replace(partial, folder)


def _from_cache(folder: Path, loaded: LoadedModel, report: Callable[[str], None]) -> ColdStartResult:
    """The model takes over the weights when all of them are there and fit, or none."""
    try:
        record = json.loads((folder / "cold_start.json").read_text())
        result = ColdStartResult(record["rate"], record["steps"], record["seconds"], folder, cached=True)
        with no_progress_bars():
            widest = reduce(torch.promote_types, (x.dtype for x in loaded.model.parameters()))  # routers may be wider
            saved = load_weights(str(folder), widest).state_dict()
        if {name: x.shape for name, x in saved.items()} != {n: x.shape for n, x in loaded.model.state_dict().items()}:
            raise ValueError("its weights are of another model")
        loaded.model.load_state_dict(saved)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise RunError(f"the cached cold start {folder} cannot be read ({error}); delete that folder.") from error
    report(f"cold start: success {result.rate:.1%} after {result.steps} steps, from {folder}")
    return result
