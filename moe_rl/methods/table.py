"""The methods of the literature and the defaults of other frameworks as arms: `methods.toml`, read."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.lookup import Use
from moe_rl.lookup.parts import parts
from moe_rl.methods.spelling import FIELDS, PIECE, SEVERAL, parse, pieces
from moe_rl.methods.spelling import spelled as spelled_with


@dataclass(frozen=True, kw_only=True)
class Method:
    """A published method, or a framework's default: one line of parts."""

    name: str
    arm: str
    """Its spelling."""
    source: str
    family: str = ""
    note: str = ""
    """What is no part, or not as its authors have it."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a `RunConfig` that belong to it."""
    elsewhere: tuple[tuple[str, str, str, str, str], ...] = ()
    """Who else has it: framework, name there, default there, difference there, and how that is known: `O`, its code was
    run on inputs of ours, `R`, it was read."""
    of: str = ""
    """Of a framework's default: which method it is one of."""


@functools.cache
def _content() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("methods.toml").read_text(encoding="utf-8"))


@functools.cache
def methods() -> Mapping[str, Method]:
    """The published methods by name, in the order of the page."""
    return {name: Method(name=name, **entry | {"elsewhere": tuple(map(tuple, entry.get("elsewhere", ())))})
            for name, entry in _content()["methods"].items()}


@functools.cache
def presets() -> Mapping[str, Method]:
    """`framework:method`, what a framework does where nothing else is said; `paper:method` for every method."""
    papers = {f"paper:{m.name}": replace(m, name=f"paper:{m.name}", of=m.name) for m in methods().values()}
    given = {}
    for name, entry in _content()["presets"].items():
        framework, _, method = name.partition(":")
        given[name] = Method(name=name, **{"of": method, "source": frameworks()[framework], **entry})
    return papers | given


@functools.cache
def spellings() -> Mapping[str, str]:
    """What may come first in a spelling, and what it stands for."""
    return {m.name: m.arm for m in (*methods().values(), *presets().values())}


def refused() -> Mapping[str, str]:
    """Published names that are no arm here, and why."""
    return _content()["refused"]


def frameworks() -> Mapping[str, str]:
    """The frameworks that presets and the page are about, and the versions."""
    return _content()["frameworks"]


def arm(text: str) -> Arm:
    """The arm that a text spells: `gspo`, `sapo(tau_neg=1.05)+old_policy`, `trl:grpo+seq_mean_token_mean`.

    How it is written: `moe_rl.methods.spelling`; what there is: `moe-rl methods`. Raises ConfigError with the closest
    names for one that is not there, and with the reason for a method that cannot be an arm.
    """
    for piece in pieces(text):
        match = PIECE.match(piece)
        if match and match.group(2) in refused() and match.group(1) not in ("name", "anchor"):
            raise ConfigError(f"arm {text!r}: {refused()[match.group(2)]}")
    return parse(text, spellings())


def spelled(arm: Arm) -> str:
    """The text that `arm` reads as this arm, its name included."""
    return spelled_with(arm, spellings())


def entry(name: str) -> Method:
    """A method or preset by name. Raises ConfigError where there is none."""
    found = methods().get(name) or presets().get(name)
    if found is None:
        arm(name)  # says what there is, or why there is none
        raise ConfigError(f"{name!r} is a loss, not a method; see `moe-rl methods`")
    return found


SAME = {
    "group": Use("normalized"),
    "gspo": Use("grpo", level="sequence", clip_low=3e-4, clip_high=4e-4),
    "gspo_token": Use("grpo", level="sequence_token", clip_low=3e-4, clip_high=4e-4),
}
"""Parts that are another with these options."""


def _plain(use: Use) -> Use:
    """The same part under its more general name."""
    same = SAME.get(use.name)
    return Use(same.name, **{**same.options, **use.options}) if same else use


def differences(a: Arm, b: Arm) -> list[str]:
    """Where the parts of two arms differ, a line each, as `what a has, not what b has`; defaults are filled in, and
    of steps of one name the last counts."""
    found = []
    for name in FIELDS:
        if name == "name" or (ours := getattr(a, name)) == (theirs := getattr(b, name)):
            continue
        if name == "anchor":
            found.append(f"anchor: {ours}, not {theirs}")
            continue
        both = [{u.name: u for u in map(_plain, x if name in SEVERAL else (x or Use("none"),))} for x in (ours, theirs)]
        for part in dict.fromkeys([*both[0], *both[1]]):
            if part in both[0] and part in both[1]:
                one, other = ({**(parts()[part].options if part in parts() else {}), **side[part].options}
                              for side in both)
                found += [f"{name}: {part} with {option} {one[option]}, not {other[option]}"
                          for option in one if one[option] != other.get(option)]
            elif name in SEVERAL:
                found.append(f"{name}: {both[0][part]} too" if part in both[0] else f"{name}: no {both[1][part]}")
            elif part in both[0]:
                found.append(f"{name}: {both[0][part]}, not {next(iter(both[1].values()))}")
        if name == "advantage" and [*both[0]] != [*both[1]] and {*both[0]} == {*both[1]}:
            found.append("advantage: in another order")
    return found
