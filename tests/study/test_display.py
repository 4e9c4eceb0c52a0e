"""How far runs are is shown, whatever their number, at little cost."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from moe_rl.config import Arm, RunConfig
from moe_rl.study import display
from moe_rl.study.declaration import Planned
from moe_rl.study.display import SHARE, Display


def test_folders_are_read_in_a_share_of_the_time_and_no_more_once_their_run_has_ended(monkeypatch):
    """A reading takes two seconds here, one per folder that is read."""
    clock, read, states = [0.0], [], {"a": "running", "b": "running"}

    def state(path: Path, steps: int) -> dict:
        clock[0] += 1.0
        read.append((path.name, clock[0]))
        return {"state": states[path.name], "step": 3}

    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(display.runs, "state", state)
    planned = [Planned(Path(name), RunConfig(arm=Arm(name="grpo"), steps=9)) for name in states]
    out = Console(file=io.StringIO(), width=80)
    with Display(planned, out) as shown:
        for _ in range(1000):
            shown.update()
            clock[0] += 0.2
        assert len(read) / clock[0] <= SHARE < 1.3 * len(read) / clock[0]
        states["a"] = "finished"
        clock[0] += 100
        shown.update()
        read.clear()
        clock[0] += 100
        shown.update()
        assert [name for name, _ in read] == ["b"]
        states["b"] = "finished"
        shown.update()  # not due: nobody waits for it
    assert out.file.getvalue().splitlines()[-1] == "b  3/9  finished"
