"""How `ratio_variance` trains and measures.

Beside the usual tables a run writes two of its own:

- `prompts.parquet`: a row per mini-batch and prompt, with sums over its tokens right before they are trained on. D is
  log π_θ − log π_old under natural routes, R the same under π_old's routes, J = D − R, as in `metrics.attribution`. KL
  is exact: from π_old to π_θ over the whole vocabulary, under either routes.
- `scaling.parquet`: the same between θ and θ + α·u on fixed tokens sampled from θ, where u is the change of weights
  that one more step makes.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moe_rl.build import build, check  # noqa: F401  runs are checked by it before they start
from moe_rl.config import RunConfig
from moe_rl.policies.hf import HFPolicy
from moe_rl.recorder import Recorder, Row
from moe_rl.storage.folder import RunFolder
from moe_rl.trainer import Listener, Parts, roll_out, train, train_step
from moe_rl.types import Batch, Scored, response_rows

ALPHAS = np.logspace(-3, 0, 13)
FIXED = 16
"""Batches of rollouts on which the scaling law is measured."""


def execute(run: RunConfig, folder: RunFolder, *, cache: Path, listen: Listener = lambda rows: None) -> None:
    """Carry out a run of the study from its beginning; nothing is kept of one that was interrupted."""
    parts = build(run, folder.path, cache)
    recorder = PromptRecorder(run, parts.policy)
    diverged = train(run, replace(parts, recorder=lambda *_: recorder), folder, listen)
    pd.concat(recorder.prompts).to_parquet(folder.path / "prompts.parquet", index=False)
    pd.DataFrame(scaling(run, parts)).to_parquet(folder.path / "scaling.parquet", index=False)
    folder.finish(diverged)


class PromptRecorder(Recorder):
    """Also measures every mini-batch before it is trained on."""

    def __init__(self, run: RunConfig, policy: HFPolicy):
        super().__init__(run, policy)
        self.old = HFPolicy(deepcopy(policy.model), run.optimizer)
        self.prompts: list[pd.DataFrame] = []

    def begin(self, step: int, batch: Batch, natural: Scored, split: list[Tensor]) -> None:
        """The weights of now are π_old."""
        self.old.model.load_state_dict(self.policy.model.state_dict())
        super().begin(step, batch, natural, split)

    def before(self, update: int, part: Batch, probed: Row) -> None:
        """At the first update nothing has moved."""
        super().before(update, part, probed)
        if update:
            prompts = (
                compare(self.old, self.policy, part)
                .groupby("prompt")
                .agg(n=("d", "size"), **{name: (name, "sum") for name in SUMS}, largest=("dd", "max"))
            )
            self.prompts.append(prompts.reset_index().assign(step=self.step, update=update + 1))


SUMS = ("d", "r", "dd", "rr", "jj", "rj", "kl_natural", "kl_replayed", "changed")


def compare(old: HFPolicy, new: HFPolicy, batch: Batch) -> pd.DataFrame:
    """The response tokens of a batch, row by row: log-ratios and KL of two policies, natural and replaying `old`."""
    mask, inputs = batch.response_mask, response_rows(batch)
    before, after = old.score(batch), new.score(batch)
    replayed = new.score(batch, before.routes)
    old_log_p = old.distributions(batch)
    log_p = {"kl_natural": new.distributions(batch), "kl_replayed": new.distributions(batch, before.routes)}
    kl = {k: (old_log_p.exp() * (old_log_p - new_log_p)).sum(-1)[mask].double() for k, new_log_p in log_p.items()}
    d, r = ((scored.logprobs - before.logprobs)[mask].double() for scored in (after, replayed))
    was, now = (scored.routes.ids()[inputs] for scored in (before, after))
    slots = 1 - (was[..., None] == now[..., None, :]).any(-1).double().mean((-2, -1))
    return pd.DataFrame({
        "prompt": batch.prompt_index[:, None].expand_as(mask)[mask],
        "d": d, "r": r, "dd": d * d, "rr": r * r, "jj": (d - r) ** 2, "rj": r * (d - r), **kl,
        "expert_change_rate": slots, "changed": (slots > 0).double(),
    })  # fmt: skip


def scaling(run: RunConfig, parts: Parts) -> list[dict[str, float]]:
    """Mean squares between θ and θ + α·u per token, and the share of expert slots changed, a row per α."""
    policy = parts.policy
    theta = HFPolicy(deepcopy(policy.model), run.optimizer)
    batches = [roll_out(run, parts, run.steps + 2 + i) for i in range(FIXED)]
    train_step(run, parts, run.steps + 1, Recorder(run, policy))
    start, end = theta.model.state_dict(), {k: v.clone() for k, v in policy.model.state_dict().items()}
    rows = []
    for alpha in ALPHAS:
        policy.model.load_state_dict({k: torch.lerp(start[k], end[k], float(alpha)) for k in start})
        tokens = pd.concat([compare(theta, policy, batch) for batch in batches])
        rows.append({"alpha": alpha, "tokens": len(tokens), **tokens.drop(columns="prompt").mean()})
    policy.model.load_state_dict(start)
    return rows
