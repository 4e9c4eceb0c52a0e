"""README, docs, pages of studies and docstrings are plain: short sentences, none of the banned words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = {"columns", "methods", "settings"}
DOCS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem not in GENERATED]
STUDIES = [page for page in sorted((ROOT / "studies").glob("*/README.md")) if page.parent.name != "archive"]
PAGES = [ROOT / "README.md", *DOCS, *sorted((ROOT / "studies").glob("*.md")), *STUDIES]
LONGEST, MEAN = 32, 18
"""Words of a sentence of a page, and of its sentences on average."""
LONG_DOCSTRINGS, BANNED_DOCSTRINGS = 126, 87
"""Sentences of docstrings that are longer, or have a banned word: to be lowered to 0."""
BANNED = re.compile(
    r"\bwho broke\b|\bwhoever\b|\bby the letter\b|\bin other company\b|\bgoes? by\b|\bheld (to|against)\b"
    r"|\bwhere there (is|are) (none|one)\b|\bwhat (parts|draws|waits|stands|holds|sends|asks|trains)\b"
    r"|\bis (answered|told|asked|said)\b|\bwants? (a|an|the|no|to be)\b"
    r"|\b(it|that|which|row|page|note|tables?|figures?|dictionary) (says?|said|tells?|told)\b"
    r"|\bstands? (in|on|left|beside|above|there|twice)\b|\bcold starts?\b|\bthe dial\b|\bdoses?\b|\bstand-ins?\b"
    r"|\brehears|\blease\b|\bflips?\b|(?<![\w.])[-−+]?\.\d",  # the last: a decimal without its leading zero
    re.IGNORECASE,
)


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z][A-Za-z'’-]*", text)


def sentences(text: str) -> list[str]:
    """Those of paragraphs and lists, without code, folded parts, tables, headings, figures and targets of links."""
    text = re.sub(r"```.*?```|<details>.*?</details>", "\n\n", text, flags=re.S)
    text = "\n".join(line for line in text.splitlines() if not re.match(r"\s*(\||#|!\[|<)|    ", line))
    text = re.sub(r"\n\s*([-*]|\d+\.)\s", "\n\n", re.sub(r"\]\([^)]*\)|`[^`]*`", " X ", text))
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    split = [sentence for block in blocks for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`*(\[])", block)]
    return [sentence for sentence in split if len(words(sentence)) > 3]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_plain(page):
    lengths = {sentence: len(words(sentence)) for sentence in sentences(page.read_text())}
    assert not [sentence for sentence, length in lengths.items() if length > LONGEST or BANNED.search(sentence)]
    assert sum(lengths.values()) <= MEAN * len(lengths)


def test_docstrings_are_plain():
    trees = [ast.parse(file.read_text()) for file in sorted((ROOT / "moe_rl").rglob("*.py"))]
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, documented)]
    texts = [sentence for node in nodes for sentence in sentences(ast.get_docstring(node) or "")]
    assert sum(len(words(text)) > LONGEST for text in texts) <= LONG_DOCSTRINGS
    assert sum(bool(BANNED.search(text)) for text in texts) <= BANNED_DOCSTRINGS
