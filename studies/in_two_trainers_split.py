"""Our trainer with verl's split: a step is cut into mini-batches of whole groups, in the order of the prompts."""

from __future__ import annotations

import torch

import moe_rl.trainer
from moe_rl.build import build, check  # noqa: F401  runs are checked before they start
from moe_rl.build import execute as own
from moe_rl.config import RunConfig
from moe_rl.storage.folder import RunFolder


def execute(run: RunConfig, folder: RunFolder, **further: object) -> None:
    """Carry out a run. The process is the run's own, so nothing else sees the other split."""
    moe_rl.trainer.split_rows = lambda rows, count, seed: list(torch.arange(rows).tensor_split(count))
    own(run, folder, **further)
