"""The page of a study: one file that loads nothing, in which every number of the tables can be read."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import json
import re

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from moe_rl import cli
from moe_rl.config import Arm, RunConfig
from moe_rl.results import figures
from moe_rl.results.printed import print_study
from moe_rl.results.study_page import Live, card, card_file, write_study_page
from moe_rl.results.tables import cautions, cost_table
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import Frames
from moe_rl.study.declaration import write_declaration
from tests import fake_study
from tests.results.test_factors import DECLARED
from tests.results.test_summary import with_curves
from tests.test_cli import fake_runs

HOSTILE = '<script>alert("x")</script> & $100 ${title}'


class Reader(html.parser.HTMLParser):
    """Tags that are open, everything that would be loaded, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.loaded, self.text, self.tags = [], [], "", []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> tuple[str, Reader]:
    tmp_path = tmp_path_factory.mktemp("page")
    fake_runs(tmp_path)
    write_declaration(
        dataclasses.replace(
            fake_study.study,
            question=HOSTILE,
            decision_rule="Fixed before: p < 0.05.",
            figures=("expert_change", "of_another_version", "engine_mismatch"),
        ),
        tmp_path,
    )
    write_study_page(tmp_path / "fake", tmp_path / "page.html", mix_code=True)
    text = (tmp_path / "page.html").read_text()
    reader = Reader()
    reader.feed(text)
    return text, reader


def test_the_page_is_whole_and_loads_nothing(page):
    text, reader = page
    assert reader.open == [] and "script" not in reader.tags and "link" not in reader.tags
    assert reader.loaded and all(source.startswith("data:image/svg+xml;base64,") for source in reader.loaded)
    assert not re.search(r"url\(|@import", text) and "default-src 'none'" in text and "@media print" in text
    assert "prefers-color-scheme: dark" in text and 'http-equiv="refresh' not in text


def test_text_from_a_declaration_is_text(page):
    text, reader = page
    assert HOSTILE in reader.text and "<script>" not in text


def test_the_page_says_what_was_asked_found_and_used(page):
    _, reader = page
    for words in ("It does.", "p < 0.05.", "Made-up numbers.", "n = 2 seeds", "torch", "6 runs", "gspo − grpo-replay"):
        assert words in reader.text, words
    assert reader.tags.count("img") + reader.text.count("No figure") == 3 + len(figures.TOGETHER)


def test_rollouts_are_a_grid_of_arms_and_seeds_and_runs_without_a_gradient_are_named(tmp_path, monkeypatch):
    pages = [("grpo", 0, "a.html"), ("grpo", 1, "b.html"), ("gspo", 1, "c.html")]
    monkeypatch.setattr("moe_rl.results.study_page.write_pages", lambda runs, out: pages)
    monkeypatch.setattr("moe_rl.results.study_page.untrained", lambda frames: "no gradient in 1 of 6 runs")
    monkeypatch.setattr("moe_rl.results.study_page._figures", lambda *_, **__: ())
    write_declaration(fake_study.study, tmp_path)
    write_study_page(fake_runs(tmp_path), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    rows = re.findall(
        r"<tr><td>(\w+)</td>(<td>.*?)</tr>", text.partition("<h2>Rollouts")[2].partition("<h2>")[0], re.DOTALL
    )
    links = {arm: [cell.split('"')[1:2] for cell in cells.split("</td>")[:2]] for arm, cells in rows}
    assert links == {"grpo": [["a.html"], ["b.html"]], "gspo": [[], ["c.html"]]}
    assert "no gradient in 1 of 6 runs" in text


@pytest.mark.parametrize(
    ("seeds", "true", "false"),
    [
        (3, ["no interval and no p-value. Run at least 4"], ["below"]),
        (4, ["no p-value can be below 0.125"], ["no interval"]),
        (6, [], ["below", "no interval"]),
    ],
)
def test_what_the_seeds_that_there_are_cannot_show_follows_the_declared_caution(seeds, true, false):
    frames, declared = with_curves({("grpo", seed): [0.5] for seed in range(seeds)}), "A pilot of two seeds. One size."
    text = cautions(frames, {"caution": declared})
    assert text.startswith(declared) and all(part in text for part in true)
    assert not any(part in text for part in false)


def test_cost_counts_all_response_tokens_of_an_arm():
    """12 steps of 4 · 4 responses of 13 tokens, 1.5 s each, on two seeds."""
    rows = {(arm, seed): [0.5] * 12 for arm in ("grpo", "gspo") for seed in (0, 1)}
    frames = with_curves(rows)
    config = json.dumps(fake_study.study.base.to_dict())
    steps = frames["steps"].assign(response_tokens=13.0)
    runs = frames.runs.assign(config=config, seconds=18.0, step=12)
    table = cost_table(Frames(runs, {**frames.tables, "steps": steps}), DECLARED)
    assert table.rows[0] == ("grpo", "2", "0.01", "1.5", f"{2 * 12 * 16 * 13 / 1e6:.3g}")


def raises(frames, arms):
    return frames["steps"]["own_rewards"]


def returns_nothing(frames, arms):
    """It forgot to."""


def cannot_be_saved(frames, arms):
    figure = Figure()
    figure.text(0, 0, r"$\nothing$")
    return figure


def test_a_figure_of_ones_own_that_fails_is_named_and_the_rest_is_shown(tmp_path):
    own = [f"{__name__}:{one.__name__}" for one in (raises, returns_nothing, cannot_be_saved)]
    own.append("nowhere:drawn")
    folder, out = fake_runs(tmp_path), io.StringIO()
    write_declaration(dataclasses.replace(fake_study.study, figures=(*own, "expert_change")), tmp_path)
    print_study(Console(file=out, width=10_000), folder, trust=True)
    write_study_page(folder, tmp_path / "page.html", trust=True)
    reader = Reader()
    reader.feed((tmp_path / "page.html").read_text())
    for name, why in zip(own, ("'own_rewards'", "returned None", "ValueError", "no module"), strict=True):
        assert all(name in text and why in text for text in (out.getvalue(), reader.text))
    assert (folder / "figures/expert_change.png").exists()
    assert reader.tags.count("img") == 1 + len(figures.TOGETHER)
    assert "Made-up numbers." in out.getvalue() and "Made-up numbers." in reader.text


def test_the_card_replaces_no_file_beside_the_page(tmp_path):
    folder = fake_runs(tmp_path)
    write_declaration(fake_study.study, tmp_path)
    for name in ("README.md", "README.html"):
        (tmp_path / name).write_text("mine")
    write_study_page(folder, tmp_path / "README.html")
    assert (tmp_path / "README.md").read_text() == "mine"
    assert card_file(tmp_path / "README.html").read_text().startswith("| set-up |")
    write_study_page(folder, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text().startswith("<!")


def test_the_card_says_what_was_run_and_every_declared_difference():
    """Two seeds, on each of which gspo earns .1 more: a mean, but no interval and no p."""
    curves = {(arm, s): [0.5 + 0.1 * (arm == "gspo") + 0.01 * s] * 8 for arm in ("grpo", "gspo") for s in (3, 4)}
    frames, declared = with_curves(curves), DECLARED | {"comparisons": [["gspo", "grpo"]], "factors": {}}
    config = RunConfig(arm=Arm(name="grpo"), steps=8)
    frames = Frames(
        frames.runs.assign(
            config=json.dumps(config.to_dict()),
            packages="{}",
            git="null",
            declared="null",
            created=None,
            finished_at=None,
            seconds=1800.0,
        ),
        frames.tables,
    )
    text = card(frames, declared)
    assert "| gspo − grpo | 2 | 0.1 [–] | – |" in text and "nan" not in text
    assert "| seeds | 2: 3, 4 |" in text and "| compute | 4 runs, 2.0 hours of steps |" in text
    assert "difference" not in card(frames, DECLARED)
    assert "| commit | not recorded |" in text
    made = json.dumps({"commit": "0123456789" * 4, "dirty": True})
    assert "| commit | 0123456789 (dirty) |" in card(Frames(frames.runs.assign(git=made), frames.tables), declared)


@pytest.fixture
def training(tmp_path, monkeypatch):
    """A study of which one run has finished and another has measured six of its twelve steps, and goes on."""
    monkeypatch.setattr("moe_rl.results.study_page._figures", lambda *_, **__: ())
    write_declaration(fake_study.study, tmp_path)
    one = fake_study.study.base
    runs = [
        (RunFolder.open(tmp_path / f"fake/{a.name}/base/seed=0", c.to_dict(), c.hash), c)
        for a in fake_study.study.arms[:2]
        for c in [one.replace(arm=a)]
    ]
    fake_study.train(runs[0][1], runs[0][0], cache=tmp_path)
    runs[0][0].__exit__()
    with runs[1][0] as folder:
        yield tmp_path / "fake", folder, fake_study.fake_tables(runs[1][1])


def commit(folder: RunFolder, rows: dict, steps: range) -> None:
    for table, every in rows.items():
        folder.add(table, [row for row in every if row["step"] in steps])
    folder.progress(steps[-1], reward=0.25, seconds_per_step=30.0)
    folder.commit(steps[-1], lambda path: (path / "weights.npy").write_bytes(b""))


def test_a_page_of_runs_that_train_is_read_again_until_they_end(training):
    root, folder, rows = training
    page = Live(root, root / "page.html", mix_code=True)

    def written(refresh: float) -> str:
        page.write(refresh)
        text = (root / "page.html").read_text()
        reader = Reader()
        reader.feed(text)
        assert "script" not in reader.tags and reader.loaded == []
        return text

    text = written(5)
    assert "grpo-replay, seed 0</td><td>0/12" in text and "refresh" in text, "no rows, and nobody knows how long"
    commit(folder, rows, range(1, 7))
    text = written(5)
    assert '<meta http-equiv="refresh" content="5">' in text and "1 of 2 runs" in text
    assert "grpo-replay, seed 0</td><td>6/12" in text and '<progress value="6" max="12">' in text
    assert "The longest needs 3 min more." in text and "<td>3 min left</td>" in text and "<td>0.250</td>" in text
    whole, half = re.findall(r'points="(.*?)"', text)
    assert (whole.count(","), half.count(",")) == (12, 6) and whole.split()[-1].startswith("128.0,")
    assert half.split()[-1].startswith("64.0,") and "gspo" not in text.partition("<h2>Results")[0]
    folder.progress(7, reward=0.5, seconds_per_step=30.0)
    assert "7/12" in (later := written(5)) and later.count("<h3>") == text.count("<h3>"), "tables stay as they were"
    assert "refresh" not in written(0)
    commit(folder, rows, range(7, 13))
    folder.finish()
    folder.__exit__()
    assert "2 of 2 runs" in (ended := written(5)) and "refresh" not in ended


def test_watch_ends_with_ctrl_c_and_leaves_a_page_that_is_not_read_again(training, monkeypatch, capsys):
    root, folder, rows = training
    commit(folder, rows, range(1, 7))
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert 'content="2.0"' in (root / "report.html").read_text()
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", pause)
    assert cli.main(["watch", str(root), "--every", "2", "--mix-code"]) == 0
    assert len(pauses) == 2 and min(pauses) >= 2 and "Ctrl-C ends" in capsys.readouterr().out
    text = (root / "report.html").read_text()
    assert "refresh" not in text and "6/12" in text and not [*root.glob(".tmp*")]
    assert cli.main(["watch", str(root), "--once", "--mix-code"]) == 0 and len(pauses) == 2
    assert 'content="60"' in (root / "report.html").read_text()
