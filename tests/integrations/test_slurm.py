"""What is asked of SLURM, and how its settings are read; through a real one in `make test-slurm`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moe_rl import build as execute
from moe_rl import cli, ranks
from moe_rl.errors import ConfigError, RunError
from moe_rl.integrations import slurm
from moe_rl.integrations.slurm import Slurm, arguments, cancel, launcher, scheduled, script
from moe_rl.storage import folder as runs
from tests.fake_study import study
from tests.integrations.megatron_study import study as megatron_study

FAKE = str(Path(__file__).parents[1] / "fake_study.py")


def test_settings_come_from_a_file_and_from_the_command_line_which_wins(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('partition = "gpu"\ngpus = 2\noptions = ["--account=lab"]\npreamble = "module load cuda"\n')
    asked = launcher(str(file), ["launcher.gpus=1", "launcher.time=04:00:00", "launcher.container=apptainer exec a b"])
    assert asked == Slurm(
        partition="gpu",
        gpus=1,
        options=("--account=lab",),
        preamble="module load cuda",
        time="04:00:00",
        container="apptainer exec a b",
    )
    assert launcher("slurm", ["launcher.options=--qos=low --comment='a b'"]).options == ("--qos=low", "--comment=a b")
    assert launcher("slurm", ["launcher.partition=8"]).partition == "8" and launcher("local", []) is None


@pytest.mark.parametrize(
    "name, settings, match",
    [
        ("local", ["launcher.gpus=1"], "launcher.gpus=1"),
        ("sge", [], "sge"),
        ("slurm", ["launcher.gpu=1"], "launcher.gpu='1'.*gpus"),
        ("slurm", ["launcher.gpus=two"], "launcher.gpus='two'"),
        ("slurm", ["launcher.gpus"], "launcher.gpus has no value"),
        ("slurm", ["launcher.ranks=0"], "launcher.ranks='0'"),
        ("{file}", [], "bad.toml"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, name, settings, match):
    (tmp_path / "bad.toml").write_text("partition = gpu")
    with pytest.raises(ConfigError, match=match):
        launcher(name.format(file=tmp_path / "bad.toml"), settings)


def test_what_sbatch_is_asked_for(tmp_path):
    asked = Slurm(partition="gpu", time="1:00:00", gpus=2, memory="8G", warning=60, options=("--account=lab",))
    words = arguments("my_study", tmp_path, asked, 24, 8)
    assert {
        "--array=0-23%8",
        "--requeue",
        "--signal=B:USR1@60",
        "--gres=gpu:2",
        "--time=1:00:00",
        "--mem=8G",
        "--partition=gpu",
        "--account=lab",
    } < set(words)
    plain = arguments("my_study", tmp_path, Slurm(), 1, None)
    assert "--array=0-0" in plain and not any(w.startswith(("--gres", "--time", "--mem", "--part")) for w in plain)


def test_the_script_is_shell_and_starts_ranks_inside_the_container(tmp_path):
    text = script(tmp_path / "it's here", Slurm(ranks=4, container="apptainer exec a.sif", python="/p/python"))
    assert "command=(apptainer exec a.sif /p/python -m torch.distributed.run --standalone --nproc-per-node 4 " in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    first = subprocess.run(
        ["bash"],
        input=text.partition("\ntask=")[0] + '\necho "$here|${#command[@]}"',
        text=True,
        capture_output=True,
        check=True,
    )
    assert first.stdout == f"{tmp_path}/it's here|12\n"


def test_without_a_submission_nobody_is_asked_and_without_slurm_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert scheduled(tmp_path) == {} and cancel(tmp_path) == []
    here = tmp_path / "fake" / ".jobs" / "1"
    here.mkdir(parents=True)
    runs.write_json(here / "submission.json", {"job": "7", "runs": [{"path": "grpo/base/seed=0", "steps": 12}]})
    with pytest.raises(RunError, match="squeue"):
        scheduled(tmp_path)
    planned = study.runs(tmp_path)[0]
    with runs.RunFolder.open(planned.path, planned.config.to_dict(), planned.config.hash):
        pass
    assert cli.main(["runs", "list", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "interrupted" in out and "squeue" in err
    assert cli.main(["run", FAKE, "--out", str(tmp_path / "b"), "--launcher", "slurm", "--mix-code"]) == 2
    assert "sbatch" in capsys.readouterr().err


def test_runs_of_several_ranks_are_checked_before_they_are_submitted(monkeypatch):
    monkeypatch.setattr(ranks, "_planned", 1)
    run = megatron_study.base
    ranks.plan_for(2)
    with pytest.raises(ConfigError, match="policy='hf'"):
        execute.check(run)
    pytest.importorskip("megatron", reason="pip install 'moe_rl[megatron]'")
    execute.check(run.replace(policy="megatron(ep=2)"))
    assert ranks.world() == 1 and not ranks.launched()


def test_only_a_job_with_the_name_of_the_study_is_its_own_and_is_cancelled(tmp_path, monkeypatch):
    """The job of a folder that was sent from elsewhere may be another one here."""
    for number, job in (("1", "7"), ("2", "8"), ("x1", "9")):
        here = tmp_path / "fake" / ".jobs" / number
        here.mkdir(parents=True)
        run = {"path": f"grpo/base/seed={job}", "steps": 12}
        runs.write_json(here / "submission.json", {"job": job, "runs": [run]})
    asked = []

    def answer(program, *words):
        asked.append((program, *words))
        return "7_0|moe-rl-fake|RUNNING|None\n8_0|somebody's training|RUNNING|None\n9_0|moe-rl-fake|RUNNING|None\n"

    monkeypatch.setattr(slurm, "call", answer)
    assert cancel(tmp_path) == ["7_0"] and asked[-1] == ("scancel", "7_0")
