"""Errors that a user can cause; the command line prints their text and exits with 2."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

FULL = r"out of ?memory|(can't|cannot|unable to) allocate|not enough memory|alloc_failed"
"""The texts of the errors of torch's CPU allocator, CUDA and the system, which have no class of their own."""


class MoeRlError(Exception):
    """Base of all errors of this package."""


class ConfigError(MoeRlError, ValueError):
    """A setting, name, path or file that cannot be used."""


class RoutingError(MoeRlError, ValueError):
    """A model that cannot be hooked, or routes that do not fit the forward they meet."""


class RunError(MoeRlError, RuntimeError):
    """A run folder that does not match what was asked, or a run that cannot go on."""


class Diverged(RunError):
    """Gradients or weights are no longer finite."""


class NotFinite(RoutingError, Diverged):
    """Routers whose scores are not finite have chosen nothing."""


class Stopped(MoeRlError):
    """A run was told to stop, and did after a commit."""


class AuxLossSilentlyOn(UserWarning):
    """Something balances the routers of a model in training beside the objective, or against replay."""


@contextmanager
def name_full_memory(run: Any) -> Iterator[None]:
    """Raise RunError where the memory is full in a block of a run: which settings need less of it, and their values."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not isinstance(error, MemoryError) and not re.search(FULL, f"{type(error).__name__}: {error}", re.I):
            raise
        raise RunError(
            f"the memory of {run.model.device} is full ({type(error).__name__}: {str(error)[:200]}). Lower "
            f"micro_batch={run.micro_batch}, set micro_batch_tokens={run.micro_batch_tokens} lower, or turn "
            f"activation_checkpointing={run.activation_checkpointing} on. The same command goes on."
        ) from error


# ---------------------------------------------------------------------- names of before 0.2, which work until 0.3
OLD_NAMES = (
    "names of columns and settings from before 0.2. Rename them: python studies/migrate.py FOLDER (in the repository)"
)
"""The end of an error about a folder of tables with old names."""
Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


def warn_of(old: str, new: str) -> None:
    """Warn that a name has another one since 0.2."""
    text = f"{old} is called {new} since moe_rl 0.2; 0.3 will not know the old name"
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def renamed_arguments(**names: str) -> Callable[[Function], Function]:
    """A function that also takes the old names, `old="new"`, of its keyword arguments."""

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **arguments: Any) -> Any:
            for old in names.keys() & arguments.keys():
                warn_of(f"{function.__qualname__}({old}=…)", names[old])
                if names[old] in arguments:
                    raise TypeError(f"{function.__qualname__} got both {old} and {names[old]}, which are one")
                arguments[names[old]] = arguments.pop(old)
            return function(*args, **arguments)

        return cast(Function, call)

    return wrap


def renamed(**names: str) -> Callable[[Class], Class]:
    """A class whose attributes, and arguments of whose constructor, also have the old names, `old="new"`."""

    def wrap(cls: Class) -> Class:
        for old, new in names.items():

            def get(self: Any, old: str = old, new: str = new) -> Any:
                warn_of(f"{cls.__name__}.{old}", new)
                return getattr(self, new)

            setattr(cls, old, property(get))
        cls.__init__ = renamed_arguments(**names)(cls.__init__)  # type: ignore[misc]
        return cls

    return wrap
