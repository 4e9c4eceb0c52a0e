"""Supervised training on prompts with answers: a cold start before reinforcement learning, and pretraining.

A cold start ends at a success rate, after some hundred steps, when routers are still uneven. Studies of routing want
models whose experts are all in use, and whose loss no longer falls: pretraining ends when loss and load have settled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.config import Pretraining, RunConfig, plain
from moe_rl.errors import ConfigError, RunError, raise_os_errors
from moe_rl.metrics.rounding import number
from moe_rl.metrics.volatility import Load, load_statistics
from moe_rl.models.load import LoadedModel, load, load_weights, no_progress_bars, save_checkpoint
from moe_rl.models.tokens import completion_tokens, demonstrated, encode_prompts
from moe_rl.routing import Recording, record_routing
from moe_rl.seeds import derive
from moe_rl.tasks.base import AnyTask, Split, draw, held_out, load_task, split_of
from moe_rl.tasks.environments import compute_reward, sample_rollouts
from moe_rl.types import Prompt, Rollout, Sampling

Sample = Callable[..., list[Rollout]]
"""sample(model, tokenizer, prompts, group_size, *, key, sampling) → one rollout per prompt and group member."""
Progress = Callable[[Mapping[str, Any]], None]
"""Hears about once a second how far the training is: `step` of at most `steps`, `rate` of `target`, `seconds_left` at
most; or that another process has `waiting` runs like this one use its cold start."""
Alone = Callable[[Path, Progress], AbstractContextManager[Any]]
"""alone(folder, progress): for the block, no other process works under that name; a killed one gives it back."""

TRAINING, STOPPING, NOISE, PRETRAINING = 101, 102, 103, 104  # streams of this file, beside those of `seeds`
CHUNK = 8  # batches drawn from the task at a time
GRAD_CLIP = 1.0
STOP_SAMPLES = 4
WARM_UP = 50  # steps of rising learning rate
SAMPLE_EVERY = 200  # steps; more often once the training batches say that the target is near
SAMPLE_GAP = 5  # steps between two samplings, at least
KNOWN, PATIENCE = 0.9, 10  # memorised: the chance of the answers trained on, and samplings that do not follow it
Row = dict[str, float]
"""A measurement on held-out prompts: `measure`."""
RECORD, STATE = "pretraining.json", "pretraining.pt"


# ---------------------------------------------------------------------- training steps
def train(
    loaded: LoadedModel,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[list[Prompt]],
    rate: Callable[[int], float],
    *,
    begun: int = 0,
    micro_batch: int,
    temperature: float = 1.0,
    load_balance: float = 0.0,
) -> Iterator[tuple[int, list[Prompt], float, float]]:
    """Take a step on each batch until the learning `rate` of a step is 0. Yields the number of the step, from
    `begun` + 1, its batch, and the loss and chance of `add_gradient` before the step."""
    for step, batch in enumerate(batches, begun + 1):
        if (now := rate(step)) <= 0:
            return
        optimizer.param_groups[0]["lr"] = now
        loss, chance = add_gradient(loaded, batch, micro_batch, temperature, load_balance)
        torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        yield step, batch, loss, chance


def make_optimizer(loaded: LoadedModel, lr: float) -> torch.optim.AdamW:
    """AdamW without weight decay."""
    return torch.optim.AdamW(loaded.model.parameters(), lr=lr, weight_decay=0.0, fused=True)


def add_gradient(
    loaded: LoadedModel, batch: list[Prompt], micro_batch: int, temperature: float, load_balance: float
) -> tuple[float, float]:
    """Add the gradient of the cross-entropy of (prompt, answer, EOS), mean over the batch's answer tokens, and of
    `load_balance` times the balance of each forward by its share of rows. Returns the cross-entropy in nats and the
    mean chance of sampling the answer, exp of the sum of its log-probs."""
    answers = encode_answers(loaded, batch)
    total, loss, chance = sum(map(len, answers)), 0.0, 0.0
    for i in range(0, len(batch), micro_batch):
        rows = slice(i, i + micro_batch)
        with record_routing(loaded.model, logits=True) if load_balance else nullcontext() as recording:
            logprobs = answer_logprobs(loaded, batch[rows], answers[rows], temperature)
        objective = share = -logprobs.sum() / total
        if recording is not None:
            balance = _balance_of_sites(recording, real_tokens(batch[rows], answers[rows]))
            objective = share + load_balance * balance * len(batch[rows]) / len(batch)
        objective.backward()
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


def encode_answers(loaded: LoadedModel, prompts: list[Prompt]) -> list[list[int]]:
    """The tokens of each answer, EOS included."""
    return [completion_tokens(p.answer or "", loaded.tokenizer) for p in prompts]


def real_tokens(prompts: list[Prompt], answers: list[list[int]]) -> Bool[Tensor, "batch time"]:
    """Which tokens of the rows of `answer_logprobs` are no padding."""
    lengths = torch.tensor([len(p.tokens) + len(a) for p, a in zip(prompts, answers, strict=True)])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _balance_of_sites(recording: Recording, real: Bool[Tensor, "batch time"]) -> Tensor:
    """Σ over sites of E · Σ_e f_e · P_e (arXiv 2101.03961, eq. 4): 1 each where load is even."""
    logits = recording.logits(len(real))
    ids = recording.take().unflatten(0, (len(real), -1))
    return torch.stack([_balance(x, ids[:, :, site], real) for site, x in enumerate(logits)]).sum()


def _balance(logits: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """E · Σ_e f_e · P_e of one site: 1 where load is even."""
    experts = logits.shape[-1]
    share = torch.bincount(ids[real].flatten().long(), minlength=experts) / ids[real].numel()
    return experts * (logits.softmax(-1)[real].mean(0) * share).sum()


def draw_batches(
    task: AnyTask, loaded: LoadedModel, size: int, excluding: set[str], stream: int, seed: int, first: int = 0
) -> Iterator[list[Prompt]]:
    """Encoded prompts with answers, `size` at a time without end, from the batch of index `first` on; none of the texts
    in `excluding`. Raises ConfigError for a prompt without an answer."""
    for chunk in count(first // CHUNK):
        prompts = encode_examples(task, draw(task, CHUNK * size, derive(stream, seed, chunk), excluding), loaded)
        for i in range(max(0, first - chunk * CHUNK), CHUNK):
            yield prompts[i * size : (i + 1) * size]


def encode_examples(task: AnyTask, prompts: list[Prompt], loaded: LoadedModel) -> list[Prompt]:
    """Prompts to train on, encoded. Raises ConfigError for one without an answer."""
    examples = demonstrated(task, encode_prompts(prompts, loaded.tokenizer), loaded.tokenizer)
    if any(p.answer is None for p in examples):
        raise ConfigError(
            f"{type(task).__name__} has prompts without a reference answer. Remove it from the pretraining, or start a "
            "run from a trained checkpoint with cold_start.target=0.")
    return examples


# ---------------------------------------------------------------------- the cold start
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
            return _from_cache(folder, loaded, report)
        report(f"supervised warm-up: {split}")
        result = _train(loaded, task, run, chain(first, batches), stop_prompts, split, sample, report, progress)
        _write(folder, loaded, identity, result)
    return dataclasses.replace(result, path=folder)


def _check_reachable(examples: list[Prompt], loaded: LoadedModel, run: RunConfig) -> None:
    target = run.cold_start.target
    if not 0 < target <= 1:
        raise ConfigError(f"cold_start.target={target} must be a success rate in [0, 1]; 0 turns the supervised "
                          "warm-up off")
    lengths = [len(answer) - 1 for answer in encode_answers(loaded, examples)]
    fit = sum(n <= run.max_new_tokens for n in lengths) / len(lengths)
    if fit < target:
        raise ConfigError(
            f"cold_start.target={target}, but only {fit:.0%} of the answers fit into "
            f"max_new_tokens={run.max_new_tokens} (the longest has {max(lengths)} tokens). Raise max_new_tokens, or "
            "lower the target."
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
) -> ColdStartResult:
    """The loop. The chance of sampling the answers of a batch predicts the success rate for nothing; sampling then
    decides. Of prompts that all came before it predicts what is memorised."""
    settings = run.cold_start
    steps = train(loaded, make_optimizer(loaded, settings.lr), batches,
                  lambda step: settings.lr * min(1.0, step / WARM_UP),
                  micro_batch=run.micro_batch, temperature=run.temperature)
    started, sampled, best = time.process_time(), 0, 0.0
    seen: set[str] = set()
    rate, in_vain, begun, said = 0.0, 0, time.monotonic(), 0.0
    for step, batch, loss, predicted in islice(steps, settings.max_steps):
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
            report(f"supervised warm-up: step {step}, loss {number(loss, '.3f')}, success {rate:.1%} of {samples} "
                   "samples")
            if rate >= settings.target:
                return ColdStartResult(rate, step, time.process_time() - started, None)
            in_vain += again and predicted >= KNOWN and rate < settings.target / 2
            if in_vain == PATIENCE:
                raise RunError(
                    f"the supervised warm-up on {run.task} memorised its {len(seen)} training prompts: at step {step} "
                    f"it solves {predicted:.0%} of them, but {rate:.0%} of the others (target {settings.target:.0%}). "
                    f"Use more data ({split}), an easier task, or a trained checkpoint with cold_start.target=0.")
    raise RunError(
        f"the supervised warm-up of {run.model.name!r} on {run.task} reached {best:.1%} success in "
        f"{settings.max_steps} steps, below the target of {settings.target:.0%}. Raise cold_start.max_steps, lower "
        "cold_start.target, or make the task easier."
    )


def _success_rate(
    loaded: LoadedModel, task: AnyTask, run: RunConfig, prompts: list[Prompt], sample: Sample, step: int
) -> float:
    """Share of full rewards among some completions per prompt, sampled as the run will sample."""
    sampling = Sampling(temperature=run.temperature, max_new_tokens=run.max_new_tokens, stop=run.stop)
    key = (NOISE, run.cold_start.seed, step)
    generate = partial(sample, loaded.model, loaded.tokenizer)
    rollouts = sample_rollouts(generate, task, prompts, STOP_SAMPLES, key=key, sampling=sampling)
    return sum(compute_reward(task, rollout) >= 1.0 for rollout in rollouts) / len(rollouts)


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
        raise RunError(f"the cached supervised warm-up {folder} cannot be read ({error}). Delete that "
                       "folder.") from error
    report(f"supervised warm-up: success {result.rate:.1%} after {result.steps} steps, from {folder}")
    return result


# ---------------------------------------------------------------------- pretraining
def pretrain(
    settings: Pretraining, folder: Path, report: Callable[[str], None] = print
) -> tuple[list[Row], dict[str, bool]]:
    """Train until the goals are met, or `max_steps`; then let the rate fall to 0, and write a Hugging Face checkpoint
    in float16 with its record, `pretraining.json`. Returns the measurements, the last of which is of the weights as
    they were written, and the goals: whether the loss was flat before the rate fell, the load balanced at the end.

    The loss is the cross-entropy of (prompt, answer, EOS) over answer tokens, in nats, plus `load_balance` of routers.
    AdamW without weight decay, gradients clipped at 1. The same call goes on after a kill, and ends with the same bits;
    a folder that has its checkpoint is left as it is. Raises ConfigError for one that was begun with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = json.loads(json.dumps(plain(settings)))
    if found := _record(folder, described):
        return found["rows"], found["goals"]
    task, loaded = load_task(settings.task), load(settings.model, settings.seed)
    apart = encode_examples(task, held_out(task, settings.held_out), loaded)
    optimizer = make_optimizer(loaded, settings.lr)
    done, falling, rows = _resume(folder, described, loaded, optimizer)
    batches = draw_batches(task, loaded, settings.batch_size, {p.text for p in apart}, PRETRAINING, settings.seed, done)
    by_length = (sorted(batch, key=lambda p: len(p.tokens)) for batch in batches)  # several forwards of one pad less

    def rate(step: int) -> float:
        factor = min(1.0, step / settings.warmup) if falling is None else 1 - (step - falling) / max(1, falling // 5)
        return settings.lr * factor

    step, began = done, time.monotonic()
    for step, *_ in train(loaded, optimizer, by_length, rate, begun=done, micro_batch=settings.micro_batch,
                          load_balance=settings.load_balance):
        last = falling is None and step >= settings.max_steps
        if step % settings.every == 0 or last:
            rows.append({"step": step, "lr": rate(step), **measure(loaded, apart, settings.micro_batch)})
            report(f"{_describe(rows[-1])}, {time.monotonic() - began:.0f} s")
            if falling is None and (last or all(settings.goals(rows).values())):
                falling = step
            _keep(folder, described, loaded, optimizer, step, falling, rows)
    flat = settings.goals([row for row in rows if row["step"] <= (falling or 0)])["flat"]
    for parameter in loaded.model.parameters():
        parameter.data.copy_(parameter.data.half())
    rows.append({"step": step, "lr": 0.0, **measure(loaded, apart, settings.micro_batch)})
    goals = settings.goals(rows) | {"flat": flat}
    report(f"{_describe(rows[-1])}, as written")
    loaded.model.half()
    save_checkpoint(loaded.model, loaded.tokenizer, folder)
    record = {"settings": described, "rows": rows, "goals": goals}
    _atomically(folder / RECORD, lambda file: file.write_text(json.dumps(record, indent=1)))
    (folder / STATE).unlink(missing_ok=True)
    return rows, goals


@torch.no_grad()
def measure(loaded: LoadedModel, prompts: list[Prompt], rows: int) -> Row:
    """On these prompts and their answers: `loss` in nats per answer token, `exact` the mean chance of sampling the
    answer, and of the site that is worst in it, over all real tokens, `load_entropy`, `load_max_violation` and
    `load_dead_experts`."""
    loss, tokens, chance, load = 0.0, 0, 0.0, None
    for i in range(0, len(prompts), rows):
        part = prompts[i : i + rows]
        answers = encode_answers(loaded, part)
        with record_routing(loaded.model) as recording:
            logprobs = answer_logprobs(loaded, part, answers, 1.0)
        ids = recording.take().unflatten(0, (len(part), -1))
        experts = [layer.num_experts for layer in recording.layout.sites]
        known = load_statistics(ids, experts, real_tokens(part, answers))
        load = known if load is None else load + known
        loss, tokens = loss - logprobs.sum().item(), tokens + sum(map(len, answers))
        chance += logprobs.sum(1).exp().sum().item()
    assert isinstance(load, Load)
    sites = load.site_rows()
    return {"loss": loss / tokens, "exact": chance / len(prompts),
            "load_entropy": min(site["load_entropy"] for site in sites),
            "load_max_violation": max(site["load_max_violation"] for site in sites),
            "load_dead_experts": max(site["load_dead_experts"] for site in sites)}


def _describe(row: Row) -> str:
    return (f"step {row['step']}: loss {number(row['loss'], '.3f')}, exact {row['exact']:.0%}; worst site: load "
            f"entropy {row['load_entropy']:.3f}, MaxVio {row['load_max_violation']:.2f}, dead "
            f"{row['load_dead_experts']:.0f}")


def _record(folder: Path, described: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Of a pretraining that ended here."""
    if not (folder / RECORD).exists():
        return None
    try:
        found = json.loads((folder / RECORD).read_text())
        same = {**found["settings"]} == described
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{folder / RECORD} cannot be read ({error}). Delete {folder} to pretrain again.") from error
    if not same:
        raise _other(folder, found["settings"], described)
    return found


def _resume(
    folder: Path, described: Mapping[str, Any], loaded: LoadedModel, optimizer: torch.optim.Optimizer
) -> tuple[int, int | None, list[Row]]:
    """Step, since when the rate falls, and measurements, as far as a pretraining here has come."""
    if not (folder / STATE).exists():
        return 0, None, []
    try:
        state = torch.load(folder / STATE, weights_only=True)
    except Exception as error:  # of pickle, zip or torch
        raise RunError(f"{folder / STATE} cannot be read ({type(error).__name__}). Delete {folder} to pretrain "
                       "again.") from error
    if state["settings"] != described:
        raise _other(folder, state["settings"], described)
    loaded.model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["falling"], state["rows"]


def _other(folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> ConfigError:
    parts = [f"{key} was {was.get(key)!r}, is {now.get(key)!r}" for key in now if was.get(key) != now[key]]
    return ConfigError(f"{folder} contains a pretraining with other settings ({'; '.join(parts)}). Choose another "
                       "folder, or delete it.")


def _keep(
    folder: Path, described: Mapping[str, Any], loaded: LoadedModel, optimizer: torch.optim.Optimizer, step: int,
    falling: int | None, rows: list[Row],
) -> None:
    state = {"settings": described, "model": loaded.model.state_dict(), "optimizer": optimizer.state_dict(),
             "step": step, "falling": falling, "rows": rows}
    _atomically(folder / STATE, lambda file: torch.save(state, file))


def _atomically(file: Path, write: Callable[[Path], Any]) -> None:
    partial = file.with_suffix(".partial")
    with raise_os_errors(partial):
        write(partial)
    os.replace(partial, file)
