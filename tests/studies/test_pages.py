"""What the pages of the studies say is what their tables say."""

from __future__ import annotations

import re
from functools import cache

import overview
import pages
import pytest
from rule import outcomes

NUMBER = r"[-−]?(?:\d+\.\d+|\.\d+|\d+)(?:e[-−]?\d+)?"
TRIPLE = re.compile(rf"({NUMBER})\s+(?:%\s+)?\[({NUMBER}),\s+({NUMBER})\]")
ROUNDED = re.compile(r"(?<![\w.,/§×])([-−]?\d*\.\d+)(?![\w.]*[\d/])(?!e[-−])")
"""Numbers with a decimal point, the only ones that are looked for alone: shares, or percent."""


def says(value: str, percent: bool, exact: list[float]) -> bool:
    """Whether a number of the words is one of those printed, rounded as the words do."""
    value = value.replace("−", "-")
    digits = len(value.partition(".")[2]) + 2 * percent
    wanted = float(value) / (100 if percent else 1)
    return any(abs(wanted - x) <= 0.51 * 10**-digits for x in exact)


@cache
def everything() -> str:
    return "\n".join([overview.table(), *(file.read_text() for file in sorted(pages.PRINTED.iterdir()))])


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_every_interval_and_every_fraction_of_the_words_is_printed(page):
    text = page.read_text()
    assert pages.refilled(text) == text, "the page is not of today: make results"
    words = pages.BLOCK.sub("", text)
    own = pages.PRINTED / f"{page.stem}.txt"
    block = own.read_text() if own.exists() else everything()
    study = pages.HERE / f"{page.stem}.py"
    printed = [tuple(float(x.replace("−", "-")) for x in t) for t in TRIPLE.findall(block)]
    for found in TRIPLE.finditer(words):
        one, percent = found.groups(), "%" in found[0]
        sentence = re.split(r"\.\s", words[:found.start()])[-1]
        if "lower" in sentence and sentence.split()[-1:] == ["by"]:  # "lower by 0.1 [0.0, 0.3]" is −0.1 [−0.3, −0.0]
            one = [f"-{one[i]}".replace("--", "").replace("-−", "") for i in (0, 2, 1)]
        assert any(all(says(v, percent, [x]) for v, x in zip(one, t, strict=True)) for t in printed), found[0]
    numbers = [float(x.replace("−", "-")) for x in re.findall(NUMBER, block)]
    declared = [float(x) for x in re.findall(r"\d*\.\d+|\d+", study.read_text())] if study.exists() else []
    missing = [value for value in ROUNDED.findall(TRIPLE.sub("", words))
               if not says(value, True, numbers) and not says(value, False, [*numbers, *declared])]
    assert not missing, missing
    of_a_study = page.parent == pages.HERE and study.exists()
    assert not of_a_study or f"<!-- printed: {page.stem} -->" in text


def test_the_indexes_name_every_page_and_study():
    text = "".join((folder / "README.md").read_text() for folder in (pages.HERE, pages.ARCHIVE))
    named = set(re.findall(r"\]\((?:archive/)?(\w+)\.(?:md|py)\)", text))
    assert {page.stem for page in pages.pages()} - {"README"} <= named


def test_outcomes_of_the_one_rule_are_rows_with_both_endpoints():
    """0.05 and 0.03 on every of four seeds, p = 2 / 2⁴ in each; twice as large after Holm over two."""
    first, second, none = ({seed: value for seed in range(4)} for value in (0.05, 0.03, 0.0))
    found = outcomes({name: ((first, second), (none, none)) for name in ("a − b", "c − b")}, 0.02)
    text = pages.decided([(one, one.said) for one in found], "Holm over the 2 comparisons")
    assert "| a − b | 4 | 0.050 [0.050, 0.050] | [0.050, 0.050] | 0.25 | 0.030 [0.030, 0.030] | undecided |" in text
    assert text.endswith("after Holm over the 2 comparisons.\n")


def test_a_page_is_refilled_between_its_markers_alone(monkeypatch):
    monkeypatch.setitem(pages.LISTS, "one", lambda: "1\n")
    text = "a\n<!-- printed: one -->\nold\n<!-- end -->\nb <!-- printed: one -->\n<!-- end -->"
    assert pages.refilled(text) == "a\n<!-- printed: one -->\n1\n<!-- end -->\nb <!-- printed: one -->\n1\n<!-- end -->"
