"""The command: whole studies in real processes, killed and resumed; what it prints and how it fails."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
from rich.console import Console

from moe_rl import cli, ranks
from moe_rl.cli import running
from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.storage import folder as runs
from moe_rl.storage.folder import RunFolder, run_folders
from moe_rl.storage.frames import diff, load_study
from moe_rl.study import workers
from moe_rl.study.declaration import write_declaration
from tests import fake_study

FAKE = str(Path(__file__).parent / "fake_study.py")
TABLES = str(Path(__file__).parent.parent / "studies" / "routing_replay")
RUN = ["run", FAKE, "--jobs", "2", "--mix-code"]
"""`--mix-code`: the package may be edited while its tests run."""


def moe_rl(*arguments: str, nap: float = 0.0, **options) -> subprocess.Popen:
    """The command, as the leader of a process group of its own; it heeds Ctrl-C even where these tests do not."""
    return subprocess.Popen(
        [sys.executable, "-m", "moe_rl", *arguments],
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env=os.environ | {"FAKE_NAP": str(nap), "COLUMNS": "200"},
        **options,
    )


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.fixture
def command(request, monkeypatch, capsys, forked_workers):
    """The command in this process, which spares its imports; workers are processes all the same. Only the test of
    figures writes them."""
    monkeypatch.setenv("COLUMNS", "200")
    if "figures" not in request.node.name:
        monkeypatch.setattr("moe_rl.results.plots.save", lambda figure, folder, name, formats: [folder / f"{name}.png"])

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


SMALL = [*RUN, "--seeds", "0", "--steps", "100", "--set", "save_every=1"]


@pytest.mark.ranks
@pytest.mark.parametrize("kills, arguments, longest", [(12, SMALL, 0.4)])
def test_a_study_killed_twelve_times_ends_identical_to_an_uninterrupted_one(tmp_path, kills, arguments, longest):
    whole = fake_runs(tmp_path / "whole", fake_study.study.base.replace(steps=100), seeds=(0,))
    met = kill_again_and_again(kills, arguments, tmp_path / "killed", longest, nap=0.04)
    assert met == kills and committed(tmp_path / "killed") < 3 * 100, (
        "the study was too quick to be killed: lengthen it"
    )
    code, _, err = ended(moe_rl(*arguments, "--out", str(tmp_path / "killed")))
    assert code == 0, err
    for a in run_folders(whole):
        b = tmp_path / "killed" / a.relative_to(tmp_path / "whole")
        assert diff(a, b) is None
        assert runs.read_manifest(a)["checkpoint"] == runs.read_manifest(b)["checkpoint"]
        assert not list(b.rglob(".tmp-*"))


def until_running(process, out):
    """The folder of the only run, as soon as it is running."""
    path = out / "fake" / "grpo" / "base" / "seed=0"
    while runs.state(path)["state"] != "running":
        assert process.poll() is None, "the study ended before its run began"
        time.sleep(0.1)
    return path


def test_workers_die_with_a_study_that_is_killed_alone(tmp_path):
    process = moe_rl(*RUN, "--seeds", "0", "--steps", "1000", "--out", str(tmp_path), nap=0.05)
    path = until_running(process, tmp_path)
    process.kill()
    process.wait()
    deadline = time.time() + 60
    while runs.state(path)["state"] == "running" and time.time() < deadline:
        time.sleep(0.1)
    assert runs.state(path)["state"] == "interrupted"


def test_watch_waits_for_a_study_and_not_for_what_is_none(tmp_path, monkeypatch, capsys):
    """The folder comes during the first nap; it is one of tables, which have no page to be written again."""
    folder, naps = tmp_path / "later", iter([1])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(naps) and shutil.copytree(TABLES, folder))
    assert cli.main(["watch", str(folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("waiting for ") and "moe-rl report writes their page" in printed.err
    for wrong in (tmp_path, folder / "study.json"):
        assert cli.main(["watch", str(wrong)]) == 2, "a second nap would end the test"


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path):
    process = moe_rl(*RUN, "--seeds", "0", "--steps", "1000", "--out", str(tmp_path), nap=0.05)
    path = until_running(process, tmp_path)
    workers = [child for child in psutil.Process(process.pid).children() if "spawn_main" in str(child.cmdline())]
    masks = [re.search(r"SigBlk:\s+(\w+)", Path(f"/proc/{w.pid}/status").read_text())[1] for w in workers]
    assert masks and all(int(mask, 16) & 1 << signal.SIGINT - 1 for mask in masks), "the parent decides on Ctrl-C"
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130 and "The same command continues" in err and "Traceback" not in err
    assert runs.state(path)["state"] == "interrupted"


def test_a_study_ends_with_its_summary_its_caution_and_its_figures(tmp_path, command, capsys):
    code, out, err = command(*RUN, "--out", str(tmp_path), "--steps", "3")
    assert (code, err) == (0, "")
    assert cli.main(["plot", str(tmp_path / "fake"), "--all"]) == 0
    out += capsys.readouterr().out
    assert "n = 2 seeds" in out and "Holm" in out and "Made-up numbers." in out
    figures = tmp_path / "fake" / "figures"
    assert {p.name for p in figures.iterdir()} == {f"{n}.{e}" for n in fake_study.study.figures for e in ("png", "svg")}
    assert all(str(figures / f"{n}.png") in out for n in fake_study.study.figures)
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("step=*.parquet")}
    code, out, _ = command(*RUN, "--out", str(tmp_path), "--steps", "3")
    assert code == 0 and "6 runs, 6 finished" in out, "a finished run is skipped"
    assert stamps and stamps == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("step=*.parquet")}


def test_a_run_that_breaks_does_not_stop_the_others(tmp_path, command):
    code, out, err = command(*RUN, "--out", str(tmp_path), "--task", "broken", "--seeds", "0")
    assert code == 1 and "ZeroDivisionError" in err
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
    words = f"--mix-code --jobs 1 --seeds 0 --steps 6 --task {task} --set task.diverges_at={at} --out {tmp_path}"
    code, out, err = command("run", FAKE, *words.split())
    assert (code, err) == (0, ""), "no failure"
    states = {p.parent.parent.name: runs.state(p) for p in run_folders(tmp_path)}
    assert [states[arm]["state"] for arm in ("grpo", "grpo-replay", "gspo")] == ["diverged", "finished", "finished"]
    assert states["grpo"]["step"] == {"commits": at - 1, "raises": 3}[task], "up to its last commit"
    assert "the gradient norm is nan" in runs.read_manifest(tmp_path / "fake/grpo/base/seed=0")["diverged"]
    assert "1 of 1" in out, "the short table counts it"


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


BRACKETS = "[/INST] [red] :bug:"


def test_brackets_in_a_declaration_are_printed_as_they_stand(tmp_path, capsys, forked_workers):
    file = tmp_path / "brackets_study.py"
    texts = ", ".join(f"{key}={key + BRACKETS!r}" for key in ("question", "hypothesis", "caution", "cost"))
    file.write_text(
        f"import dataclasses, sys\nsys.path.insert(0, {str(Path(FAKE).parent)!r})\nimport fake_study\n"
        f"study = dataclasses.replace(fake_study.study, {texts})\n"
    )
    out = tmp_path / "[bold]runs[/]"
    assert cli.main(["run", str(file), "--dry-run", "--out", str(out)]) == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert all(key + BRACKETS in plan for key in ("question", "hypothesis", "cost")) and "[bold]runs[/]" in plan
    assert cli.main(["run", str(file), "--seeds", "0", "--steps", "3", "--mix-code", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "caution" + BRACKETS in shown and str(out / "fake" / "figures" / "expert_change.png") in shown


@pytest.mark.parametrize("world", ["1", "2"])
def test_a_world_of_one_left_in_the_environment_is_not_a_launch(monkeypatch, world):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world)
    assert ranks.launched() == (world == "2") and ranks.world() == int(world) and ranks.rank() == 0


def test_quick_is_one_seed_and_three_steps_in_a_folder_of_its_own(tmp_path):
    """And its worker is an interpreter of its own, which most tests here spare themselves."""
    assert cli.main(["run", FAKE, "--quick", "--out", str(tmp_path), "--jobs", "1", "--arms", "grpo"]) == 0
    frames = load_study(tmp_path / "fake-quick")
    assert frames.runs["seed"].unique().tolist() == [0] and set(frames.runs["steps"]) == {3}
    assert not (tmp_path / "fake").exists()


def test_a_part_of_a_study_is_still_that_study(tmp_path, command):
    code, out, err = command(*RUN, "--out", str(tmp_path), "--steps", "3", "--arms", "gspo,grpo", "--seeds", "0")
    assert (code, err) == (0, "") and "2 runs, 0 finished" in out
    assert out.count("warning") == 1 and "gspo(clip_low=0.0003," in out
    declared = (tmp_path / "fake" / "study.json").read_text()
    assert [arm["name"] for arm in json.loads(declared)["arms"]] == ["grpo", "grpo-replay", "gspo"]
    code, out, _ = command(*RUN, "--out", str(tmp_path), "--steps", "3", "--seeds", "0")
    assert code == 0 and "3 runs, 2 finished" in out and out.count("warning") == 1
    code, out, _ = command(*RUN, "--out", str(tmp_path), "--steps", "3", "--seeds", "0", "--arm", "grpo")
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
    assert not (tmp_path / "none").exists()


def test_a_dry_run_prints_prompts_that_two_models_share_once(tmp_path, capsys):
    file = tmp_path / "depths_study.py"
    file.write_text(
        "import dataclasses\nfrom moe_rl.study import routing_replay\n"
        "depths = {str(n): {'model.overrides': {'num_hidden_layers': n}} for n in (1, 2)}\n"
        "study = dataclasses.replace(routing_replay.study, factors={}, conditions=depths)\n"
    )
    assert cli.main(["run", str(file), "--dry-run", "--out", str(tmp_path / "none")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("task ") for line in lines) == 1


def test_a_number_of_seeds_is_not_taken_for_a_seed():
    """A study whose seeds begin at 400 would else get 403 of them."""
    assert running._seeds("403,", (400, 403)) == [403] and running._seeds("2", (400, 403)) == [0, 1]
    assert running._seeds("2", (0, 1, 2)) == [0, 1] and running._seeds("5", (0, 1, 2)) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="write --seeds 403, with the comma"):
        running._seeds("403", (400, 403))
    with pytest.raises(ConfigError, match="99999999999: "):  # a list of as many fits into no memory
        running._seeds("99999999999", (0,))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "nowhere.py"], "'nowhere.py'"),
        (["run", FAKE, "--set", "optimiser.lr=1"], "did you mean optimizer.lr"),
        (["run", FAKE, "--arms", "gspo,ppo"], "'ppo'"),
        (["run", FAKE, "--seeds", "0:4"], "--seeds '0:4'"),
        (["run", FAKE, "--jobs", "-1"], "--jobs -1"),
        (["run", FAKE, "--out", FAKE], FAKE),
        (["run", "routing_reply"], "did you mean routing_replay?"),
        (["run", "routing_replay", "--dry-run", "--set", "model.name=/nowhere"], "'/nowhere'"),
        (["run", "routing_replay", "--set", "model.device=cuda:99"], "cuda:99"),
        *(([*words, "nowhere"], "nowhere") for words in (["plot"], ["report"], ["runs", "repeat"], ["runs", "list"])),
        (["runs", "export", TABLES, "--to", FAKE], "File exists"),
        *((["plot", TABLES, "--width", text], f"--width {text}: give") for text in ("0", "nan", "")),
        (["watch", TABLES, "--every", "0"], "--every 0: give the seconds"),
        (["watch", TABLES], "moe-rl report writes their page"),
        (["plot", TABLES, "--format", "gif"], "no format is called 'gif'. There are: pdf, png, svg"),
        (["plot", TABLES, "--style", "print"], "no style is called 'print'. There are: paper, screen"),
        (["plot", TABLES, "--arms", "grpo,gspo"], "no arm is called 'gspo'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err and err.startswith("moe-rl: ") and err.count("\n") == 1
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize(
    "changes, words",
    [
        ("endpoint='rewards'", "'rewards'"),
        ("figures=('lerning',)", "'lerning'"),
        ("figures=('against:optimizer.lr',)", "the factor optimizer.lr"),
        ("comparisons=(('gspo', 'ppo'),)", "gspo − ppo"),
    ],
)
def test_a_declaration_that_cannot_be_reported_is_noticed_before_anything_runs(tmp_path, capsys, changes, words):
    file = tmp_path / f"wrong_{abs(hash(changes))}.py"
    file.write_text(
        f"import dataclasses, sys\nsys.path.insert(0, {str(Path(FAKE).parent)!r})\nimport fake_study\n"
        f"study = dataclasses.replace(fake_study.study, {changes})\n"
    )
    assert cli.main(["run", str(file), "--out", str(tmp_path / "runs")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_diff_exits_with_one_and_names_the_row(tmp_path, capsys):
    a, b = fake_runs(tmp_path / "a", seeds=(0,)), fake_runs(tmp_path / "b", seeds=(0, 1))
    assert cli.main(["runs", "diff", str(a / "grpo/base/seed=0"), str(b / "grpo/base/seed=0")]) == 0
    assert cli.main(["runs", "diff", str(a / "grpo/base/seed=0"), str(b / "grpo/base/seed=1")]) == 1
    out = capsys.readouterr().out
    assert "config.seed: 0 | 1" in out and "step 1, update 1: loss = " in out


def test_export_writes_every_digit(tmp_path, capsys):
    folder = fake_runs(tmp_path, seeds=(0,))
    beside = folder / "grpo/base/seed=0/csv"  # a folder, although its name has a =
    assert cli.main(["runs", "export", str(folder), "--to", str(beside), "--mix-code"]) == 0
    frame = pd.read_csv(beside / "steps.csv", float_precision="round_trip")
    want = [
        row["reward"]
        for arm in ("grpo", "grpo-replay", "gspo")
        for row in fake_study.fake_tables(
            fake_study.study.base.replace(arm=next(a for a in fake_study.study.arms if a.name == arm))
        )["steps"]
    ]
    assert frame["reward"].to_list() == want and frame["arm"].unique().tolist() == ["grpo", "grpo-replay", "gspo"]


def test_help_imports_nothing_that_reads_or_draws():
    heavy = "{'torch', 'pandas', 'matplotlib', 'rich', 'pyarrow', 'numpy', 'scipy', 'transformers'}"
    code = f"import sys\nfrom moe_rl.cli import main\ntry: main(['--help'])\nfinally: print({heavy} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith("\nset()\n")


def test_a_terminal_without_unicode_gets_question_marks_and_files_are_utf_8(tmp_path):
    folder = fake_runs(tmp_path, seeds=(0,))
    write_declaration(fake_study.study, tmp_path)
    plain = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONPATH": os.getcwd()}
    for words in (["methods", "gspo"], ["report", str(folder), "--mix-code"]):
        done = subprocess.run([sys.executable, "-m", "moe_rl", *words], env=plain, capture_output=True)
        assert done.returncode == 0 and done.stdout.isascii(), done.stderr
    assert "\N{MINUS SIGN}" in (folder / "report.html").read_text(encoding="utf-8")


def test_figures_for_a_paper_are_of_the_arms_and_figures_that_are_asked_for(tmp_path, command):
    folder = fake_runs(tmp_path)
    write_declaration(fake_study.study, tmp_path)
    paper = ("plot", str(folder), "--style", "paper", "--width", "5.5")
    code, out, _ = command(*paper, "--arms", "gspo,grpo", "--figures", "clipping")
    assert code == 0 and "figures/clipping.pdf\n" in out and "grpo-replay" not in out
    assert "caption: Fraction of response tokens" in out and "Mean over n = 2 seeds" in out
    assert [file.name for file in (folder / "figures").iterdir()] == ["clipping.pdf"]
    assert b"/MediaBox [ 0 0 396 " in (folder / "figures/clipping.pdf").read_bytes()
