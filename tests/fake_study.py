"""A study whose trainer makes numbers up, deterministically: what the study runner and the figures are tested with.

`train` behaves as the real one does — it commits, goes on from the last commit, publishes — and is slow enough, its
writes included, to be killed anywhere.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from moe_rl.config import Arm, RunConfig
from moe_rl.errors import ConfigError, Diverged
from moe_rl.registry import Component
from moe_rl.storage.columns import TABLES
from moe_rl.storage.folder import Row, RunFolder
from moe_rl.study import Study

if sys.argv[1:2] == ["work"]:

    class NoPandas:
        """pyarrow imports pandas where it is found: half the seconds of a worker, which has no use for it."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "pandas":
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, NoPandas)

GRPO = Arm(name="grpo")
REPLAY = Arm(name="grpo-replay", routes="old_policy")
GSPO = Arm(name="gspo", loss=Component("gspo", clip_low=0.01, clip_high=0.013))
MOE_LAYERS = 6


def fake_step(config: RunConfig, step: int, weights: np.ndarray) -> tuple[Row, list[Row], list[Row]]:
    """The rows of one step, plausible to look at, and determined by arm, seed, step and weights."""
    arm = {"grpo": 0, "grpo-replay": 1, "gspo": 2}.get(config.arm.name, 3)
    rng = np.random.default_rng((config.seed, step, arm))
    progress = step / 100
    gain = (0.05, 0.02, 0.42)[arm % 3]
    learnt = 0.36 + gain * (1 - np.exp(-3 * progress)) + 0.03 * np.sin(config.seed + 6 * progress)
    clip = (2e-3, 1e-3, 0.12)[arm % 3]
    row = {
        "step": step,
        "reward": float(np.clip(learnt + rng.normal(0, 0.03), 0, 1)),
        "entropy": 0.4 * np.exp(-progress),
        "zero_variance_groups": 0.1,
        "clip_tokens": float(clip * rng.lognormal(0, 0.3)),
        "clip_sequences": float(clip * rng.lognormal(0, 0.3)),
        "token_log_ratio_var": 0.004 * rng.lognormal(0, 0.2),
        "expert_change_rate": float(0.06 + 0.05 * progress + rng.normal(0, 0.004)),
        "replay_gap_std": 0.03,
        "any_change_rate": float(0.1 + 0.08 * progress),
        "engine_any_change_rate": float(0.02 * rng.lognormal(0, 0.1)),
        "engine_kl_k3": float(2e-3 * rng.lognormal(0, 0.3)),
        "seconds_step": time.perf_counter() % 1,
        "memory_peak_mb": 500.0,
        "response_tokens": 13.0,
        "truncated": 0.0,
        "exact": learnt,
        "grad_norm": float(np.abs(weights).mean()),
        "grad_clipped": 0.5,
    }
    if step % 10 == 0 or step == 1:
        for measure, scale in (("kl_k3", 2e-3), ("beyond_2", 1e-3)):
            row |= {
                f"engine_{measure}_unconstrained": scale * rng.lognormal(0, 0.3),
                f"noise_floor_{measure}": 0.0,
                f"engine_{measure}_replayed": scale / 20 * rng.lognormal(0, 0.3),
            }
        row |= {
            "eval_exact_greedy": float(np.clip(learnt + 0.06 + rng.normal(0, 0.01), 0, 1)),
            "eval_exact_sampled": float(np.clip(learnt + rng.normal(0, 0.01), 0, 1)),
        }
    updates = []
    for update in range(1, config.mini_batches + 1):
        d2 = (update - 1) * (8 if arm == 1 else 10) * rng.lognormal(0, 0.2)
        r2 = (0.45 + 0.05 * config.seed) * d2
        updates.append(
            {
                "step": step,
                "update": update,
                "loss": rng.normal(),
                "clip_tokens": float(clip * (update - 1) / 4),
                "token_log_ratio_var": d2 / 2000,
                "lr": 2e-4,
                "attribution_n": 2000,
                "attribution_sum_d": 0.1,
                "attribution_sum_r": 0.1,
                "attribution_sum_dd": d2,
                "attribution_sum_rr": r2,
                "attribution_sum_jj": d2 - r2 + 0.1 * d2,
                "attribution_sum_rj": -0.05 * d2,
            }
        )
    layers = [
        {
            "step": step,
            "moe_layer": s,
            "layer": s,
            "expert_change_rate": float(row["expert_change_rate"] * (0.7 + 0.1 * s)),
            "any_change_rate": float(row["any_change_rate"] * (0.7 + 0.1 * s)),
            "noise_floor_any_change_rate": 0.0,
            "engine_any_change_rate": float(row["engine_any_change_rate"] * (0.7 + 0.1 * s)),
        }
        for s in range(MOE_LAYERS)
    ]
    return row, updates, layers


def train(config: RunConfig, folder: RunFolder, *, cache: Path, listen=lambda rows: None) -> None:
    """As `moe_rl.build.execute`, without a model. `task` makes it fail on request."""
    if config.task.name == "broken" and config.arm.name == "gspo":
        raise ZeroDivisionError("a bug in the trainer")
    if config.task.name == "unknown":
        raise ConfigError("there is no task 'unknown'; choose running_sums")
    nap = float(os.environ.get("FAKE_NAP", "0"))
    done, checkpoint = folder.latest()
    weights = np.load(checkpoint / "weights.npy") if checkpoint else np.random.default_rng(config.seed).normal(size=100)

    def save(path: Path) -> None:
        np.save(path / "weights.npy", weights)
        time.sleep(nap)  # a kill may fall between the two files of a checkpoint
        (path / "optimizer.txt").write_text("state")

    for step in range(done + 1, config.steps + 1):
        if config.arm.name == "grpo" and step == config.task.options.get("diverges_at"):
            if config.task.name == "raises":  # and leaves it to others to record it
                raise Diverged("the gradient norm is nan")
            folder.commit(step - 1, save)
            return folder.finish(diverged=f"step {step}: the gradient norm is nan")
        row, updates, layers = fake_step(config, step, weights)
        weights = weights * 0.99 + np.random.default_rng((config.seed, step)).normal(size=100)
        for table, rows in (("steps", [row]), ("updates", updates), ("layers", layers)):
            folder.add(table, rows)
        time.sleep(nap)
        if folder.stopping() or step % config.save_every == 0 or step == config.steps:
            folder.commit(step, save)
        listen({"steps": [row], "updates": updates, "layers": layers})
    folder.finish()


def fake_tables(config: RunConfig) -> dict[str, list[Row]]:
    """All rows of a run, at once."""
    tables: dict[str, list[Row]] = {name: [] for name in TABLES}
    for step in range(1, config.steps + 1):
        row, updates, layers = fake_step(config, step, np.ones(3))
        tables["steps"].append(row)
        tables["updates"].extend(updates)
        tables["layers"].extend(layers)
    return tables


study = Study(
    name="fake",
    question="Does the study runner work?",
    hypothesis="It does.",
    arms=(GRPO, REPLAY, GSPO),
    base=RunConfig(arm=GRPO, steps=12, save_every=3, mini_batches=4, prompts_per_step=4, group_size=4),
    seeds=(0, 1),
    figures=("expert_change",),
    caution="Made-up numbers.",
    cost="nothing",
    seconds_per_step=0.01,
    trainer="fake_study:train",
)
