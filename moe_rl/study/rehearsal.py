"""What is looked at before compute is spent: what a run asks, what its reference answers earn, its own code
on a toy batch.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl import ranks
from moe_rl.build import build
from moe_rl.config import Measure, ModelConfig, RunConfig
from moe_rl.errors import ConfigError, Diverged, MoeRlError
from moe_rl.models.load import PRESETS, hf_config, load_tokenizer, skeleton
from moe_rl.models.tokens import byte_tokenizer, completion_tokens, demonstrated, encode_prompts
from moe_rl.routing.sites import layout_of
from moe_rl.storage.commits import check_rows
from moe_rl.tasks.base import AnyTask, Environment, Split, checked_reward, draw, load_task, split_of
from moe_rl.trainer import train_step
from moe_rl.types import Prompt

LOOKED_AT, SECONDS = 512, 5.0
"""Prompts of a preview, and the time that rewarding their answers may take."""
FEW = 1000
"""Warm-up prompts below which an untrained preset memorises: of sums of two numbers below 100 it memorised 372 and 872,
and learned from 1,872."""


@dataclass(frozen=True)
class Preview:
    """What a run will ask and be given for it."""

    lines: tuple[tuple[str, str], ...]
    """Name and text, to be printed below each other."""
    cautions: tuple[str, ...]


def preview(run: RunConfig) -> Preview:
    """The split, one prompt as the model reads it, its answer, and how many answers fit. Reads no weights.

    Looks at LOOKED_AT prompts, and rewards their answers for at most SECONDS. Raises ConfigError where the task's own
    code breaks.
    """
    task, tokenizer = load_task(run.task), _tokenizer(run.model)
    split = split_of(task, run.eval_prompts)
    with _explained(run, "the prompts and rewards of the task"):
        prompts, needed = _shown(task, split, tokenizer)
        answered = [p for p in prompts if p.answer is not None]
        earned, until = [], time.monotonic() + SECONDS
        for p in answered:
            if not isinstance(task, Environment) and time.monotonic() < until:
                earned.append(checked_reward(task, p, p.answer or ""))
    first = prompts[0]
    lines = [("task", f"{run.task}"), ("prompts", f"{split}"),
             ("prompt", f"{_short(tokenizer.decode(list(first.tokens)))}, {len(first.tokens)} tokens")]
    found = []
    if answered:
        fit, longest = sum(n - 1 <= run.max_new_tokens for n in needed), max(needed)
        end = "its end and the earlier turns" if isinstance(task, Environment) else "its end"
        of_first, of_all = (f"; its reward is {earned[0]:g}", f"; {sum(r >= 1 for r in earned)} of {len(earned)} earn 1"
                            ) if earned else ("", "; the environment rewards them during a rollout")
        lines += [("answer", f"{_short(answered[0].answer or '')}, {needed[0]} tokens with {end}{of_first}"),
                  ("answers", f"{fit} of {len(answered)} fit into max_new_tokens={run.max_new_tokens}, the longest has "
                              f"{longest} tokens with {end}{of_all}")]
        if fit < len(answered):
            found.append(f"{len(answered) - fit} of {len(answered)} reference answers do not fit into max_new_tokens="
                         f"{run.max_new_tokens}, so the model cannot learn them. Use max_new_tokens={longest}.")
        if (least := min(earned, default=1.0)) < 1:
            worst = answered[earned.index(least)]
            found.append(f"{sum(r < 1 for r in earned)} of {len(earned)} reference answers have a reward below 1: "
                         f"{_short(worst.answer or '')} to {_short(worst.text)} has {least:g}. Check the answers and "
                         "the reward of the task: the supervised warm-up imitates these answers.")
    else:
        lines.append(("answer", "the task has no reference answers, so it cannot have a supervised warm-up"))
    left = None if split.different is None else split.different - split.evaluation
    if left is not None and left < run.prompts_per_step:
        found.append(f"a step samples {run.prompts_per_step} prompts, but only {left} different ones can be trained "
                     "on. Some appear several times in a step.")
    cold = run.cold_start
    if left is not None and cold.target and run.model.name in PRESETS and left - split.stopping < FEW:
        found.append(f"the supervised warm-up trains on {left - split.stopping} different prompts. An untrained model "
                     f"may memorise fewer than {FEW}, and the warm-up then stops. Use more data, or start from a "
                     "trained checkpoint with cold_start.target=0.")
    return Preview(tuple(lines), tuple(found))


def previews(runs: Iterable[RunConfig]) -> list[Preview]:
    """Those of the runs that ask different things, each once; those that differ in a seed ask the same."""
    distinct = {str((r.task, r.model, r.cold_start.replace(seed=0), r.max_new_tokens, r.eval_prompts,
                     r.prompts_per_step)): r for r in runs}
    return [preview(run) for run in distinct.values()]


def rehearse(run: RunConfig) -> list[str]:
    """One step of the run on a toy batch, where it names code from outside the package: that task, loss, advantage,
    route source or term is called as a step calls it, with two prompts and answers of eight tokens by untrained
    weights of as many layers and experts. Returns cautions.

    Raises ConfigError, with file and line, for code that breaks or gives what cannot be used.
    """
    if not run.own_code() or ranks.planned() > 1:
        return []
    with _explained(run, f"arm {run.arm.name!r} on a toy batch"), tempfile.TemporaryDirectory() as name:
        small, folder = _toy(run), Path(name)
        try:
            parts = build(small, folder, folder)
            for table, rows in train_step(small, parts, 1, parts.recorder(small, parts.policy)).items():
                check_rows(table, rows)
        except Diverged as error:
            return [f"arm {run.arm.name!r} on a toy batch: {error} Real batches may do the same."]
        except MoeRlError as error:
            raise ConfigError(f"arm {run.arm.name!r} on a toy batch: {error}") from error
    return []


def _tokenizer(model: ModelConfig) -> Any:
    return byte_tokenizer(hf_config(model).vocab_size) if model.name in PRESETS else load_tokenizer(model.name)


def _shown(task: AnyTask, split: Split, tokenizer: Any) -> tuple[list[Prompt], list[int]]:
    """LOOKED_AT prompts, or all there are, as a cold start reads them; and of those with an answer, how many tokens it
    needs, its end included, and what was said before it."""
    draw(task, 1, 0)  # refuses a task that gives none
    count = min(split.different or LOOKED_AT, LOOKED_AT)
    asked = encode_prompts(task.prompts(count, 0)[:count], tokenizer)
    shown = demonstrated(task, asked, tokenizer)
    return shown, [len(p.tokens) - len(q.tokens) + len(completion_tokens(p.answer, tokenizer))
                   for p, q in zip(shown, asked, strict=True) if p.answer is not None]


def _toy(run: RunConfig) -> RunConfig:
    """The run with everything small that can be."""
    model, bias = run.model, run.optimizer.loss_free_bias
    if model.name not in PRESETS:
        layout, bias = layout_of(skeleton(model)), 0.0
        sizes = {"num_hidden_layers": len(layout.sites), "num_experts_per_tok": layout.top_k,
                 "num_local_experts": max(site.num_experts for site in layout.sites)}
        model = ModelConfig(overrides=sizes | {"max_position_embeddings": 2**20})  # bytes are more than its tokens
    return run.replace(
        model=ModelConfig(name=model.name, overrides=model.overrides, router_dtype=model.router_dtype), policy="hf",
        engine="hf", batches="fresh", measure=Measure(responses=4, detail_every=1), steps=1, epochs=1,
        prompts_per_step=2, group_size=min(run.group_size, 4), mini_batches=2, micro_batch=4,
        max_new_tokens=min(run.max_new_tokens, 8), eval_prompts=1, hf_checkpoints=(), activation_checkpointing=False,
        **{"cold_start.target": 0.0, "optimizer.loss_free_bias": bias})


@contextmanager
def _explained(run: RunConfig, what: str) -> Iterator[None]:
    """What breaks inside becomes a sentence with the line of the user's code that it came from, or went through."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MoeRlError:
        raise
    except Exception as error:
        named = ", ".join(sorted(run.own_code())) or str(run.task)
        raise ConfigError(f"{what} ({named}) failed before any run was started: "
                          f"{_where(error, run.own_code())}{type(error).__name__}: {error}") from error


def _where(error: Exception, own: Collection[str]) -> str:
    """File, line and function: the last in a module of the user's own, else the last of all."""
    modules = [sys.modules.get(name.partition(":")[0]) for name in own]
    files = {getattr(module, "__file__", None) for module in modules}
    frames = traceback.extract_tb(error.__traceback__)
    at = ([frame for frame in frames if frame.filename in files] or list(frames))[-1]
    return f"{Path(at.filename).name}, line {at.lineno}, in {at.name}: "


def _short(text: str) -> str:
    return repr(text if len(text) <= 160 else f"{text[:80]} … {text[-70:]}")
