"""Files of JSON objects, one per line: the one reader of all that users bring."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_rl.errors import ConfigError


def objects(file: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Of every line that is not empty, one at a time: "file, line n" for errors about it, n from 1, and its object.

    Lines end at \\n alone, since JSON strings may hold other separators, and a byte order mark in front is read over.
    Raises ConfigError, with file and line, for bytes that are not UTF-8, for what is no JSON object, for an object that
    has a key twice, of which the last would count, and for half of a surrogate pair ("\\ud800"), which is no text:
    neither a tokenizer nor a file takes it.
    """
    with file.open("rb") as lines:
        for n, raw in enumerate(lines, start=1):
            where = f"{file}, line {n}"
            try:
                line = (raw.removeprefix(codecs.BOM_UTF8) if n == 1 else raw).decode()
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: not UTF-8 text ({error}). Convert the file.") from error
            if line.strip():
                yield where, n, _object(line, where)


def _object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for a key that is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        entry, reason = json.loads(line, object_pairs_hook=_object_once), ""
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are ValueErrors of their own
        entry, reason = None, f" ({error})"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected a JSON object, not {line[:80].strip()!r}{reason}")
    if "\\u" in line:  # only an escape can write half a pair: UTF-8 has no bytes for it
        try:
            json.dumps(entry, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ConfigError(f"{where}: {half} is only half of a surrogate pair. Write the whole character, or remove "
                              "it.") from error
    return entry
