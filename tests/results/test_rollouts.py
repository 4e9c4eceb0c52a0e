"""Reading rollouts: orders, ranges, hostile text on a terminal and in a page, the report's links."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest

from moe_rl import cli
from moe_rl.results import rollouts as reading
from moe_rl.results.rollouts import load_rollouts, ordered, write_rollouts_page
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import load_study
from moe_rl.storage.terminal import visible

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e</script><script>alert(1)</script>[red]&\r\n"


def row(step: int, rollout: int, reward: float, ratio: float = 0.1, length: int = 2, text: str = "ok") -> dict:
    tokens = [[text, ratio, 1, 2], ["!", 0.0, 0, 0], [7], ["env", None, 0, 0]]
    return {
        "step": step,
        "rollout": rollout,
        "group": 0,
        "reward": reward,
        "advantage": reward - 0.5,
        "response_tokens": float(length),
        "truncated": 0.0,
        "log_ratio_min": min(ratio, 0),
        "log_ratio_max": max(ratio, 0),
        "clipped": 1,
        "flips": 2,
        "prompt": text,
        "response": json.dumps(tokens),
    }


def run_of(path: Path, steps: list[list[dict]]) -> Path:
    with RunFolder.open(path, {"steps": len(steps), "seed": 0}, "hash") as folder:
        for step, rows in enumerate(steps, start=1):
            folder.add("steps", [{"step": step, "reward": 0.5}])
            folder.add("rollouts", rows)
            folder.commit(step, lambda target: (target / "model.safetensors").write_bytes(b"w"))
        folder.finish()
    return path


@pytest.fixture
def run(tmp_path):
    return run_of(
        tmp_path / "study" / "gspo" / "base" / "seed=0",
        [
            [row(1, 0, 0.0, 0.3), row(1, 1, 1.0, -0.9, text="the hack")],
            [row(2, 4, 0.5, 0.2, length=9), row(2, 5, 0.25, 0.4, text=HOSTILE)],
        ],
    )


def titles(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"step (\d+), rollout (\d+)", text)]


@pytest.mark.parametrize(
    "options, found",
    [
        ([], [(2, 4), (2, 5)]),  # the last step
        (["--step", "1"], [(1, 1), (1, 0)]),
        (["--step", "1:2"], [(1, 1), (2, 4), (2, 5), (1, 0)]),
        (["--best", "1"], [(1, 1)]),
        (["--worst", "2"], [(1, 0), (2, 5)]),
        (["--best", "1", "--worst", "1", "--step", "2"], [(2, 4), (2, 5)]),
        (["--sort", "ratio", "--best", "2"], [(1, 1), (2, 5)]),
        (["--sort", "length", "--best", "1"], [(2, 4)]),
        (["--sort", "step", "--worst", "1"], [(1, 0)]),
    ],
)
def test_read_shows_what_is_asked_for(run, capsys, options, found):
    assert cli.main(["runs", "read", str(run), *options]) == 0
    assert titles(capsys.readouterr().out) == found


def test_everything_that_a_reader_needs_is_there(run, capsys):
    assert cli.main(["runs", "read", str(run), "--best", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "advantage +0.5" in said and "log r -0.9 … +0" in said
    assert "the hack! […7 tokens…] env" in said and "furthest: 'the hack' -0.9 clipped 2 flips" in said


def test_no_control_code_reaches_the_terminal(run, capsys):
    assert cli.main(["runs", "read", str(run), "--step", "2"]) == 0
    said = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in said) and "\\x1b[2J" in said and "[red]" in said
    assert visible("a\tb\n\u202e[/x]é") == "a\\tb⏎\n\\u202e[/x]é"


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_holds_them_and_no_text_ends_its_data(run, tmp_path):
    write_rollouts_page(run, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == 2 and "alert(1)</script>" not in page and "\x1b" not in page
    rows = data_of(page)["rows"]
    assert [r["prompt"] for r in rows].count(HOSTILE) == 1 and len(rows) == 4
    assert {"step", "rollout", "reward", "advantage", "length", "ratio", "clipped", "flips"} <= rows[0].keys()
    assert "innerHTML" not in page and "default-src 'none'" in page and "@" not in page[: page.index("<style>")]


def test_a_number_that_is_none_is_no_json_of_its_own_kind(tmp_path):
    bad = row(1, 0, 0.5) | {"advantage": float("nan"), "response": '[["x",NaN,0,0]]'}
    write_rollouts_page(run_of(tmp_path / "seed=0", [[bad]]), tmp_path / "page.html")
    (found,) = data_of((tmp_path / "page.html").read_text())["rows"]
    assert found["advantage"] is None and found["response"] == [["x", None, 0, 0]]


def test_a_long_run_has_a_page_of_bounded_length_with_all_extremes(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST", 80)
    steps = [[row(s, i, 0.5, ratio=0.1 * i, length=3) for i in range(4)] for s in range(1, 101)]
    steps[36][2]["reward"], steps[57][1]["log_ratio_min"] = 0.9, -5.0
    path = run_of(tmp_path / "seed=0", steps)
    write_rollouts_page(path, tmp_path / "page.html")
    rows = data_of((tmp_path / "page.html").read_text())["rows"]
    assert len(rows) <= 80 and len({r["step"] for r in rows}) >= 10
    assert {(37, 2), (58, 1)} <= {(r["step"], r["rollout"]) for r in rows}
    assert ordered(load_rollouts(path), "ratio").iloc[0]["step"] == 58


def test_the_report_links_the_page_of_every_run(run, tmp_path):
    """In two clicks: the run, and the rollout in its list."""
    odd = run_of(tmp_path / "study" / "a#b %20" / "base" / "seed=1", [[row(1, 0, 0.0)]])
    runs = load_study(tmp_path / "study", mix_code=True).runs
    report = tmp_path / "out" / "report.html"
    links = {name: link for name, _, link in reading.write_pages(runs, report)}
    assert len(links) == 2 and all((report.parent / unquote(link)).is_file() for link in links.values())
    assert "#" not in "".join(links.values()) and len(load_rollouts(odd)) == 1


@pytest.mark.parametrize("place", ["a/b/../../index", "."])
def test_a_page_stays_beside_its_report_whatever_path_a_table_names(run, tmp_path, monkeypatch, place):
    (tmp_path / "a" / "b").mkdir(parents=True)
    run.rename(tmp_path / "index")
    monkeypatch.chdir(tmp_path / "index" if place == "." else tmp_path)
    runs = pd.DataFrame([{"path": place, "arm": "grpo", "condition": "base", "seed": 0}])
    ((row, seed, link),) = reading.write_pages(runs, tmp_path / "out" / "report.html")
    assert (row, seed) == ("grpo", 0)
    assert link.startswith("report_rollouts/") and ".." not in link
    assert (tmp_path / "out" / unquote(link)).is_file()
