"""Nested settings: walked, made plain, read back, changed by their dotted keys."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from moe_rl.errors import ConfigError
from moe_rl.registry import Use


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
    if isinstance(value, list):
        listed = next((k for k in (kind, *typing.get_args(kind)) if typing.get_origin(k) is tuple), tuple[Any, ...])
        return tuple(read(typing.get_args(listed)[0], one) for one in value)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return value
    hints = typing.get_type_hints(kind)
    if later := sorted(set(value) - set(hints)):
        raise ConfigError(f"{kind.__name__} has no setting {', '.join(later)}: this configuration is of another "
                          "version of moe_rl; run it with the code that its row names")
    return kind(**{name: read(hints[name], below) for name, below in value.items()})


def replaced(root: Any, changes: Mapping[str, Any]) -> Any:
    """`root` with some dotted settings changed; what lies below a mapping is one key of it. Raises ConfigError with the
    settings that may be meant where there is no such one."""
    for key, value in changes.items():
        root = _replaced(root, key, value)
    return root


def _replaced(root: Any, key: str, value: Any) -> Any:
    def inside(node: Any, key_here: str) -> Any:
        if isinstance(node, Mapping):
            return {**node, key_here: value}
        if isinstance(node, Use) and key_here.startswith("options."):
            return Use(node.name, **{**node.options, key_here.removeprefix("options."): value})
        head, _, tail = key_here.partition(".")
        if isinstance(node, Use) or head not in _names(node):
            no_setting(root, key)
        below = inside(getattr(node, head), tail) if tail else value
        return dataclasses.replace(node, **{head: below})

    return inside(root, key)


def no_setting(root: Any, key: str) -> NoReturn:
    """Raise a ConfigError for a dotted key that is not there: the settings that may be meant, and those beside it."""
    group, _, word = key.rpartition(".")
    known = list(keys(root))
    if group in known:
        raise ConfigError(f"there is no setting {key!r}: {group} is one value; options of a part that it names are "
                          f"{group}.options.NAME")
    beside = {k.removeprefix(f"{group}."): k for k in known if k.rpartition(".")[0] == group}
    same = [k for k in known if k.rpartition(".")[2] == word]
    near = [beside[name] for name in difflib.get_close_matches(word, beside)] or difflib.get_close_matches(
        key, same, cutoff=0.8) or same or difflib.get_close_matches(key, () if beside else known, cutoff=0.8)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    groups = dict.fromkeys(name if name in known else f"{name}.…" for name in _names(root))
    raise ConfigError(f"there is no setting {key!r}.{hint} There are: "
                      f"{', '.join(beside.values() if group and beside else groups)}.")


def keys(node: Any, prefix: str = "") -> Iterator[str]:
    """The dotted key of every setting below a dataclass."""
    for name in _names(node):
        below = getattr(node, name)
        inner = dataclasses.is_dataclass(below) and not isinstance(below, Use)
        yield from keys(below, f"{prefix}{name}.") if inner else (prefix + name,)


def _names(node: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []
