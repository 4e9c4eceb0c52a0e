"""Messages are short: what is wrong, and what to do, in two sentences of at most 30 words; a third may be a command."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_rl import cli

ROOT = Path(__file__).parents[1]
SENTENCES, WORDS = 2, 30
PRINTERS = {"say", "print", "warn", "error", "require", "refuse", "report", "unknown"}
"""Functions that print or raise the text that they are given."""
COMMAND = re.compile(r"`|moe-rl |pip install|--\w")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|cf)\.")
VALUE = "X"
"""What stands in a message for a value, as one word."""


def sentences(text: str) -> list[str]:
    """The sentences of a text, a line at a time."""
    lines = [re.split(r"(?<=[.!?])\s+", ABBREVIATIONS.sub(r"\1", line)) for line in text.splitlines()]
    return [sentence for line in lines for sentence in line if re.search(r"[a-z]", sentence)]


def breaks(text: str) -> list[str]:
    """The sentences that break the rule."""
    found = sentences(text)
    third = [one for one in found[SENTENCES : SENTENCES + 1] if not COMMAND.search(one)]
    return [one for one in found if len(one.split()) > WORDS] + third + found[SENTENCES + 1 :]


def error_classes(trees: dict[Path, ast.Module]) -> set[str]:
    """The names of the errors of the package, without an import: some modules need packages that are not here."""
    bases = {node.name: {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
             for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = {"MoeRlError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def texts(node: ast.expr, local: dict[str, list[ast.expr]]) -> list[str]:
    """What an expression can be as a text, `VALUE` for each value; nothing, if it has no text of its own."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp(body=body, orelse=orelse):
            return texts(body, local) + texts(orelse, local)
        case ast.Name(id=name):
            return [text for value in local.get(name, []) for text in texts(value, {})]
        case ast.JoinedStr(values=values):
            parts = [texts(part.value if isinstance(part, ast.FormattedValue) else part, local) for part in values]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [texts(left, local), texts(right, local)]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return texts(left, local) or texts(right, local)
        case ast.Tuple(elts=[first, *_]):
            return texts(first, local)
        case _:
            return []
    longest = [max(part or [VALUE], key=lambda text: len(text.split())) for part in parts]
    return ["".join(longest)] if any(parts) else []


def assigned(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """By the names of a function's local variables, the expressions that they are given."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) | \
                 ast.NamedExpr(target=ast.Name(id=name), value=value):  # fmt: skip
                found.setdefault(name, []).append(value)
    return found


def messages() -> Iterator[tuple[str, str]]:
    """Every message of the package: its file and line, and its text."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "moe_rl").rglob("*.py"))}
    raised = error_classes(trees) | PRINTERS
    for path, tree in trees.items():
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            local = assigned(function)
            for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
                if getattr(call.func, "id", getattr(call.func, "attr", "")) in raised:
                    for text in [text for given in call.args for text in texts(given, local)]:
                        yield f"{path.relative_to(ROOT)}:{call.lineno}", text


def helps(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of a command's help, from its parser: the summary, the options, and what follows the examples."""
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args",
                        lambda parser, words: (parsers.append(parser), (argparse.Namespace(), []))[1])
    cli.parsed(name.split())
    (parser,) = parsers
    epilog = [line for line in str(parser.epilog).splitlines() if not line.startswith(" ")]
    return [str(parser.description), *(action.help or "" for action in parser._actions), " ".join(epilog)]


def test_the_rule_counts_words_and_sentences():
    assert not breaks("x=1 is wrong. Use 2.") and not breaks("A. B. Run `moe-rl x`.") and not breaks("e.g. a. B.")
    assert breaks("One. Two. Three.") == ["Three."] and breaks("word " * 31)
    (text,) = texts(ast.parse("f'a {b} ' + ('c' if d else 'c e')").body[0].value, {})  # type: ignore[attr-defined]
    assert text == "a X c e"


def test_a_message_is_two_short_sentences():
    found = {*messages()}
    assert len(found) > 600
    long = [f"{where}: {sentence}" for where, text in sorted(found) for sentence in breaks(text)]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_help_text_is_two_short_sentences(name, monkeypatch):
    long = [f"moe-rl {name}: {sentence}" for text in helps(name, monkeypatch) for sentence in breaks(text)]
    assert not long, "\n".join(long)
