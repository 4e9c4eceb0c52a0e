"""What trackers are given, without TensorBoard and wandb: every number, and nothing of them reaches the run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from moe_rl import cli
from moe_rl.errors import ConfigError, RunError
from moe_rl.integrations.trackers import Tracked, export, find_tracker, values_of
from moe_rl.storage.columns import TABLES, entry
from moe_rl.storage.folder import RunFolder, read_manifest, run_folders
from moe_rl.storage.frames import diff, labels_of, read_table
from moe_rl.study.collect import collect
from moe_rl.study.declaration import Planned, write_declaration
from moe_rl.study.workers import carry_out
from tests import fake_study
from tests.conftest import python_block
from tests.own_trackers import points
from tests.test_cli import FAKE, fake_runs

LINES = "tests.own_trackers:Lines"


def tracked(root):
    """Every run below a folder, as a tracker sees it."""
    for path in run_folders(root):
        manifest = read_manifest(path)
        yield Tracked(**labels_of(path), config=manifest["config"], created=manifest["created"], step=-1)


def expected(path):
    """Every number of a run's tables by name and step, read another way: by pandas."""
    found = {}
    for table, keys in TABLES.items():
        if table in ("evaluations", "rollouts"):  # completions
            continue
        for row in read_table(path, table).to_dict("records"):
            names = "".join(f"/{key}_{row[key]}" for key in keys[1:])
            found |= {
                (f"{table}/{c}{names}", row["step"]): float(v) for c, v in row.items() if c not in keys and v == v
            }
    return found


def given(lines):
    """What was given, by name and step; twice is an error."""
    found = [((name, p["step"]), value) for p in lines for name, value in p["values"].items()]
    assert len(found) == len(dict(found))
    return dict(found)


def of(folder, run):
    return folder / (run.place.replace("/", "+") + ".jsonl")


def test_the_points_of_two_steps_by_hand():
    tables = {
        "steps": [
            {"step": 2, "reward": math.nan, "own_note": "text", "seconds_step": 3.0},
            {"step": 1, "reward": 0.5, "exact": None, "seconds_step": 2.0},
        ],
        "updates": [{"step": 2, "update": 1, "loss": 1}],
        "layers": [{"step": 2, "moe_layer": 3, "layer": 4, "expert_change_rate": 0.25}],
        "evaluations": [{"step": 2, "benchmark": "held_out", "problem": 7, "sample": 1, "reward": 1.0}],
        "rollouts": [{"step": 2, "rollout": 17, "reward": 1.0, "prompt": "?"}],
    }
    (first, one), (second, two) = values_of(tables).items()
    assert (first, one) == (1, {"steps/reward": 0.5, "steps/seconds_step": 2.0}) and second == 2
    assert two == {
        "steps/seconds_step": 3.0,
        "updates/loss/update_1": 1.0,
        "layers/layer/moe_layer_3": 4.0,
        "layers/expert_change_rate/moe_layer_3": 0.25,
    }


def test_every_number_of_every_table_is_given_under_the_names_of_the_dictionary(tmp_path, capsys):
    root = fake_runs(tmp_path, seeds=(0,))
    assert cli.main(["runs", "export", str(root), "--to", f"{LINES}={tmp_path / 'lines'}"]) == 0
    assert "fake/gspo/base/seed=0: 12 steps" in capsys.readouterr().out
    for run in tracked(root):
        lines = points(of(tmp_path / "lines", run))
        found = given(lines)
        assert found == expected(tmp_path / run.place) and len(found) > 500
        assert {entry(name.split("/")[1]) is None for name, _ in found} == {False}
        seconds = [value for (name, _), value in found.items() if name == "steps/seconds_step"]
        assert lines[-1]["time"] == pytest.approx(run.created + sum(seconds))
        assert of(tmp_path / "lines", run).with_suffix(".closed").exists()


def test_collected_tables_are_given_as_their_runs_are(tmp_path):
    write_declaration(fake_study.study, tmp_path)
    collect(fake_runs(tmp_path, seeds=(0,)), tmp_path / "small", mix_code=True)
    assert cli.main(["runs", "export", str(tmp_path / "small"), "--to", f"{LINES}={tmp_path / 'lines'}"]) == 0
    found = given(points(tmp_path / "lines" / "fake+gspo+base+seed=0.jsonl"))
    whole = expected(tmp_path / "fake/gspo/base/seed=0")
    assert len(found) > 100 and all(value == pytest.approx(whole[key], rel=1e-6) for key, value in found.items())


def run_for(path, steps):
    config = fake_study.study.base.replace(steps=steps)
    with RunFolder.open(path, config.to_dict(), config.hash) as folder:
        fake_study.train(config, folder, cache=path)


@pytest.mark.parametrize(
    "tracker, steps, words",
    [
        ("Failing", 2, "ConnectionError('the service is down"),
        ("Refusing", 0, "OSError('no such service')"),
        ("Absent", 0, "no tracker"),
    ],
)
def test_a_tracker_that_fails_is_dropped_with_a_warning_and_changes_nothing(tmp_path, capsys, tracker, steps, words):
    config = fake_study.study.base
    paths = [tmp_path / f"{name}/fake/grpo/base/seed=0" for name in ("with", "without")]
    target = f"tests.own_trackers:{tracker}={tmp_path / 'lines'}"
    for path, trackers in zip(paths, ([target, f"{LINES}={tmp_path / 'all'}"], []), strict=True):
        carry_out(Planned(path, config), "tests.fake_study:train", tmp_path, trackers)
    said = capsys.readouterr().err
    assert said.count("no longer used") == 1 and words in said and f"the tracker {target}" in said
    assert len(points(tmp_path / "lines/fake+grpo+base+seed=0.jsonl")) == steps
    assert given(points(tmp_path / "all/fake+grpo+base+seed=0.jsonl")) == expected(paths[0]), "others go on"
    assert (tmp_path / "all/fake+grpo+base+seed=0.closed").exists()
    assert diff(*paths) is None


def test_run_gives_a_tracker_its_rows_and_says_nothing_of_it_in_the_configuration(
    tmp_path, monkeypatch, forked_workers
):
    monkeypatch.setenv("PYTHONPATH", ".:tests")
    words = ["--seeds", "0", "--arms", "grpo", "--jobs", "1", "--out", str(tmp_path)]
    assert cli.main(["run", FAKE, *words, "--track", f"{LINES}={tmp_path / 'lines'}"]) == 0
    (run,) = tracked(tmp_path / "fake")
    assert given(points(of(tmp_path / "lines", run))) == expected(tmp_path / run.place)
    assert run.config == fake_study.study.base.to_dict()


def test_a_run_that_goes_on_gives_the_steps_after_its_last_commit_and_export_all(tmp_path):
    path, target = tmp_path / "fake/grpo/base/seed=0", f"{LINES}={tmp_path / 'lines'}"
    run_for(path, 5)
    carry_out(Planned(path, fake_study.study.base), "tests.fake_study:train", tmp_path, [target])
    file = tmp_path / "lines/fake+grpo+base+seed=0.jsonl"
    wanted = expected(path)
    assert given(points(file)) == {key: value for key, value in wanted.items() if key[1] > 5}
    list(export(tmp_path / "fake", target))
    assert given(points(file)) == wanted


@pytest.mark.parametrize(
    "text, words",
    [
        ("wanndb", "no tracker is called 'wanndb': did you mean wandb"),
        ("tests.own_trackers:Line", "did you mean Lines"),
    ],
)
def test_what_is_no_tracker_is_refused_before_anything_starts(tmp_path, text, words, capsys):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        find_tracker(text)
    assert cli.main(["run", FAKE, "--out", str(tmp_path), "--track", text]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_an_export_that_the_tracker_refuses_and_one_of_nothing_say_so(tmp_path):
    root = fake_runs(tmp_path, seeds=(0,))
    with pytest.raises(RunError, match="fake/grpo/base/seed=0: ConnectionError"):
        list(export(root, f"tests.own_trackers:Failing={tmp_path / 'lines'}"))
    with pytest.raises(RunError, match="none"):
        list(export(tmp_path / "none", f"{LINES}={tmp_path / 'lines'}"))


def test_the_tracker_of_the_docs_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    (tmp_path / "tracker_of_the_docs.py").write_text(python_block(page, "class Lines"))
    monkeypatch.syspath_prepend(tmp_path)
    root = fake_runs(tmp_path, seeds=(0,))
    assert cli.main(["runs", "export", str(root), "--to", f"tracker_of_the_docs:Lines={tmp_path / 'lines'}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "lines" / "fake+gspo+base+seed=0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13)) and lines[3]["layers/layer/moe_layer_2"] == 2
