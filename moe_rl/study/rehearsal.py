"""Checks before compute is spent: the prompts and reference answers of a run, and its own code on a toy batch."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_rl import ranks
from moe_rl.build import build
from moe_rl.config import Measure, ModelConfig, RunConfig
from moe_rl.errors import ConfigError, Diverged, MoeRlError
from moe_rl.models.load import PRESETS, hf_config, is_missing, load_tokenizer, skeleton
from moe_rl.models.memory import describe
from moe_rl.models.supervised import CHUNK
from moe_rl.models.tokens import byte_tokenizer, completion_tokens, demonstrated, encode_prompts
from moe_rl.registry import Component
from moe_rl.routing.moe_layers import layout_of
from moe_rl.seeds import PROMPTS, derive
from moe_rl.storage.commits import check_rows
from moe_rl.study.declaration import Planned
from moe_rl.tasks.base import RIGHT, Environment, draw, held_out, load_task, rewards_of, split_of
from moe_rl.tasks.rewards import Reward
from moe_rl.trainer import train_step

LOOKED_AT, SECONDS = 512, 5.0
"""Prompts of a preview, and the time for rewarding their answers."""


def preview(run: RunConfig) -> tuple[list[tuple[str, str]], list[str]]:
    """Lines of a name and a text on what a run asks: the split, a prompt as the model reads it, its answer and reward;
    and cautions about reference answers that do not fit or are not right. Reads no weights.

    Looks at LOOKED_AT prompts, and rewards their answers for at most SECONDS. Raises ConfigError where the task's own
    code breaks.
    """
    task, tokenizer = load_task(run.task), _tokenizer(run.model)
    split = split_of(task, run.eval_prompts, bool(run.cold_start.target))
    with _explained(run, "the prompts and rewards of the task"):
        held_out_texts = {prompt.text for prompt in held_out(task, run.eval_prompts)}
        draw(task, run.prompts_per_step, derive(run.seed, PROMPTS, 1), held_out_texts)
        if run.own_code() and run.cold_start.target:
            draw(task, CHUNK * run.cold_start.batch_size, 0, held_out_texts)
        asked = encode_prompts(draw(task, min(split.different or LOOKED_AT, LOOKED_AT), 0), tokenizer)
        prompts = demonstrated(task, asked, tokenizer)
        rewards, until = [], time.monotonic() + SECONDS
        if not isinstance(task, Environment):
            rewards_of(task, prompts[:1], [""], [[]])
            for p in prompts:
                if p.answer is not None and time.monotonic() < until:
                    ids = completion_tokens(p.answer, tokenizer)
                    rewards.append((rewards_of(task, [p], [p.answer], [ids])[0], p))
    first, answer = prompts[0], prompts[0].answer
    lines = [("task", f"{run.task}"), ("prompts", f"{split}")]
    lines.append(("prompt", f"{tokenizer.decode(list(first.tokens))[-160:]!r}, {len(first.tokens)} tokens"))
    lines.append(("answer", "none, so the task cannot have a supervised warm-up" if answer is None else repr(answer)))
    if run.model.device.startswith("cuda"):
        lines += describe(run, max(len(p.tokens) for p in asked) + run.max_new_tokens, ranks.planned())
    cautions = []
    needed = [  # of an answer, its end included, and what was said before it
        len(p.tokens) - len(q.tokens) + len(completion_tokens(p.answer, tokenizer))
        for p, q in zip(prompts, asked, strict=True)
        if p.answer is not None
    ]
    if too_long := sum(n - 1 > run.max_new_tokens for n in needed):
        cautions.append(
            f"{too_long} of {len(needed)} reference answers do not fit into max_new_tokens={run.max_new_tokens}. "
            f"Use max_new_tokens={max(needed)}."
        )
    scored = [(reward, p) for reward, p in rewards if not isinstance(reward, Reward) or reward.scored]
    if unscored := len(rewards) - len(scored):
        cautions.append(f"{unscored} of {len(rewards)} reference answers are not scored (None): their reward is 0.")
    if wrong := [(reward, p) for reward, p in scored if reward < RIGHT]:
        reward, p = min(wrong, key=lambda pair: pair[0])
        cautions.append(
            f"{len(wrong)} of {len(rewards)} reference answers have a reward below 1: {p.answer!r} to "
            f"{p.text[-160:]!r} has {reward:g}. Check the answers and the reward of the task."
        )
    return lines, cautions


def on_this_machine(planned: Sequence[Planned]) -> tuple[list[Planned], list[str]]:
    """The runs, on the processor where this machine lacks their device, Megatron's then in float32; and a caution that
    names the device."""
    lacking = {p.config.model.device for p in planned if is_missing(p.config.model.device)}
    here = []
    for p in planned:
        there = {"model.device": "cpu"} if p.config.model.device in lacking else {}
        if there and Component.of(p.config.policy).name == "megatron":
            there |= {"model.dtype": "float32"}
        here.append(replace(p, config=p.config.replace(**there)))
    return here, [
        f"this machine has no model.device={name!r}, so the device, its memory and its speed were not checked"
        for name in sorted(lacking)
    ]


def require_writable(folder: Path) -> None:
    """Raise ConfigError where no file can be written into a folder that is there, or that is still to be made."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise ConfigError(
            f"runs cannot be written into {folder}: {there}: {error.strerror}. Give another --out, or make room."
        ) from error


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


def _toy(run: RunConfig) -> RunConfig:
    """The run with everything small that can be."""
    model, bias = run.model, run.optimizer.loss_free_bias
    if model.name not in PRESETS:
        layout, bias = layout_of(skeleton(model)), 0.0
        sizes = {
            "num_hidden_layers": len(layout.moe_layers),
            "num_experts_per_tok": layout.top_k,
            "num_local_experts": max(moe_layer.num_experts for moe_layer in layout.moe_layers),
        }
        model = ModelConfig(overrides=sizes | {"max_position_embeddings": 2**20})  # bytes are more than its tokens
    return run.replace(
        model=ModelConfig(name=model.name, overrides=model.overrides, router_dtype=model.router_dtype),
        policy="hf",
        engine="hf",
        batches=run.batches if Component.of(run.batches).own else "fresh",
        measure=Measure(responses=4, detail_every=1),
        steps=1,
        epochs=1,
        prompts_per_step=2,
        group_size=min(run.group_size, 4),
        mini_batches=2,
        micro_batch=4,
        max_new_tokens=min(run.max_new_tokens, 8),
        eval_prompts=1,
        hf_checkpoints=(),
        activation_checkpointing=False,
        **{"cold_start.target": 0.0, "optimizer.loss_free_bias": bias},
    )


@contextmanager
def _explained(run: RunConfig, what: str) -> Iterator[None]:
    """Raise an error inside as a ConfigError with the line of the user's code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MoeRlError:
        raise
    except Exception as error:
        named = ", ".join(sorted(run.own_code())) or str(run.task)
        raise ConfigError(
            f"{what} ({named}) failed before any run was started: "
            f"{_where(error, run.own_code())}{type(error).__name__}: {error}"
        ) from error


def _where(error: Exception, own: Collection[str]) -> str:
    """File, line and function: the last in a module of the user's own, else the last of all."""
    modules = [sys.modules.get(name.partition(":")[0]) for name in own]
    files = {getattr(module, "__file__", None) for module in modules}
    frames = traceback.extract_tb(error.__traceback__)
    at = ([frame for frame in frames if frame.filename in files] or list(frames))[-1]
    return f"{Path(at.filename).name}, line {at.lineno}, in {at.name}: "
