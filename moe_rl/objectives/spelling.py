"""Arms as one line of text, and back.

    sapo(tau_neg=1.05)+old_policy
    grpo+token_mean+masked(low=0.5,high=5.0)+kl(coef=0.04)+name=mine
    gspo+overlong(limit=20,buffer=4)+group+filters=masked(high=2.0)
    loss=mine:reinforce+terms=mine:stay(coef=0.1)

The first component is a method, a preset or a loss; its options are those of the component that has its name, or the
loss's. The others are named as the registries do, and add to it. A field of `Arm` before a component says where it
goes, and that it replaces what the method has there: so are written `filters`, `ratio_routes`, `anchor`, `name` and
functions of one's own; `terms=none` empties a field. Advantage steps have an order, so those that are named are all of
them, and one of `BASELINES` is among them.

Names and options are read from `methods.toml`, so that a study can be declared without torch.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
import tomllib
from collections.abc import Collection, Mapping
from keyword import iskeyword
from pathlib import Path
from typing import Any, NamedTuple

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.registry import WORDS, Component, Part, read_options, unknown

FIELD = {"loss": "loss", "aggregation": "aggregate", "correction": "corrections", "term": "terms",
         "advantage": "advantage", "routes": "routes"}
"""Kind of component → the field of an `Arm` that it goes into."""
BASELINES = ("group", "leave_one_out", "normalized", "opo", "gae")
"""Advantage steps that compare a response with others, or with what a critic expects."""
SEVERAL = ("corrections", "filters", "terms", "advantage")
"""Fields that hold any number of components."""
DEFAULT = Arm(name="")
FIELDS = list(Arm.model_fields)
SAME_COMPONENTS = {"filters": "corrections", "ratio_routes": "routes"}
PLAIN = re.compile(r"[\w.:-]+")
PIECE = re.compile(r"""(?:(\w+)=)?([\w.:-]+|'[^']*'|"[^"]*")(?:\((.*)\))?""", re.DOTALL)


class Known(NamedTuple):
    """What `methods.toml` has of a component."""

    kind: str
    options: Collection[str]
    required: Collection[str]


@functools.cache
def read_table() -> dict[str, Any]:
    """The content of `methods.toml`."""
    return tomllib.loads(Path(__file__).with_name("methods.toml").read_text(encoding="utf-8"))


@functools.cache
def known_components() -> Mapping[str, Known]:
    """Every component by name; a name is of one kind only."""
    return {name: Known(kind, options.replace("!", "").split(), re.findall(r"(\w+)!", options))
            for kind, names in read_table()["components"].items() for name, options in names.items()}


def suggest_field(name: str, choices: Collection[str]) -> str:
    """What a name, or the closest to it, is of another kind than that of `choices`: `grpo goes into Arm(loss=…)`;
    empty where it is nothing."""
    others = {n: f"is a whole method; use --arm {n}, or arms=({n!r},)" for n in read_table()["methods"]}
    others |= {n: f"goes into Arm({FIELD[known.kind]}=…)" for n, known in known_components().items()}
    found = difflib.get_close_matches(name, others.keys() - {*choices}, n=1, cutoff=0.8)
    return f"{found[0]} {others[found[0]]}" if found else ""


# ---------------------------------------------------------------------- text → arm
def parse(text: str, methods: Mapping[str, str]) -> Arm:
    """The arm that a text spells. `methods`: names that may come first, and how each is spelled.

    Its name is the text without blanks, if no `name=` is given. Raises ConfigError for a name or an option that is not
    there, for a component where the method has one, and for what cannot be read.
    """
    head, *rest = split_pieces(text)
    field, use = _read_piece(text, head)
    if field not in (None, "loss"):
        raise ConfigError(f"arm {text!r} begins with {head!r}. Begin with a method, a preset, a loss, or loss=….")
    start = _start_from(use, {} if field else methods)
    found: dict[str, Any] = {}
    for piece in rest:
        field, use = _read_piece(text, piece)
        where = field or _field_of(text, use, methods)
        if where not in SEVERAL and (where in found or where == "loss"):
            raise ConfigError(f"arm {text!r} has more than one {where}. Give one.")
        if where in ("name", "anchor"):
            found[where] = ast.literal_eval(use.name) if use.name[0] in "'\"" else use.name
        elif where in SEVERAL:
            before = () if field or where == "advantage" else getattr(start, where)
            found[where] = () if use.name == "none" else (*found.get(where, before), require_options(use))
        else:
            if field is None and getattr(start, where) != getattr(DEFAULT, where):
                raise ConfigError(f"arm {text!r}: {head} already has {where}={getattr(start, where)}. To replace it, "
                                  f"write {where}={piece}.")
            if use.name == "none" and getattr(DEFAULT, where) is not None:
                raise ConfigError(f"arm {text!r}: {where} cannot be none. Replace it by another component.")
            found[where] = None if use.name == "none" else require_options(use)
    steps = found.get("advantage")
    if steps and "advantage=" not in text and not any(step.name in BASELINES for step in steps):
        written = "+".join(map(_spell_use, steps))
        raise ConfigError(f"arm {text!r} has no advantage step that compares with other responses or a critic "
                          f"({', '.join(BASELINES)}). Write group+{written} or {written}+group, or advantage={written} "
                          "for no baseline.")
    return start.replace(**{"name": "".join(text.split()), **found})


def require_options(use: Component) -> Component:
    """The component, if it has its options. Raises ConfigError for one that is not its own, and for one it lacks."""
    if known := known_components().get(use.name):
        for name in use.options:
            if name not in known.options:
                unknown(f"option of the {known.kind} {use.name!r}", name, known.options)
        if missing := [name for name in known.required if name not in use.options]:
            raise ConfigError(f"the {known.kind} {use.name!r} needs {', '.join(missing)}: {use.name}({missing[0]}=…)")
    return use


def split_pieces(text: str) -> list[str]:
    """The text cut at every + that is in no bracket and no quotes."""
    found, depth, quote, escaped = [""], 0, "", False
    for sign in text:
        if escaped or sign == "\\":
            escaped = not escaped
        elif quote or sign in "'\"":
            quote = "" if sign == quote else quote or sign
        else:
            depth += (sign in "([{") - (sign in ")]}")
        if sign == "+" and not depth and not quote:
            found.append("")
        elif quote or not sign.isspace():
            found[-1] += sign
    return found


def _start_from(use: Component, methods: Mapping[str, str]) -> Arm:
    """What the first component of a text stands for."""
    if use.name in methods:
        method = parse(methods[use.name], {})
        field = _known_field(use) or "loss"
        if field == "loss" and use.name.rpartition(":")[2] not in (field, Component.of(method.loss).name):
            _refuse_ambiguous(use, method)

        def add_options(part: Part) -> Component:
            part = Component.of(part)
            mine = field == "loss" or part.name == use.name
            return require_options(Component(part.name, **{**part.options, **use.options})) if mine else part

        value = getattr(method, field)
        changed: Any = tuple(map(add_options, value)) if field in SEVERAL else add_options(value)
        return method.replace(**{field: changed})
    families = {name.partition(":")[0] for name in methods if ":" in name}
    if _known_field(use) != "loss" and (not use.own or use.name.partition(":")[0] in families):
        choices = {*methods, *_names_for("loss"), "pkg.module:name"}
        unknown("method, preset or loss", use.name, choices, suggest_field(use.name, choices))
    return Arm(name="", loss=require_options(use))


def _refuse_ambiguous(use: Component, method: Arm) -> None:
    """Raise ConfigError for an option that a component of the method has which is not its loss: `tis(cap=5)`, where the
    loss has a `cap` of its own."""
    loss = Component.of(method.loss).name
    for field in SEVERAL:
        steps = getattr(method, field)
        for part in steps:
            for name in use.options if part.name in known_components() else ():
                if name in known_components()[part.name].options:
                    new = Component(part.name, **{**part.options, name: use.options[name]})
                    text = "+".join(f"{field}={_spell_use(new if step is part else step)}" for step in steps)
                    mine = name in known_components()[loss].options
                    raise ConfigError(
                        f"{_spell_use(Component(use.name, **{name: use.options[name]}))}: {name} is an option "
                        f"of {part.name}. Write {use.name}+{text}"
                        + (f", or begin with {loss}(…) for its loss" if mine else "")
                    )


def _field_of(text: str, use: Component, methods: Mapping[str, str]) -> str:
    """The field that a component goes into, by its kind."""
    if (field := _known_field(use)) is not None:
        return field
    if use.own:
        raise ConfigError(f"arm {text!r}: name the field of {use.name}, e.g. terms={use.name}. The fields are "
                          f"{', '.join(FIELDS)}.")
    if use.name in methods:
        added = methods[use.name].partition("+")[2]
        raise ConfigError(f"arm {text!r}: {use.name} is a whole method, and can only come first."
                          + (f" Its component is {added}." if added else ""))
    unknown("component", use.name, known_components())


def _known_field(use: Component) -> str | None:
    known = known_components().get(use.name)
    return FIELD[known.kind] if known else None


def _names_for(field: str) -> list[str]:
    """The components that may go into a field of an arm."""
    return [n for n, known in known_components().items() if FIELD[known.kind] == SAME_COMPONENTS.get(field, field)]


def _read_piece(text: str, piece: str) -> tuple[str | None, Component]:
    """The field that a piece names, if it does, and its component."""
    match = PIECE.fullmatch(piece)
    if match is None:
        raise ConfigError(f"arm {text!r}: {piece!r} cannot be read. Write name, name(option=value,…) or field=name, "
                          "joined by +.")
    field, name, options = match.groups()
    if field is not None and field not in FIELDS:
        unknown("field of an arm", field, FIELDS)
    use = Component(name, **read_options(options or "", f"{piece!r} in arm {text!r}"))
    if field not in (None, "name", "anchor") and name != "none" and not use.own and name not in _names_for(field):
        if known := _known_field(use):
            raise ConfigError(f"arm {text!r}: {name} goes into {known}, not into {field}")
        unknown(f"component for {field}", name, [*_names_for(field), "pkg.module:name"],
                suggest_field(name, _names_for(field)))
    return field, use


# ---------------------------------------------------------------------- arm → text
def spell(arm: Arm, methods: Mapping[str, str]) -> str:
    """The text that `parse` reads as this arm, its name included."""
    loss = Component.of(arm.loss)
    more = loss.name in methods and parse(loss.name, methods) != Arm(name=loss.name, loss=loss.name)
    pieces = [f"{'loss=' if more or loss.own else ''}{_spell_use(loss)}"]
    for field in FIELDS:
        value = getattr(arm, field)
        if field in ("name", "loss") or value == getattr(DEFAULT, field):
            continue
        if field == "anchor":
            pieces.append(f"anchor={value}")
            continue
        uses = value if field in SEVERAL else (value,)
        pieces += [_spell_use(use) if field != "advantage" and _known_field(use) == field
                   else f"{field}={_spell_use(use)}" for use in uses] or [f"{field}=none"]
    text = "+".join(pieces)
    if text == arm.name:
        return text
    return f"{text}+name={arm.name if PLAIN.fullmatch(arm.name) else repr(arm.name)}"


def _spell_use(use: Part) -> str:
    use = Component.of(use)
    options = ",".join(f"{name}={_spell_value(value)}" for name, value in use.options.items())
    return f"{use.name}({options})" if options else use.name


def _spell_value(value: Any) -> str:
    if isinstance(value, str):
        word = value.isascii() and value.isidentifier()  # Python reads other letters as their nearest equals
        return value if word and not iskeyword(value) and value not in WORDS else repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_spell_value(k)}:{_spell_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_spell_value, value)) + "]"
    return repr(value)
