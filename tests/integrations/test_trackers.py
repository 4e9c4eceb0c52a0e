"""What trackers are given, without any: every committed number once, whatever happens to whoever trains or tracks."""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import re
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from moe_rl import cli
from moe_rl.errors import ConfigError, RunError
from moe_rl.integrations.trackers import processes as tracking
from moe_rl.integrations.trackers.listeners import bring_up_to_date, committed, opened, points_of, target, tracked
from moe_rl.storage.columns import TABLES, entry
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import read_table
from moe_rl.study.collect import collect
from moe_rl.study.declaration import write_declaration
from tests import fake_study
from tests.own_trackers import Lines, points
from tests.test_cli import FAKE, fake_runs

LINES = "tests.own_trackers:Lines"


def expected(path):
    """Every number of a run's tables by name and step, read another way: by pandas."""
    found = {}
    for table, keys in TABLES.items():
        if table in ("evaluations", "rollouts"):  # completions
            continue
        for row in read_table(path, table).to_dict("records"):
            names = "".join(f"/{key}_{row[key]}" for key in keys[1:])
            found |= {(f"{table}/{c}{names}", row["step"]): float(v) for c, v in row.items()
                      if c not in keys and v == v}
    return found


def given(lines):
    """What was given, by name and step; twice is an error."""
    found = [((name, p["step"]), value) for p in lines for name, value in p["values"].items()]
    assert len(found) == len(dict(found))
    return dict(found)


def test_the_points_of_two_steps_by_hand():
    tables = {"steps": [{"step": 1, "reward": 0.5, "exact": None, "seconds_step": 2.0},
                        {"step": 2, "reward": math.nan, "own_note": "text", "seconds_step": 3.0}],
              "updates": [{"step": 2, "update": 1, "loss": 1}],
              "layers": [{"step": 2, "site": 3, "layer": 4, "slot_change": 0.25}],
              "evaluations": [{"step": 2, "benchmark": "held_out", "problem": 7, "sample": 1, "reward": 1.0}],
              "rollouts": [{"step": 2, "rollout": 17, "reward": 1.0, "prompt": "?"}]}  # fmt: skip
    first, second = points_of(tables, 100.0)
    assert (first.step, first.time, first.values) == (1, 102.0, {"steps/reward": 0.5, "steps/seconds_step": 2.0})
    assert (second.step, second.time) == (2, 105.0)
    assert math.isnan(second.values.pop("steps/reward")), "measured, and not finite"
    assert second.values == {"steps/seconds_step": 3.0, "updates/loss/update_1": 1.0, "layers/layer/site_3": 4.0,
                             "layers/slot_change/site_3": 0.25}


def test_every_number_of_every_table_is_given_once_under_the_names_of_the_dictionary(tmp_path, capsys):
    root = fake_runs(tmp_path, seeds=(0,))
    for _ in range(2):
        assert cli.main(["export", str(root), "--to", f"{LINES}={tmp_path / 'lines'}"]) == 0
    said = capsys.readouterr().out
    assert "fake/gspo/base/seed=0: 12 steps more" in said and said.count(": 0 steps more") == 3
    for run in tracked(root):
        found = given(points(Lines(tmp_path / "lines").file(run)))
        assert found == expected(tmp_path / run.place) and len(found) > 500
        assert {entry(name.split("/")[1]) is None for name, _ in found} == {False}


def test_collected_tables_are_given_as_their_runs_are(tmp_path):
    write_declaration(fake_study.study, tmp_path)
    collect(fake_runs(tmp_path, seeds=(0,)), tmp_path / "small", mix_code=True)
    assert cli.main(["export", str(tmp_path / "small"), "--to", f"{LINES}={tmp_path / 'lines'}"]) == 0
    found = given(points(tmp_path / "lines" / "fake+gspo+base+seed=0.jsonl"))
    whole = expected(tmp_path / "fake/gspo/base/seed=0")
    assert len(found) > 100 and all(value == pytest.approx(whole[key], rel=1e-6) for key, value in found.items())


def test_a_run_that_goes_on_adds_what_is_new(tmp_path):
    config = fake_study.study.base
    path = tmp_path / "fake/grpo/base/seed=0"
    for steps in (5, 12):
        longer = config.replace(steps=steps)
        with RunFolder.open(path, longer.to_dict(), longer.hash) as folder:
            fake_study.train(longer, folder, cache=tmp_path)
        with opened(f"{LINES}={tmp_path / 'lines'}") as tracker:
            (run,) = tracked(tmp_path / "fake")
            assert bring_up_to_date(tracker, run) == {5: 5, 12: 7}[steps]
    assert given(points(tmp_path / "lines" / "fake+grpo+base+seed=0.jsonl")) == expected(path)


def _busy(path, steps, after_each=lambda: None):
    for more in range(1, steps + 1):  # each time published, extended, and its parts and commits removed
        config = fake_study.study.base.replace(steps=3 * more)
        with RunFolder.open(path, config.to_dict(), config.hash) as folder:
            fake_study.train(config, folder, cache=path)
        after_each()


def test_what_is_read_while_the_run_commits_and_finishes_is_whole(tmp_path):
    path = tmp_path / "fake/grpo/base/seed=0"
    fork = multiprocessing.get_context("fork")
    was_read = fork.Event()

    def wait_for_a_whole_look():
        for _ in range(2):  # the first may have begun before
            was_read.clear()
            was_read.wait(10)

    process = fork.Process(target=_busy, args=(path, 8, wait_for_a_whole_look))
    process.start()
    seen = set()
    while process.is_alive():
        if (path / "manifest.json").exists():
            step, tables = committed(path)
            assert [row["step"] for row in tables["steps"]] == list(range(1, step + 1))
            assert len(tables["updates"]) == 4 * step and len(tables["layers"]) == fake_study.SITES * step
            seen.add(step)
            was_read.set()
    process.join()
    assert process.exitcode == 0 and len(seen) > 5


@pytest.fixture
def quick_looks(monkeypatch):
    """Trackers look at the study all the time, and have no patience."""
    monkeypatch.setattr(tracking, "EVERY", 0.02)
    monkeypatch.setattr(tracking, "REST", 0)
    monkeypatch.setattr(tracking, "LIMIT", 1.0)


def test_what_follows_a_study_has_all_of_it_when_it_is_told_to_stop(tmp_path, quick_looks):
    stop = threading.Event()
    root = tmp_path / "fake"
    follower = threading.Thread(target=tracking.follow, args=(f"{LINES}={tmp_path / 'lines'}", root, stop))
    follower.start()
    path = root / "grpo/base/seed=0"
    _busy(path, 3)
    stop.set()
    follower.join()
    assert given(points(tmp_path / "lines" / "fake+grpo+base+seed=0.jsonl")) == expected(path)


def test_a_slow_tracker_is_given_rows_less_often(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "EVERY", 0.01)
    stop, naps = threading.Event(), []
    monkeypatch.setattr(stop, "wait", lambda seconds: naps.append(seconds) or len(naps) < 3 or stop.set())
    fake_runs(tmp_path, seeds=(0,))
    tracking.follow(f"tests.own_trackers:Slow={tmp_path / 'lines'}", tmp_path / "fake", stop)
    assert naps[0] > 3 * 0.2 * 200 and naps[1] < naps[0] / 5, "three runs at first, then nothing new"


@pytest.mark.parametrize("tracker, words", [
    ("Failing", "did not take the rows of fake/grpo/base/seed=0: ConnectionError('the service is down"),
    ("Hanging", "it took more than 1 s"),
])
def test_a_tracker_that_fails_or_hangs_is_dropped_and_the_runs_go_on(tmp_path, tracker, words):
    """In a process that is made as the real one is, but looks all the time and has no patience."""
    code = ("import sys; from moe_rl.integrations.trackers import processes as t; "
            "t.EVERY, t.REST, t.LIMIT = 0.02, 0, 1.0; sys.exit(t.main())")
    out = io.StringIO()
    real = tracking.subprocess.Popen

    def started(command, **settings):
        return real([command[0], "-c", code, *command[3:]], **settings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tracking.subprocess, "Popen", started)
        text = f"tests.own_trackers:{tracker}={tmp_path / 'lines'}"
        start = time.monotonic()
        with tracking.trackers_beside([text], tmp_path / "fake", Console(file=out, width=400)):
            path = tmp_path / "fake/grpo/base/seed=0"
            _busy(path, 1)
            while not out.getvalue() and time.monotonic() - start < 30:  # said while the runs go on
                time.sleep(0.05)
                if Lines(tmp_path / "lines").file(next(tracked(tmp_path / "fake"))).exists():
                    _busy(path, 2)
            _busy(path, 4)
    assert f"warning the tracker {text} is dropped: " in out.getvalue() and words in out.getvalue()
    assert f"moe-rl export {tmp_path / 'fake'} --to {text} gives it afterwards" in out.getvalue()
    assert len(expected(path)) > 500
    with opened(f"{LINES}={tmp_path / 'lines'}") as afterwards:
        for run in tracked(tmp_path / "fake"):
            bring_up_to_date(afterwards, run)
    assert given(points(tmp_path / "lines" / "fake+grpo+base+seed=0.jsonl")) == expected(path)


def test_run_gives_a_tracker_what_it_commits_and_says_nothing_of_it_in_the_configuration(tmp_path, monkeypatch,
                                                                                        forked_workers):
    monkeypatch.setenv("PYTHONPATH", ".:tests")
    assert cli.main(["run", FAKE, "--seeds", "0", "--arms", "grpo", "--jobs", "1", "--out", str(tmp_path),
                     "--track", f"{LINES}={tmp_path / 'lines'}"]) == 0  # fmt: skip
    (run,) = tracked(tmp_path / "fake")
    assert given(points(Lines(tmp_path / "lines").file(run))) == expected(tmp_path / run.place)
    assert run.config == fake_study.study.base.to_dict()


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    with opened(f"{LINES}={tmp_path}"), pytest.raises(RunError, match="another process is writing"), opened(
            f"{LINES}={tmp_path}"):  # fmt: skip
        pass
    with opened(f"{LINES}={tmp_path}"), opened(f"{LINES}={tmp_path / 'another'}"):
        pass  # once the first is done


@pytest.mark.parametrize("text, words", [
    ("wanndb", "no tracker is called 'wanndb'. Did you mean wandb"),
    ("tests.own_trackers:Line", "Did you mean Lines"),
])
def test_what_is_no_tracker_is_refused_before_anything_starts(tmp_path, text, words, capsys):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        target(text)
    assert cli.main(["run", FAKE, "--out", str(tmp_path), "--track", text]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_tracker_of_the_docs_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text()
    (tmp_path / "tracker_of_the_docs.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    monkeypatch.syspath_prepend(tmp_path)
    root = fake_runs(tmp_path, seeds=(0,))
    for _ in range(2):
        assert cli.main(["export", str(root), "--to", f"tracker_of_the_docs:Lines={tmp_path / 'lines'}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "lines" / "fake+gspo+base+seed=0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13)) and lines[3]["layers/layer/site_2"] == 2
