"""Every method by name: `arm("sapo(tau_neg=1.05)+old_policy")`, and the defaults of other frameworks: `methods.toml`,
read; and what the registries say of every component."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives.spelling import FIELDS, PIECE, SEVERAL, parse, read_table, split_pieces
from moe_rl.objectives.spelling import spell as spell_with
from moe_rl.registry import Component

SENTENCE = re.compile(r"(?<!\bDr)\. (?=[A-Z])")
REQUIRED = "…"
"""Stands for the default of an option that must be given."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A published method, or a framework's default: one line of components."""

    name: str
    arm: str
    """Its written form."""
    source: str
    family: str = ""
    note: str = ""
    """What is no component, or not as its authors have it."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a `RunConfig` that belong to it."""
    of: str = ""
    """Of a framework's default: which method it is one of."""


@functools.cache
def methods() -> Mapping[str, Method]:
    """The published methods by name, in the order of the page."""
    return {name: Method(name=name, **entry) for name, entry in read_table()["methods"].items()}


@functools.cache
def presets() -> Mapping[str, Method]:
    """`framework:method`, what a framework does where nothing else is said; `paper:method` for every method."""
    found = {f"paper:{m.name}": replace(m, name=f"paper:{m.name}", of=m.name) for m in methods().values()}
    for name, entry in read_table()["presets"].items():
        framework, _, method = name.partition(":")
        found[name] = Method(name=name, **{"of": method, "source": frameworks()[framework], **entry})
    return found


@functools.cache
def spellings() -> Mapping[str, str]:
    """What may come first in a written arm, and what it stands for."""
    return {m.name: m.arm for m in (*methods().values(), *presets().values())}


def refusals() -> Mapping[str, str]:
    """Published names that are no arm here, and why."""
    return read_table()["refused"]


def frameworks() -> Mapping[str, str]:
    """The frameworks that presets are of, and the versions."""
    return read_table()["frameworks"]


def arm(text: str) -> Arm:
    """The arm that a text spells: `gspo`, `sapo(tau_neg=1.05)+old_policy`, `trl:grpo+seq_mean_token_mean`.

    How it is written: `moe_rl.objectives.spelling`; what there is: `moe-rl methods`. Raises ConfigError with the
    closest names for one that is not there, and with the reason for a method that cannot be an arm.
    """
    for piece in split_pieces(text):
        match = PIECE.match(piece)
        if match and match.group(2) in refusals() and match.group(1) not in ("name", "anchor"):
            raise ConfigError(f"arm {text!r}: {refusals()[match.group(2)]}")
    return parse(text, spellings())


def spell(arm: Arm) -> str:
    """The text that `arm` reads as this arm, its name included."""
    return spell_with(arm, spellings())


def entry(name: str) -> Method:
    """A method or preset by name. Raises ConfigError where there is none."""
    found = methods().get(name) or presets().get(name)
    if found is None:
        arm(name)  # says what there is, or why there is none
        raise ConfigError(f"{name!r} is a loss, not a method. See `moe-rl methods`.")
    return found


# ---------------------------------------------------------------------- what the registries say, which needs torch
@functools.cache
def registries() -> Mapping[str, Mapping[str, Callable[..., Any]]]:
    """Kind of component → name → function."""
    from moe_rl.objectives.advantages import ADVANTAGES
    from moe_rl.objectives.losses import LOSSES
    from moe_rl.objectives.router import ROUTER_LOSSES, ROUTER_TERMS
    from moe_rl.objectives.terms import TERMS
    from moe_rl.objectives.weights import AGGREGATIONS, CORRECTIONS
    from moe_rl.routing.sources import SOURCES

    return {"loss": LOSSES | ROUTER_LOSSES, "aggregation": AGGREGATIONS, "correction": CORRECTIONS,
            "term": TERMS | ROUTER_TERMS, "advantage": ADVANTAGES, "routes": SOURCES}


@functools.cache
def components() -> Mapping[str, Callable[..., Any]]:
    """Every component by name; a name is of one kind only."""
    return {name: function for functions in registries().values() for name, function in functions.items()}


def read_options(name: str) -> dict[str, Any]:
    """The options of a component and their defaults, `REQUIRED` where there is none; none for a user's own."""
    if name not in components():
        return {}
    return {p.name: REQUIRED if p.default is p.empty else p.default
            for p in inspect.signature(components()[name]).parameters.values() if p.kind is p.KEYWORD_ONLY}


def read_equation(name: str) -> str:
    """The first sentence of the docstring of a component, in one line."""
    text = (inspect.getdoc(components()[name]) or "").partition("\n\n")[0]
    return SENTENCE.split(" ".join(text.split()))[0].rstrip(".")


SAME = {
    "group": Component("normalized"),
    "gspo": Component("grpo", level="sequence", clip_low=3e-4, clip_high=4e-4),
    "gspo_token": Component("grpo", level="sequence_token", clip_low=3e-4, clip_high=4e-4),
}
"""Components that are another with these options."""


def differences(a: Arm, b: Arm) -> list[str]:
    """Where the components of two arms differ, a line each, as `what a has, not what b has`; defaults are filled in,
    and of steps of one name the last counts."""
    found = []
    for name in FIELDS:
        if name == "name" or (ours := getattr(a, name)) == (theirs := getattr(b, name)):
            continue
        if name == "anchor":
            found.append(f"anchor: {ours}, not {theirs}")
            continue
        ours, theirs = (_general(x if name in SEVERAL else (x or Component("none"),)) for x in (ours, theirs))
        for part in dict.fromkeys([*ours, *theirs]):
            if part in ours and part in theirs:
                one, other = ({**read_options(part), **side[part].options} for side in (ours, theirs))
                found += [f"{name}: {part} with {option} {one[option]}, not {other[option]}"
                          for option in one if one[option] != other.get(option)]
            elif name in SEVERAL:
                found.append(f"{name}: {ours[part]} too" if part in ours else f"{name}: no {theirs[part]}")
            elif part in ours:
                found.append(f"{name}: {ours[part]}, not {next(iter(theirs.values()))}")
        if name == "advantage" and [*ours] != [*theirs] and {*ours} == {*theirs}:
            found.append("advantage: in another order")
    return found


def _general(uses: tuple[Component, ...]) -> dict[str, Component]:
    """Components by name, each under its more general one."""
    found = [
        Component(SAME[u.name].name, **{**SAME[u.name].options, **u.options}) if u.name in SAME else u for u in uses
    ]
    return {use.name: use for use in found}
