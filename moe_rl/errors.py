"""Errors that a user can cause; the command line prints their text and exits with 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
