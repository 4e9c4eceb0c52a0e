"""How `gradient_clipping` measures: gradients of ratios with and without clipping and length normalisation.

A run trains with GRPO, takes one step of eight updates at its end, and before the eighth compares gradients as
`gradient_quality` does; then it goes back. `gradients.parquet` has a row per update that was looked at and arm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from gradient_quality_trainer import STALE, cut, go_on, gradient, of_fresh, of_stale, quality
from small import grpo, gspo
from why_gspo import cell

from moe_rl.build import build, check  # noqa: F401  runs are checked by it before they start
from moe_rl.config import Arm, RunConfig
from moe_rl.registry import Component
from moe_rl.storage.folder import RunFolder
from moe_rl.trainer import Listener, Parts, roll_out, split_rows, train

UNCLIPPED = {"clip_low": 1.0, "clip_high": 1e9}
ARMS = (
    grpo, cell("token", "none"), gspo, cell("sequence", "none"),
    Arm(name="product-none", loss=Component("crossed", weigh="product", clip="none", **UNCLIPPED)),
    cell("none", "none"),
)  # fmt: skip
"""Weight and what is clipped, by `crossed`; GRPO is token-token, GSPO sequence-sequence. product: no 1/|y| in eq. 7."""


def execute(run: RunConfig, folder: RunFolder, *, cache: Path, listen: Listener = lambda rows: None) -> None:
    """Carry out a run of the study from its beginning; nothing is kept of one that was interrupted."""
    parts = build(run, folder.path, cache)
    diverged = train(run, parts, folder, listen)
    rows = compare(run, parts, folder.path / "frozen")
    pd.DataFrame(rows).to_parquet(folder.path / "gradients.parquet", index=False)
    folder.finish(diverged)


def compare(run: RunConfig, parts: Parts, frozen: Path) -> list[dict[str, Any]]:
    """The rows of a run at its end: of the first update how far every arm's gradient is from GRPO's, in shares of its
    norm, which is rounding where all ratios are 1; of the last their quality. The policy is left as it was found."""
    policy, keys = parts.policy, iter(range(1_000 * (run.steps + 1), 1_000 * (run.steps + 2)))
    policy.save(frozen)
    stale = [(batch, policy.score(batch)) for batch in (roll_out(run, parts, next(keys)) for _ in range(STALE))]
    path = roll_out(run, parts, next(keys))
    old, split = policy.score(path), split_rows(len(path), run.mini_batches, seed=run.steps)
    first = {arm.name: gradient(policy, arm, *cut(*stale[0], split[0])).double() for arm in ARMS}
    norm = first["grpo"].norm()
    rows = [{"update": 1, "compared": name, "apart": float((g - first["grpo"]).norm() / norm)}
            for name, g in first.items()]
    for index in split[:-1]:
        go_on(parts, *cut(path, old, index))
    fresh = of_fresh(run, parts, keys)
    for arm in ARMS:
        found = of_stale(run, policy, arm, stale, fresh, seed=run.steps)
        rows.append({"update": len(split), "compared": arm.name, **quality(found, fresh)})
    policy.load(frozen)
    return rows
