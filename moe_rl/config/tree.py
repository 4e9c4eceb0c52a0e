"""Nested settings: walked, made plain, read back, changed by their dotted keys."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.lookup import Use


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a configuration or its JSON, however deep, and its dotted key, which entries of a list share."""
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from leaves(below, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for below in value:
            yield from leaves(below, key)
    else:
        yield key, value


def plain(value: Any) -> Any:
    """A configuration as nested dictionaries; a Use without options is its name."""
    if isinstance(value, Use) and not value.options:
        return value.name
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(below) for key, below in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple | list) else value


def read(kind: Any, value: Any) -> Any:
    """`value` as JSON gave it, as an instance of the dataclass `kind`; JSON's lists were tuples."""
    if Use in typing.get_args(kind) and isinstance(value, Mapping):
        return Use.of(value)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return tuple(read(typing.get_args(kind)[0], one) for one in value) if isinstance(value, list) else value
    hints = typing.get_type_hints(kind)
    if later := sorted(set(value) - set(hints)):
        raise ConfigError(f"{kind.__name__} has no setting {', '.join(later)}: this configuration is of another "
                          "version of moe_rl; run it with the code that its row names")
    return kind(**{name: read(hints[name], below) for name, below in value.items()})


def changed(node: Any, key: str, value: Any, name: str = "a run") -> Any:
    """`node` with one dotted setting changed; what lies below a mapping is one key of it."""
    if isinstance(node, Mapping):
        return {**node, key: value}
    if isinstance(node, Use) and key.startswith("options."):
        return Use(node.name, **{**node.options, key.removeprefix("options."): value})
    if isinstance(node, Use):
        raise ConfigError(f"{name} has no setting {key!r}: give another {name} as a whole, or one of its options as "
                          f"{name}.options.NAME")
    head, _, tail = key.partition(".")
    known = [f.name for f in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []
    if head not in known:
        raise ConfigError(f"{name} has no setting {head!r}; it has {', '.join(known) or 'none, being a value'}")
    below = changed(getattr(node, head), tail, value, head) if tail else value
    return dataclasses.replace(node, **{head: below})
