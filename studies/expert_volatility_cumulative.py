"""What `expert_volatility` adds after its runs: how many routes differ between the cold start and the end of training.

    python studies/expert_volatility_cumulative.py runs/expert_volatility

writes `cumulative.parquet` into every run: the change of natural routes from the cold start's weights to the last ones,
on a step's worth of fresh responses of each of the two policies. Then `moe-rl runs collect` with `--also` for
any_change_rate, any_layer_change, layers_changed and jaccard_distance: `answers.py` reads them per update, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from moe_rl.build import build
from moe_rl.config import RunConfig
from moe_rl.metrics.volatility import route_change
from moe_rl.storage.folder import read_manifest, run_folders
from moe_rl.trainer import roll_out
from moe_rl.types import response_rows

KEY = 1_000_000
"""Of the rollouts; no step of training has it."""


def cumulative(path: Path, cache: Path) -> pd.DataFrame:
    """A row per policy whose responses were scored: `cold start` and `end`."""
    run = RunConfig.from_dict(read_manifest(path)["config"])
    parts = build(run, path, cache)
    last = next((path / "commit").glob("step=*")) / "checkpoint"
    first = {name: weight.clone() for name, weight in parts.policy.weights()}
    batches = {"cold start": roll_out(run, parts, KEY)}
    before = {"cold start": parts.policy.score(batches["cold start"]).routes}
    parts.policy.load(last)
    batches["end"] = roll_out(run, parts, KEY)
    after = {name: parts.policy.score(batch).routes for name, batch in batches.items()}
    parts.policy.model.load_state_dict(first)
    before["end"] = parts.policy.score(batches["end"]).routes
    change = {name: route_change(before[name].ids(), after[name].ids(), response_rows(batches[name])).row()
              for name in batches}
    return pd.DataFrame([{"responses_of": name, **row} for name, row in change.items()])


def main() -> None:
    folder = Path(sys.argv[1])
    for path in run_folders(folder):
        cumulative(path, folder.parent / ".cache").to_parquet(path / "cumulative.parquet", index=False)
        print(path)


if __name__ == "__main__":
    main()
