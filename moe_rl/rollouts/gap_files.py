"""Rollouts whose log-probs are further from the trainer's than usual, kept beside the run for `moe-rl diagnose`."""

from __future__ import annotations

import base64
import io
import json
import math
import statistics
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.types import Batch, Sampling

USUAL, TIMES = 3, 5.0
"""Steps after which a usual gap is known, and how many times it a gap has to be."""
UNHEARD_OF, NOTHING = 0.01, 1e-6
"""A KL, in nats per token, that is kept at the first step too; and one that never is."""
FILES, ROWS, BYTES = 3, 64, 2**24
"""Most files of a run; responses and bytes of a file, which has one response at least."""


class GapFiles:
    """Looks at the engine's gap of every step, and keeps the rollouts of a few of those that stand out.

    A gap is `engine_kl_k3`; usual is the median of up to 20 steps before, in this process, those that have one: NaN
    is a gap that stands out. What is written is never read by the run, and a file that cannot be written is a warning.
    """

    def __init__(self, folder: Path, sampling: Sampling):
        self.folder, self.sampling = folder, sampling
        self.before: deque[float] = deque(maxlen=20)

    def __call__(self, step: int, batch: Batch, row: Mapping[str, Any]) -> None:
        """The batch of a step and its row of `steps`."""
        gap = row.get("engine_kl_k3")
        if gap is None or not bool(batch.response_mask.any()):
            return
        usual = statistics.median(self.before) if len(self.before) >= USUAL else UNHEARD_OF / TIMES
        if math.isfinite(gap):
            self.before.append(gap)
        file = self.folder / f"step={step:06d}.jsonl"
        if gap <= max(TIMES * usual, NOTHING) or len(set(self.folder.glob("*.jsonl")) - {file}) >= FILES:
            return
        try:
            self.folder.mkdir(exist_ok=True)
            with file.open("w") as out:
                for line in lines(batch, self.sampling, f"step {step - 1}"):
                    if (there := out.tell()) and there + len(line) > BYTES:
                        break
                    out.write(line)
        except OSError as error:
            warnings.warn(f"step {step}: the engine's gap is {gap:.2g} nats per token, and its rollouts cannot be "
                          f"kept: {error}", stacklevel=2)
            return
        warnings.warn(f"step {step}: the engine's log-probs are {gap:.2g} nats per token (KL) from the trainer's, "
                      f"usually up to {usual:.2g}. `moe-rl diagnose {file} CHECKPOINT`, with the weights after step "
                      f"{step - 1}, says why.", stacklevel=2)


def lines(batch: Batch, sampling: Sampling, version: str) -> Iterator[str]:
    """The first responses of a batch, a line of JSON each, as docs/diagnose.md has them; null is a log-prob of what an
    environment wrote."""
    for b in range(min(len(batch), ROWS)):
        own = batch.response_mask[b]
        if not bool(own.any()):
            continue
        end, start = int(batch.attention_mask[b].sum()), int(own.long().argmax())
        values = zip(batch.rollout_logprobs[b, start:end].tolist(), own[start:end].tolist(), strict=True)
        entry: dict[str, Any] = {
            "tokens": batch.tokens[b, :end].tolist(), "prompt_length": start,
            "logprobs": [value if is_own else None for value, is_own in values],
            "temperature": sampling.temperature, "weight_version": version}
        if sampling.truncates:
            entry |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        if batch.rollout_routes is not None:
            file = io.BytesIO()
            np.save(file, batch.rollout_routes.experts[b, : end - 1].cpu().numpy())
            entry["routes"] = base64.b64encode(file.getvalue()).decode()
        yield json.dumps(entry) + "\n"
