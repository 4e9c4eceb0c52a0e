"""Pretraining: a small MoE model whose routers have settled, from nothing, on a mixture of tasks.

A cold start stops at a success rate, after some hundred steps, when routers are still uneven; studies of routing want
models whose experts are all in use, and whose loss no longer falls.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_rl.config import Pretraining, plain
from moe_rl.errors import ConfigError, RunError
from moe_rl.metrics.volatility import Load, load_statistics
from moe_rl.models.cold_start import CHUNK, GRAD_CLIP, answer_logprobs
from moe_rl.models.load import LoadedModel, load, save_checkpoint
from moe_rl.models.tokens import completion_tokens, demonstrated, encode_prompts
from moe_rl.routing import Recording, record_routing
from moe_rl.routing.file_mode import usual_errors
from moe_rl.seeds import derive
from moe_rl.tasks.base import AnyTask, draw, held_out, load_task
from moe_rl.types import Prompt

PRETRAINING = 104  # a stream beside those of the cold start
Row = dict[str, float]
"""A measurement on held-out prompts: `measured`."""
RECORD, STATE = "pretraining.json", "pretraining.pt"


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
    apart = _examples(task, held_out(task, settings.held_out), loaded)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=settings.lr, weight_decay=0.0, fused=True)
    done, falling, rows = _resume(folder, described, loaded, optimizer)
    batches = _batches(task, loaded, settings, done, {p.text for p in apart})
    begun = time.monotonic()
    for step, batch in zip(itertools.count(done + 1), batches, strict=False):
        factor = min(1.0, step / settings.warmup) if falling is None else 1 - (step - falling) / max(1, falling // 5)
        if factor <= 0:
            break
        optimizer.param_groups[0]["lr"] = settings.lr * factor
        _gradient(loaded, batch, settings)
        torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        last = falling is None and step >= settings.max_steps
        if step % settings.every == 0 or last:
            rows.append({"step": step, "lr": settings.lr * factor, **measured(loaded, apart, settings.micro_batch)})
            report(f"{_said(rows[-1])}, {time.monotonic() - begun:.0f} s")
            if falling is None and (last or all(settings.goals(rows).values())):
                falling = step
            _keep(folder, described, loaded, optimizer, step, falling, rows)
    flat = settings.goals([row for row in rows if row["step"] <= (falling or 0)])["flat"]
    for parameter in loaded.model.parameters():
        parameter.data.copy_(parameter.data.half())
    rows.append({"step": step - 1, "lr": 0.0, **measured(loaded, apart, settings.micro_batch)})
    goals = settings.goals(rows) | {"flat": flat}
    report(f"{_said(rows[-1])}, as written")
    loaded.model.half()
    save_checkpoint(loaded.model, loaded.tokenizer, folder)
    record = {"settings": described, "rows": rows, "goals": goals}
    _atomically(folder / RECORD, lambda file: file.write_text(json.dumps(record, indent=1)))
    (folder / STATE).unlink(missing_ok=True)
    return rows, goals


@torch.no_grad()
def measured(loaded: LoadedModel, prompts: list[Prompt], rows: int) -> Row:
    """On these prompts and their answers: `loss` in nats per answer token, `exact` the mean chance of sampling the
    answer, and of the site that is worst in it, over all real tokens, `load_entropy`, `load_max_violation` and
    `load_dead_experts`."""
    loss, tokens, chance, load = 0.0, 0, 0.0, None
    for i in range(0, len(prompts), rows):
        part = prompts[i : i + rows]
        answers = _answers(loaded, part)
        logprobs, real, recording = _forward(loaded, part, answers)
        ids = recording.take().unflatten(0, (len(part), -1))
        known = load_statistics(ids.long(), [layer.num_experts for layer in recording.layout.sites], real)
        load = known if load is None else load + known
        loss, tokens = loss - logprobs.sum().item(), tokens + sum(map(len, answers))
        chance += logprobs.sum(1).exp().sum().item()
    assert isinstance(load, Load)
    sites = load.site_rows()
    return {"loss": loss / tokens, "exact": chance / len(prompts),
            "load_entropy": min(site["load_entropy"] for site in sites),
            "load_max_violation": max(site["load_max_violation"] for site in sites),
            "load_dead_experts": max(site["load_dead_experts"] for site in sites)}


def _gradient(loaded: LoadedModel, batch: list[Prompt], settings: Pretraining) -> None:
    """Add the gradient of one batch: mean over its answer tokens, the balance of each forward by its share of rows."""
    answers = _answers(loaded, batch)
    total = sum(map(len, answers))
    for i in range(0, len(batch), settings.micro_batch):
        part = batch[i : i + settings.micro_batch]
        logprobs, real, recording = _forward(loaded, part, answers[i : i + settings.micro_batch], logits=True)
        logits = recording.logits(len(part))
        ids = recording.take().unflatten(0, (len(part), -1))
        balance = torch.stack([_balance(x, ids[:, :, site], real) for site, x in enumerate(logits)]).sum()
        (-logprobs.sum() / total + settings.load_balance * balance * len(part) / len(batch)).backward()


def _forward(
    loaded: LoadedModel, prompts: list[Prompt], answers: list[list[int]], logits: bool = False
) -> tuple[Tensor, Tensor, Recording]:
    """Log-probs of the answers, which tokens are no padding, [batch, time], and the routes of both."""
    with record_routing(loaded.model, logits=logits) as recording:
        logprobs = answer_logprobs(loaded, prompts, answers, 1.0)
    lengths = torch.tensor([len(p.tokens) + len(a) for p, a in zip(prompts, answers, strict=True)])
    return logprobs, torch.arange(logprobs.shape[1] + 1) < lengths[:, None], recording


def _balance(logits: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """E · Σ_e f_e · P_e of one site: 1 where load is even."""
    experts = logits.shape[-1]
    share = torch.bincount(ids[real].flatten().long(), minlength=experts) / ids[real].numel()
    return experts * (logits.softmax(-1)[real].mean(0) * share).sum()


def _batches(
    task: AnyTask, loaded: LoadedModel, settings: Pretraining, done: int, excluding: set[str]
) -> Iterator[list[Prompt]]:
    """Those after the first `done`, each sorted by length, so that several forwards of one pad less."""
    chunk, begin = divmod(done, CHUNK)
    while True:
        prompts = draw(task, CHUNK * settings.batch_size, derive(PRETRAINING, settings.seed, chunk), excluding)
        encoded = _examples(task, prompts, loaded)
        for i in range(begin, CHUNK):
            batch = encoded[i * settings.batch_size : (i + 1) * settings.batch_size]
            yield sorted(batch, key=lambda p: len(p.tokens))
        chunk, begin = chunk + 1, 0


def _examples(task: AnyTask, prompts: list[Prompt], loaded: LoadedModel) -> list[Prompt]:
    examples = demonstrated(task, encode_prompts(prompts, loaded.tokenizer), loaded.tokenizer)
    if any(p.answer is None for p in examples):
        raise ConfigError(f"{type(task).__name__} has prompts without a reference answer, so there is nothing to learn "
                          "from; leave it out")
    return examples


def _answers(loaded: LoadedModel, prompts: list[Prompt]) -> list[list[int]]:
    return [completion_tokens(p.answer or "", loaded.tokenizer) for p in prompts]


def _said(row: Row) -> str:
    return (f"step {row['step']}: loss {row['loss']:.3f}, exact {row['exact']:.0%}; worst site: load entropy "
            f"{row['load_entropy']:.3f}, MaxVio {row['load_max_violation']:.2f}, dead {row['load_dead_experts']:.0f}")


def _record(folder: Path, described: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Of a pretraining that ended here."""
    if not (folder / RECORD).exists():
        return None
    try:
        found = json.loads((folder / RECORD).read_text())
        same = found["settings"] == described
    except (ValueError, KeyError) as error:
        raise RunError(f"{folder / RECORD} cannot be read ({error}); delete {folder} to pretrain again") from error
    if not same:
        raise _other(folder, found["settings"], described)
    return found


def _resume(
    folder: Path, described: Mapping[str, Any], loaded: LoadedModel, optimizer: torch.optim.Optimizer
) -> tuple[int, int | None, list[Row]]:
    """Step, since when the rate falls, and measurements, as far as a pretraining here has come."""
    if not (folder / STATE).exists():
        return 0, None, []
    state = torch.load(folder / STATE, weights_only=True)
    if state["settings"] != described:
        raise _other(folder, state["settings"], described)
    loaded.model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["falling"], state["rows"]


def _other(folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> ConfigError:
    parts = [f"{key} was {was.get(key)!r}, is {now.get(key)!r}" for key in now if was.get(key) != now[key]]
    return ConfigError(f"{folder} holds a pretraining with other settings ({'; '.join(parts)}): choose another folder, "
                       "or delete it")


def _keep(
    folder: Path, described: Mapping[str, Any], loaded: LoadedModel, optimizer: torch.optim.Optimizer, step: int,
    falling: int | None, rows: list[Row],
) -> None:
    state = {"settings": described, "model": loaded.model.state_dict(), "optimizer": optimizer.state_dict(),
             "step": step, "falling": falling, "rows": rows}
    _atomically(folder / STATE, lambda file: torch.save(state, file))


def _atomically(file: Path, write: Callable[[Path], Any]) -> None:
    partial = file.with_suffix(".partial")
    with usual_errors(partial):
        write(partial)
    os.replace(partial, file)
