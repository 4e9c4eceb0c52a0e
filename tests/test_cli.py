"""The command: whole studies in real processes, killed and resumed; what it prints and how it fails."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from moe_rl import cli, ranks
from moe_rl.cli import running
from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.registry import Component
from moe_rl.results import printed
from moe_rl.results.tables import Shown
from moe_rl.storage import folder as runs
from moe_rl.storage import lock
from moe_rl.storage.folder import RunFolder, run_folders
from moe_rl.storage.frames import diff, load_study
from moe_rl.study import workers
from moe_rl.study.declaration import write_declaration
from tests import fake_study

FAKE = str(Path(__file__).parent / "fake_study.py")
TABLES = str(Path(__file__).parent.parent / "studies" / "results" / "routing_replay")
RUN = ["run", FAKE, "--jobs", "2", "--mix-code"]
"""`--mix-code`: the package may be edited while its tests run."""


def moe_rl(*arguments: str, nap: float = 0.0, **options) -> subprocess.Popen:
    """The command, as the leader of a process group of its own; it heeds Ctrl-C even where these tests do not."""
    return subprocess.Popen([sys.executable, "-m", "moe_rl", *arguments], start_new_session=True, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                            env=os.environ | {"FAKE_NAP": str(nap), "COLUMNS": "200"}, **options)


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.fixture
def command(request, monkeypatch, capsys, forked_workers):
    """The command in this process, which spares its imports; workers are processes all the same. Only the test of
    figures writes them."""
    monkeypatch.setenv("COLUMNS", "200")
    if "figures" not in request.node.name:
        monkeypatch.setattr("moe_rl.results.plots.save", lambda figure, folder, name: [folder / f"{name}.png"])

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        return code, *capsys.readouterr()

    return run


def fake_runs(out: Path, config: RunConfig = fake_study.study.base, seeds: tuple[int, ...] = (0, 1)) -> Path:
    """The fake study, finished, without a process."""
    for arm in fake_study.study.arms:
        for seed in seeds:
            one = config.replace(arm=arm, seed=seed)
            path = out / "fake" / arm.name / "base" / f"seed={seed}"
            with RunFolder.open(path, one.to_dict(), one.hash) as folder:
                fake_study.train(one, folder, cache=out)
    return out / "fake"


def committed(out: Path) -> int:
    """Steps in the last commits of all runs."""
    return sum(max((int(c.name[5:]) for c in path.glob("commit/step=*")), default=0) for path in run_folders(out))


def kill_again_and_again(kills: int, arguments: list[str], out: Path, longest: float, nap: float = 0.0) -> int:
    """Start the study and SIGKILL its whole process group at random instants; how many kills met it unfinished.

    Every third kill falls into the start, the others at most `longest` seconds after a new commit.
    """
    rng, met = np.random.default_rng(0), 0
    for i in range(kills):
        before, process = committed(out), moe_rl(*arguments, "--out", str(out), nap=nap)
        while i % 3 and process.poll() is None and committed(out) == before:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, longest))
        met += process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return met


SMALL = [*RUN, "--seeds", "0", "--steps", "40", "--set", "save_every=1"]


@pytest.mark.ranks
@pytest.mark.parametrize("kills, arguments, longest", [(12, SMALL, 0.4)])
def test_a_study_killed_twelve_times_ends_identical_to_an_uninterrupted_one(tmp_path, kills, arguments, longest):
    whole = fake_runs(tmp_path / "whole", fake_study.study.base.replace(steps=40), seeds=(0,))
    met = kill_again_and_again(kills, arguments, tmp_path / "killed", longest, nap=0.04)
    assert met == kills and committed(tmp_path / "killed") < 3 * 40, "the study was too quick to be killed: lengthen it"
    code, _, err = ended(moe_rl(*arguments, "--out", str(tmp_path / "killed")))
    assert code == 0, err
    for a in run_folders(whole):
        b = tmp_path / "killed" / a.relative_to(tmp_path / "whole")
        assert diff(a, b) is None
        assert runs.read_manifest(a)["checkpoint"] == runs.read_manifest(b)["checkpoint"]
        assert not list(b.rglob(".tmp-*"))


def test_workers_die_with_a_study_that_is_killed_alone(tmp_path):
    process = moe_rl(*RUN, "--seeds", "0", "--steps", "1000", "--out", str(tmp_path), nap=0.05)
    path = tmp_path / "fake" / "grpo" / "base" / "seed=0"
    deadline = time.time() + 60
    while runs.state(path)["state"] != "running" and time.time() < deadline:
        time.sleep(0.1)
    process.kill()
    process.wait()
    while runs.state(path)["state"] == "running" and time.time() < deadline:
        time.sleep(0.1)
    assert runs.state(path)["state"] == "interrupted"


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path):
    process = moe_rl(*RUN, "--seeds", "0", "--steps", "1000", "--out", str(tmp_path), nap=0.05)
    path = tmp_path / "fake" / "grpo" / "base" / "seed=0"
    while runs.state(path)["state"] != "running":
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130 and "The same command continues" in err and "Traceback" not in err
    assert runs.state(path)["state"] == "interrupted"


def test_a_full_disk_is_named_with_what_to_do_and_the_same_command_goes_on(tmp_path, command, monkeypatch):
    """A full device in place of the first file that a run writes."""
    run = tmp_path / "fake/grpo/base/seed=0"
    arguments = (*RUN, "--arms", "grpo", "--seeds", "1", "--steps", "3", "--out", str(tmp_path))
    with monkeypatch.context() as full:
        full.setattr(lock, "replaced", lambda file: Path("/dev/full"))
        code, out, err = command(*arguments)
    assert (code, "Traceback" in out + err) == (2, False), err
    assert f"{run}: No space left on device. Free some space on the disk at /" in err and "repeat the command" in err
    assert command(*arguments)[0] == 0


def test_a_study_ends_with_its_summary_its_caution_and_its_figures(tmp_path, command, capsys):
    code, out, err = command(*RUN, "--out", str(tmp_path), "--steps", "3")
    assert (code, err) == (0, "")
    assert "n = 2 seeds" in out and "95% Student t" in out and "difference" in out and "--all" in out
    assert len(out.partition("┏")[2].splitlines()) <= 25, "a study ends with one table"
    assert cli.main(["plot", str(tmp_path / "fake"), "--all"]) == 0
    out += capsys.readouterr().out
    assert "Clopper" in out and "Holm" in out
    assert "reward, second half" in out and "Made-up numbers." in out
    figures = tmp_path / "fake" / "figures"
    assert {p.name for p in figures.iterdir()} == {f"{n}.{e}" for n in fake_study.study.figures for e in ("png", "svg")}
    assert all(str(figures / f"{n}.png") in out for n in fake_study.study.figures)
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("steps.parquet")}
    code, out, _ = command(*RUN, "--out", str(tmp_path), "--steps", "3")
    assert code == 0 and "6 runs, 6 finished" in out, "a finished run is skipped"
    assert stamps == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("steps.parquet")}


def test_a_run_that_breaks_does_not_stop_the_others(tmp_path, command):
    code, out, err = command(*RUN, "--out", str(tmp_path), "--task", "broken", "--seeds", "0")
    assert code == 1 and "ZeroDivisionError: a bug in the trainer" in err
    assert "Traceback" in out and "fake_study.py" in out
    states = {p.parent.parent.name: runs.state(p)["state"] for p in run_folders(tmp_path)}
    assert states == {"grpo": "finished", "grpo-replay": "finished", "gspo": "failed"}
    log = (tmp_path / "fake" / "gspo" / "base" / "seed=0" / "log.txt").read_text()
    assert "ZeroDivisionError" in log


def test_a_wrong_task_is_one_sentence_and_starts_no_more_runs(tmp_path, command):
    code, out, err = command(*RUN, "--out", str(tmp_path), "--task", "unknown")
    assert code == 2 and "Traceback" not in out + err
    assert err.count("there is no task 'unknown'") == 1
    assert len(list(run_folders(tmp_path))) == 2, "the two that ran when the first one failed"


@pytest.mark.parametrize("at, task", [(1, "commits"), (5, "commits"), (5, "raises")])
def test_a_run_that_diverges_is_a_result_and_the_others_go_on(tmp_path, command, at, task):
    code, out, err = command("run", FAKE, "--mix-code", "--jobs", "1", "--out", str(tmp_path), "--seeds", "0",
                             "--steps", "6", "--task", task, "--set", f"task.diverges_at={at}")
    assert (code, err) == (0, ""), "no failure"
    states = {p.parent.parent.name: runs.state(p) for p in run_folders(tmp_path)}
    assert {arm: now["state"] for arm, now in states.items()} == {
        "grpo": "diverged", "grpo-replay": "finished", "gspo": "finished"}
    assert states["grpo"]["step"] == {"commits": at - 1, "raises": 3}[task], "up to its last commit"
    assert "the gradient norm is nan" in runs.read_manifest(tmp_path / "fake/grpo/base/seed=0")["diverged"]
    assert "reward, " in out and "second half" in out
    assert "collapsed" in out and "1 of 1" in out, "the short table counts it"


def test_a_divergence_without_a_commit_is_a_failure_of_its_own_run_alone(tmp_path, command):
    code, out, err = command("run", FAKE, "--mix-code", "--jobs", "1", "--out", str(tmp_path), "--seeds", "0",
                             "--steps", "6", "--task", "raises", "--set", "task.diverges_at=1")
    assert code == 1 and "the gradient norm is nan" in err and "The run has no checkpoint" in err
    states = {p.parent.parent.name: runs.state(p)["state"] for p in run_folders(tmp_path)}
    assert states == {"grpo": "failed", "grpo-replay": "finished", "gspo": "finished"}


@pytest.mark.parametrize("task", ["commits", "raises"])
def test_a_run_that_diverges_on_ranks_is_recorded_and_the_next_one_begins(tmp_path, task, monkeypatch):
    monkeypatch.setattr(ranks, "launched", lambda: True)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    study = dataclasses.replace(fake_study.study, trainer="tests.fake_study:train", seeds=(0,))
    study = dataclasses.replace(study, base=study.base.replace(task=Component(task, diverges_at=5)))
    planned = study.runs(tmp_path)
    workers.run_together(study, planned, planned, tmp_path, (), Console(quiet=True))
    assert [runs.state(p.path)["state"] for p in planned] == ["diverged", "finished", "finished"]


def test_another_task_or_model_is_a_caution_that_names_what_the_settings_were_chosen_for(tmp_path, command):
    dry = ("run", "routing_replay", "--dry-run", "--out", str(tmp_path))
    for words in (("--task", "guessing"), ("--set", "model.overrides={'num_experts': 8}")):
        assert "were chosen for running_sums" in " ".join(command(*dry, *words)[1].split())
    assert "were chosen for" not in " ".join(command(*dry, "--set", "optimizer.lr=1e-4")[1].split())
    chosen = [word for name in ("optimizer.lr=1e-4", "max_new_tokens=14", "cold_start.target=0.5")
              for word in ("--set", name)]
    asked = " ".join(command(*dry, "--task", "guessing", *chosen[:4])[1].split())
    assert "Check cold_start.target, and set" in asked
    assert "were chosen for" not in " ".join(command(*dry, "--task", "guessing", *chosen)[1].split())


def test_what_is_measured_in_some_steps_only_is_said_before_a_run(tmp_path, command):
    dry = ("run", "routing_replay", "--dry-run", "--out", str(tmp_path))
    for words, every in (((), 10), (("--set", "measure.detail_every=3"), 3)):
        assert f"measured every {every} steps only: changes per update" in " ".join(command(*dry, *words)[1].split())


def test_brackets_in_an_error_are_printed_as_they_stand_and_stop_nobody(tmp_path, command):
    code, out, err = command("run", FAKE, "--mix-code", "--jobs", "1", "--out", str(tmp_path), "--seeds", "0",
                             "--steps", "3", "--task", "brackets")
    assert code == 1 and "[/INST] [bold]has no answer" in out and "[/INST] [bold]has no answer" in err
    states = {p.parent.parent.name: runs.state(p)["state"] for p in run_folders(tmp_path)}
    assert states == {"grpo": "failed", "grpo-replay": "finished", "gspo": "finished"}


BRACKETS = "[/INST] [red] :bug:"


def test_brackets_in_a_declaration_are_printed_as_they_stand(tmp_path, capsys, forked_workers):
    file = tmp_path / "brackets_study.py"
    texts = ", ".join(f"{key}={key + BRACKETS!r}" for key in ("question", "hypothesis", "caution", "cost"))
    file.write_text(f"import dataclasses, sys\nsys.path.insert(0, {str(Path(FAKE).parent)!r})\nimport fake_study\n"
                    f"study = dataclasses.replace(fake_study.study, {texts})\n")
    out = tmp_path / "[bold]runs[/]"
    assert cli.main(["run", str(file), "--dry-run", "--out", str(out)]) == 0
    plan = capsys.readouterr().out
    assert all(key + BRACKETS in plan for key in ("question", "hypothesis", "cost")) and "[bold]runs[/]" in plan
    assert cli.main(["run", str(file), "--seeds", "0", "--steps", "3", "--mix-code", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "caution" + BRACKETS in shown and str(out / "fake" / "figures" / "expert_change.png") in shown


def test_brackets_in_a_warning_a_figure_and_a_table_are_printed_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("moe_rl.study.workers.preflight", lambda *_: [f"void {BRACKETS}"])
    assert cli.main(["run", FAKE, "--dry-run", "--out", str(tmp_path)]) == 0
    assert f"void {BRACKETS}" in capsys.readouterr().out
    folder = fake_runs(tmp_path, seeds=(0,))
    write_declaration(fake_study.study, tmp_path)

    def missing(*_):
        raise RunError(f"missing {BRACKETS}")

    monkeypatch.setattr("moe_rl.results.figures.draw", lambda *_: missing)
    assert cli.main(["plot", str(folder), "--mix-code"]) == 0
    assert f"missing {BRACKETS}" in capsys.readouterr().out
    console = Console(width=200, file=io.StringIO())
    printed.print_table(console, Shown(f"title {BRACKETS}", ("mean", f"arm {BRACKETS}"), [("a", BRACKETS)], BRACKETS))
    text = console.file.getvalue()
    assert text.count(BRACKETS) == 4 and f"title {BRACKETS}" in text and f"arm {BRACKETS}" in text


@pytest.mark.parametrize("world", ["1", "2"])
def test_a_world_of_one_left_in_the_environment_is_not_a_launch(monkeypatch, world):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world)
    assert ranks.launched() == (world == "2") and ranks.world() == int(world) and ranks.rank() == 0


def test_other_settings_than_those_of_the_runs_that_are_there_are_refused_also_for_the_plan(tmp_path, command):
    fake_runs(tmp_path)
    code, shown, said = command("run", FAKE, "--out", str(tmp_path), "--arms", "gspo", "--seeds", "5,6", "--set",
                                "optimizer.lr=0.1", "--dry-run")
    assert code == 2 and "different settings (optimizer.lr: " in said and "gspo" in shown


def test_no_runs_at_a_time_are_refused_also_for_the_plan(tmp_path, capsys):
    for arguments in ([], ["--dry-run"]):
        assert cli.main(["run", FAKE, "--jobs", "0", "--out", str(tmp_path / "runs"), *arguments]) == 2
        assert "--jobs 0 must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_one_seed_says_that_it_has_no_interval(tmp_path, capsys):
    fake_runs(tmp_path, seeds=(0,))
    assert cli.main(["run", FAKE, "--out", str(tmp_path), "--seeds", "0", "--mix-code"]) == 0
    assert "no interval" in capsys.readouterr().out


def test_quick_is_one_seed_and_three_steps_in_a_folder_of_its_own(tmp_path):
    """And its worker is an interpreter of its own, which most tests here spare themselves."""
    assert cli.main(["run", FAKE, "--quick", "--out", str(tmp_path), "--jobs", "1", "--arms", "grpo"]) == 0
    frames = load_study(tmp_path / "fake-quick")
    assert frames.runs["seed"].unique().tolist() == [0] and set(frames.runs["steps"]) == {3}
    assert not (tmp_path / "fake").exists()


def test_a_part_of_a_study_is_still_that_study(tmp_path, command):
    code, out, err = command(*RUN, "--out", str(tmp_path), "--steps", "3", "--arms", "gspo,grpo", "--seeds", "0")
    assert (code, err) == (0, "") and "2 runs, 0 finished" in out
    declared = (tmp_path / "fake" / "study.json").read_text()
    assert [arm["name"] for arm in json.loads(declared)["arms"]] == ["grpo", "grpo-replay", "gspo"]
    code, out, _ = command(*RUN, "--out", str(tmp_path), "--steps", "3", "--seeds", "0")
    assert code == 0 and "3 runs, 2 finished" in out and "warning" not in out
    code, out, _ = command(*RUN, "--out", str(tmp_path), "--steps", "3", "--seeds", "0", "--arm", "gspo")
    assert code == 0 and "warning" not in out and (tmp_path / "fake" / "study.json").read_text() == declared
    code, out, _ = command(*RUN, "--out", str(tmp_path), "--steps", "3", "--seeds", "0", "--arm", "sapo")
    assert code == 0 and "warning" not in out
    added = json.loads((tmp_path / "fake" / "study.json").read_text())
    assert [arm["name"] for arm in added["arms"]] == ["grpo", "grpo-replay", "gspo", "sapo"]
    code, out, _ = command("plot", str(tmp_path / "fake"), "--mix-code")
    assert code == 0 and "not declared" not in out and "sapo" in out and "grpo-replay" in out


def test_a_dry_run_prints_the_plan_and_touches_nothing(tmp_path, capsys):
    assert cli.main(["run", FAKE, "--dry-run", "--out", str(tmp_path / "none"), "--seeds", "3", "--steps", "50"]) == 0
    out = capsys.readouterr().out
    assert out.count("waiting 0/50") == 9 and "450 steps to go" in out and "Does the study runner work?" in out
    assert "study:train has no function `check` beside it" in " ".join(out.split())
    assert not (tmp_path / "none").exists()


def test_a_number_of_seeds_is_not_taken_for_a_seed():
    """A study whose seeds begin at 400 would else get 403 of them."""
    assert running._seeds("403,", (400, 403)) == [403] and running._seeds("2", (400, 403)) == [0, 1]
    assert running._seeds("2", (0, 1, 2)) == [0, 1] and running._seeds("5", (0, 1, 2)) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="write --seeds 403, with the comma"):
        running._seeds("403", (400, 403))


def test_settings_reach_the_runs(tmp_path, command):
    code, _, err = command(*RUN, "--out", str(tmp_path), "--seeds", "1", "--steps", "2",
                           "--set", "optimizer.lr=1", "--set", "mini_batches=2")
    assert code == 0, err
    found = [runs.read_manifest(p) for p in run_folders(tmp_path)]
    assert {(m["seed"], m["finished"], m["config"]["optimizer"]["lr"], m["config"]["mini_batches"]) for m in found} == {
        (0, 2, 1.0, 2)}


def test_another_configuration_in_the_same_place_is_refused_before_anything_starts(tmp_path, capsys):
    folder = fake_runs(tmp_path)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert cli.main([*RUN, "--out", str(tmp_path), "--set", "optimizer.lr=1"]) == 2
    assert "optimizer.lr: 0.0002 there, 1.0 now" in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "study.json"}


@pytest.mark.parametrize("arguments, words", [
    (["run", "nowhere.py"], "no study file nowhere.py"),
    (["run", FAKE, "--set", "optimiser.lr=1"], "did you mean optimizer.lr?"),
    (["run", FAKE, "--arms", "gspo,ppo"], "no arm of study 'fake' is called 'ppo'"),
    (["run", FAKE, "--set", "prompts_per_step=0"], "prompts_per_step=0"),
    (["run", FAKE, "--steps", "0"], "steps=0"),
    (["run", FAKE, "--seeds", "a"], "--seeds a"),
    (["run", FAKE, "--jobs", "-1"], "--jobs -1"),
    (["plot", "nowhere"], "not the folder of a study"),
    (["runs", "list", "nowhere"], "no run below nowhere. Give a folder of studies"),
    (["runs", "show", "nowhere"], "not a run"),
    (["runs", "diff", "nowhere", "nowhere"], "not a run"),
    (["runs", "export", "nowhere"], "no finished run below nowhere"),
    (["report", "nowhere"], "not the folder of a study"),
    (["runs", "collect", "nowhere", "--out", "there"], "not the folder of a study"),
    (["rerun", "nowhere"], "not the folder of a study"),
    (["run", "studies/routing_replay.py", "--task", "running_sum"], "did you mean running_sums"),
    (["run", "studies/routing_replay.py", "--task", "jsonl:nowhere.jsonl"], "nowhere.jsonl"),
    (["run", "studies/routing_replay.py", "--dry-run", "--set", "model.name=/nowhere"], "'/nowhere'"),
    (["run", "studies/routing_replay.py", "--dry-run", "--set", "model.device=cuda:99"], "cuda:99"),
    (["run", "studies/routing_replay.py", "--set", "model.overrides=3"], "one entry at a time, model.overrides.NAME="),
    (["run", "studies/routing_replay.py", "--set", "measure.detail_every=0"], "at least 1 step"),
    (["run", FAKE, "--seeds", "-3"], "seeds must not be negative"),
    (["run", "studies/routing_replay.py", "--set", "optimizer.lr=-1"], "a learning rate must not be negative"),
    (["run", "studies/learning_rates.py", "--set", "optimizer.lr=2"],
     "study 'learning_rates' gives the factor optimizer.lr the values 0.0002"),
    (["run", "studies/engine_mismatch.py", "--set", "engine.experts=fast"], "choose eager, batched_mm, grouped_mm"),
    (["runs", "export", TABLES, "--to", FAKE], "File exists"),
])
def test_bad_input_is_one_sentence_and_exit_code_two(tmp_path, monkeypatch, capsys, arguments, words):
    if arguments[1].startswith("studies"):
        arguments[1] = str(Path(FAKE).parent.parent / arguments[1])
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err and err.startswith("moe-rl: ") and err.count("\n") == 1
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_narrow_terminal_wraps_tables_and_cuts_no_number():
    rows = [("reward, second half", "0.17 [-0.32, 0.66]", "0.54 [0.33, 0.76]")]
    shown = Shown("title", ("mean", "grpo", "gspo"), rows, "note")
    console = Console(width=30, file=io.StringIO())
    printed.print_table(console, shown)
    assert "…" not in console.file.getvalue()
    for number in ("-0.32", "0.66]", "0.33", "0.76]"):
        assert number in console.file.getvalue()


def test_an_unknown_figure_is_noticed_before_anything_runs(tmp_path, capsys):
    file = tmp_path / "typo_study.py"
    file.write_text(f"import dataclasses, sys\nsys.path.insert(0, {str(Path(FAKE).parent)!r})\nimport fake_study\n"
                    "study = dataclasses.replace(fake_study.study, figures=('lerning',))\n")
    assert cli.main(["run", str(file), "--out", str(tmp_path / "runs")]) == 2
    assert "no figure is called 'lerning'" in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("changes, words", [
    ("endpoint='rewards'", "no metric is called 'rewards'"),
    ("figures=('against:optimizer.lr',)", "needs the factor optimizer.lr, but the study's factors are none"),
    ("comparisons=(('gspo', 'ppo'),)", "the comparison gspo − ppo of study 'fake' needs two of its arms"),
])
def test_a_declaration_that_cannot_be_reported_is_noticed_before_anything_runs(tmp_path, capsys, changes, words):
    file = tmp_path / f"wrong_{abs(hash(changes))}.py"
    file.write_text(f"import dataclasses, sys\nsys.path.insert(0, {str(Path(FAKE).parent)!r})\nimport fake_study\n"
                    f"study = dataclasses.replace(fake_study.study, {changes})\n")
    assert cli.main(["run", str(file), "--out", str(tmp_path / "runs")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_list_shows_state_age_and_time_left(tmp_path, capsys):
    fake_runs(tmp_path, seeds=(0,))
    config = fake_study.study.base.replace(seed=1)
    path = tmp_path / "fake" / "grpo" / "base" / "seed=1"
    with RunFolder.open(path, config.to_dict(), config.hash) as folder:
        folder.progress(2, seconds_per_step=60.0, reward=0.25)
        assert cli.main(["runs", "list", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["run", "state", "step", "reward", "changed", "left"] and len(rows) == 5
    running = next(row for row in rows if "seed=1" in row)
    assert all(word in running for word in ("running", "2/12", "0.250", "0 s ago", "10 min"))
    assert sum("finished" in row and "12/12" in row for row in rows) == 3


def test_show_prints_configuration_versions_and_the_last_rows(tmp_path, capsys):
    path = fake_runs(tmp_path, seeds=(0,)) / "gspo" / "base" / "seed=0"
    assert cli.main(["runs", "show", str(path)]) == 0
    out = capsys.readouterr().out
    manifest = json.loads(out[: out.index("\n}\n") + 2])
    loss = {"name": "gspo", "options": {"clip_low": 0.01, "clip_high": 0.013}}
    assert manifest["config"]["arm"]["loss"] == loss and manifest["packages"]
    assert "updates: 48 rows" in out and "eval_exact_greedy" not in out, "the last row has no evaluation"


def test_diff_exits_with_one_and_names_the_row(tmp_path, capsys):
    a, b = fake_runs(tmp_path / "a", seeds=(0,)), fake_runs(tmp_path / "b", seeds=(0, 1))
    assert cli.main(["runs", "diff", str(a / "grpo/base/seed=0"), str(b / "grpo/base/seed=0")]) == 0
    assert cli.main(["runs", "diff", str(a / "grpo/base/seed=0"), str(b / "grpo/base/seed=1")]) == 1
    out = capsys.readouterr().out
    assert "config.seed: 0 | 1" in out and "updates: step 1, update 1: loss = " in out


def test_export_writes_every_digit(tmp_path, capsys):
    folder = fake_runs(tmp_path, seeds=(0,))
    assert cli.main(["runs", "export", str(folder), "--to", str(tmp_path / "csv"), "--mix-code"]) == 0
    frame = pd.read_csv(tmp_path / "csv" / "steps.csv", float_precision="round_trip")
    want = [row["reward"] for arm in ("grpo", "grpo-replay", "gspo") for row in fake_study.fake_tables(
        fake_study.study.base.replace(arm=next(a for a in fake_study.study.arms if a.name == arm)))["steps"]]
    assert frame["reward"].to_list() == want and frame["arm"].unique().tolist() == ["grpo", "grpo-replay", "gspo"]


def test_plot_needs_only_the_folder(tmp_path, capsys):
    fake_runs(tmp_path, seeds=(0,))
    write_declaration(fake_study.study, tmp_path)
    assert cli.main(["plot", str(tmp_path / "fake"), "--mix-code"]) == 0
    assert (tmp_path / "fake" / "figures" / "expert_change.svg").exists() and "Made-up" in capsys.readouterr().out


def test_help_imports_nothing_that_reads_or_draws():
    heavy = "{'torch', 'pandas', 'matplotlib', 'rich', 'pyarrow', 'numpy', 'scipy', 'transformers'}"
    code = f"import sys\nfrom moe_rl.cli import main\ntry: main(['--help'])\nfinally: print({heavy} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith("\nset()\n")


def test_a_run_whose_rewards_trained_nothing_says_so(tmp_path, capsys, monkeypatch):
    real = fake_study.fake_step

    def without_signal(config, step, weights):
        row, *others = real(config, step, weights)
        return row | ({"zero_variance_groups": 1.0} if config.arm.name == "gspo" else {}), *others

    monkeypatch.setattr(fake_study, "fake_step", without_signal)
    folder = fake_runs(tmp_path, seeds=(0,))
    write_declaration(fake_study.study, tmp_path)
    assert cli.main(["runs", "collect", str(folder), "--out", str(tmp_path / "tables"), "--mix-code"]) == 0
    capsys.readouterr()
    for where in (folder, tmp_path / "tables"):
        assert cli.main(["runs", "list", str(where)]) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if "no gradient" in line]
        assert [Path(line.split()[0]).parts[-3] for line in said] == ["gspo"]
    assert cli.main(["report", str(folder), "--mix-code"]) == 0
    assert "no gradient in 1 of 3 runs (gspo seed=0)" in (folder / "report.html").read_text()


def test_listing_and_showing_runs_draws_nothing(tmp_path):
    path = fake_runs(tmp_path, seeds=(0,)) / "gspo" / "base" / "seed=0"
    for words, heavy in ((["runs", "list", str(tmp_path)], "{'torch', 'pandas', 'matplotlib', 'rich'}"),
                         (["runs", "show", str(path)], "{'torch', 'matplotlib', 'rich'}"),
                         (["runs", "list", TABLES], "{'torch', 'matplotlib', 'rich'}")):
        code = f"import sys\nfrom moe_rl.cli import main\nmain({words})\nprint({heavy} & {{*sys.modules}})"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith("\nset()\n")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    assert f"moe-rl {command}" in capsys.readouterr().out.split("examples:")[1]


def test_what_a_verb_does_not_take_prints_its_usage_and_the_nearest(capsys):
    for words, usage, hint in ((["run", FAKE, "--seed", "3"], "run [options] study", "did you mean --seeds or --set?"),
                               (["plot", "x", "--al"], "plot [options] folder", "did you mean --all?"),
                               (["runs", "list", "a", "b"], "runs list [options] [folder]", "unknown argument b.")):
        with pytest.raises(SystemExit, match="2"):
            cli.main(words)
        err = capsys.readouterr().err
        name = usage.partition(" [")[0]
        assert f"usage: moe-rl {usage}\nmoe-rl {name}: error: " in err and hint in err and "--help" in err


@pytest.mark.parametrize("words, hint", [
    (["rum"], "no command of moe-rl is called 'rum': did you mean run?"),
    (["runs", "lst"], "no command of moe-rl runs is called 'lst': did you mean list?"),
    (["volatility", "a", "b"], "volatility is now `moe-rl checkpoint compare`"),
    (["list"], "list is now `moe-rl runs list`"),
    (["evaluate", "--help"], "evaluate is now `moe-rl checkpoint evaluate`"),
])
def test_an_unknown_command_is_one_line_with_the_nearest_or_the_new_name(words, hint, capsys):
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-rl: ") and hint in err and err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["runs"], ["checkpoint"]], ids=str)
def test_a_name_without_its_end_lists_how_it_goes_on(words, capsys):
    """On stderr, as an error, unless help is asked for."""
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert cli.main([*words, "--help"]) == 0
    assert (out, capsys.readouterr().out) == ("", err)
    rows = [row.split()[0] for row in err.splitlines() if row.startswith("  ")]
    assert len(rows) <= 12 and "work" not in rows, "which a scheduler calls, not a person"
    assert not words or cli.GROUPS[words[0]].endswith(f": {', '.join(rows)}.")


@pytest.mark.parametrize("line, words", [
    ("moe-rl re", ["rerun", "report"]),
    ("moe-rl runs ", ["list", "show", "read", "diff", "collect", "export", "import"]),
    ("moe-rl runs collect x --", ["--help", "--out", "--also", "--without", "--mix-code"]),
    ("moe-rl checkpoint view --t", ["--tokenizer"]), ("moe-rl plot ru", []), ("moe-rl nothing ", []),
    ("moe-rl", []),
])
def test_a_shell_completes_commands_and_options(line, words):
    """`complete -o default -C moe-rl moe-rl`: where nothing is printed, the shell completes files."""
    done = subprocess.run([sys.executable, "-m", "moe_rl", "moe-rl"], capture_output=True, text=True,
                          env=os.environ | {"COMP_LINE": f"{line}!", "COMP_POINT": str(len(line))})
    expected = [w for w in cli.COMMANDS if " " not in w and w != "work"] + ["runs", "checkpoint"] \
        if line == "moe-rl" else words
    assert (done.returncode, sorted(done.stdout.split()), done.stderr) == (0, sorted(expected), "")


def test_a_group_and_its_command_in_one_word_are_no_command(capsys):
    """Else the words after them would be cut in the wrong place."""
    assert cli.main(["runs list", "somewhere"]) == 2
    assert "'runs list'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["diagnose", "a", "b"], ["checkpoint", "evaluate", "--help"],
                                   ["runs", "export", "a", "--to", "wandb"]])
def test_a_command_says_which_folder_of_the_package_is_missing(words):
    code = ("import sys; sys.modules |= {'moe_rl.analysis': None, 'moe_rl.integrations': None}\n"
            f"from moe_rl.cli import main; sys.exit(main({words}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert " needs the folder moe_rl/" in done.stderr and "this installation of moe_rl lacks" in done.stderr


@pytest.mark.parametrize("name", [*cli.GROUPS, *cli.COMMANDS])
def test_help_fits_a_screen(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        sys.exit(cli.main([*name.split(), "--help"]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80, "\n".join(lines)
