"""The worker: one process that carries out one run of a plan, wherever it is started.

    moe-rl work PLAN NUMBER

is all that a scheduler has to call, on any machine that sees the files. It may be called again, anywhere and at any
time: a run that has ended is left alone, an interrupted one goes on from its last commit, one at which another worker
is at work is refused. SIGTERM, SIGUSR1 or the file `--stop` have the next step committed, whatever `save_every` says,
and end the worker. What it prints goes to `log.txt` in the run's folder; how it ended is one line of JSON on stdout.
A plan of `-` is read from stdin, a line, and the worker dies when stdin closes: so no worker of a study on one machine
outlives the study that started it, however that ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from moe_rl import ranks
from moe_rl.errors import Diverged, MoeRlError, Stopped
from moe_rl.storage.folder import state
from moe_rl.storage.lease import Held
from moe_rl.study.declaration import Planned
from moe_rl.study.plan import read_plan, run_of
from moe_rl.study.workers import carry_out, environment, unfinished

DONE, BUG, TO_MEND, TOLD_TO_STOP = 0, 1, 2, 75
"""Exit codes of a worker: its run ended, divergence included; an error that may not come again, as that another worker
is at it; one that would; stopped, and to be called again (EX_TEMPFAIL)."""


def work(source: str, number: int, stop: Path | None = None) -> int:
    """The worker process: one run of a plan; its exit code."""
    if (wanted := environment()) != dict(os.environ):  # the allocator reads its part before Python runs
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)
    told: list[int] = []
    for warning in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(warning, lambda received, frame: told.append(received))
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    message, code, expected = "", DONE, False
    try:
        planned = _carried_out(source, number, lambda: bool(told) or stop is not None and stop.exists())
        message = f"{planned.path} is {state(planned.path, planned.config.steps)['state']}"
    except Stopped as error:
        message, code = str(error), TOLD_TO_STOP
    except BaseException as error:  # a divergence is this run's own: other runs need not fail alike
        expected = isinstance(error, MoeRlError) and not isinstance(error, Diverged)
        message = str(error) if expected else traceback.format_exc()
        code = TO_MEND if expected and not isinstance(error, Held) else BUG
    if code:
        print(f"moe-rl: {message}" if expected else message, file=sys.stderr)
    if not ranks.rank():
        json.dump({"message": message[-20_000:], "expected": expected}, report)
        print(file=report, flush=True)
    return code


def _carried_out(source: str, number: int, stopping: Callable[[], bool]) -> Planned:
    """The run with a number, which has ended now."""
    if source == "-":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
        plan = json.loads(sys.stdin.buffer.readline())
        threading.Thread(target=_die_with_parent, daemon=True).start()
    else:
        plan = read_plan(Path(source))
    sys.path[:] = list(dict.fromkeys([*plan["search_path"], *sys.path]))
    planned = run_of(plan, number)
    if ranks.launched():
        ranks.join(planned.config.model.device)
    attached = source == "-"  # whoever is there has checked, and keeps the log
    if ranks.from_rank_0(lambda: attached or unfinished([planned], plan["mix_code"])[0]):
        if not attached and not ranks.rank():
            planned.path.mkdir(parents=True, exist_ok=True)
            log = os.open(planned.path / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
        carry_out(planned, plan["trainer"], Path(plan["cache"]), stopping=stopping)
    if ranks.launched():
        ranks.leave()
    return planned


def _die_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    os._exit(1)
