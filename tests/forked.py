"""The command as a process that is forked, and not started anew: an interpreter and its imports cost two seconds.

It has its own memory, is sent signals and is killed, as others are.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from moe_rl import cli
from moe_rl.study import workers


class Forked(subprocess.Popen):
    """`python -m moe_rl WORD...`; `preexec_fn` is called in the child, where all is imported."""

    def _execute_child(
        self,
        args: list[str],
        executable: None,
        preexec_fn: Callable[[], None] | None,
        close_fds: bool,
        pass_fds: tuple,
        cwd: None,
        env: dict[str, str],
        startupinfo: None,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *others: object,
    ) -> None:
        assert args[0] == sys.executable and args[1:].index("moe_rl") <= 2 and cwd is None, args
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                for number, end in enumerate((p2cread, c2pwrite, errwrite)):
                    if end != -1:
                        os.dup2(end, number)
                os.closerange(3, 1024)
                sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, how, closefd=False) for n, how in enumerate("rww"))
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.environ.clear()
                os.environ.update(env)
                if preexec_fn is not None:
                    preexec_fn()
                code = cli.main(args[args.index("moe_rl") + 1 :])
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


@contextmanager
def forking() -> Iterator[None]:
    """Studies fork their workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "CONTEXT", multiprocessing.get_context("fork"))
        yield
