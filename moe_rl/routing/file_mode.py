"""Files of tensors that others than their owner may read: safetensors makes its own by mkstemp, with mode 600."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def usual_mode(*files: Path) -> None:
    """Give each file the mode of any other new file beside it, as the umask says."""
    for file in files:
        other = file.with_name(f".tmp-{os.getpid()}-{file.name}")  # asking for the umask would set it for all threads
        other.touch(exist_ok=False)
        try:
            file.chmod(stat.S_IMODE(other.stat().st_mode))
        finally:
            other.unlink()
