"""`Component(name, **options)`: how a configuration names a function or a class, and the one importer of what it
names."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

from pydantic import Field, PydanticUserError, TypeAdapter, ValidationError

from moe_rl.errors import ConfigError, MoeRlError

F = TypeVar("F", bound=Callable[..., Any])
CALL = re.compile(r"([^\s()]+)\((.*)\)", re.DOTALL)
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
AtLeastOne = Annotated[float, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
"""Ranges of options, as annotations of parameters, which `lookup` checks. Those without an upper end include inf."""
WORDS = {"inf": math.inf, "nan": math.nan, "true": True, "false": False}
"""What words among the values of options mean; any other is a string."""


@dataclass(frozen=True, init=False)
class Component:
    """A name and the keyword arguments that go with it: `Component("grpo", clip_high=0.28)`.

    The name is one that the package knows, or a user's own `pkg.module:name`. Where a Component is wanted, a plain
    string stands for one without options.
    """

    name: str
    options: Mapping[str, Any] = field(hash=False)

    def __init__(self, name: str, /, **options: Any) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", options)

    @staticmethod
    def of(part: Part | Mapping[str, Any]) -> Component:
        """A Component from any of its forms; the mapping is its JSON. Raises ConfigError for anything else."""
        if isinstance(part, Component):
            return part
        if isinstance(part, str) and part:
            return Component(part)
        if isinstance(part, Mapping) and set(part) == {"name", "options"}:
            return Component(part["name"], **part["options"])
        raise ConfigError(f'{part!r} is not the name of a component. Write "name", or Component("name", option=value).')

    @staticmethod
    def read(part: Part | Mapping[str, Any]) -> Component:
        """As `of`; of a text, `name(option=value, …)` is read with its options."""
        if isinstance(part, str) and (match := CALL.fullmatch(part.strip())):
            return Component(match[1], **read_options(match[2], f"{part!r}"))
        return Component.of(part)

    def __str__(self) -> str:
        """As it is written: `grpo(clip_high=0.28)`."""
        return self.name + (f"({', '.join(f'{k}={v!r}' for k, v in self.options.items())})" if self.options else "")

    @property
    def own(self) -> bool:
        """Whether it names code from outside the package."""
        module, colon, attribute = self.name.partition(":")
        return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


Part = str | Component
"""What configurations take wherever something is named."""
Known = Mapping[str, Callable[..., Any] | str]
"""Components by name: functions and classes, or `pkg.module:name` of one that is imported when it is looked up."""


def read_options(text: str, where: str) -> dict[str, Any]:
    """`cap=2.0,level=token` as values: literals of Python, infinity, and words, which are strings. Raises ConfigError,
    which names `where`."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError("its first bracket is closed before the text ends")
        named = [(keyword.arg, ast.literal_eval(_Words().visit(keyword.value))) for keyword in call.keywords]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"the options of {where} cannot be read. Write name=value, where a value is a number, a "
            "word, 'text', a list or a dictionary, in one pair of brackets."
        ) from error
    names = [name for name, _ in named if name]
    if call.args or len(set(names)) < len(named):
        raise ConfigError(f"the options of {where} must be name=value, and no name may appear twice")
    return {name: value for name, value in named if name}


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(WORDS.get(node.id, node.id))


def lookup(
    kind: str,
    use: Part,
    known: Known,
    hint: Callable[[str, Collection[str]], str] | None = None,
) -> Callable[..., Any]:
    """The function or class that `use` names, one of `known` or a user's own, its options bound.

    Options are the callable's keyword-only parameters, and their annotations say which values they may have. `hint` is
    asked for what an unknown name is elsewhere. Raises ConfigError, before anything is called, for a name that is not
    there, for an option that the callable does not have, for one that it needs, and for a value that is out of range.
    """
    use = Component.of(use)
    if use.name in known:
        named = known[use.name]
        function = import_component(kind, use.name, named) if isinstance(named, str) else named
    elif use.own:
        function = import_callable(kind, use.name)
    else:
        unknown(kind, use.name, [*known, "pkg.module:name"], hint(use.name, known) if hint else "")
    check_options(kind, use, function)
    check_values(use, function)
    return partial(function, **use.options) if use.options else function


STUDY = {"filelock", "jinja2", "matplotlib", "pandas", "pyarrow", "rich", "scipy"}
"""The packages of the extra `study`, which most commands import."""
EXTRAS = {**dict.fromkeys(STUDY, "study"), "megatron": "megatron", "trl": "trl", "vllm": "vllm"}
"""The extra that brings a package."""


def import_component(kind: str, name: str, path: str) -> Callable[..., Any]:
    """A component of the package, `moe_rl.module:name`. Raises ConfigError where a package that it needs is not
    installed."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or module
        package = missing.partition(".")[0]
        how = f": pip install 'moe_rl[{EXTRAS[package]}]'" if package in EXTRAS else ""
        raise ConfigError(f"the {kind} {name!r} needs {missing}, which is not installed{how}") from error


def import_callable(kind: str, name: str) -> Callable[..., Any]:
    """The callable that `pkg.module:name` names; the working directory is importable. Raises ConfigError when it is not
    there. An error inside the module is its own and passes."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # stays there: the module may import its neighbours later
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and one of its own imports fails
        raise ConfigError(f"{kind} {name!r}: no module {error.name!r} in {Path.cwd()}, nor on PYTHONPATH") from error
    if not callable(function):
        public = [n for n, v in vars(sys.modules[module]).items() if callable(v) and not n.startswith("_")]
        unknown(f"{kind} in the module {module}", attribute, public)
    return function


def check_options(kind: str, use: Component, function: Callable[..., Any], said: Collection[str] | None = None) -> None:
    """Raise ConfigError for options that the callable does not take by keyword alone, or lacks; of a class, whose
    parameters are all options, for others than these without those `said` already."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    options = {
        p.name: p
        for p in parameters
        if p.kind is p.KEYWORD_ONLY or said is not None and p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in said
    }
    for name in use.options:
        if name not in options:
            unknown(f"option of the {kind} {use.name!r}", name, options)
        if isinstance(use.options[name], float) and math.isnan(use.options[name]):
            raise ConfigError(f"the {kind} {use.name!r}: {name}=nan is not a number")
    if missing := [n for n, p in options.items() if p.default is p.empty and n not in use.options]:
        raise ConfigError(
            f"the {kind} {use.name!r} needs {', '.join(missing)}: Component({use.name!r}, {missing[0]}=…)"
        )


def check_values(use: Component, function: Callable[..., Any]) -> None:
    """Raise ConfigError for the value of an option that the annotation of the parameter does not allow."""
    function = inspect.unwrap(getattr(function, "func", function))  # of a partial
    parameters = inspect.signature(function).parameters
    for option, value in use.options.items():
        adapter = _adapter(function, option) if option in parameters and isinstance(function, Hashable) else None
        try:
            if adapter is not None:
                adapter.validate_python(value)
        except ValidationError as error:
            reasons = " or ".join(dict.fromkeys(detail["msg"] for detail in error.errors(include_url=False)))
            raise ConfigError(f"{use.name}({option}={value!r}): {reasons}") from None


@functools.cache
def _adapter(function: Callable[..., Any], option: str) -> Any:
    """The TypeAdapter that checks the values of an option; None where pydantic cannot check its type."""
    try:
        if is_dataclass(function):
            annotation = get_type_hints(function, include_extras=True)[option]
        else:
            annotation = inspect.signature(function).parameters[option].annotation
        if isinstance(annotation, str):
            code = inspect.unwrap(vars(function).get("__init__", function) if isinstance(function, type) else function)
            names = getattr(code, "__globals__", None) or code.__call__.__globals__
            alone = type("alone", (), {"__annotations__": {option: annotation}})  # others may name what is not there
            annotation = get_type_hints(alone, names, include_extras=True)[option]
        return None if annotation is inspect.Parameter.empty else TypeAdapter(annotation, config={"strict": True})
    except (NameError, AttributeError, TypeError, PydanticUserError):  # of a user's own, e.g. imported for mypy alone
        return None


def needs(*what: str, when: Callable[..., bool] | None = None) -> Callable[[F], F]:
    """Mark a part with what it must be given, e.g. `reference` or `scores`, so that nobody else pays for it; where that
    depends on its options, `when` is called with those that are given."""

    def mark(function: F) -> F:
        function.needs, function.when = frozenset(what), when  # type: ignore[attr-defined]  # they take any attribute
        return function

    return mark


@contextmanager
def on_a_test_token(name: str) -> Iterator[None]:
    """Raise ConfigError, with file and line, where components that `name` is made of fail in the block."""
    try:
        yield
    except MoeRlError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{name} failed on a test token ({at.filename}:{at.lineno}: {type(error).__name__}: {error}). Check the "
            "types of its options, what it returns, and that moe_rl.registry.needs names what it reads."
        ) from error


def needs_of(part: Callable[..., Any] | None) -> frozenset[str]:
    """What a part that `lookup` gave was marked with; nothing, where there is none."""
    function, options = (part.func, part.keywords) if isinstance(part, partial) else (part, {})
    when = getattr(function, "when", None)
    return getattr(function, "needs", frozenset()) if when is None or when(**options) else frozenset()


def checked(check: Callable[..., Any]) -> Callable[[F], F]:
    """Mark a component with what checks a run before compute: `check(run, **options)` raises ConfigError; what it
    returns is of its kind."""

    def mark(function: F) -> F:
        function.check = check  # type: ignore[attr-defined]  # they take any attribute
        return function

    return mark


def check_component(part: Callable[..., Any], run: Any) -> Any:
    """Have a component that `lookup` gave check the run, where it brings a check; what that returns."""
    function, options = (part.func, part.keywords) if isinstance(part, partial) else (part, {})
    check = getattr(function, "check", None)
    return check and check(run, **options)


def split_list(text: str | None) -> list[str]:
    """The parts of a text between commas, as `grpo,dapo(a=1,b=2)` has two; commas in brackets belong to a part."""
    parts = re.findall(r"(?:[^,()]|\([^()]*\))+", text or "")
    return [part.strip() for part in parts if part.strip()]


def unknown(kind: str, name: str, choices: Iterable[str], other: str = "") -> NoReturn:
    """Raise a ConfigError that names what was asked for, the closest matches and all choices, unless something comes
    close and they would fill the screen. `other`: what the name, or one like it, is elsewhere; said where the name is
    just that, or nothing here comes close."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=3) or difflib.get_close_matches(name.lower(), choices, n=3)
    hint = f": did you mean {' or '.join(close)}?" if close else "."
    hint = f": {other}." if other and (not close or other.startswith(f"{name} ")) else hint
    all_of_them = "" if close and len(choices) > 40 else f" There are: {', '.join(choices) or 'none'}."
    raise ConfigError(f"no {kind} is called {name!r}{hint}{all_of_them}")
