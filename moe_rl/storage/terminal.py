"""How text reaches a terminal: as it stands, whatever brackets it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def say(console: Console, *parts: str | tuple[str, str], wrap: bool = False) -> None:
    """Print parts of a line, each a text or (text, style); Rich's markup and emoji codes in them mean nothing.

    Paths, errors and what a study declares come from outside, and a prompt's `[/INST]` would end a tag that was never
    opened. With `wrap`, lines break between words; else they are left whole, so that a path can be copied.
    """
    from rich.text import Text

    shown = [harmless(part) if isinstance(part, str) else (harmless(part[0]), part[1]) for part in parts]
    console.print(Text.assemble(*shown), soft_wrap=not wrap)


def harmless(text: str) -> str:
    """Text of anybody's, with every character that is not shown as itself written out, but for the ends of lines: one
    that moves the cursor, colours, reverses the line or hides does nothing."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def visible(text: str) -> str:
    """As `harmless`; a line ends behind a ⏎."""
    return harmless(text).replace("\n", "⏎\n")


def duration(seconds: float) -> str:
    """A length of time as people say it."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows as lines, their columns aligned."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
