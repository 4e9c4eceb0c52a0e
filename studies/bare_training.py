"""The training loop of studies that measure by themselves: no evaluation, no checkpoints, nothing to resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_rl.config import RunConfig
from moe_rl.runs import RunFolder
from moe_rl.trainer import Clock, Parts, train_step

OnStep = Callable[[dict[str, Any]], None] | None


def train_bare(run: RunConfig, parts: Parts, folder: RunFolder, on_step: OnStep,
               before: Callable[[int], None] | None = None) -> None:
    """Take `run.steps` steps, and add their rows; `before` is called with the number of each before it begins."""
    for step in range(1, run.steps + 1):
        if before:
            before(step)
        clock = Clock()
        row, updates, layers = train_step(run, parts, step, clock)
        row |= clock.columns()
        for table, rows in (("steps", [row]), ("updates", updates), ("layers", layers)):
            folder.add(table, rows)
        if on_step:
            on_step(row)
