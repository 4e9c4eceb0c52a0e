"""The training loop of studies that measure by themselves: no evaluation, no checkpoints, nothing to resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_rl.config import RunConfig
from moe_rl.runs import Tables
from moe_rl.trainer import Clock, Parts, train_step

OnStep = Callable[[dict[str, Any]], None] | None


def train_bare(run: RunConfig, parts: Parts, on_step: OnStep, before: Callable[[int], None] | None = None) -> Tables:
    """Take `run.steps` steps and return their rows; `before` is called with the number of each before it begins."""
    tables = Tables()
    for step in range(1, run.steps + 1):
        if before:
            before(step)
        clock = Clock()
        row, updates, layers = train_step(run, parts, step, clock)
        tables.steps.append(row | clock.columns())
        tables.updates.extend(updates)
        tables.layers.extend(layers)
        if on_step:
            on_step(tables.steps[-1])
    return tables
