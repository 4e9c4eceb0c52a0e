"""How `irreversible` measures: a run trains until it has collapsed, then goes on from two of its states in many ways.

Weights and moments of every fifth step are kept while the run trains. If its reward collapses, each of VARIANTS takes
STEPS steps from the collapsed state and from a checkpoint before the onset, on prompts and noise that are new to the
run and, but for longer generation, common to all variants. `recoveries.parquet` has a row per start, variant and
step, and per start a row `again`, which repeats the run's own next step from the checkpoint; a run that did not
collapse has none.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from small import grpo, gspo, replay
from torch import Tensor

from moe_rl.build import build, check  # noqa: F401  runs are checked by it before they start
from moe_rl.config import Arm, RunConfig
from moe_rl.errors import Diverged
from moe_rl.metrics.convergence import PATIENCE, SPAN, collapse, ema
from moe_rl.objectives import objective_of
from moe_rl.policies.hf import optimizer_of
from moe_rl.recorder import Recorder, Row, Rows, batch_row, evaluate
from moe_rl.registry import Component, lookup
from moe_rl.rollouts.batches import Queue
from moe_rl.rollouts.engine import sampling_of
from moe_rl.routing.sources import SOURCES
from moe_rl.seeds import NOISE
from moe_rl.storage.commits import read_rows
from moe_rl.storage.folder import RunFolder
from moe_rl.tasks.base import load_task
from moe_rl.tasks.running_sums import RunningSums
from moe_rl.trainer import Listener, Parts, roll_out, train, train_step
from moe_rl.types import Batch, Prompt, Scored, Updated

EVERY, BACK, STEPS, LAST = 5, 10, 18, 5
"""Steps between kept states; from the checkpoint to the onset, at least; of a restart; of those that decide."""


@dataclass(frozen=True)
class Variant:
    """How a restart goes on: what it changes of the run."""

    arm: Arm = grpo
    changes: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False
    """AdamW begins anew, its learning rate being what `changes` say from the first update on."""


class SmallDigits(RunningSums):
    """Running sums of digits 0 to 4: other queries of a length that the cold start has learned."""

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """See `Task.prompts`."""
        rng = random.Random(seed)
        return [self.prompt([rng.randrange(5) for _ in range(self.digits)]) for _ in range(count)]


VARIANTS = {
    "unchanged": Variant(),
    "narrower clip": Variant(Arm(name="grpo", loss=Component("grpo", clip_low=0.1, clip_high=0.135))),
    "wider clip": Variant(Arm(name="grpo", loss=Component("grpo", clip_low=0.4, clip_high=0.54))),
    "longer generation": Variant(changes={"max_new_tokens": 26}),
    "other queries": Variant(changes={"task": Component("irreversible_trainer:SmallDigits", digits=12)}),
    "Routing Replay": Variant(replay),
    "GSPO": Variant(gspo),
    "low rate": Variant(changes={"optimizer.lr": 2e-4, "optimizer.warmup": 0}, fresh=True),
}
"""The first five are the paper's. GRPO's own range is .2 / .27: half and twice. Completions end after 13 tokens, longer
ones after 26."""
STARTS = ("collapsed", "before")


def execute(run: RunConfig, folder: RunFolder, *, cache: Path, listen: Listener = lambda rows: None) -> None:
    """Carry out a run of the study, or go on with it; what is interrupted after its training repeats its restarts."""
    parts, kept = build(run, folder.path, cache), folder.path / "kept"
    parts.policy.save(at(kept, 0))

    def keep(recorder: Recorder, row: Row) -> Rows:
        if row["step"] % EVERY == 0:
            parts.policy.save(at(kept, row["step"]))
        return parts.watch(recorder, row)

    diverged = train(run, replace(parts, watch=keep), folder, listen)
    steps = read_rows(folder.path, "steps", None).to_pandas().query("step > 0").sort_values("step")
    onset = collapse(steps["step"], steps["reward"]).step
    rows: list[Row] = []
    for start, number in starts(onset, int(steps["step"].max())).items():
        common = {"start": start, "onset": onset, "checkpoint": number, "best": best(steps["reward"], onset)}
        rows.append(common | again(run, parts, at(kept, number), steps.set_index("step")["reward"], number))
        for name, variant in VARIANTS.items():
            rows += [common | row for row in restarted(run, parts, at(kept, number), name, variant)]
    if rows:
        pd.DataFrame(rows).to_parquet(folder.path / "recoveries.parquet", index=False)
    shutil.rmtree(kept)
    folder.finish(diverged)


def at(kept: Path, step: int) -> Path:
    """Where the state after a step is kept."""
    return kept / f"step={step:06d}"


def starts(onset: int | None, end: int) -> dict[str, int]:
    """The kept steps to go on from: the first at which the collapse is established, and the last BACK steps or more
    before its onset, at the earliest the cold start. None where a run of so many steps has no such state."""
    if onset is None or (collapsed := -(-(onset + PATIENCE - 1) // EVERY) * EVERY) > end:
        return {}
    return dict(zip(STARTS, (collapsed, max(0, (onset - BACK) // EVERY * EVERY)), strict=True))


def best(rewards: ArrayLike, onset: int | None) -> float:
    """The best moving average before the onset, as the definition of a collapse has it."""
    return float(ema(rewards, SPAN)[: (onset or 1) - 1].max(initial=0.0))


def again(run: RunConfig, parts: Parts, checkpoint: Path, rewards: pd.Series, step: int) -> Row:
    """The run's own next step from a checkpoint, and the rollouts of the step after it: how far their rewards are from
    those that the run had there, which is 0 where weights and moments are what they were."""
    restore(parts, checkpoint)
    apart = []
    if step + 2 in rewards.index:
        [row] = train_step(run, replace(parts, batches=Queue()), step + 1, Brief(run, parts.policy))["steps"]
        after = float(roll_out(run, parts, step + 2).rewards.double().mean())
        apart = [abs(row["reward"] - rewards[step + 1]), abs(after - rewards[step + 2])]
    return {"variant": "again", "step": 0, "apart": max(apart, default=np.nan)}


def restarted(run: RunConfig, parts: Parts, checkpoint: Path, name: str, variant: Variant) -> list[Row]:
    """A row per step of a restart; after it diverged, its rewards are 0. Settings of the run are put back."""
    there = run.replace(**variant.changes, arm=variant.arm)
    here = replace(parts, collector=replace(parts.collector, run=there, task=load_task(there.task)),
                   objective=objective_of(there.arm), batches=Queue(),
                   source=lookup("route source", there.arm.routes, SOURCES))
    restore(parts, checkpoint)
    policy, own = parts.policy, parts.policy.settings
    policy.settings = there.optimizer
    if variant.fresh:
        policy.optimizer = optimizer_of(policy.model, there.optimizer)
    rows, recorder = [], Brief(there, policy)
    for step in range(1, STEPS + 1):
        row: Row = {"variant": name, "step": step}
        try:
            # Positions in the streams of prompts and noise that no step of the run has.
            row |= train_step(there, here, 1_000 + step, recorder)["steps"][0]
        except Diverged:
            rows += [row | {"step": n, "reward": 0.0, "held_out": 0.0} for n in range(step, STEPS + 1)]
            break
        held = {"held_out": held_out(run, parts, step)} if step > STEPS - LAST else {}
        rows.append(row | {"step": step} | held)
    policy.settings = own
    return rows


def restore(parts: Parts, checkpoint: Path) -> None:
    """Weights and moments of a checkpoint, in the policy and in the engine."""
    parts.policy.load(checkpoint)
    parts.collector.engine.load(parts.policy.weights())


def held_out(run: RunConfig, parts: Parts, step: int) -> float:
    """Mean reward on the held-out prompts of the run's own task, one completion each, sampled as in training."""
    collector = parts.collector
    found = evaluate(collector.engine, collector.task, collector.held_out, sampling_of(run),
                     key=(run.seed, NOISE, 2_000 + step), greedy=False)
    return float(np.mean([row["reward"] for row, _ in found]))


class Unprobed:
    """In place of a `Probe`: nothing is scored again."""

    def score_before(self, update: int) -> Row:
        return {}

    score_after = score_before

    def score_at_end(self) -> tuple[Row, list[Row]]:
        return {}, []


class Brief(Recorder):
    """Of a step only what was sampled and what the updates say themselves."""

    def begin(self, step: int, batch: Batch, natural: Scored, split: list[Tensor]) -> None:
        self.step, self.batch, self.natural, self.said, self.updates = step, batch, natural, [], [{}]

    def start_probe(self) -> Unprobed:
        return Unprobed()

    def before(self, update: int, part: Batch, probed: Row) -> None:
        pass

    def after(self, update: int, part: Batch, updated: Updated) -> None:
        clipped = (updated.clipped_by != 0)[part.response_mask].double().mean()
        self.said.append({"grad_norm": updated.grad_norm, "clip_tokens": float(clipped)})

    def end(self, push_gap: float | None, probed: tuple[Row, list[Row]]) -> Rows:
        return {"steps": [{"step": self.step, **batch_row(self.batch, self.natural),
                           **pd.DataFrame(self.said).mean().to_dict()}]}
