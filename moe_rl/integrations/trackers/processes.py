"""Trackers beside a study while it runs: a process each, which follows the commits of its runs and gives a tracker what
is new. One that fails, or does not come back, is dropped with a warning, and the runs notice nothing.

    python -m moe_rl.integrations.trackers.processes ROOT NAME[=FOLDER]     until its stdin closes
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe_rl.errors import MoeRlError
from moe_rl.integrations.trackers.listeners import bring_up_to_date, opened, tracked
from moe_rl.storage.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

EVERY, REST = 5.0, 200
"""Seconds between two looks at the runs, at least; and at least so many times as long as the last look took: a tracker
takes up no more than half a percent of one core, however slow it is."""
LIMIT = 120.0
"""Seconds that a tracker may take for the new rows of one run."""


@contextlib.contextmanager
def trackers_beside(targets: Sequence[str], root: Path, console: Console) -> Iterator[None]:
    """Give the runs below `root` to trackers for as long as the block lasts, and what is left when it ends. Whatever
    they have to say is a warning."""
    beside = [subprocess.Popen([sys.executable, "-m", "moe_rl.integrations.trackers.processes", str(root), text],
                               stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
              for text in targets]

    def warn_of(process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None, "it is a pipe"
        for line in process.stderr:
            say(console, ("warning", "yellow"), f" {line.rstrip()}")

    warned = [threading.Thread(target=warn_of, args=(process,), daemon=True) for process in beside]
    for thread in warned:
        thread.start()
    try:
        yield
    finally:
        for process in beside:
            assert process.stdin is not None, "it is a pipe"
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process, thread, text in zip(beside, warned, targets, strict=True):
            try:
                process.wait(2 * LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                say(console, ("warning", "yellow"), f" {_dropped(text, root, 'it did not come to an end')}")
            thread.join(1)


def follow(text: str, root: Path, stop: threading.Event) -> None:
    """Bring a tracker up to date again and again, and once more when `stop` is set. Ends the process where one run
    takes it longer than LIMIT, since nothing else ends a call that hangs."""
    def give_up() -> None:
        print(_dropped(text, root, f"it took more than {LIMIT:.0f} s"), file=sys.stderr, flush=True)
        os._exit(1)

    with opened(text) as tracker:
        ended = False
        while not ended:
            ended, start = stop.is_set(), time.monotonic()
            for run in tracked(root):
                watchdog = threading.Timer(LIMIT, give_up)
                watchdog.start()
                try:
                    bring_up_to_date(tracker, run)
                finally:
                    watchdog.cancel()
            if not ended:
                stop.wait(max(EVERY, REST * (time.monotonic() - start)))


def _dropped(text: str, root: Path, why: str) -> str:
    return (f"the tracker {text} is dropped: {why}. The runs go on; what it lacks, moe-rl export {root} --to {text} "
            "gives it afterwards")


def main() -> int:
    """The process of one tracker; it ends with whoever started it, whose Ctrl-C is not its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    root, text, stop = Path(sys.argv[1]), sys.argv[2], threading.Event()

    def wait_for_the_end() -> None:
        while os.read(0, 1):
            pass
        stop.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    try:
        follow(text, root, stop)
        return 0
    except Exception as error:
        why = str(error) if isinstance(error, MoeRlError) else repr(error)
        print(_dropped(text, root, why), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
