"""Methods and the defaults of other frameworks by name, from `methods.toml`: `arm("sapo(tau_neg=1.05)+old_policy")`;
and the registries of all components."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import spelling
from moe_rl.objectives.spelling import PIECE, parse, read_table, split_pieces

SENTENCE = re.compile(r"(?<!\bDr)\. (?=[A-Z])")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A published method, or a framework's default: one line of components."""

    name: str
    arm: str
    """Its written form."""
    source: str
    family: str = ""
    note: str = ""
    """Parts that are no component, and differences from its authors."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a `RunConfig` that belong to it."""
    of: str = ""
    """The method of which this is a framework's default, or another range."""


@functools.cache
def methods() -> Mapping[str, Method]:
    """The published methods by name, in the order of the page."""
    return {name: Method(name=name, **entry) for name, entry in read_table()["methods"].items()}


@functools.cache
def presets() -> Mapping[str, Method]:
    """`framework:method`, the defaults of a framework; `paper:method` for every method."""
    entries = {f"paper:{m.name}": replace(m, name=f"paper:{m.name}", of=m.name) for m in methods().values() if not m.of}
    for name, entry in read_table()["presets"].items():
        framework, _, method = name.partition(":")
        entries[name] = Method(name=name, **{"of": method, "source": frameworks()[framework], **entry})
    return entries


@functools.cache
def spellings() -> Mapping[str, str]:
    """The text of every method and preset."""
    return {m.name: m.arm for m in (*methods().values(), *presets().values())}


def refusals() -> Mapping[str, str]:
    """Published names that are no arm here, and why."""
    return read_table()["refused"]


def frameworks() -> Mapping[str, str]:
    """The frameworks of the presets, and their versions."""
    return read_table()["frameworks"]


def arm(text: str) -> Arm:
    """The arm of a text: `gspo`, `sapo(tau_neg=1.05)+old_policy`, `trl:grpo+seq_mean_token_mean`.

    `moe_rl.objectives.spelling` has the grammar, `moe-rl methods` the names. Raises ConfigError with the closest names
    for an unknown one, and with the reason for a method that cannot be an arm.
    """
    for piece in split_pieces(text):
        match = PIECE.match(piece)
        if match and match.group(2) in refusals() and match.group(1) not in ("name", "anchor"):
            raise ConfigError(f"arm {text!r}: {refusals()[match.group(2)]}")
    return parse(text, spellings())


def spell(arm: Arm) -> str:
    """The text of this arm for `arm`, its name included."""
    return spelling.spell(arm, spellings())


def spell_out(arm: Arm) -> str:
    """The text of an arm with all options, defaults included, as tables and pages show it."""
    return spelling.spell_components(arm, spellings(), spelling.fill_in)


def entry(name: str) -> Method:
    """A method or preset by name. Raises ConfigError where there is none."""
    method = methods().get(name) or presets().get(name)
    if method is None:
        arm(name)  # raises with the closest names
        raise ConfigError(f"{name!r} is a loss, not a method. See `moe-rl methods`.")
    return method


# ---------------------------------------------------------------------- the registries, which need torch
@functools.cache
def registries() -> Mapping[str, Mapping[str, Callable[..., Any]]]:
    """Kind of component → name → function."""
    from moe_rl.objectives.advantages import ADVANTAGES
    from moe_rl.objectives.losses import LOSSES
    from moe_rl.objectives.router import ROUTER_LOSSES, ROUTER_TERMS
    from moe_rl.objectives.terms import TERMS
    from moe_rl.objectives.weights import AGGREGATIONS, CORRECTIONS
    from moe_rl.routing.sources import SOURCES

    return {
        "loss": LOSSES | ROUTER_LOSSES,
        "aggregation": AGGREGATIONS,
        "correction": CORRECTIONS,
        "term": TERMS | ROUTER_TERMS,
        "advantage": ADVANTAGES,
        "routes": SOURCES,
    }


@functools.cache
def components() -> Mapping[str, Callable[..., Any]]:
    """Every component by name; a name is of one kind only."""
    return {name: function for functions in registries().values() for name, function in functions.items()}


def read_equation(name: str) -> str:
    """The first sentence of the docstring of a component, in one line."""
    text = (inspect.getdoc(components()[name]) or "").partition("\n\n")[0]
    return SENTENCE.split(" ".join(text.split()))[0].rstrip(".")
