"""Arms as one line of text, and back.

    sapo(tau_neg=1.05)+old_policy
    grpo+token_mean+masked(low=0.5,high=5.0)+kl(coef=0.04)+name=mine
    gspo+overlong(limit=20,buffer=4)+group+filters=masked(high=2.0)
    loss=mine:reinforce+terms=mine:stay(coef=0.1)

The first part is a method, a preset or a loss; its options are those of the part that has its name, or the loss's. The
others are named as the registries do, and add to it. A field of `Arm` before a part says where it goes, and that it
replaces what the method has there: so are said `filters`, `ratio_routes`, `anchor`, `name` and functions of one's own;
`terms=none` empties a field. Advantage steps have an order, so those that are named are all of them, and one of
`BASELINES` is among them.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.lookup import Part, Use, unknown
from moe_rl.lookup.parts import FIELD, REQUIRED, elsewhere, parts

BASELINES = ("group", "leave_one_out", "normalized", "opo", "gae")
"""Advantage steps that compare a response with others, or with what a critic expects."""
SEVERAL = ("corrections", "filters", "terms", "advantage")
"""Fields that hold any number of parts."""
DEFAULT = Arm(name="")
FIELDS = list(Arm.model_fields)
SAME_PARTS = {"filters": "corrections", "ratio_routes": "routes"}
WORDS = {"inf": math.inf, "nan": math.nan, "true": True, "false": False}
"""What words among the values of options mean; any other is a string."""
PLAIN = re.compile(r"[\w.:-]+")
PIECE = re.compile(r"""(?:(\w+)=)?([\w.:-]+|'[^']*'|"[^"]*")(?:\((.*)\))?""", re.DOTALL)


def parse(text: str, methods: Mapping[str, str]) -> Arm:
    """The arm that a text spells. `methods`: names that may come first, and how each is spelled.

    Its name is the text without blanks, if no `name=` is given. Raises ConfigError for a name or an option that is not
    there, for a part where the method has one, and for what cannot be read.
    """
    head, *rest = pieces(text)
    field, use = _read(text, head)
    if field not in (None, "loss"):
        raise ConfigError(f"arm {text!r} begins with {head!r}: first comes a method, a preset, a loss, or loss=…")
    start = _start(use, {} if field else methods)
    given: dict[str, Any] = {}
    for piece in rest:
        field, use = _read(text, piece)
        where = field or _field_of(text, use, methods)
        if where not in SEVERAL and (where in given or where == "loss"):
            raise ConfigError(f"arm {text!r} has more than one {where}; an arm has one")
        if where in ("name", "anchor"):
            given[where] = ast.literal_eval(use.name) if use.name[0] in "'\"" else use.name
        elif where not in SEVERAL:
            if field is None and getattr(start, where) != getattr(DEFAULT, where):
                raise ConfigError(f"arm {text!r}: {head} has {where}={getattr(start, where)} already; to replace it, "
                                  f"write {where}={piece}")
            if use.name == "none" and getattr(DEFAULT, where) is not None:
                raise ConfigError(f"arm {text!r}: {where} cannot be empty, only replaced")
            given[where] = None if use.name == "none" else checked(use)
        else:
            before = () if field or where == "advantage" else getattr(start, where)
            given[where] = () if use.name == "none" else (*given.get(where, before), checked(use))
    said = given.get("advantage")
    if said and "advantage=" not in text and not any(step.name in BASELINES for step in said):
        steps = "+".join(map(_text, said))
        raise ConfigError(f"arm {text!r} names advantage steps, which are then all of them, but none that compares a "
                          f"response with others or a critic ({', '.join(BASELINES)}): write group+{steps} or "
                          f"{steps}+group, or, if that is what you mean, advantage={steps}")
    return start.replace(**{"name": "".join(text.split()), **given})


def spelled(arm: Arm, methods: Mapping[str, str]) -> str:
    """The text that `parse` reads as this arm, its name included."""
    loss = Use.of(arm.loss)
    more = loss.name in methods and parse(loss.name, methods) != Arm(name=loss.name, loss=loss.name)
    pieces = [f"{'loss=' if more or loss.own else ''}{_text(loss)}"]
    for field in FIELDS:
        value = getattr(arm, field)
        if field in ("name", "loss") or value == getattr(DEFAULT, field):
            continue
        if field == "anchor":
            pieces.append(f"anchor={value}")
            continue
        uses = value if field in SEVERAL else (value,)
        pieces += [_text(use) if field != "advantage" and _known_as(use) == field else f"{field}={_text(use)}"
                   for use in uses] or [f"{field}=none"]
    text = "+".join(pieces)
    if text == arm.name:
        return text
    return f"{text}+name={arm.name if PLAIN.fullmatch(arm.name) else repr(arm.name)}"


def checked(use: Use) -> Use:
    """A part whose options its function has. Raises ConfigError for one that it has not, and for one that it lacks."""
    if use.name in parts():
        part = parts()[use.name]
        for name in use.options:
            if name not in part.options:
                unknown(f"option of the {part.kind} {use.name!r}", name, part.options)
        if missing := [n for n, default in part.options.items() if default is REQUIRED and n not in use.options]:
            raise ConfigError(f"the {part.kind} {use.name!r} needs {', '.join(missing)}: {use.name}({missing[0]}=…)")
    return use


def _start(use: Use, methods: Mapping[str, str]) -> Arm:
    """What the first part of a text stands for."""
    if use.name in methods:
        method = parse(methods[use.name], {})
        field = _known_as(use) or "loss"
        if use.name.rpartition(":")[2] not in (field, Use.of(method.loss).name) and field == "loss":
            _unambiguous(use, method)

        def more(part: Part) -> Use:
            part = Use.of(part)
            mine = field == "loss" or part.name == use.name
            return checked(Use(part.name, **{**part.options, **use.options})) if mine else part

        value = getattr(method, field)
        changed: Any = tuple(map(more, value)) if field in SEVERAL else more(value)
        return method.replace(**{field: changed})
    families = {name.partition(":")[0] for name in methods if ":" in name}
    if _known_as(use) != "loss" and (not use.own or use.name.partition(":")[0] in families):
        losses = [part.name for part in parts().values() if part.kind == "loss"]
        choices = {*methods, *losses, "pkg.module:name"}
        unknown("method, preset or loss", use.name, choices, elsewhere(use.name, choices))
    return Arm(name="", loss=checked(use))


def _unambiguous(use: Use, method: Arm) -> None:
    """Raise ConfigError for an option that a part of the method has which is not its loss: `tis(cap=5)`, where the loss
    has a `cap` of its own."""
    loss = Use.of(method.loss).name
    for field in SEVERAL:
        steps = getattr(method, field)
        for part in steps:
            for name in use.options if part.name in parts() else ():
                if name in parts()[part.name].options:
                    said = Use(use.name, **{name: use.options[name]})
                    new = Use(part.name, **{**part.options, name: use.options[name]})
                    text = "+".join(f"{field}={_text(new if step is part else step)}" for step in steps)
                    mine = f", or, for the loss, begin with {loss}(…)" if name in parts()[loss].options else ""
                    raise ConfigError(f"{_text(said)}: {name} is an option of its {part.name}: write {use.name}+{text}"
                                      f"{mine}")


def _field_of(text: str, use: Use, methods: Mapping[str, str]) -> str:
    """The field that a part goes into, by its kind."""
    if (field := _known_as(use)) is not None:
        return field
    if use.own:
        raise ConfigError(f"arm {text!r}: say what {use.name} is, e.g. terms={use.name}; a field of an arm is one of "
                          f"{', '.join(FIELDS)}")
    if use.name in methods:
        added = methods[use.name].partition("+")[2]
        raise ConfigError(f"arm {text!r}: {use.name} is a whole method, and can only come first"
                          + (f"; the part that you may mean is {added}" if added else ""))
    unknown("part", use.name, parts())


def _known_as(use: Use) -> str | None:
    return FIELD[parts()[use.name].kind] if use.name in parts() else None


def pieces(text: str) -> list[str]:
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


def _read(text: str, piece: str) -> tuple[str | None, Use]:
    """The field that a piece names, if it does, and its part."""
    match = PIECE.fullmatch(piece)
    if match is None:
        raise ConfigError(f"arm {text!r}: {piece!r} cannot be read; parts are name, name(option=value,…) or "
                          "field=name, joined by +")
    field, name, options = match.groups()
    if field is not None and field not in FIELDS:
        unknown("field of an arm", field, FIELDS)
    use = Use(name, **_options(text, piece, options or ""))
    known = _known_as(use)
    if field not in (None, "name", "anchor") and known not in (None, SAME_PARTS.get(field, field)):
        raise ConfigError(f"arm {text!r}: {name} belongs into {known}, not into {field}")
    if field not in (None, "name", "anchor") and known is None and not use.own and name != "none":
        fitting = [p.name for p in parts().values() if FIELD[p.kind] == SAME_PARTS.get(field, field)]
        unknown(f"part for {field}", name, [*fitting, "pkg.module:name"], elsewhere(name, fitting))
    return field, use


def _options(text: str, piece: str, options: str) -> dict[str, Any]:
    """`cap=2.0,level=token` as values: literals of Python, infinity, and words, which are strings."""
    try:
        call = ast.parse(f"f({options})", mode="eval").body
        assert isinstance(call, ast.Call)
        named = [(keyword.arg, ast.literal_eval(_Words().visit(keyword.value))) for keyword in call.keywords]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"arm {text!r}: the options of {piece!r} cannot be read; they are name=value, where a value "
                          "is a number, a word, 'text', a list or a dictionary") from error
    names = [name for name, _ in named if name]
    if call.args or len(set(names)) < len(named):
        raise ConfigError(f"arm {text!r}: the options of {piece!r} are name=value, each once")
    return {name: value for name, value in named if name}


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(WORDS.get(node.id, node.id))


def _text(use: Use) -> str:
    """A part as `parse` reads it."""
    use = Use.of(use)
    return use.name + (f"({','.join(f'{k}={_value(v)}' for k, v in use.options.items())})" if use.options else "")


def _value(value: Any) -> str:
    if isinstance(value, str):
        word = value.isascii() and value.isidentifier()  # Python reads other letters as their nearest equals
        return value if word and not iskeyword(value) and value not in WORDS else repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_value(k)}:{_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_value, value)) + "]"
    return repr(value)
