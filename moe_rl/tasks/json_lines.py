"""Files of JSON objects, one per line: the one reader of all that users bring."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_rl.errors import ConfigError


def objects(file: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Every line that is not empty, one at a time: "file, line n" for errors about it, n from 1, and its object.

    Lines end at \\n alone, since JSON strings may hold other separators. Raises ConfigError, with file and line, for
    bytes that are not UTF-8, for anything but a JSON object, and for a key that an object has twice.
    """
    with file.open("rb") as lines:
        for n, raw in enumerate(lines, start=1):
            where = f"{file}, line {n}"
            if not raw.strip():
                continue
            try:
                entry = json.loads(raw, object_pairs_hook=_object_once)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: expected a JSON object, not {raw[:80]!r} ({error})") from error
            if not isinstance(entry, dict):
                raise ConfigError(f"{where}: expected a JSON object, not {raw[:80]!r}")
            yield where, n, entry


def _object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for a key that is there twice, of which the last would count."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the key {twice[0]!r} is there twice")
    return dict(pairs)
