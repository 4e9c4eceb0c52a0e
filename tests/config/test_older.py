"""Rows of tables that older versions wrote: every run in the repository can be read, named and made again."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import pandas as pd
import pytest

from moe_rl.config import Arm, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.objectives import advantage_of, objective_of
from moe_rl.older import modern
from moe_rl.registry import Use, lookup
from moe_rl.routing.sources import SOURCES
from moe_rl.tasks.base import load_task

TABLES = sorted((Path(__file__).parents[2] / "studies" / "results").glob("*/runs.parquet"))
COMMITTED = json.loads(Path(__file__).with_name("committed_rows.json").read_text())
"""SHA-256 of a table's rows, each its JSON and its hash, as they were before configurations were pydantic models."""


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.parent.name)
def test_every_committed_row_is_readable_and_what_it_names_is_there(table):
    rows = pd.read_parquet(table, columns=["config", "arm", "seed"])
    assert len(rows)
    tasks, arms = set(), set()
    for row in rows.itertuples():
        run = RunConfig.from_dict(json.loads(row.config))
        assert (run.arm.name, run.seed) == (row.arm, row.seed)
        again = RunConfig.from_dict(json.loads(json.dumps(run.to_dict())))
        assert again == run and again.to_dict() == run.to_dict() and again.hash == run.hash
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


@pytest.mark.parametrize("study", COMMITTED)
def test_the_committed_rows_are_the_runs_that_they_were(study):
    rows = pd.read_parquet(TABLES[0].parents[1] / study / "runs.parquet", columns=["config"])
    runs = [RunConfig.from_dict(json.loads(row)) for row in rows["config"]]
    text = "".join(f"{json.dumps(run.to_dict())}\n{run.hash}\n" for run in runs)
    assert hashlib.sha256(text.encode()).hexdigest() == COMMITTED[study]


def test_there_are_tables_to_read():
    assert len(TABLES) >= 16


# ---------------------------------------------------------------------- by hand
def arm_of(**old) -> Arm:
    return RunConfig.from_dict({"arm": {"name": "a", **old}}).arm


@pytest.mark.parametrize("old, new", [
    ({}, Arm(name="a")),
    ({"loss": "gspo", "clip": [0.01, 0.013]}, Arm(name="a", loss=Use("gspo", clip_low=0.01, clip_high=0.013))),
    ({"loss": "gspo", "clip": None}, Arm(name="a", loss="gspo")),
    ({"clip": [0.1, 0.2]}, Arm(name="a", loss=Use("grpo", clip_low=0.1, clip_high=0.2))),
    ({"truncation": 2.0}, Arm(name="a", corrections=(Use("truncated", cap=2.0),))),
    ({"truncation": 0.0, "kl": 0.0, "entropy": 0.0}, Arm(name="a")),
    ({"kl": 0.1}, Arm(name="a", terms=(Use("kl", coef=0.1),))),
    ({"kl": 0.1, "entropy": 0.01}, Arm(name="a", terms=(Use("kl", coef=0.1), Use("entropy", coef=0.01)))),
    ({"routes": "old_policy", "ratio_routes": "live"}, Arm(name="a", routes="old_policy", ratio_routes="live")),
    ({"routes": "rollout", "anchor": "engine", "ratio_routes": None}, Arm(name="a", routes="rollout", anchor="engine")),
    ({"routes": "placebos_sources:half"}, Arm(name="a", routes=Use("random_share", share=0.5))),
    ({"routes": "placebos_sources:flips"}, Arm(name="a", routes=Use("false_flips", share=0.18))),
    ({"ratio_routes": "placebos_sources:quarter"}, Arm(name="a", ratio_routes=Use("random_share", share=0.25))),
    ({"loss": "why_gspo_losses:sequence_token", "clip": [0.2, 0.27]},
     Arm(name="a", loss=Use("crossed", weigh="sequence", clip="token", clip_low=0.2, clip_high=0.27))),
    ({"loss": "why_gspo_losses:none_none", "clip": [9.0, 9.0]},
     Arm(name="a", loss=Use("crossed", weigh="none", clip="none", clip_low=9.0, clip_high=9.0))),
    ({"loss": "why_gspo_losses:dual_clip", "clip": [0.2, 0.27]},
     Arm(name="a", loss=Use("why_gspo_losses:dual_clip", clip_low=0.2, clip_high=0.27))),
])  # fmt: skip
def test_older_settings_of_an_arm_become_its_parts(old, new):
    assert arm_of(**old) == new


def test_the_options_of_a_task_become_its_uses():
    arm = {"name": "a"}
    both = {"arm": arm, "task": "running_sums", "task_options": {"digits": 12, "min_digits": 4}}
    assert RunConfig.from_dict(both).task == Use("running_sums", digits=12, min_digits=4)
    assert RunConfig.from_dict(both | {"task_options": {}}).task == Use("running_sums")


def test_what_is_modern_stays_as_it_is_and_nothing_is_changed_in_place():
    arm = Arm(name="a", loss=Use("grpo", clip_low=0.1), terms=(Use("kl", coef=0.1),))
    run = RunConfig(arm=arm, task=Use("x:Y", k=1))
    assert RunConfig.from_dict(run.to_dict()) == run
    old = {"arm": {"name": "a", "clip": [0.1, 0.2], "kl": 0.5}, "task": "running_sums", "task_options": {"digits": 3}}
    before = json.dumps(old)
    once = modern(old)
    assert json.dumps(old) == before and modern(once) == once


def test_a_setting_that_never_was_is_still_refused():
    with pytest.raises(ConfigError, match="Arm has no setting klip"):
        arm_of(klip=[0.1, 0.2])
