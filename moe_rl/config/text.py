"""Settings as text, as a command line has them."""

from __future__ import annotations

import ast
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from moe_rl.config.pretraining import Pretraining
from moe_rl.config.run import RunConfig
from moe_rl.config.tree import no_setting
from moe_rl.errors import ConfigError
from moe_rl.registry import Use


def parse_settings(config: RunConfig | Pretraining, settings: Sequence[str]) -> dict[str, Any]:
    """`["optimizer.lr=1e-4"]` as typed values for `config.replace`: each gets the type of its dataclass field.

    Raises ConfigError for an unknown setting or a value of another type.
    """
    typed = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set takes key=value, e.g. optimizer.lr=1e-4, but got {setting!r}")
        if key.split(".")[0] in ("arm", "seed", "steps"):
            raise ConfigError(f"{key} is not set with --set: arms belong to the study file; use --seeds and --steps")
        typed[key] = _typed(config, key, text)
    config.replace(**typed)
    return typed


def _typed(config: RunConfig | Pretraining, key: str, text: str) -> Any:
    name, *path = key.split(".")
    owner: Any = config
    for name_below in path:
        owner, name = getattr(owner, name, None), name_below
    if isinstance(owner, Mapping):
        kinds: tuple[Any, ...] = (object,)
    elif not dataclasses.is_dataclass(owner) or name not in (hints := typing.get_type_hints(type(owner))):
        no_setting(config, key)
    else:
        hint = hints[name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(k) or k for k in kinds)
    if str in kinds or Use in kinds:
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        value = text
    if float in kinds and type(value) is int:
        value = float(value)
    if tuple in kinds and type(value) in (int, float):
        value = (value,)
    if object not in kinds and type(value) not in kinds:
        wanted = " or ".join(k.__name__ for k in kinds)
        more = f"; set one entry at a time, {key}.NAME=VALUE" if Mapping in kinds else ""
        raise ConfigError(f"{key} needs a value of type {wanted}, but got {text!r}{more}")
    return value
