"""A study carried out by several processes together, run after run; what `workers` does with one process a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_rl import ranks
from moe_rl.config import RunConfig
from moe_rl.errors import Diverged
from moe_rl.runs import folder as runs
from moe_rl.runs.folder import RunFolder
from moe_rl.study import workers
from moe_rl.study.declaration import Planned, Study
from moe_rl.terminal import say


def run_study(study: Study, planned: Sequence[Planned], *, cache: Path, mix_code: bool, console: Console) -> None:
    """Carry out the runs one after the other, all ranks together. The first error ends the job."""
    def unfinished() -> list[bool]:
        for p in planned:
            runs.check(p.path, p.config.to_dict(), p.config.hash)
            workers.check_code(p.path, mix_code)
        return [runs.state(p.path, p.config.steps)["state"] not in runs.ENDED for p in planned]

    execute = workers.load(study.trainer)
    waiting = [p for p, left in zip(planned, ranks.from_rank_0(unfinished), strict=True) if left]
    if ranks.rank():
        for p in waiting:
            with contextlib.suppress(Diverged):  # rank 0 records it
                execute(p.config, ranks.SharedFolder(None), cache=cache)
        return
    done = len(planned) - len(waiting)
    say(console, f"{study.name}: {len(planned)} runs, {done} finished, {ranks.world()} ranks each")
    with workers.Display(planned, console) as display:
        for p in waiting:
            with RunFolder.open(p.path, p.config.to_dict(), p.config.hash, trainer=study.trainer) as folder:
                _lead(execute, p.config, folder, cache, display)
            display.update()


def _lead(execute: Callable[..., None], config: RunConfig, folder: RunFolder, cache: Path, display: Any) -> None:
    """Rank 0's part of a run: it also keeps the folder's progress and shows it."""
    watch = workers.Watch(folder)

    def listen(rows: dict[str, list[dict[str, Any]]]) -> None:
        watch(rows)
        display.update()

    with workers.recorded(folder, config.steps, watch):
        execute(config, ranks.SharedFolder(folder), cache=cache, listen=listen)
