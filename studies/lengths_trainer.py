"""How `lengths` measures: one policy, responses of 13, 40 and 120 tokens, gradients of stale mini-batches.

A run trains for two steps on whole answers, for the usual tables. Then, for each cell, the cold start takes five
steps of its own and one more of eight updates; before the eighth, ratios and gradients on the old policy's responses
are measured, and gradients on fresh ones of the current policy. `lengths.parquet` has a row per cell and objective,
`ratios.parquet` one per cell, `cells.parquet` one per cell and step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from gradient_quality_trainer import Gradients, cut, go_on, gradient, of_stale
from small import GSPO_CLIP, grpo
from why_gspo import cell as crossed

from moe_rl.build import build, check  # noqa: F401  runs are checked by it before they start
from moe_rl.config import Arm, RunConfig
from moe_rl.metrics.ratios import grouped_ess, ratio_statistics
from moe_rl.recorder import Recorder
from moe_rl.registry import Component
from moe_rl.rollouts.batches import Queue
from moe_rl.storage.folder import RunFolder
from moe_rl.tasks.base import load_task
from moe_rl.trainer import Listener, Parts, roll_out, split_rows, train, train_step
from moe_rl.types import Batch, Scored

STEPS, STALE, TOKENS, SEQUENCES = 5, 6, 208, 16
"""Steps of a cell before it is measured; batches of the old policy, and of the current one; an ESS is over groups of so
many tokens, or of so many responses."""


@dataclass(frozen=True)
class Cell:
    """A length of responses, in tokens, at equal responses or at equal tokens per update."""

    length: int
    equal: str
    times: int
    """As many responses per update as the run has."""

    def run(self, run: RunConfig) -> RunConfig:
        """The run of this cell."""
        return run.replace(**{"task.tokens": self.length, "max_new_tokens": self.length,
                              "prompts_per_step": self.times * run.prompts_per_step})


CELLS = (Cell(120, "both", 1), Cell(40, "responses", 1), Cell(13, "responses", 1), Cell(40, "tokens", 3),
         Cell(13, "tokens", 9))
"""1,920, 1,920 and 1,872 tokens per update where they are equal, 16 responses where these are."""


def arms(length: int) -> tuple[Arm, ...]:
    """GRPO and GSPO, and both weights unclipped. GSPO's range shrinks with √length, as the spread of a mean of
    independent tokens does; over the paper's thousands of tokens that comes near the paper's 3e-4 and 4e-4."""
    narrower = math.sqrt(13 / length)
    gspo = Arm(name="gspo", loss=Component("gspo", **{side: narrower * x for side, x in GSPO_CLIP.items()}))
    return grpo, gspo, crossed("token", "none"), crossed("sequence", "none")


def execute(run: RunConfig, folder: RunFolder, *, cache: Path, listen: Listener = lambda rows: None) -> None:
    """Carry out a run of the study from its beginning; nothing is kept of one that was interrupted."""
    parts, start = build(run, folder.path, cache), folder.path / "start"
    parts.policy.save(start)
    diverged = train(run, parts, folder, listen)
    found: dict[str, list[dict[str, Any]]] = {"lengths": [], "ratios": [], "cells": []}
    for cell in CELLS:
        here = cell.run(run)
        collector = replace(parts.collector, run=here, task=load_task(here.task))
        own = replace(parts, collector=collector, batches=Queue())
        what = {"length": cell.length, "equal": cell.equal}
        parts.policy.load(start)
        for step in range(1, STEPS + 1):
            rows = train_step(here, own, step, Recorder(here, own.policy))["steps"]
            found["cells"] += [{**what, **row} for row in rows]
        gradients, ratios = compare(here, own, cell, folder.path / "frozen")
        found["lengths"] += [{**what, **row} for row in gradients]
        found["ratios"].append({**what, **ratios})
    for name, rows in found.items():
        pd.DataFrame(rows).to_parquet(folder.path / f"{name}.parquet", index=False)
    folder.finish(diverged)


def compare(run: RunConfig, parts: Parts, cell: Cell, frozen: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """What objectives make of stale mini-batches, a row each, and how the ratios spread; the policy is left as found.

    `apart`: how far an objective's gradient is from GRPO's before the first update, in its norm: rounding."""
    policy, keys = parts.policy, iter(range(1_000 * (STEPS + 1), 1_000 * (STEPS + 2)))
    policy.save(frozen)
    stale = [(batch, policy.score(batch)) for batch in (roll_out(run, parts, next(keys)) for _ in range(STALE))]
    path = roll_out(run, parts, next(keys))
    old, split = policy.score(path), split_rows(len(path), run.mini_batches, seed=STEPS)
    first = {arm.name: gradient(policy, arm, *cut(*stale[0], split[0])).double() for arm in arms(cell.length)}
    for index in split[:-1]:
        go_on(parts, *cut(path, old, index))
    fresh = of_fresh(run, parts, keys)
    rows = [{"compared": "fresh", "apart": 0.0, **moments(fresh)}]
    for arm in arms(cell.length):
        apart = float((first[arm.name] - first["grpo"]).norm() / first["grpo"].norm())
        found = of_stale(run, policy, arm, stale, fresh, seed=STEPS)
        rows.append({"compared": arm.name, "apart": apart, **moments(found)})
    ratios = spread(parts, stale)
    policy.load(frozen)
    return rows, ratios


def of_fresh(run: RunConfig, parts: Parts, keys: Iterator[int]) -> Gradients:
    """Gradients of the current policy on responses of its own, in mini-batches as large and as many as the stale
    ones: what an objective has whose ratios are 1."""
    fresh = Gradients()
    for _ in range(STALE):
        batch = roll_out(run, parts, next(keys))
        natural, split = parts.policy.score(batch), split_rows(len(batch), run.mini_batches, seed=STEPS)
        fresh.add([gradient(parts.policy, grpo, *cut(batch, natural, rows)) for rows in split])
    return fresh


def moments(found: Gradients) -> dict[str, float]:
    """Of mini-batch gradients g: `variance` E‖g − E g‖² and `square` ‖E g‖², unbiased, over `mini_batches` of them, of
    which `idle` have no gradient at all."""
    return {"variance": sum(found.norms) / len(found.norms) - found.square, "square": found.square,
            "mini_batches": float(len(found.norms)), "idle": float(sum(norm == 0 for norm in found.norms))}


def spread(parts: Parts, stale: Iterable[tuple[Batch, Scored]]) -> dict[str, float]:
    """Statistics of the stale responses' ratios: `n` of them, their mean `response_tokens`, share of `right` tokens, of
    responses `without` an advantage; of all of them together variances of log r and of log s, in nats²; and ESS, the
    mean over groups of TOKENS tokens or SEQUENCES responses."""
    logs, masks, rewards, idle = [], [], [], []
    for batch, old in stale:
        logs.append(parts.policy.score(batch).logprobs - old.logprobs)
        masks.append(batch.response_mask)
        rewards.append(batch.rewards.double())
        idle.append((batch.advantages == 0).double())
    width = max(mask.shape[1] for mask in masks)
    log_ratio, mask = (torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in xs])
                       for xs in (logs, masks))
    found, lengths = ratio_statistics(log_ratio, mask), mask.sum(1)
    sequences = (log_ratio.double() * mask).sum(1) / lengths
    return {
        "n": float(len(mask)), "response_tokens": float(lengths.double().mean()),
        "right": float(torch.cat(rewards).mean()), "without": float(torch.cat(idle).mean()),
        "token_var": found["token_log_ratio_var"], "sequence_var": found["sequence_log_ratio_var"],
        "token_kurtosis": found["token_log_ratio_kurtosis"],
        "token_ess": float(grouped_ess(log_ratio[mask], TOKENS).mean()),
        "sequence_ess": float(grouped_ess(sequences, SEQUENCES).mean()),
        "product_ess": float(grouped_ess(sequences * lengths, SEQUENCES).mean()),
    }  # fmt: skip
