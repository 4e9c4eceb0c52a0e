"""How `gradient_quality` measures: every arm's gradient on stale mini-batches against fresh on-policy samples.

A run trains with GRPO and stops twice, at its cold start and at its end. There it takes one step of eight updates, and
before each of them compares gradients; then it goes back. `gradients.parquet` has a row per stop, update and arm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from small import grpo, gspo, gspo_replay, replay
from torch import Tensor

from moe_rl.build import build, check  # noqa: F401  runs are checked by it before they start
from moe_rl.config import Arm, RunConfig
from moe_rl.objectives import objective_of
from moe_rl.policies.hf import HFPolicy
from moe_rl.storage.folder import RunFolder
from moe_rl.trainer import Listener, Parts, roll_out, split_rows, train
from moe_rl.types import Batch, Scored

ARMS = (grpo, replay, gspo, gspo_replay)
STALE, FRESH = 6, 32
"""Batches of rollouts (of 128 responses): of the old policy, for the arms; of the current one, for the reference."""


def execute(run: RunConfig, folder: RunFolder, *, cache: Path, listen: Listener = lambda rows: None) -> None:
    """Carry out a run of the study from its beginning; nothing is kept of one that was interrupted."""
    parts = build(run, folder.path, cache)
    rows = compare(run, parts, 0, folder.path / "frozen")
    diverged = train(run, parts, folder, listen)
    rows += compare(run, parts, run.steps, folder.path / "frozen")
    pd.DataFrame(rows).to_parquet(folder.path / "gradients.parquet", index=False)
    folder.finish(diverged)


def compare(run: RunConfig, parts: Parts, step: int, frozen: Path) -> list[dict[str, Any]]:
    """The rows of one stop, after `step` steps; the policy is left as it was found."""
    policy, keys = parts.policy, iter(range(1_000 * (step + 1), 1_000 * (step + 2)))
    policy.save(frozen)
    stale = [roll_out(run, parts, next(keys)) for _ in range(STALE)]
    olds = [policy.score(batch) for batch in stale]
    path = roll_out(run, parts, next(keys))
    old = policy.score(path)
    found_rows = []
    for number, index in enumerate(split_rows(len(path), run.mini_batches, seed=step), start=1):
        fresh = of_fresh(run, parts, keys)
        for arm in ARMS:
            found = of_stale(run, policy, arm, zip(stale, olds, strict=True), fresh, seed=step)
            found_rows.append({"step": step, "update": number, "compared": arm.name, **quality(found, fresh)})
        go_on(parts, *cut(path, old, index))
    policy.load(frozen)
    return found_rows


def of_fresh(run: RunConfig, parts: Parts, keys: Iterator[int]) -> Gradients:
    """The gradient of the current policy on responses of its own."""
    fresh = Gradients()
    for _ in range(FRESH):
        batch = roll_out(run, parts, next(keys))
        fresh.add([gradient(parts.policy, grpo, batch, parts.policy.score(batch))])
    return fresh


def of_stale(run: RunConfig, policy: HFPolicy, arm: Arm, stale: Iterable[tuple[Batch, Scored]], fresh: Gradients,
             seed: int) -> Gradients:
    """An arm's gradients on every mini-batch of batches of the old policy, which scored them."""
    found = Gradients(reference=fresh.mean)
    for batch, scored in stale:
        split = split_rows(len(batch), run.mini_batches, seed=seed)
        found.add([gradient(policy, arm, *cut(batch, scored, rows)) for rows in split])
    return found


def go_on(parts: Parts, part: Batch, natural: Scored) -> None:
    """One update of the run's own objective."""
    parts.policy.update(parts.objective.attach_weights(replace(part, old_logprobs=natural.logprobs)), parts.objective)


def cut(batch: Batch, old: Scored, rows: Tensor) -> tuple[Batch, Scored]:
    """Some responses, and what the old policy said of them."""
    part = batch.rows(rows)
    return part, old.rows(rows, part.tokens.shape[1])


def gradient(policy: HFPolicy, arm: Arm, part: Batch, old: Scored) -> Tensor:
    """An arm's gradient on a mini-batch, which the old policy scored as `old`."""
    objective, routes = objective_of(arm), old.routes if arm.routes.name == "old_policy" else None
    return policy.gradient(objective.attach_weights(replace(part, old_logprobs=old.logprobs, routes=routes)), objective)


@dataclass
class Gradients:
    """Sums over gradients that come in independent batches: mini-batches of one batch share prompts."""

    reference: Tensor | None = None
    total: Tensor | float = 0.0
    """Sum over batches of the mean gradient of a batch."""
    squares: float = 0.0
    """Sum over batches of that mean's square."""
    batches: int = 0
    norms: list[float] = field(default_factory=list)
    """Squared, of every mini-batch."""
    cosines: list[float] = field(default_factory=list)
    """With the reference, of every mini-batch."""

    def add(self, gradients: list[Tensor]) -> None:
        """The gradients of one batch's mini-batches."""
        gradients = [g.double() for g in gradients]
        mean = torch.stack(gradients).mean(0)
        self.total = self.total + mean
        self.squares += float(mean @ mean)
        self.batches += 1
        self.norms += [float(g @ g) for g in gradients]
        if self.reference is not None:
            self.cosines += [float(g @ self.reference / (g.norm() * self.reference.norm())) for g in gradients]

    @property
    def mean(self) -> Tensor:
        return self.total / self.batches

    @property
    def square(self) -> float:
        """‖E g‖² without bias: products of different batches only."""
        return (float(self.total @ self.total) - self.squares) / (self.batches * (self.batches - 1))


def quality(arm: Gradients, fresh: Gradients) -> dict[str, float]:
    """How an arm's mini-batch gradient g estimates the on-policy gradient g*, relative to ‖g*‖².

    `bias` = ‖E g − g*‖², `variance` = E‖g − E g‖², both unbiased but for the division; `cosine` of a mini-batch and
    `cosine_mean` of E g with g*, both corrected for the noise in the estimate of g*. NaN where that noise is so large
    that an unbiased square comes out negative.
    """
    ours, true, product = arm.square, fresh.square, float(arm.mean @ fresh.mean)
    true = true if true > 0 else np.nan
    length, true_length = np.sqrt(ours) if ours > 0 else np.nan, np.sqrt(true)
    attenuation = true_length / float(fresh.mean.norm())
    return {
        "cosine": sum(arm.cosines) / len(arm.cosines) / attenuation,
        "cosine_mean": product / (length * true_length),
        "bias": (ours - 2 * product + true) / true,
        "variance": (sum(arm.norms) / len(arm.norms) - ours) / true,
        "norm": length / true_length,
        "reference": true_length,
        "attenuation": attenuation,
        "mini_batches": len(arm.norms),
    }
