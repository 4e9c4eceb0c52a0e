"""A study through a real SLURM that is as rough as one can be, and ends as on one machine. `make test-slurm`."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from moe_rl import cli
from moe_rl.storage import folder as runs
from moe_rl.storage.folder import run_folders
from moe_rl.storage.frames import diff
from moe_rl.study.declaration import load_study_file
from moe_rl.study.workers import carry_out

HERE = Path(__file__).parent
STUDY, FAKE = str(HERE / "slurm_study.py"), str(HERE.parent / "fake_study.py")
pytestmark = pytest.mark.skipif("MOE_RL_SLURM" not in os.environ, reason="a real SLURM is started by `make test-slurm`")
CPUS = 4
MOST = 12
"""Kills and the like of one study."""
LONGEST = 2700
"""Seconds that a study may take."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A SLURM of one node, and its folder."""
    folder = tmp_path_factory.mktemp("cluster")
    before = dict(os.environ)
    os.environ |= {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "COLUMNS": "200",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, [before.get("PYTHONPATH")])]),
    }
    try:
        subprocess.run(["bash", HERE / "cluster.sh", "up", folder, str(CPUS)], check=True)
        yield folder
    finally:
        subprocess.run(["bash", HERE / "cluster.sh", "down", folder], check=False)
        os.environ.clear()
        os.environ.update(before)


def moe_rl(*words: str) -> None:
    assert cli.main([*words]) == 0


def submit(out: Path, study: str, *words: str, retries: int = 50) -> None:
    """The study's runs to the cluster."""
    slurm = f"--launcher slurm --set launcher.retries={retries} --set launcher.warning=15"
    moe_rl("run", study, "--mix-code", "--out", str(out), *slurm.split(), *words)


def asked(*words: str) -> str:
    """What SLURM says; nothing while its controller is away."""
    return subprocess.run(words, capture_output=True, text=True).stdout


def queue() -> dict[str, str]:
    """The state of every task of a study that has not ended, by its id."""
    words = ("--noheader", "--array", "--partition=main", "--format=%F_%K %T")
    return dict(line.split() for line in asked("squeue", *words).splitlines())


def workers(out: Path) -> list[psutil.Process]:
    """Processes that carry out a run of a plan below a folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "work" in words and any(word.startswith(str(out)) and word.endswith("plan.json") for word in words):
            found.append(process)
    return found


def until(holds, seconds: float = 900.0, say=lambda: "") -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, say()
        time.sleep(0.2)


def said(out: Path) -> str:
    """What the shells of all tasks said."""
    return "".join(file.read_text() for file in sorted(out.glob("*/.jobs/*/task-*.txt")))


def states(out: Path) -> list[str]:
    return [runs.state(path)["state"] for path in run_folders(out)]


def test_a_study_killed_requeued_and_preempted_at_random_ends_as_on_one_machine(cluster, tmp_path):
    study, seeds = load_study_file(STUDY), 8
    local, out, draw = tmp_path / "local", tmp_path / "cluster", random.Random(0)
    submit(out, STUDY, "--seeds", str(seeds))
    done, end = dict.fromkeys(("kill", "requeue", "preempt", "controller"), 0), time.monotonic() + LONGEST
    while (finished := states(out).count("finished")) < len(study.arms) * seeds or min(done.values()) < 2:
        assert time.monotonic() < end, (done, states(out), queue(), said(out)[-5000:])
        if finished == len(study.arms) * seeds:  # on a quick machine the study ends before it was disturbed enough
            seeds += 4
            submit(out, STUDY, "--seeds", str(seeds))
        time.sleep(draw.uniform(2, 6))
        running = sorted(task for task, state in queue().items() if state == "RUNNING")
        least = min(done, key=lambda kind: done[kind])
        what = least if done[least] < 2 else draw.choice(["kill", "requeue", *[""] * 4])
        what = what if sum(done.values()) < MOST else ""  # on a busy machine no run would come through
        if what == "controller":
            controller = psutil.Process(int((cluster / "slurmctld.pid").read_text()))
            controller.terminate()  # killed, SLURM itself forgets up to five seconds, and drains the node over it
            controller.wait(60)
            time.sleep(draw.uniform(0, 4))
            subprocess.run(["bash", HERE / "cluster.sh", "controller", cluster], check=True)
        elif what == "kill" and (found := workers(out)):
            draw.choice(found).kill()
        elif what == "requeue" and running:
            subprocess.run(["scontrol", "requeue", draw.choice(running)], capture_output=True)
        elif what == "preempt" and running:
            before = said(out).count("told USR1")
            urgent = f"--wait --partition=urgent --cpus-per-task={CPUS // 2} --output=/dev/null"
            asked("sbatch", *urgent.split(), "--wrap=sleep 3")
            if said(out).count("told USR1") == before:  # there was room beside it, or the task ended by itself
                continue
        else:
            continue
        done[what] += 1
    until(lambda: not queue())
    text = said(out)
    assert re.search(r"restart [1-9]", text) and "told USR1" in text, text[-3000:]
    print(done, "seeds:", seeds, "restarts:", len(re.findall(r"restart [1-9]", text)))
    for planned in study.runs(local, range(seeds)):
        carry_out(planned, study.trainer, local / ".cache")
    for a in run_folders(local / study.name):
        b = out / a.relative_to(local)
        assert diff(a, b) is None, b
        assert runs.read_manifest(a)["checkpoint"] == runs.read_manifest(b)["checkpoint"], b
    shutil.rmtree(local)
    suffixes = sorted(path.suffix for path in out.glob(".cache/cold_starts/*"))
    assert suffixes == ["", ".holder", ".lock"], "one for all, and whole"
    submit(out, STUDY, "--seeds", str(seeds))
    assert not queue(), "nothing is submitted again"


def test_a_failing_run_is_run_again_a_bounded_number_of_times_and_one_to_mend_is_not(cluster, tmp_path, capsys):
    submit(tmp_path, FAKE, "--seeds", "0", "--arms", "grpo,gspo", "--task", "broken", retries=1)
    until(lambda: not queue(), say=lambda: said(tmp_path))
    failed = list(tmp_path.glob("fake/.jobs/1/failed-*"))
    assert [len(file.read_text().splitlines()) for file in failed] == [2], "once, and again"
    assert sorted(states(tmp_path)) == ["failed", "finished"]
    text = (tmp_path / "fake/gspo/base/seed=0/log.txt").read_text()
    assert text.count("a bug in the trainer") >= 2
    submit(tmp_path / "mend", FAKE, "--seeds", "0", "--arms", "grpo", "--task", "unknown")
    until(lambda: not queue())
    assert "there is no task 'unknown'" in said(tmp_path / "mend") and "would fail alike" in said(tmp_path / "mend")
    assert not list(tmp_path.glob("mend/fake/.jobs/1/failed-*"))


def test_list_shows_the_schedulers_state_and_cancel_ends_it(cluster, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_NAP", "1")
    submit(tmp_path, FAKE, "--steps", "300", "--jobs", "2")
    until(lambda: states(tmp_path).count("running") == 2, say=lambda: said(tmp_path))
    capsys.readouterr()
    submit(tmp_path, FAKE, "--steps", "300")
    assert "6 runs" in capsys.readouterr().out
    moe_rl("runs", "list", str(tmp_path / "fake"))
    shown = capsys.readouterr().out
    assert len(re.findall(r"running \(\d+_\d RUNNING\)", shown)) == 2, shown
    assert len(re.findall(r"waiting \(\d+_\d PENDING: JobArrayTaskLimit\)", shown)) == 4, shown
    moe_rl("runs", "cancel", str(tmp_path / "fake" / "gspo"))
    assert capsys.readouterr().out.startswith("2 cancelled: ")
    moe_rl("runs", "cancel", str(tmp_path / "fake"))
    assert capsys.readouterr().out.startswith("4 cancelled: ")
    until(lambda: not queue() and not workers(tmp_path))
    assert "running" not in states(tmp_path) and "failed" not in states(tmp_path)
    assert "told to stop; step" in said(tmp_path), "committed within KillWait"
    assert cli.main(["runs", "cancel", str(tmp_path / "fake")]) == 2
    assert "queue" in capsys.readouterr().err


def test_a_run_of_two_ranks_is_one_task_and_goes_on_after_a_preemption_and_the_kill_of_a_rank(cluster, tmp_path):
    steps = 60
    settings = "--set launcher.ranks=2 --set launcher.cpus=2 --set save_every=100"
    submit(tmp_path, STUDY, *f"--arms grpo --seeds 1 --policy fsdp --steps {steps} {settings}".split())
    path = tmp_path / "slurm/grpo/base/seed=0"

    def begun(after: int) -> bool:
        return runs.state(path)["state"] == "running" and runs.state(path)["step"] > after

    until(lambda: begun(0), say=lambda: said(tmp_path))
    asked("sbatch", "--partition=urgent", f"--cpus-per-task={CPUS - 1}", "--output=/dev/null", "--wrap=sleep 1")
    until(lambda: "is committed" in said(tmp_path), say=lambda: said(tmp_path))
    told = int(re.search(r"was told to stop; step (\d+) is committed", said(tmp_path))[1])
    assert 0 < told < steps, "when it was told, whatever save_every says"
    until(lambda: begun(told), say=lambda: said(tmp_path))
    next(worker for worker in workers(tmp_path) if worker.environ().get("RANK") == "1").kill()
    until(lambda: runs.state(path)["state"] == "finished", say=lambda: said(tmp_path))
    until(lambda: not queue())
    assert "exit 1" in (tmp_path / "slurm/.jobs/1/failed-0").read_text(), "the kill is counted"
    rows = runs.commits.read_rows(path, "steps").to_pylist()
    assert [row["step"] for row in rows] == [*range(steps + 1)]
