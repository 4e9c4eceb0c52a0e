"""Arms as one line of text, and back.

    sapo(tau_neg=1.05)+old_policy
    grpo+token_mean+masked(low=0.5,high=5.0)+kl(coef=0.04)+name=mine
    gspo+overlong(limit=20,buffer=4)+group+filters=masked(high=2.0)
    loss=mine:reinforce+terms=mine:stay(coef=0.1)

The first component is a method, a preset or a loss; its options are those of the component of its name, or of the loss.
The others add to it. `field=component` replaces a field of the method, e.g. `filters`, `ratio_routes`, `anchor`,
`name`, and is needed for a user's own functions; `terms=none` empties a field. Advantage steps have an order, so named
ones replace all others; one of them is in `BASELINES`.

Names and options are read from the source text of the registries, so that a study can be declared without torch.
"""

from __future__ import annotations

import ast
import difflib
import functools
import math
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from keyword import iskeyword
from pathlib import Path
from typing import Any, NamedTuple

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.registry import WORDS, Component, Part, read_options, unknown

FIELD = {
    "loss": "loss",
    "aggregation": "aggregate",
    "correction": "corrections",
    "term": "terms",
    "advantage": "advantage",
    "routes": "routes",
}
"""Kind of component → its field of an `Arm`."""
REGISTRIES = {
    "losses.py": {"LOSSES": "loss"},
    "router.py": {"ROUTER_LOSSES": "loss", "ROUTER_TERMS": "term"},
    "weights.py": {"AGGREGATIONS": "aggregation", "CORRECTIONS": "correction"},
    "terms.py": {"TERMS": "term"},
    "advantages.py": {"ADVANTAGES": "advantage"},
    "../routing/sources.py": {"SOURCES": "routes"},
}
"""The kinds of the components in each registry, by source file."""
BASELINES = ("group", "leave_one_out", "normalized", "opo", "gae")
"""Advantage steps that compare a response with others, or with a critic."""
SEVERAL = ("corrections", "filters", "terms", "advantage")
"""Fields with any number of components."""
DEFAULT = Arm(name="")
FIELDS = list(Arm.model_fields)
SAME_COMPONENTS = {"filters": "corrections", "ratio_routes": "routes"}
WORD = re.compile(r"[\w.]{2}")
PLAIN = re.compile(r"[\w.:-]+")
PIECE = re.compile(r"""(?:(\w+)=)?([\w.:-]+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(?:\((.*)\))?""", re.DOTALL)
REQUIRED = "…"
"""The default of an option that has none."""


class Known(NamedTuple):
    """The kind of a component, and the options of its function."""

    kind: str
    options: Mapping[str, Any]
    """With their defaults."""
    required: Collection[str]


@functools.cache
def read_table() -> dict[str, Any]:
    """The content of `methods.toml`."""
    return tomllib.loads(Path(__file__).with_name("methods.toml").read_text(encoding="utf-8"))


@functools.cache
def known_components() -> Mapping[str, Known]:
    """Every component by name; a name is of one kind only. Read from the source text of the registries."""
    components: dict[str, Known] = {}
    for file in REGISTRIES:
        body = ast.parse(Path(__file__).parent.joinpath(file).read_text(encoding="utf-8")).body
        functions = {node.name: node.args for node in body if isinstance(node, ast.FunctionDef)}
        for statement in body:
            kind = REGISTRIES[file].get(getattr(getattr(statement, "target", None), "id", ""))
            if kind and isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Dict):
                names = map(ast.unparse, statement.value.values)
                components |= {name: _read_signature(kind, functions[name]) for name in names}
    return components


def _read_signature(kind: str, arguments: ast.arguments) -> Known:
    """The keyword-only parameters of a function as options."""
    options: dict[str, Any] = {}
    for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        text = REQUIRED if default is None else ast.unparse(default)
        options[parameter.arg] = {REQUIRED: REQUIRED, "math.inf": math.inf}.get(text) or ast.literal_eval(text)
    return Known(kind, options, [name for name, value in options.items() if value == REQUIRED])


def suggest_field(name: str, choices: Collection[str]) -> str:
    """The other field for a name, or for the closest one to it: `grpo goes into Arm(loss=…)`; else empty."""
    others = {n: f"is a whole method; use --arm {n}, or arms=({n!r},)" for n in read_table()["methods"]}
    others |= {n: f"goes into Arm({FIELD[known.kind]}=…)" for n, known in known_components().items()}
    close = difflib.get_close_matches(name, others.keys() - {*choices}, n=1, cutoff=0.8)
    return f"{close[0]} {others[close[0]]}" if close else ""


# ---------------------------------------------------------------------- text → arm
def parse(text: str, methods: Mapping[str, str]) -> Arm:
    """The arm of a text. `methods`: names that may come first, and the text of each.

    Its name is the text without blanks, unless there is a `name=`. Raises ConfigError for an unknown name or option,
    for a second component where the method has one, and for text that cannot be read.
    """
    head, *rest = split_pieces(text)
    field, use = _read_piece(text, head)
    if field not in (None, "loss"):
        raise ConfigError(f"arm {text!r} begins with {head!r}. Begin with a method, a preset, a loss, or loss=….")
    start = _start_from(use, {} if field else methods)
    fields: dict[str, Any] = {}
    for piece in rest:
        field, use = _read_piece(text, piece)
        where = field or _field_of(text, use, methods)
        if where not in SEVERAL and (where in fields or where == "loss"):
            raise ConfigError(f"arm {text!r} has more than one {where}. Give one.")
        if where in ("name", "anchor"):
            quoted = use.name[0] in "'\""
            fields[where] = read_options(f"{where}={use.name}", f"{text!r}")[where] if quoted else use.name
        elif where in SEVERAL:
            own = () if where == "advantage" else getattr(start, where)
            if where in fields and (use.name == "none" or field and own and fields[where][: len(own)] == own):
                raise ConfigError(f"arm {text!r}: {piece} replaces {where} before it. Write it first, or leave it out.")
            before = fields.get(where, () if field else own)
            fields[where] = () if use.name == "none" else (*before, require_options(use))
        else:
            if field is None and getattr(start, where) != getattr(DEFAULT, where):
                raise ConfigError(
                    f"arm {text!r}: {head} already has {where}={getattr(start, where)}. To replace it, write "
                    f"{where}={piece}."
                )
            if use.name == "none" and getattr(DEFAULT, where) is not None:
                raise ConfigError(f"arm {text!r}: {where} cannot be none")
            fields[where] = None if use.name == "none" else require_options(use)
    steps = fields.get("advantage")
    if steps and "advantage=" not in text and not any(step.name in BASELINES for step in steps):
        written = "+".join(map(_spell_use, steps))
        raise ConfigError(
            f"arm {text!r} has no baseline among its advantage steps ({', '.join(BASELINES)}). Write group+{written}, "
            f"or advantage={written} for none."
        )
    return start.replace(**{"name": "".join(text.split()), **fields})


def require_options(use: Component) -> Component:
    """The component. Raises ConfigError for an unknown option, and for one that it lacks."""
    if known := known_components().get(use.name):
        for name in use.options:
            if name not in known.options:
                unknown(f"option of the {known.kind} {use.name!r}", name, known.options)
        if missing := [name for name in known.required if name not in use.options]:
            raise ConfigError(f"the {known.kind} {use.name!r} needs {', '.join(missing)}: {use.name}({missing[0]}=…)")
    return use


def split_pieces(text: str) -> list[str]:
    """The text cut at every + outside of brackets and quotes, without blanks. Raises ConfigError for a blank inside a
    word or a number."""
    pieces, depth, quote, escaped = [""], 0, "", False
    for place, sign in enumerate(text):
        if escaped or sign == "\\":
            escaped = not escaped
        elif quote or sign in "'\"":
            quote = "" if sign == quote else quote or sign
        else:
            depth += (sign in "([{") - (sign in ")]}")
        if sign == "+" and not depth and not quote:
            pieces.append("")
        elif quote or not sign.isspace():
            if not quote and text[:place][-1:].isspace() and WORD.fullmatch(pieces[-1][-1:] + sign):
                raise ConfigError(f"arm {text!r} has a blank before {text[place:]!r:.40}. Join its pieces by +.")
            pieces[-1] += sign
    return pieces


def _start_from(use: Component, methods: Mapping[str, str]) -> Arm:
    """The arm of the first component of a text."""
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
    """Raise ConfigError for an option of another component of the method than its loss: of `tis(cap=5)` the loss has a
    `cap`, too."""
    for field in SEVERAL:
        for part in getattr(method, field):
            known = known_components().get(part.name)
            if known and (names := [name for name in use.options if name in known.options]):
                new = Component(part.name, **{**part.options, names[0]: use.options[names[0]]})
                raise ConfigError(
                    f"{_spell_use(use)}: {names[0]} is an option of {part.name}. Write {use.name}+{field}="
                    f"{_spell_use(new)}, or begin with {Component.of(method.loss).name}(…) for its loss."
                )


def _field_of(text: str, use: Component, methods: Mapping[str, str]) -> str:
    """The field of a component, by its kind."""
    if (field := _known_field(use)) is not None:
        return field
    if use.own:
        raise ConfigError(f"arm {text!r}: name the field of {use.name}, e.g. terms={use.name}: {', '.join(FIELDS)}")
    if use.name in methods:
        raise ConfigError(f"arm {text!r}: {use.name} is the method {methods[use.name]}, and can only come first")
    unknown("component", use.name, known_components())


def _known_field(use: Component) -> str | None:
    known = known_components().get(use.name)
    return FIELD[known.kind] if known else None


def _names_for(field: str) -> list[str]:
    """The components for a field of an arm."""
    return [n for n, known in known_components().items() if FIELD[known.kind] == SAME_COMPONENTS.get(field, field)]


def _read_piece(text: str, piece: str) -> tuple[str | None, Component]:
    """The field of a piece, where it has one, and its component."""
    match = PIECE.fullmatch(piece)
    if match is None:
        raise ConfigError(f"arm {text!r}: {piece!r} cannot be read. Write name, name(option=value,…) or field=name.")
    field, name, options = match.groups()
    if field is not None and field not in FIELDS:
        unknown("field of an arm", field, FIELDS)
    use = Component(name, **read_options(options or "", f"{piece!r} in arm {text!r}"))
    if use.options and (field in ("name", "anchor") or name == "none"):
        raise ConfigError(f"arm {text!r}: {piece!r} takes no options. Write {piece.partition('(')[0]}.")
    if field not in (None, "name", "anchor") and name != "none" and not use.own and name not in _names_for(field):
        if known := _known_field(use):
            raise ConfigError(f"arm {text!r}: {name} goes into {known}, not into {field}")
        names = _names_for(field)
        unknown(f"component for {field}", name, [*names, "pkg.module:name"], suggest_field(name, names))
    return field, use


# ---------------------------------------------------------------------- arm → text
def spell(arm: Arm, methods: Mapping[str, str]) -> str:
    """The text of this arm for `parse`, its name included."""
    text = spell_components(arm, methods)
    if text == arm.name:
        return text
    return f"{text}+name={arm.name if PLAIN.fullmatch(arm.name) else repr(arm.name)}"


def spell_components(arm: Arm, methods: Mapping[str, str], form: Callable[[Part], Component] = Component.of) -> str:
    """The text of an arm without its name; `form` completes each component."""
    loss = Component.of(arm.loss)
    more = loss.name in methods and parse(loss.name, methods) != Arm(name=loss.name, loss=loss.name)
    pieces = [f"{'loss=' if more or loss.own else ''}{_spell_use(form(loss))}"]
    for field in FIELDS:
        value = getattr(arm, field)
        if field in ("name", "loss") or value == getattr(DEFAULT, field):
            continue
        if field == "anchor":
            pieces.append(f"anchor={value}")
            continue
        uses = map(form, value if field in SEVERAL else (value,))
        pieces += [
            _spell_use(use) if field != "advantage" and _known_field(use) == field else f"{field}={_spell_use(use)}"
            for use in uses
        ] or [f"{field}=none"]
    return "+".join(pieces)


def fill_in(part: Part) -> Component:
    """A component with all its options, defaults included."""
    part = Component.of(part)
    known = known_components().get(part.name)
    options = {**(known.options if known else {}), **part.options}
    if known and "options" in options:  # of the component that `base` or `rule` names
        inner = Component(options.get("base") or options["rule"], **(options["options"] or {}))
        options["options"] = dict(fill_in(inner).options)
    return Component(part.name, **{name: value for name, value in options.items() if value != REQUIRED})


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
    if isinstance(value, list):
        return "[" + ",".join(map(_spell_value, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_spell_value(item)}," for item in value) + ")"
    return repr(value)
