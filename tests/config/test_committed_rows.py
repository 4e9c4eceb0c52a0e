"""Every run in the committed tables can be read, named and made again."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pandas as pd
import pytest

from moe_rl.config import RunConfig
from moe_rl.objectives import advantage_of, objective_of
from moe_rl.registry import lookup
from moe_rl.routing.sources import SOURCES
from moe_rl.tasks.base import load_task

TABLES = sorted(file.parent / "runs.parquet" for file in (Path(__file__).parents[2] / "studies").glob("*/study.json"))
HASHED = {"lag_natural", "ratio_gradient", "router_noise_low", "routing_replay"}
"""Studies whose runs were made since settings are hashed by value: their runs can be continued."""


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.parent.name)
def test_every_committed_row_is_readable_and_what_it_names_is_there(table):
    rows = pd.read_parquet(table, columns=["config", "arm", "seed", "hash"])
    assert len(rows)
    tasks, arms = set(), set()
    for row in rows.itertuples():
        run = RunConfig.from_dict(json.loads(row.config))
        assert (run.arm.name, run.seed) == (row.arm, row.seed)
        assert run.to_dict() == json.loads(row.config)
        ran = run.replace(**{"arm.name": {"gspo_short": "gspo"}.get(row.arm, row.arm)})  # its name when it ran
        assert row.hash in (run.hash, ran.hash) or table.parent.name not in HASHED
        if str(run.arm) not in arms:
            arms.add(str(run.arm))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a clip range is wide is what one study asks about
                objective_of(run.arm)
            advantage_of(run.arm)
            for routes in filter(None, (run.arm.routes, run.arm.ratio_routes)):
                lookup("route source", routes, SOURCES)
        if str(run.task) not in tasks:
            tasks.add(str(run.task))
            load_task(run.task)


def test_there_are_tables_to_read():
    assert len(TABLES) >= 12
