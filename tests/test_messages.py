"""Every message of the package is short: what is wrong, and what to do, in at most two sentences of 30 words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moe_rl.cli import COMMANDS, GROUPS, verb_of

ROOT = Path(__file__).parents[1]
SENTENCES, WORDS = 2, 30
PRINTERS = {"say", "print", "warn", "warning", "error", "require", "refuse", "report", "unknown"}
"""Functions and methods that print or raise the texts they are given."""
FILES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "moe_rl").rglob("*.py"))}


class Message(NamedTuple):
    where: str
    text: str


def error_classes() -> set[str]:
    """The names of the classes below `MoeRlError`, found without an import: some modules need packages of others."""
    bases = {node.name: {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
             for tree in FILES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = {"MoeRlError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def texts(node: ast.AST, local: dict[str, list[ast.expr]]) -> list[str]:
    """What an expression may be, one word in the place of each value; nothing, if it holds no text of its own."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp():
            return texts(node.body, local) + texts(node.orelse, local)
        case ast.Tuple() | ast.Starred() | ast.Attribute():
            return []
        case ast.Name(id=name):
            return [text for value in local.get(name, []) for text in texts(value, {})]
        case ast.JoinedStr():
            parts = [[str(part.value)] if isinstance(part, ast.Constant) else value_texts(part, local)
                     for part in node.values]
        case ast.BinOp(op=ast.Add()):
            parts = [texts(side, local) or ["X"] for side in (node.left, node.right)]
        case ast.BinOp(op=ast.Mult()):
            return [text for side in (node.left, node.right) for text in texts(side, local)]
        case _:
            return []
    longest = ["".join(max(part, key=lambda text: len(text.split())) for part in parts)]
    return longest if set(longest) != {"X"} else []


def value_texts(part: ast.AST, local: dict[str, list[ast.expr]]) -> list[str]:
    assert isinstance(part, ast.FormattedValue)
    return texts(part.value, local) or ["X"]


def assigned(function: ast.AST) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found.setdefault(name, []).append(value)
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                found.setdefault(name, []).append(value)
    return found


def messages() -> Iterator[Message]:
    errors = error_classes()
    for path, tree in FILES.items():
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            local = assigned(function)
            for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
                name = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if name not in errors | PRINTERS:
                    continue
                for given in call.args:
                    shown = given.elts[0] if isinstance(given, ast.Tuple) and given.elts else given
                    for text in texts(shown, local):
                        yield Message(f"{path.relative_to(ROOT)}:{call.lineno}", text)


def sentences(text: str) -> list[str]:
    text = re.sub(r"\b(e\.g|i\.e|cf|et al)\.", r"\1", " ".join(text.split()))
    return [one for one in re.split(r"(?<=[.!?])\s+", text) if re.search(r"[a-z]", one)]


def long_parts(text: str) -> list[str]:
    """The sentences that break the rule; one more may hold a command to type."""
    found = sentences(text)
    last = found[SENTENCES:]
    more = last[1:] if last and re.search(r"`|moe-rl |pip install", last[0]) else last
    return [one for one in found if len(one.split()) > WORDS] + more


def helps() -> Iterator[Message]:
    """Of every command its summary and what it says of its arguments."""
    for name, (_, summary) in COMMANDS.items():
        yield Message(f"moe-rl {name}", summary)
        for flags, settings in verb_of(name).arguments:
            yield Message(f"moe-rl {name} {flags[0]}", settings.get("help", ""))
    for name, summary in GROUPS.items():
        yield Message(f"moe-rl {name}", summary)


def test_every_message_and_every_help_text_is_short():
    found = [*messages(), *helps()]
    assert len(found) > 700, "the texts are no longer found"
    assert [f"{where}: {part}" for where, text in found for part in long_parts(text)] == []


def test_what_is_too_long_is_found():
    """One sentence of 31 words, a third sentence, and a third one that is a command."""
    assert len(long_parts(f"{'word ' * 30}word.")) == 1 and not long_parts(f"{'word ' * 29}word. Two.")
    assert long_parts("One is wrong. Do two. And three.") == ["And three."]
    assert long_parts("One is wrong. Do two. Try `moe-rl run`.") == []
