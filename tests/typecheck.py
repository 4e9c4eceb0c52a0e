"""The run-time type checker of the tests: every annotated shape in `moe_rl` is checked at every call.

What `jaxtyping.jaxtyped` puts on a function binds its arguments, and checks them twice at every call, which was 60 % of
the seconds of a tiny training. What `check` puts there refuses the same calls. Of the tensors inside a list, a tuple of
any length or a dictionary beartype looks at one, drawn at random.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import jaxtyping
import numpy as np
from beartype import BeartypeConf, beartype
from beartype.door import die_if_unbearable
from torch import Tensor

SETTINGS = BeartypeConf(is_pep484_tower=True, violation_type=TypeError)
"""An int is welcome where a float is asked for; what the library does about a TypeError, it does about these."""
with_types = beartype(conf=SETTINGS)
jaxtyped = jaxtyping.jaxtyped
ARRAYS = (Tensor, np.ndarray)
VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def install(package: str) -> None:
    """Check everything that is imported from `package` from now on."""
    jaxtyping.jaxtyped = lambda typechecker: check
    jaxtyping.install_import_hook(package, "tests.typecheck.with_types")


def check(made: Any) -> Any:
    """The function, or the dataclass, such that a call is refused where types or shapes are not those of annotations,
    or an axis has two lengths under one name. A function within another is checked for shapes alone: it is made anew
    at every call of the other, and mypy sees who calls it."""
    if isinstance(made, type):
        if dataclasses.is_dataclass(made) and "__init__" in vars(made) and made.__init__.__module__ != __name__:
            made.__init__ = check(made.__init__)
        return made
    if isinstance(made, classmethod | staticmethod):
        return type(made)(check(made.__func__))
    if isinstance(made, property):
        return property(*(part and check(part) for part in (made.fget, made.fset, made.fdel)))
    hints = {name: hint(annotation, made.__module__) for name, annotation in made.__annotations__.items()}
    if not any(map(has_shape, hints.values())):
        return made if "<locals>" in made.__qualname__ else typed(made, hints)
    if inspect.isgeneratorfunction(made):
        return jaxtyped(made, typechecker=with_types)
    classes = {name: hint for name, hint in hints.items() if is_class(hint)}
    others = {name: hint for name, hint in hints.items() if name not in classes}
    if not any(map(has_shape, others.values())) and not made.__code__.co_flags & VARIADIC:
        return once_per_shape(typed(made, others) if others else made, classes)
    checked = typed(made, hints)

    @functools.wraps(made)
    def with_axes(*arguments: Any, **named: Any) -> Any:
        with jaxtyped("context"):
            return checked(*arguments, **named)

    return with_axes


def typed(function: Callable, hints: dict[str, Any]) -> Callable:
    """Checked by beartype, which would refuse names that are imported for mypy alone."""
    written, function.__annotations__ = function.__annotations__, hints
    checked = with_types(function)
    checked.__annotations__ = function.__annotations__ = written
    return checked


def once_per_shape(function: Callable, hints: dict[str, Any]) -> Callable:
    """Checked when arguments, or a result, of such classes, dtypes and shapes are seen for the first time: of `hints`,
    which are classes, nothing else decides."""
    accepted: defaultdict[Hashable, set[Hashable]] = defaultdict(set)

    def require(values: dict[str, Any]) -> None:
        with jaxtyped("context"):
            for name in filter(hints.__contains__, values):
                die_if_unbearable(
                    values[name],
                    hints[name],
                    conf=SETTINGS,
                    exception_prefix=f"{function.__module__}.{function.__qualname__}: {name} ",
                )

    @functools.wraps(function)
    def remembering(*arguments: Any, **named: Any) -> Any:
        given: Hashable = tuple(map(kind, arguments))
        if named:
            given = (given, *named, *map(kind, named.values()))
        if given not in accepted:
            require(inspect.signature(function).bind(*arguments, **named).arguments)
        result = function(*arguments, **named)
        if (came := kind(result)) not in accepted[given]:
            require(inspect.signature(function).bind(*arguments, **named).arguments | {"return": result})
            accepted[given].add(came)
        return result

    return remembering


def kind(value: Any) -> Hashable:
    """All that an annotation can ask of a value, if it is a class."""
    return (type(value), value.dtype, value.shape) if isinstance(value, ARRAYS) else type(value)


def hint(annotation: Any, module: str) -> Any:
    """What an annotation means in its module; anything, where it names what is not there, or not yet."""
    try:
        return resolved(annotation, module)
    except Exception:
        return Any


@functools.cache
def resolved(annotation: Any, module: str) -> Any:
    holder = SimpleNamespace(__annotations__={"it": annotation})
    return get_type_hints(holder, vars(sys.modules[module]), include_extras=True)["it"]


def has_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(has_shape, get_args(hint)))


def is_class(hint: Any) -> bool:
    """Whether the class of a value says if it is one, and its dtype and shape if it is a tensor."""
    if get_origin(hint) in (Union, UnionType):
        return all(map(is_class, get_args(hint)))
    return isinstance(hint, type) and not get_args(hint) and not getattr(hint, "_is_protocol", False)
