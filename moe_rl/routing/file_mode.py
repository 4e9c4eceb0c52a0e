"""Files of tensors, written as other files are: safetensors makes its own by mkstemp, with mode 600, and calls a full
disk by an error of its own; torch says what its file is not, but not why.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    """Write a file of safetensors with the usual mode, and the usual errors."""
    from safetensors.torch import save_file

    with usual_errors(file):
        save_file(dict(tensors), str(file), metadata=dict(metadata))
    usual_mode(file)


def usual_mode(*files: Path) -> None:
    """Give each file the mode of any other new file beside it, as the umask says."""
    for file in files:
        other = file.with_name(f".tmp-{os.getpid()}-{file.name}")  # asking for the umask would set it for all threads
        other.touch(exist_ok=False)
        try:
            file.chmod(stat.S_IMODE(other.stat().st_mode))
        finally:
            other.unlink()


@contextmanager
def usual_errors(file: Path) -> Iterator[None]:
    """What cannot be written in the block raises OSError with the file's name, as any other file would."""
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
