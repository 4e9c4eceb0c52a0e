"""The site of `make docs`: README, these pages, the studies' pages, and a page for each module from its
docstrings."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
CONTENTS = {
    "README": [
        *(
            f"docs/{name}"
            for name in (
                "quickstart",
                "concepts",
                "which",
                "tasks",
                "studies",
                "extending",
                "your_trainer",
                "checkpoints",
                "diagnose",
                "engines",
                "distributed",
                "settings",
                "methods",
                "columns",
            )
        ),
        "studies/README",
        "Modules <docs/api/modules>",
        "CHANGELOG",
        "CONTRIBUTING",
    ],
    "studies/README": ["report", "*/README", "*/*/README"],
    "studies/archive/README": ["*"],
    "CONTRIBUTING": ["docs/versions", "tests/benchmarks/README", "tests/tasks/matching"],
}
"""Page → the pages below it in the sidebar."""
LINK = re.compile(r"\[([^]]*)\]\(([^)#:]+)\)")

project = html_title = "moe_rl"
root_doc = "README"
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.apidoc"]
include_patterns = ["*.md", "docs/**", "studies/**.md", "tests/**.md"]
myst_heading_anchors = 3
apidoc_modules = [
    {
        "path": "../moe_rl",
        "destination": "docs/api",
        "separate_modules": True,
        "module_first": True,
        "exclude_patterns": ["**/cli/**", "**/__main__.py", "**/verl/active.py"],
    }
]
autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    "show-inheritance": True,
    "ignore-module-all": True,
}
autodoc_mock_imports = ["megatron", "ray", "tensordict", "trl", "verl", "vllm"]
default_role = "code"
toc_object_entries = False
suppress_warnings = ["ref.python"]  # annotations name classes without their modules


def setup(app: Sphinx) -> None:
    app.connect("source-read", _prepare)
    app.connect("autodoc-process-docstring", _as_text)


def _prepare(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the list of pages for the sidebar, and leave only the text of links to folders."""
    folder = (ROOT / page).parent
    source[0] = LINK.sub(lambda link: link[1] if (folder / link[2]).is_dir() else link[0], source[0])
    if page in CONTENTS:
        source[0] += "\n".join(["\n\n```{toctree}", ":hidden:", ":glob:", "", *CONTENTS[page], "```\n"])


def _as_text(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with names in backticks, lists, and indented blocks of code."""
    lines[:] = re.sub(r"(`[^`]+`)|(\n\n {4}.*(?:\n+ {4}.*)*)|([*|\\_])", _as_rst, "\n".join(lines)).split("\n")


def _as_rst(found: re.Match[str]) -> str:
    name, block, letter = found.groups()
    return f"{name}\\ " if name else f"\n\n::{block}\n" if block else f"\\{letter}"
