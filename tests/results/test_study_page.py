"""The page of a study: one file that loads nothing, in which every number of the tables can be read."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import json
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from moe_rl.config import Arm, RunConfig
from moe_rl.results.printed import print_study
from moe_rl.results.study_page import card, card_file, write_study_page
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


def test_text_from_a_declaration_is_text(page):
    text, reader = page
    assert HOSTILE in reader.text and "<script>" not in text


def test_the_page_says_what_was_asked_found_and_used(page):
    _, reader = page
    for words in (
        "It does.",
        "Fixed before: p < 0.05.",
        "Made-up numbers.",
        "reward, second half",
        "lasting collapses",
        "n = 2 seeds",
        "torch",
        "6 runs",
        "2: 0, 1",
    ):
        assert words in reader.text, words
    assert reader.tags.count("img") + reader.text.count("No figure") == 3


def test_arms_are_texts_and_settings_have_all_their_values(page):
    _, reader = page
    assert "gspo(clip_low=0.01,clip_high=0.013)" in "".join(reader.text.split())
    assert all(name in reader.text for name in ("optimizer.lr", "group_size", "0.0002"))


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
    for name, why in zip(
        own,
        (
            "KeyError: 'own_rewards'",
            "its function returned None",
            "ValueError",
            "figure 'nowhere:drawn': no module",
        ),
        strict=True,
    ):
        assert f"no figure {name}: {why}" in out.getvalue() and f"No figure {name}: {why}" in reader.text
    assert (folder / "figures/expert_change.png").exists() and reader.tags.count("img") == 1
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
    steps = frames["steps"].assign(entropy=frames["steps"]["reward"])
    steps.loc[(steps["arm"] == "gspo") & (steps["seed"] == 4), "entropy"] = np.nan
    steps = pd.concat([steps, steps[(steps["seed"] == 3)].assign(seed=5)])
    more = pd.concat([frames.runs, frames.runs[frames.runs["seed"] == 3].assign(seed=5)])
    lost = Frames(more.assign(state=["finished"] * 5 + ["diverged"], steps=[8] * 5 + [10]), {"steps": steps})
    text = card(lost, declared | {"further_endpoints": ["entropy"]})
    assert "| gspo − grpo | 3 |" in text and "(n = 1)" in text and "Seeds left out" in text
