"""Workers that are forked, and not started anew: an interpreter and its imports cost two seconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moe_rl.study import workers


@contextmanager
def forking() -> Iterator[None]:
    """Studies fork their workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "CONTEXT", multiprocessing.get_context("fork"))
        yield
