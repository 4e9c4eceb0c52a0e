"""What the pages of the studies say is what their tables say."""

from __future__ import annotations

import re
from functools import cache

import pages
import pytest

NUMBER = r"[-−]?(?:\d+\.\d+|\.\d+|\d+)(?:e[-−]?\d+)?"
TRIPLE = re.compile(rf"({NUMBER})\s+(?:%\s+)?\[({NUMBER}),\s+({NUMBER})\]")
ROUNDED = re.compile(r"(?<![\w.,/§×])([-−]?\d*\.\d+)(?![\w.]*[\d/])(?!e[-−])")
"""Numbers with a decimal point, the only ones that are looked for alone: shares, or percent."""


def words_and_blocks(text: str) -> tuple[str, str]:
    """A page without what is printed in it, and that alone."""
    return pages.BLOCK.sub("", text), "\n".join(found[0] for found in pages.BLOCK.finditer(text))


def says(value: str, percent: bool, exact: list[float]) -> bool:
    """Whether a number of the words is one of those printed, rounded as the words do."""
    value = value.replace("−", "-")
    digits = len(value.partition(".")[2]) + 2 * percent
    wanted = float(value) / (100 if percent else 1)
    return any(abs(wanted - x) <= 0.51 * 10**-digits for x in exact)


@cache
def everything() -> str:
    return "\n".join(words_and_blocks(page.read_text())[1] for page in pages.pages())


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.stem)
def test_every_interval_and_every_fraction_of_the_words_is_printed(page):
    words, block = words_and_blocks(page.read_text())
    block = block if page.stem != "README" else everything()
    study = page.with_suffix(".py")
    printed = [tuple(float(x.replace("−", "-")) for x in t) for t in TRIPLE.findall(block)]
    for found in TRIPLE.finditer(words):
        one, percent = found.groups(), "%" in found[0]
        assert any(all(says(v, percent, [x]) for v, x in zip(one, t, strict=True)) for t in printed), found[0]
    numbers = [float(x.replace("−", "-")) for x in re.findall(NUMBER, block)]
    declared = [float(x) for x in re.findall(r"\d*\.\d+|\d+", study.read_text())] if study.exists() else []
    missing = [value for value in ROUNDED.findall(TRIPLE.sub("", words))
               if not says(value, True, numbers) and not says(value, False, [*numbers, *declared])]
    assert not missing, missing
    assert page.stem == "README" or f"<!-- printed: {page.stem} -->" in page.read_text()


def test_the_index_fits_a_screen_and_names_every_page_and_study():
    text = (pages.HERE / "README.md").read_text()
    first = text.split("\n\n")[2].splitlines()[2:]
    assert len(first) <= 10 and all(len(row.split("|")[2].split()) <= 12 for row in first)
    named = set(re.findall(r"\]\((\w+)\.(?:md|py)\)", text))
    assert {page.stem for page in pages.pages()} - {"README"} <= named
    assert {folder.name for folder in pages.RESULTS.iterdir()} <= named
    for path in re.findall(r"\]\((results/[^)]+)\)", text):
        assert (pages.HERE / path).exists(), path


def test_a_page_is_refilled_between_its_markers_alone(monkeypatch):
    monkeypatch.setitem(pages.LISTS, "one", lambda: "1\n")
    text = "a\n<!-- printed: one -->\nold\n<!-- end -->\nb <!-- printed: one -->\n<!-- end -->"
    assert pages.refilled(text) == "a\n<!-- printed: one -->\n1\n<!-- end -->\nb <!-- printed: one -->\n1\n<!-- end -->"
