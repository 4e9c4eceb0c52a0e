"""Every number in the tables of the studies' pages is what the committed tables give."""

from __future__ import annotations

import json
import re
from functools import cache

import make
import pandas as pd
import pytest
from contrasts import values_of

BY_HAND = re.compile(r"^\|.*\[[-−]?[\d.]+, [-−]?[\d.]+\].*\|$", re.MULTILINE)
"""A row of a table with an interval."""
POWER = re.compile(r"^\| (\w+) \| (\S+) − ([^ ,|]+)(?:, (\S+))? \| (\d+) \| (\S+) \| \S+ \| \S+ \|$", re.MULTILINE)
"""A row of the archive: study, a − b, condition, seeds, standard deviation of the differences."""


@pytest.mark.parametrize("page", make.pages(), ids=lambda page: page.relative_to(make.HERE).as_posix())
def test_the_tables_of_a_page_are_made_from_the_committed_tables(page):
    text = page.read_text()
    assert make.refilled(text) == text, "run make results"
    assert not BY_HAND.search(make.BLOCK.sub("", text)), "this table is not made"


def test_every_study_with_tables_has_a_page_with_them_and_every_figure_is_shown():
    studies = [file.parent for file in make.HERE.glob("*/study.json")]
    assert len(studies) == 18 and {folder / "README.md" for folder in studies} <= {*make.pages()}
    shown = {
        (page.parent / link).resolve()
        for page in [*make.HERE.rglob("*.md"), make.HERE.parent / "README.md", *make.HERE.parent.glob("docs/*.md")]
        for link in re.findall(r"!\[[^]]*\]\(([^):]+)\)", page.read_text())
    }
    files = {*make.HERE.glob("*.png"), *make.HERE.glob("*/*.png")}
    assert files == {file for file in shown if file.is_relative_to(make.HERE)}
    assert {file for file, _ in make.every_figure()} <= shown


@pytest.mark.parametrize(
    "name", sorted({file.parent.name for file in make.HERE.glob("*/figure.py")} | {*make.QUESTIONS})
)
def test_a_figure_can_be_drawn_of_three_seeds(name, monkeypatch):
    frames = make.stored_with_others(name)._where(lambda rows: rows["seed"] < rows["seed"].min() + 3)
    monkeypatch.setattr(make, "stored", lambda _: frames)
    monkeypatch.setattr(make, "stored_with_others", lambda _: frames)
    draw = dict(make.every_figure())[make.HERE / name / "figure.png"]
    assert all(ax.has_data() for ax in draw().axes)


def test_the_indexes_name_every_study():
    index, archive = ((make.HERE / name).read_text() for name in ("README.md", "archive/README.md"))
    for page in [*make.HERE.glob("*/README.md"), *make.HERE.glob("archive/*.md")]:
        assert (
            page.parent.name == "archive"
            and page.name == "README.md"
            or any(
                f"]({link})" in text
                for text, link in (
                    (index, page.relative_to(make.HERE).as_posix()),
                    (archive, page.name if page.parent.name == "archive" else f"../{page.relative_to(make.HERE)}"),
                )
            )
        ), page


@cache
def archived() -> pd.DataFrame:
    return pd.read_parquet(make.HERE / "archive" / "runs.parquet")


@pytest.mark.parametrize("study, a, b, condition, n, sd", POWER.findall((make.HERE / "archive/README.md").read_text()))
def test_the_scatter_of_differences_is_that_of_the_runs(study, a, b, condition, n, sd):
    if (make.HERE / study).is_dir():
        frames, declared = make.stored(study), json.loads((make.HERE / study / "study.json").read_text())
        values = values_of(frames, condition or frames.conditions[0], declared["endpoint"])
    else:
        rows = archived()[(archived()["study"] == study) & archived()["condition"].isin([condition or "base"])]
        values = rows.pivot(index="seed", columns="arm", values="endpoint")
    gaps = (values[a] - values[b]).dropna()
    assert (str(len(gaps)), f"{gaps.std(ddof=1):.2g}") == (n, sd)
