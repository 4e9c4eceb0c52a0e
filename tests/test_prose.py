"""README and docs are plain: short sentences, no private words, terms with one definition, headings with a verb."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = {"columns", "methods", "settings"}
DOCS = sorted(p for p in (ROOT / "docs").glob("*.md") if p.stem not in GENERATED)
PAGES = [ROOT / "README.md", *DOCS, *sorted((ROOT / "studies").glob("*.md"))]
LONGEST, MEAN = 32, 18
"""Words of a sentence, and of the sentences of a page on average."""
BANNED = (
    r"\bwho broke\b", r"\bwhoever\b", r"\bby the letter\b", r"\bin other company\b", r"\bgoes? by\b",
    r"\bheld (to|against)\b", r"\bwhere there (is|are) (none|one)\b",
    r"\bwhat (parts|draws|waits|stands|holds|sends|asks|trains)\b", r"\bis (answered|told|asked|said)\b",
    r"\b(it|that|which|row|page|note|tables?|figures?|dictionary) (says?|said|tells?|told)\b",
    r"\bwants? (a|an|the|no|to be)\b", r"\bstands? (in|on|left|beside|above|there|twice)\b",
    r"\bcold starts?\b", r"\bthe dial\b", r"\bdoses?\b", r"\bstand-ins?\b", r"\brehears", r"\blease\b", r"\bflips?\b",
    r"(?<![\w.])[-−+]?\.\d",  # a decimal without its leading zero
)  # fmt: skip
VERBS = ("Add|Choose|Compare|Declare|Diagnose|Evaluate|Find|Install|Measure|Monitor|Name|Pretrain|Read|Record|Replay|"
         "Run|Sample|Start|Train|Use|Write")  # fmt: skip


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z][A-Za-z'’-]*", text)


def sentences(text: str) -> list[str]:
    """Those of paragraphs and lists, without code, folded parts, tables, headings, figures and targets of links."""
    text = re.sub(r"```.*?```|<details>.*?</details>", "\n\n", text, flags=re.S)
    text = "\n".join(line for line in text.splitlines() if not re.match(r"\s*(\||#|!\[|<)", line))
    text = re.sub(r"\n\s*([-*]|\d+\.)\s", "\n\n", re.sub(r"\]\([^)]*\)", "]", text))
    found = [re.split(r"(?<=[.!?])\s+(?=[A-Z`*(\[])", " ".join(block.split())) for block in re.split(r"\n\s*\n", text)]
    return [sentence for block in found for sentence in block if len(words(sentence)) > 3]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_plain_and_says_what_a_reader_can_do(page):
    text = page.read_text()
    lengths = {sentence: len(words(sentence)) for sentence in sentences(text)}
    assert not [sentence for sentence, length in lengths.items() if length > LONGEST]
    assert sum(lengths.values()) <= MEAN * len(lengths)
    shown = re.sub(r"```.*?```|<details>.*?</details>|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.S)
    assert not [found[0] for banned in BANNED for found in re.finditer(banned, shown, re.I)]
    assert re.search(rf"^##+ ({VERBS})\b", text, re.M)


def test_a_term_of_the_glossary_is_defined_once():
    terms = re.findall(r"^\| \*\*(.+?)\*\* \| \S.* \|$", (ROOT / "docs" / "concepts.md").read_text(), re.M)
    assert len(terms) > 20 and terms == sorted(set(terms), key=str.lower)
