"""What the display of a study prints of runs that prepare, and which GPU a worker sees."""

import io
import os
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from moe_rl.errors import RunError
from moe_rl.objectives.methods import arm
from moe_rl.storage.folder import RunFolder, last_step
from moe_rl.study.workers import at_a_time, find_gpus, in_turns, run_study
from tests.fake_study import study as fake


def on(device):
    return replace(fake, base=fake.base.replace(**{"model.device": device}))


def note_gpu(run, folder, *, cache, listen):
    """A trainer that writes down which GPUs it sees."""
    (folder.path / "gpu").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    raise RunError("written")


@pytest.mark.parametrize("jobs, seen", [(4, {"5": 2, "GPU-7": 2}), (None, {"5": 1, "GPU-7": 1})])
def test_workers_are_spread_over_the_gpus_and_there_is_one_for_each(tmp_path, monkeypatch, jobs, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    study = replace(on("cuda"), trainer="tests.study.test_workers:note_gpu")
    planned = study.runs(tmp_path, range(4), 1)[:4]
    console = Console(file=io.StringIO())
    failures = run_study(study, planned, cache=tmp_path / ".cache", jobs=jobs, console=console)
    assert {failure.message for failure in failures} == {"written"}
    assert Counter(file.read_text() for file in tmp_path.rglob("gpu")) == seen


def test_a_run_that_another_process_carries_out_does_not_keep_the_others_waiting(tmp_path):
    study = replace(fake, arms=fake.arms[:1], factors={}, trainer="tests.fake_study:train")
    planned = study.runs(tmp_path, range(2), 2)
    config = planned[0].config
    with RunFolder.open(planned[0].path, config.to_dict(), config.hash):
        (failure,) = run_study(study, planned, cache=tmp_path / ".cache", jobs=1, console=Console(file=io.StringIO()))
    assert failure.path == planned[0].path and last_step(planned[1].path) == 2


def test_runs_that_name_their_gpu_or_have_none_are_not_spread(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5})
    for device, count in (("cuda", 3), ("cuda:1", 0), ("cpu", 0)):
        planned = on(device).runs(tmp_path, [0], 1)
        assert len(find_gpus(planned)) == count
        assert at_a_time(None, planned) == (count or 1)


def test_as_many_seeds_as_there_are_jobs_take_turns(tmp_path):
    arms = tuple(arm(name) for name in ("grpo", "gspo"))
    planned = replace(fake, arms=arms, factors={}).runs(tmp_path, [7, 5, 6], 1)
    in_order = [(p.config.arm.name, p.config.seed) for p in in_turns(planned, 2)]
    first = [("grpo", 7), ("grpo", 5), ("gspo", 7), ("gspo", 5)]
    assert in_order == [*first, ("grpo", 6), ("gspo", 6)]
    assert in_turns(planned, 1) == planned
