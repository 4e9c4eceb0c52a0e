"""Which parts there are, of which kind, with which options: read from the source of their registries, so that naming
one waits for no torch (seconds), and a part is written down in one place. A test holds this against the registries."""

from __future__ import annotations

import ast
import difflib
import functools
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REGISTRIES = (
    ("loss", "moe_rl.objectives.losses", "LOSSES"),
    ("loss", "moe_rl.objectives.router", "ROUTER_LOSSES"),
    ("aggregation", "moe_rl.objectives.aggregate", "AGGREGATIONS"),
    ("correction", "moe_rl.objectives.corrections", "CORRECTIONS"),
    ("term", "moe_rl.objectives.terms", "TERMS"),
    ("term", "moe_rl.objectives.router", "ROUTER_TERMS"),
    ("advantage", "moe_rl.objectives.advantages", "ADVANTAGES"),
    ("routes", "moe_rl.routing.sources", "SOURCES"),
)
"""Kind of part, and the module and dictionary that list its names."""
FIELD = {"loss": "loss", "aggregation": "aggregate", "correction": "corrections", "term": "terms",
         "advantage": "advantage", "routes": "routes"}
"""Kind of part → the field of an `Arm` that it goes into."""
SENTENCE = re.compile(r"(?<!\bDr)\. (?=[A-Z])")
REQUIRED = "…"
"""Stands for the default of an option that must be given."""


@dataclass(frozen=True)
class Described:
    """A part as its source describes it."""

    kind: str
    name: str
    options: Mapping[str, Any]
    """Keyword-only options and their defaults; `REQUIRED` where there is none."""
    text: str
    """The docstring."""

    @property
    def equation(self) -> str:
        """The first sentence of the docstring, in one line."""
        return SENTENCE.split(" ".join(self.text.partition("\n\n")[0].split()))[0].rstrip(".")


@functools.cache
def parts() -> Mapping[str, Described]:
    """Every part by name; a name is of one kind only."""
    return {name: Described(kind, name, _options(module, function), ast.get_docstring(function) or "")
            for kind, home, registry in REGISTRIES
            for name, module, function in _entries(home, registry)}


def names(home: str, registry: str) -> list[str]:
    """The keys of a literal dictionary of a module, which is not imported."""
    _, table = _defined(home, registry)
    assert isinstance(table, ast.Dict), f"{home}.{registry} is written as a dictionary"
    return [ast.literal_eval(key) for key in table.keys if key is not None]


def elsewhere(name: str, choices: Collection[str]) -> str:
    """What a name, or the closest to it, is of another kind than that of `choices`: `grpo is a loss, and goes into
    Arm(loss=…)`; empty where it is nothing."""
    others = {n: f"is of the kind {part.kind}, and goes into Arm({FIELD[part.kind]}=…)" for n, part in parts().items()}
    whole = "is a whole method: an arm by itself, arms=({!r},), or --arm {}"
    others = {n: whole.format(n, n) for n in _methods()} | others
    for found in difflib.get_close_matches(name, others.keys() - {*choices}, n=1, cutoff=0.8):
        return f"{found} {others[found]}"
    return ""


@functools.cache
def _methods() -> list[str]:
    file = Path(__file__).parents[1] / "methods" / "methods.toml"
    return list(tomllib.loads(file.read_text(encoding="utf-8"))["methods"])


def _entries(home: str, registry: str) -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """Name, module and definition of every function in a literal dictionary, which may take others in by `**`."""
    module, table = _defined(home, registry)
    assert isinstance(table, ast.Dict), f"{home}.{registry} is written as a dictionary"
    for key, value in zip(table.keys, table.values, strict=True):
        assert isinstance(value, ast.Name), f"{home}.{registry} names functions"
        if key is None:
            yield from _entries(module, value.id)
            continue
        name = ast.literal_eval(key)
        where, function = _defined(module, value.id)
        assert isinstance(function, ast.FunctionDef), f"{name} is a function"
        yield name, where, function


def _defined(module: str, name: str) -> tuple[str, ast.AST]:
    """Where a name of a module is defined, and as what: a function, or the value it was given."""
    for node in _tree(module).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return module, node.value
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _defined(node.module, alias.name)
    raise AssertionError(f"{module} has no {name}")


def _options(module: str, function: ast.FunctionDef) -> dict[str, Any]:
    defaults = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return {option.arg: REQUIRED if node is None else _value(module, node) for option, node in defaults}


def _value(module: str, node: ast.expr) -> Any:
    """A default: a literal, a constant of the module, or infinity."""
    if ast.unparse(node).removeprefix("-") in ("inf", "math.inf", "torch.inf", "float('inf')"):
        return float("-inf" if isinstance(node, ast.UnaryOp) else "inf")
    if isinstance(node, ast.Name):
        where, found = _defined(module, node.id)
        assert isinstance(found, ast.expr), f"{node.id} is a value"
        return _value(where, found)
    return ast.literal_eval(node)


@functools.cache
def _tree(module: str) -> ast.Module:
    path = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))
