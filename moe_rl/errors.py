"""Errors a user can cause. Each says what, with the values, why it matters and what to do; the CLI exits with 2."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


class Stopped(MoeRlError):
    """A run was told to stop, and did after a commit."""


class AuxLossSilentlyOn(UserWarning):
    """Something balances the routers of a model in training beside the objective, or against replay."""


@contextmanager
def raise_os_errors(file: Path) -> Iterator[None]:
    """Raise OSError with the file's name where safetensors or torch cannot write it in the block, as on a full disk.
    Safetensors has an error of its own, and torch says what its file is not, but not why."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
    except RuntimeError as error:
        if "inline_container" not in str(error) and "PytorchStreamWriter" not in str(error):
            raise
        why = errno.EIO if shutil.disk_usage(file.parent).free else errno.ENOSPC
        raise OSError(why, os.strerror(why), str(file)) from error


@contextmanager
def name_full_disk(folder: Path) -> Iterator[None]:
    """Raise RunError where a disk is full in the block: which one, and what to do. `folder` is where the block writes,
    for the errors that name no file, as those of `write` and of pyarrow."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        file = Path(error.filename or folder)
        disk = next(place for place in (file.resolve(), *file.resolve().parents) if place.is_mount())
        raise RunError(f"{file}: {os.strerror(error.errno)}. Free some space on the disk at {disk}, then repeat the "
                       "command: checkpoints are kept.") from error
