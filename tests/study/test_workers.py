"""When a study stops starting runs, and what its display says of those that prepare."""

from __future__ import annotations

import dataclasses

import pytest

from moe_rl.storage.folder import RunFolder
from moe_rl.study.display import preparing
from moe_rl.study.workers import Failure, _alike
from tests.fake_study import study


def after(tmp_path, steps, errors, one=study):
    """Whether the runs of a study would stop, by the steps that runs came to and the errors of those that failed, both
    by arm and seed."""
    planned = {(p.config.arm.name, p.config.seed): p for p in one.runs(tmp_path)}
    for run, step in steps.items():
        config = planned[run].config
        with RunFolder.open(planned[run].path, config.to_dict(), config.hash) as folder:
            folder.progress(step)
    return _alike([Failure(planned[run].path, *error) for run, error in errors.items()], list(planned.values()))


BUG = ("Traceback (most recent call last):\n  File …\nAttributeError: no such_field", False)
OTHER = ("Traceback (most recent call last):\nZeroDivisionError: division by zero", False)
SAID = ("table 'steps' got columns that are not explained", True)


@pytest.mark.parametrize("steps, errors, stops", [
    ({("grpo", 0): 0}, {("grpo", 0): SAID}, True),
    ({("grpo", 0): 0}, {("grpo", 0): BUG}, False),
    ({("grpo", 0): 3}, {("grpo", 0): SAID}, False),
    ({("grpo", 0): 0, ("gspo", 0): 0}, {("grpo", 0): BUG, ("gspo", 0): BUG}, True),
    ({("grpo", 0): 9, ("gspo", 0): 9}, {("grpo", 0): SAID, ("gspo", 0): SAID}, True),
    ({("grpo", 0): 0, ("gspo", 0): 0}, {("grpo", 0): BUG, ("gspo", 0): OTHER}, False),
    ({("gspo", 0): 0, ("gspo", 1): 0}, {("gspo", 0): BUG, ("gspo", 1): BUG}, False),
    ({("grpo", 0): 0, ("gspo", 0): 0, ("grpo-replay", 0): 1}, {("grpo", 0): BUG, ("gspo", 0): BUG}, False),
])  # fmt: skip
def test_no_more_runs_are_started_where_all_would_fail_alike(tmp_path, steps, errors, stops):
    assert after(tmp_path, steps, errors) == stops


def test_two_seeds_of_the_only_arm_are_all_that_can_fail_alike(tmp_path):
    one = dataclasses.replace(study, arms=("gspo",))
    assert after(tmp_path, {("gspo", 0): 0, ("gspo", 1): 0}, {("gspo", 0): BUG, ("gspo", 1): BUG}, one)


def test_what_a_run_does_before_its_first_step():
    now = {"step": 400, "steps": 3000, "rate": 0.05, "target": 0.35, "seconds_left": 40.2}
    assert preparing({"cold_start": now}) == "supervised warm-up 400/3000, success 5% of 35%, at most 40 s left"
    assert preparing({"cold_start": {"waiting": True}}) == "waiting for the supervised warm-up of another run"
    assert preparing({"step": 0}) == "preparing" and preparing({"step": 0, "seconds_per_step": None}) == "first step"
